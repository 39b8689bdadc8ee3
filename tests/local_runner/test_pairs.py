"""Pairs: the shipped files, strict parsing, and a person's own pairs."""

from __future__ import annotations

from pathlib import Path

import pytest

from local_runner.fetching import sha256_of
from local_runner.pairs import (
    DEFAULT_PAIR,
    FolderSource,
    HubSource,
    PackageSource,
    TargetSource,
    config_root,
    load_pair,
    pair_files,
    parse_pair,
)
from sglang_dspark.errors import InputError

GOOD = """
name = "mine"
description = "A pair of my own."
block = 5
[target]
source = "hub"
licence = "MIT"
repo = "someone/model"
revision = "main"
[draft]
source = "folder"
licence = "MIT"
path = "heads/mine"
[engines]
torch = "works"
"""


@pytest.fixture
def user_pairs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    folder = tmp_path / "dspark" / "pairs"
    folder.mkdir(parents=True)
    return folder


def test_shipped_pairs_parse(user_pairs: Path) -> None:
    pairs = {name: load_pair(name) for name in pair_files()}
    assert set(pairs) >= {DEFAULT_PAIR, "qwen3-4b", "qwen3-8b", "qwen3-14b", "gemma-4-12b"}
    assert isinstance(pairs[DEFAULT_PAIR].target, PackageSource)
    assert isinstance(pairs["qwen3-4b"].target, HubSource)
    assert isinstance(pairs["deepseek-v4-flash"].draft, TargetSource)


def test_the_shipped_head_is_the_pinned_one(user_pairs: Path) -> None:
    draft = load_pair(DEFAULT_PAIR).draft
    assert isinstance(draft, FolderSource)
    assert draft.path == config_root() / "heads" / "smollm2-135m-dspark-interim"
    assert {name: sha256_of(draft.path / name) for name in ("config.json", "model.safetensors")} == draft.sha256


def test_a_pair_of_ones_own_is_found_and_its_paths_follow_it(user_pairs: Path) -> None:
    (user_pairs / "mine.toml").write_text(GOOD)
    pair = load_pair("mine")
    assert "mine" in pair_files() and pair.block == 5
    assert isinstance(pair.draft, FolderSource) and pair.draft.path == user_pairs.parent / "heads" / "mine"


def test_a_pair_of_ones_own_goes_before_a_shipped_one(user_pairs: Path) -> None:
    (user_pairs / "qwen3-4b.toml").write_text(GOOD.replace('"mine"', '"qwen3-4b"'))
    assert load_pair("qwen3-4b").description == "A pair of my own."


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("block = 5", "blok = 5", "unknown key 'blok'"),
        ("block = 5\n", "", "lacks the key 'block'"),
        ("block = 5", "block = 0", "at least 1"),
        ("block = 5", "block = true", "a whole number"),
        ("block = 5", 'block = "5"', "a whole number"),
        ('name = "mine"', 'name = "other"', "name the pair after its file"),
        ('revision = "main"\n', "", "[target] lacks the key 'revision'"),
        ('revision = "main"', 'revision = ""', "'revision' to be a string"),
        ('revision = "main"', 'revison = "main"', "[target] has the unknown key 'revison'"),
        ('source = "hub"', 'source = "ftp"', "has the source 'ftp'"),
        ('source = "hub"\n', "", "has the source None"),
        ('repo = "someone/model"', 'repo = "../../etc"', "must be a hub id"),
        ('path = "heads/mine"', 'path = "heads/mine"\nsha256 = {"a" = "12"}', "64 lower-case hexadecimal digits"),
        ('torch = "works"', 'torhc = "works"', "unknown key 'torhc'"),
        ('torch = "works"', "torch = 1", "'torch' to be a string"),
        ("[draft]", "[draft", "not valid TOML"),
    ],
)
def test_faulty_files_are_named(user_pairs: Path, old: str, new: str, says: str) -> None:
    file = user_pairs / "mine.toml"
    assert old in GOOD
    file.write_text(GOOD.replace(old, new))
    with pytest.raises(InputError) as error:
        parse_pair(file)
    assert says in str(error.value) and str(file) in str(error.value) and "\n" not in str(error.value)


def test_a_target_cannot_be_inside_the_target(user_pairs: Path) -> None:
    hub = 'source = "hub"\nlicence = "MIT"\nrepo = "someone/model"\nrevision = "main"'
    (user_pairs / "mine.toml").write_text(GOOD.replace(hub, 'source = "target"\nlicence = "MIT"'))
    with pytest.raises(InputError, match="cannot have the source 'target'"):
        load_pair("mine")


def test_unknown_names_are_answered_with_the_nearest_or_all(user_pairs: Path) -> None:
    with pytest.raises(InputError, match=r"no pair 'smolm2-135'; did you mean smollm2-135m\?"):
        load_pair("smolm2-135")
    with pytest.raises(InputError, match=r"the known pairs are deepseek-v4-flash, .*, smollm2-135m\."):
        load_pair("zzz")


def test_conversions_are_optional_and_by_engine(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(GOOD)
    assert parse_pair(file).conversions == {}
    file.write_text(GOOD + '[conversions]\ngguf = "gguf"\n')
    assert parse_pair(file).conversions == {"gguf": "gguf"}
    for wrong, says in (("[conversions]\nabacus = 'gguf'\n", "abacus"), ("[conversions]\ngguf = 3\n", "a string")):
        file.write_text(GOOD + wrong)
        with pytest.raises(InputError, match=says):
            parse_pair(file)
    file.write_text("conversions = 3\n" + GOOD)
    with pytest.raises(InputError, match="a table"):
        parse_pair(file)

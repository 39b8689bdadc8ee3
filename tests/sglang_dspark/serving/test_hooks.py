"""Whether hooks are verified, and what happens where one does not fit. No SGLang is needed: any package serves."""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path

import pytest

from sglang_dspark.serving import hooks
from sglang_dspark.serving.fingerprints import Fingerprint, fingerprint, known
from sglang_dspark.serving.hooks import Hook

SOURCE = """
import functools

def plain(a: int, *, b: str = "x") -> bool:
    return bool(a)

class Thing(dict):
    @functools.cache
    def method(self, c=1):
        return c
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "someones_package"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "parts.py").write_text(SOURCE + "\nraise RuntimeError('imported')\n")
    monkeypatch.delitem(sys.modules, "someones_package", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    return folder / "parts.py"


def hook(target: str, part: hooks.Part = "cpu") -> Hook:
    return Hook(f"someones_package.parts.{target}", "replace", part, None, "does something")


def test_fingerprints_come_from_the_file_without_importing_it(package: Path) -> None:
    plain = fingerprint("someones_package.parts.plain")
    assert plain.signature == "(a: int, *, b: str='x') -> bool"
    method = fingerprint("someones_package.parts.Thing.method")
    assert method.signature == "(self, c=1)"
    assert fingerprint("someones_package.parts.Thing").signature == "dict"
    assert len({plain.source, method.source}) == 2


@pytest.mark.parametrize(
    "old, new, changes",
    [
        ("return bool(a)", "return not a", True),
        ("a: int", "a: float", True),
        ("return c", "return c + 1", False),
        ("import functools", "import functools\n# a comment elsewhere", False),
        ("return bool(a)", "return bool(a)   ", False),
    ],
)
def test_a_fingerprint_is_of_one_function(package: Path, old: str, new: str, changes: bool) -> None:
    before = fingerprint("someones_package.parts.plain")
    package.write_text(package.read_text().replace(old, new))
    assert (fingerprint("someones_package.parts.plain") != before) is changes


def test_a_changed_decorator_counts(package: Path) -> None:
    before = fingerprint("someones_package.parts.Thing.method")
    package.write_text(package.read_text().replace("@functools.cache", "@functools.lru_cache(4)"))
    assert fingerprint("someones_package.parts.Thing.method") != before


@pytest.mark.parametrize(
    "target", ["someones_package.parts.absent", "someones_package.parts.Thing.absent", "someones_package.gone.plain"]
)
def test_what_is_not_there_is_said(package: Path, target: str) -> None:
    with pytest.raises(LookupError):
        fingerprint(target)


def test_misfits_are_named_and_told_apart(package: Path) -> None:
    good = fingerprint("someones_package.parts.plain")
    table = {
        "1.0": {
            hook("plain").target: good,
            hook("Thing.method").target: Fingerprint("(self)", "0"),
            hook("Thing").target: Fingerprint("dict", "0"),
            hook("absent").target: good,
        }
    }
    every = [hook(n) for n in ("plain", "Thing.method", "Thing", "absent", "unlisted")]
    found = hooks.misfits(every, "1.0", table)
    assert hook("plain") not in found
    assert "signature" in found[hook("Thing.method")]
    assert "source" in found[hook("Thing")]
    assert "not there" in found[hook("absent")]
    assert "no fingerprint" in found[hook("unlisted")]
    assert all("supported versions (1.0)" in why for why in hooks.misfits(every, "2.0", table).values())


@pytest.fixture
def half(package: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, Fingerprint]]:
    """Hooks of two parts, of which one does not fit."""
    monkeypatch.setattr(hooks, "HOOKS", (hook("plain", "cpu"), hook("Thing", "models")))
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "1.0")
    good = fingerprint(hook("plain").target)
    return {"1.0": {hook("plain").target: good, hook("Thing").target: Fingerprint("dict", "0")}}


def test_a_misfit_ends_the_process_whatever_catches_exceptions(half: dict[str, dict[str, Fingerprint]]) -> None:
    with pytest.raises(SystemExit) as caught:
        hooks.verified(["cpu", "models"], half)
    assert not isinstance(caught.value, Exception)
    assert "source of someones_package.parts.Thing has changed" in str(caught.value)
    assert "DSPARK_UNSUPPORTED_SGLANG=warn" in str(caught.value)


def test_a_misfit_can_be_gone_without(
    half: dict[str, dict[str, Fingerprint]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(hooks.WARN, "warn")
    assert hooks.verified(["cpu", "models"], half) == ["cpu"]
    assert "without the part 'models'" in caplog.text


def test_parts_that_are_not_used_need_not_fit(half: dict[str, dict[str, Fingerprint]]) -> None:
    assert hooks.verified(["cpu"], half) == ["cpu"]


def test_every_supported_version_has_a_fingerprint_for_every_hook() -> None:
    for version, targets in known().items():
        assert set(targets) == {h.target for h in hooks.HOOKS}, version


@pytest.mark.usefixtures("sglang")
def test_the_installed_sglang_fits() -> None:
    assert hooks.misfits(hooks.HOOKS, importlib.metadata.version("sglang"), known()) == {}

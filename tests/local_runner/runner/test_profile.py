"""Profiles are remembered, and a file that cannot be trusted counts as none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from local_runner.runner.profile import Profile, remembered, stored

PROFILE = Profile(1.0, 1.01, (1, 2, 3), (1.0, 1.1, 1.2), 0.3, 0.01, (5, 3), (3, 1))
OTHER = Profile(2.0, 2.01, (1, 3), (2.0, 2.2), 0.3, 0.01, (), ())
KEY = {"target": "somewhere", "threads": 2, "files": [("a", 1, 2)]}


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DSPARK_HOME", str(tmp_path))
    return tmp_path


def never() -> Profile:
    raise AssertionError("measured again")


def file_of(home: Path) -> Path:
    (file,) = (home / "runner").iterdir()
    return file


def test_a_profile_is_measured_once() -> None:
    assert remembered(KEY, lambda: PROFILE) == (PROFILE, None)
    assert remembered(KEY, never) == (PROFILE, None)
    assert remembered(KEY | {"threads": 1}, lambda: OTHER) == (OTHER, None)
    assert remembered(KEY, never) == (PROFILE, None)


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("{", "{{"),
        ("dspark-profile 1", "dspark-profile 0"),
        ('"threads": 2', '"threads": 3'),
        ('"plain_s": 1.0', '"plain_s": -1.0'),
        ('"plain_s": 1.0', '"plain_s": NaN'),
        ('"plain_s": 1.0', '"plain_s": "quick"'),
        ('"draft_s"', '"drift_s"'),
        ('"rows": [', '"rows": [9,'),
        ('"profile": {', '"profile": [], "was": {'),
    ],
)
def test_a_file_that_is_not_sound_is_replaced(home: Path, right: str, wrong: str) -> None:
    remembered(KEY, lambda: PROFILE)
    file = file_of(home)
    text = file.read_text()
    assert right in text
    file.write_text(text.replace(right, wrong, 1))
    assert stored(KEY) is None
    assert remembered(KEY, lambda: OTHER) == (OTHER, None)
    assert json.loads(file_of(home).read_text())["profile"]["plain_s"] == 2.0


def test_nothing_or_rubbish_is_no_profile(home: Path) -> None:
    assert stored(KEY) is None
    remembered(KEY, lambda: PROFILE)
    for rubbish in (b"", b"\xff\xfe", b"[]", b"null", b"7"):
        file_of(home).write_bytes(rubbish)
        assert stored(KEY) is None


def test_a_store_that_cannot_be_written_is_a_note(home: Path) -> None:
    (home / "runner").write_text("in the way")
    profile, problem = remembered(KEY, lambda: PROFILE)
    assert profile == PROFILE and problem is not None and "measured again" in problem

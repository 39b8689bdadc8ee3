import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from local_runner.options import Settings
from sglang_dspark.errors import InputError
from ui import picture, recording, sources
from ui.messages import LANES, lane_rounds


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "ui.picture", *arguments], capture_output=True, text=True, timeout=120)


def test_what_is_missing_is_said(recorded: Path, tmp_path: Path) -> None:
    for arguments, says in (
        (["--recording", str(tmp_path / "none"), "--out", str(tmp_path)], "cannot be read"),
        (["--recording", str(recorded), "--out", str(tmp_path / "none")], "There is no folder"),
    ):
        done = command(*arguments)
        assert done.returncode == 2
        assert says in done.stderr
        assert done.stderr.startswith("Error: ") and done.stderr.count("\n") == 1


def test_without_a_browser_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(InputError, match="chromium-driver"), picture.chromium():
        pass


def test_a_race_of_its_own_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = runpy.run_path(str(Path(__file__).with_name("fake_demo.py")))["fake_engine"]()
    monkeypatch.setattr(sources, "open_engine", lambda settings, say, **options: (engine, "fake-pair"))
    monkeypatch.setattr(sources, "_fetch", lambda settings, run: None)
    picture.race(tmp_path / "race.jsonl", Settings(max_new_tokens=24))
    messages = recording.read(tmp_path / "race.jsonl")
    assert messages[0]["type"] == "run" and messages[0]["prompt"].startswith("Solve 3x + 7")
    assert [len(lane_rounds(messages, lane)) > 5 for lane in LANES] == [True, True]
    assert [m["identical"] for m in messages if m["type"] == "verdict"] == [True]


@pytest.mark.slow
def test_pictures_of_a_recording(browser: Any, recorded: Path, tmp_path: Path) -> None:
    from PIL import Image

    out = tmp_path / "out"
    out.mkdir()
    made = picture.pictures(browser, recorded, out)
    assert [p.name for p in made] == ["race-light.png", "race-dark.png", "race.webp"]
    assert all(p.stat().st_size < 300_000 for p in made[:2])
    assert made[2].stat().st_size < 1_500_000
    images: list[Any] = [Image.open(p) for p in made]
    light, dark = (i.convert("L").resize((1, 1)).getpixel((0, 0)) for i in images[:2])
    assert light > 200 > 60 > dark
    assert images[2].n_frames > 10

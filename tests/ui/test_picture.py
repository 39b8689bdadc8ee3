import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ui import picture


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
    with pytest.raises(picture.InputError, match="chromium-driver"), picture.chromium():
        pass


@pytest.mark.slow
@pytest.mark.usefixtures("browser")
def test_pictures_of_a_recording(recorded: Path, tmp_path: Path) -> None:
    from PIL import Image

    out = tmp_path / "out"
    out.mkdir()
    made = picture.pictures(recorded, out)
    assert [p.name for p in made] == ["race-light.png", "race-dark.png", "race.webp"]
    assert all(p.stat().st_size < 300_000 for p in made[:2])
    assert made[2].stat().st_size < 1_500_000
    images: list[Any] = [Image.open(p) for p in made]
    light, dark = (i.convert("L").resize((1, 1)).getpixel((0, 0)) for i in images[:2])
    assert light > 200 > 60 > dark
    assert images[2].n_frames > 10

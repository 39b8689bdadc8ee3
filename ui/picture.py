"""Pictures of a race: `python -m ui.picture --out docs/` runs one, keeps its recording there, and draws it.

With `--recording FILE` that one is drawn. A screenshot of its end in each theme, and an animation of the replay, taken
in headless Chromium. The animation is made frame by frame from the recording's own clock, so it runs at the true pace
however slow the machine is that draws it.
"""

from __future__ import annotations

import argparse
import base64
import io
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from local_runner.files import whole_file
from local_runner.options import Settings
from local_runner.prompts import read_prompts
from sglang_dspark.errors import InputError
from ui import recording
from ui.ask import Ask
from ui.export import export_html, export_jsonl

if TYPE_CHECKING:
    from selenium.webdriver import Chrome

INSTALL = "install Debian's packages chromium and chromium-driver, and this project's extra 'dev'"
PROMPT = "maths-02"
MAX_NEW_TOKENS = 96
THEMES = ("light", "dark")
WIDTH = 1180
FRAMES_PER_S = 12.5
LONGEST_S = 12.0
HOLD_MS = 2500
ANIMATION_WIDTH = 944


@contextmanager
def chromium(width: int = 1280, height: int = 900) -> Iterator[Chrome]:
    """A headless Chromium that reaches nothing but loopback and files. Raises InputError if there is none."""
    try:
        from selenium import webdriver
        from selenium.webdriver.chrome.service import Service
    except ImportError as error:
        raise InputError(f"Selenium is not installed; {INSTALL}.") from error
    browser, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if not browser or not driver:
        raise InputError(f"There is no {'chromedriver' if browser else 'chromium'} on the path; {INSTALL}.")
    options = webdriver.ChromeOptions()
    options.binary_location = browser
    arguments = ["headless=new", "disable-gpu", "hide-scrollbars", "disable-dev-shm-usage", "force-color-profile=srgb"]
    arguments += ["disable-background-networking", "no-first-run", f"window-size={width},{height}", "lang=en"]
    arguments += ["host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1 , EXCLUDE localhost"]
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        arguments.append("no-sandbox")
    for argument in arguments:
        options.add_argument(f"--{argument}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    chrome = webdriver.Chrome(options=options, service=Service(driver))
    try:
        yield chrome
    finally:
        chrome.quit()


def resize(chrome: Chrome, width: int, height: int) -> None:
    """Show pages at exactly this size, in CSS pixels."""
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    chrome.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)


def media(chrome: Chrome, **features: str) -> None:
    """Say what the user prefers: `prefers_color_scheme="dark"`, `prefers_reduced_motion="reduce"`."""
    listed = [{"name": name.replace("_", "-"), "value": value} for name, value in features.items()]
    chrome.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": listed})


def take(chrome: Chrome, last: str) -> bytes:
    """A PNG of the view, from its top to the end of the element that the selector `last` finds."""
    script = "const r = document.querySelector(arguments[0]).getBoundingClientRect(); return r.bottom + window.scrollY"
    height = chrome.execute_script(script, last) + 16
    clip: dict[str, Any] = {"x": 0, "y": 0, "width": WIDTH, "height": height, "scale": 1}
    shot = chrome.execute_cdp_cmd("Page.captureScreenshot", {"clip": clip, "captureBeyondViewport": True})
    return base64.b64decode(shot["data"])


def pictures(chrome: Chrome, file: Path, out: Path) -> list[Path]:
    """Write `race-light.png`, `race-dark.png` and `race.webp` into `out`; return their paths."""
    from PIL import Image, ImageOps

    messages = recording.read(file)
    made = []
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "race.html"
        page.write_text(export_html(messages), encoding="utf-8")
        resize(chrome, WIDTH, 900)
        for theme in THEMES:
            media(chrome, prefers_color_scheme=theme, prefers_reduced_motion="reduce")
            chrome.get(page.as_uri())
            chrome.execute_script("race.end()")
            image = Image.open(io.BytesIO(take(chrome, ".dspark")))
            made.append(out / f"race-{theme}.png")
            image.convert("RGB").quantize(192, dither=Image.Dither.NONE).save(made[-1], optimize=True)
        media(chrome, prefers_color_scheme="light", prefers_reduced_motion="reduce")
        chrome.get(page.as_uri())
        whole = chrome.execute_script("return race.end_s")
        pace = max(1.0, whole / LONGEST_S)
        frames = []
        for n in range(int(whole / pace * FRAMES_PER_S) + 2):
            chrome.execute_script("race.seek(arguments[0])", n * pace / FRAMES_PER_S)
            shot = Image.open(io.BytesIO(take(chrome, ".panel.timeline"))).convert("RGB")
            frames.append(shot.resize((ANIMATION_WIDTH, round(shot.height * ANIMATION_WIDTH / shot.width))))
        # Lines that wrap as numbers grow move what is below them; an animation has one size.
        height = max(frame.height for frame in frames)
        edge = frames[0].resize((1, 1), box=(0, 0, 1, 1)).tobytes()
        frames = [
            ImageOps.pad(f, (f.width, height), color=(edge[0], edge[1], edge[2]), centering=(0, 0)) for f in frames
        ]
        made.append(out / "race.webp")
        times = [round(1000 / FRAMES_PER_S)] * (len(frames) - 1) + [HOLD_MS]
        frames[0].save(made[-1], save_all=True, append_images=frames[1:], duration=times, loop=0, quality=55, method=4)
    return made


def race(file: Path, settings: Settings) -> None:
    """Race on a built-in prompt as the page does, and write the recording to `file`."""
    from ui.routes import recorded
    from ui.service import Run
    from ui.sources import Local

    prompt = next(p for p in read_prompts() if p.id == PROMPT)
    run = Run(Ask("race", settings, ({"role": "user", "content": prompt.turns[0]},)))
    Local(settings).run(run)
    with whole_file(file) as stream:
        stream.write(export_jsonl(recorded(run.after())))


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m ui.picture", description="Pictures of a race.")
    parser.add_argument("--recording", type=Path, help="a recording (JSONL); without one, the default pair races")
    parser.add_argument("--out", type=Path, required=True, help="the folder to write into")
    given = parser.parse_args()
    try:
        if not given.out.is_dir():
            raise InputError(f"There is no folder {given.out}; make it, or give another for --out.")
        file = given.recording or given.out / "race.jsonl"
        with chromium() as chrome:  # before the race: without a browser it would be in vain
            if not given.recording:
                race(file, Settings(max_new_tokens=MAX_NEW_TOKENS))
            made = pictures(chrome, file, given.out)
        for path in made:
            print(f"{path}: {path.stat().st_size / 1000:.0f} kB")
    except InputError as error:
        print(f"Error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()

from collections.abc import Callable
from typing import Any

import pytest

from ui.messages import state_message, verdict_message
from ui.picture import media, resize

pytestmark = pytest.mark.slow
DIFFERENT = {"position": 9, "margin": 0.5, "noise": 0.01, "numerics": False}


@pytest.mark.parametrize("width", [1280, 360])
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_a_finished_race_has_no_serious_finding(
    chrome: Any, open_view: Callable[..., Any], race_of: Any, axe: Callable[[Any], list[str]], theme: str, width: int
) -> None:
    resize(chrome, width, 900)
    media(chrome, prefers_color_scheme=theme, prefers_reduced_motion="reduce")
    open_view(race_of(), replay=True)
    assert axe(chrome) == []
    chrome.execute_script("view.seek(view.end_s * 0.4)")
    assert axe(chrome) == []


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_no_state_has_a_serious_finding(
    chrome: Any, open_view: Callable[..., Any], race_of: Any, axe: Callable[[Any], list[str]], theme: str
) -> None:
    media(chrome, prefers_color_scheme=theme, prefers_reduced_motion="reduce")
    race = race_of()
    states = [
        [],
        [state_message("queued", position=2)],
        [state_message("downloading", fraction=0.4, text="5 of 9 MB")],
        [state_message("loading", text="Reading")],
        [*race[:40]],
        [*race[:40], state_message("cancelled")],
        [race[0], state_message("error", text="It does not fit.")],
        [*race[:-2], verdict_message(False, 0.5, "So it is.", DIFFERENT), race[-1]],
    ]
    for messages in states:
        open_view(messages)
        assert axe(chrome) == [], messages[-1:]


def test_a_theme_that_is_set_overrides_the_systems(chrome: Any, open_view: Callable[..., Any], axe: Any) -> None:
    open_view()
    paper = "return getComputedStyle(view.root).backgroundColor"
    light = chrome.execute_script(paper)
    chrome.execute_script("document.documentElement.dataset.theme = 'dark'")
    dark = chrome.execute_script(paper)
    assert light != dark
    assert axe(chrome) == []
    media(chrome, prefers_color_scheme="dark")
    chrome.execute_script("document.documentElement.dataset.theme = 'light'")
    assert chrome.execute_script(paper) == light


def test_the_check_sees_what_is_wrong(chrome: Any, open_view: Callable[..., Any], race_of: Any, axe: Any) -> None:
    open_view(race_of(), replay=True, autoplay=False)
    chrome.execute_async_script("requestAnimationFrame(() => requestAnimationFrame(() => arguments[0]()))")
    chrome.execute_script(
        "view.root.style.color = '#bbb'; view.button.textContent = ''; view.button.dataset.glyph = ''"
    )
    found = " ".join(axe(chrome))
    assert "color-contrast" in found
    assert "button-name" in found

import re
import time
from collections.abc import Callable
from typing import Any

import pytest

from sglang_dspark.decoding.rounds import Round, summarise, survival_by_position
from ui import view
from ui.export import export_html
from ui.messages import LANES, lane_rounds, lane_text, reliability, state_message, verdict_message
from ui.picture import media, resize

HOSTILE = [
    "<script>window.hit=1</script>",
    "</script><script>window.hit=1</script>",
    "<img src=x onerror=window.hit=1>",
    "<svg/onload=window.hit=1>",
    "<iframe srcdoc='<script>parent.hit=1</script>'>",
    '<a href="javascript:window.hit=1">link</a>',
    '"><body onload=window.hit=1>',
    "' autofocus onfocus='window.hit=1",
    "<!--<script>window.hit=1//-->",
    "{{constructor.constructor('window.hit=1')()}} ${window.hit=1} <%= 1 %> #{1}",
    "<style>*{display:none}</style>",
    "<math><mtext><table><mglyph><style><img src onerror=window.hit=1>",
    "\u202e reversed \u2066 isolated \u2069 \u200f",
    "&lt;b&gt; &#60;script&#62;",
    "javascript:window.hit=1",
    "__proto__ constructor toString",
]
KEYS = {"arrow": "\ue014", "home": "\ue011", "end": "\ue010", "tab": "\ue004", "space": " "}
pytestmark = pytest.mark.slow


def until(chrome: Any, condition: str, seconds: float = 15) -> None:
    end = time.monotonic() + seconds
    while not chrome.execute_script(f"return Boolean({condition})"):
        assert time.monotonic() < end, f"never: {condition}"
        time.sleep(0.03)


def painted(chrome: Any) -> None:
    chrome.execute_async_script("requestAnimationFrame(() => requestAnimationFrame(() => arguments[0]()))")


def shown(chrome: Any, lane: str) -> dict[str, str]:
    script = (
        "return Object.fromEntries(Object.entries(view.lanes[arguments[0]].cells).map(([k, d]) => [k, d.innerText]))"
    )
    found: dict[str, str] = chrome.execute_script(script, lane)
    return found


def expected(rounds: list[Round]) -> dict[str, str]:
    made = summarise(rounds)
    return {
        "tokens_per_s": f"{made.tokens_per_s:.1f}",
        "ttft": f"{made.ttft_s:.2f} s",
        "tau": f"{made.mean_accepted_length:.2f}",
        "rounds": str(made.rounds),
        "tokens": str(made.tokens),
    }


def test_languages_say_the_same_things() -> None:
    english, korean = view.strings()["en"], view.strings()["ko"]
    assert list(english) == list(korean)
    for name, text in english.items():
        assert re.findall(r"\{\w+\}", text) == sorted(re.findall(r"\{\w+\}", text), key=text.index)
        assert set(re.findall(r"\{\w+\}", text)) == set(re.findall(r"\{\w+\}", korean[name])), name


def test_texts_and_figures_are_those_of_the_rounds(open_view: Callable[..., Any], race_of: Any) -> None:
    messages = race_of()
    chrome = open_view(messages, replay=True, autoplay=False)
    painted(chrome)
    for lane in LANES:
        rounds = lane_rounds(messages, lane)
        assert chrome.execute_script("return view.text(arguments[0])", lane) == lane_text(messages, lane)
        figures = shown(chrome, lane)
        assert figures["elapsed"] == f"{sum(r.draft_s + r.verify_s for r in rounds):.2f} s"
        assert {k: v for k, v in figures.items() if k != "elapsed"} == expected(rounds)
    assert "Identical: all 81 tokens" in chrome.execute_script("return view.banner.innerText")


def test_half_way_figures_are_those_of_the_rounds_so_far(open_view: Callable[..., Any], race_of: Any) -> None:
    messages = race_of(count=300)
    chrome = open_view(messages, replay=True, autoplay=False)
    for share in (0.8, 0.3):
        chrome.execute_script("view.seek(arguments[0] * view.lanes.dspark.end)", share)
        painted(chrome)
        now = chrome.execute_script("return view.now")
        for lane in LANES:
            so_far, at = [], 0.0
            for r in lane_rounds(messages, lane):
                at += r.draft_s + r.verify_s
                if at <= now + 1e-9:
                    so_far.append(r)
            figures = shown(chrome, lane)
            assert figures.pop("elapsed") == f"{now:.2f} s"
            assert figures == expected(so_far)
            text = "".join(
                "".join(m["pieces"])
                for m in [m for m in messages if m.get("lane") == lane and m["type"] == "round"][: len(so_far)]
            )
            assert chrome.execute_script("return view.text(arguments[0])", lane) == text
        tally = chrome.execute_script("const t = view.lanes.dspark.tally; return [t.survival, t.reliability]")
        assert tally[0] == pytest.approx([s for s in survival_by_position(so_far, 7) if s is not None])
        assert [b["count"] for b in tally[1]] == [b["count"] for b in reliability(so_far)]
        for name in ("confidence", "accepted"):
            assert [b[name] for b in tally[1]] == pytest.approx([b[name] for b in reliability(so_far)])
    assert chrome.execute_script("return view.banner.dataset.kind") == "pending"


def test_a_block_in_flight_is_marked(open_view: Callable[..., Any], race_of: Any) -> None:
    messages = race_of()
    chrome = open_view(messages, replay=True, autoplay=False)
    starts = 0.0
    for m in (m for m in messages if m["type"] == "round" and m["lane"] == "dspark"):
        r = m["round"]
        end = starts + r["draft_s"] + r["verify_s"]
        if r["drafted"] and r["accepted"] < r["scheduled"] < 7 and r["accepted"]:
            break
        starts = end
    marks = "return [...view.lanes.dspark.text.tail.children].map((s) => s.className)"
    chrome.execute_script("view.seek(arguments[0])", starts + r["draft_s"] + r["verify_s"] / 2)
    assert chrome.execute_script(marks) == ["ghost"] * r["scheduled"] + ["unscheduled"] * (7 - r["scheduled"])
    chrome.execute_script("view.seek(arguments[0])", end + 1e-6)
    assert chrome.execute_script(marks) == ["rejected"] * (r["scheduled"] - r["accepted"])
    styles = """const of = (m) => { const s = getComputedStyle(view.root.querySelector(`.legend .${m}`));
        return `${s.textDecorationLine} ${s.textDecorationStyle} ${s.backgroundColor !== "rgba(0, 0, 0, 0)"}` };
        return ["accepted", "bonus", "ghost", "rejected", "unscheduled"].map(of)"""
    assert len(set(chrome.execute_script(styles))) == 5, "marks must differ by more than colour"


def test_a_live_run_says_so_and_is_then_replayed(open_view: Callable[..., Any], race_of: Any) -> None:
    messages = race_of()
    chrome = open_view([messages[0], state_message("loading", text="Reading 269 MB")])
    card = "return view.notice.card.innerText"
    assert "Loading" in chrome.execute_script(card) and "269 MB" in chrome.execute_script(card)
    half = 40
    chrome.execute_script("view.feed(arguments[0])", messages[1:half])
    painted(chrome)
    assert chrome.execute_script("return view.mode.innerText") == "Live: the Plain decoding lane is running"
    assert chrome.execute_script("return view.controls.hidden && view.notice.card.hidden")
    assert chrome.execute_script("return view.text('plain')") == lane_text(messages[:half], "plain")
    assert chrome.execute_script("return view.lanes.dspark.chip.innerText") == "waits for its turn"
    chrome.execute_script("view.feed(arguments[0])", messages[half:])
    until(chrome, "!view.controls.hidden")
    assert chrome.execute_script("return view.mode.innerText") == "Replay of both on their own clocks"
    assert "Identical" in chrome.execute_script("return view.polite.textContent + view.banner.innerText")
    until(chrome, "view.playing")
    chrome.execute_script("view.end()")
    assert chrome.execute_script("return view.text('dspark')") == lane_text(messages, "dspark")
    assert not chrome.execute_script("return view.lanes.dspark.flag.hidden")


@pytest.mark.parametrize("state", ["cancelled", "error"])
def test_a_run_that_ended_early_keeps_its_text(open_view: Callable[..., Any], race_of: Any, state: Any) -> None:
    messages = race_of()[:30]
    chrome = open_view([*messages, state_message(state, text="No memory was left." if state == "error" else "")])
    painted(chrome)
    assert chrome.execute_script("return view.text('plain')") == lane_text(messages, "plain")
    words = {"cancelled": "Stopped between two rounds", "error": "No memory was left."}
    assert words[state] in chrome.execute_script("return view.notice.card.innerText")
    assert words[state] in chrome.execute_script("return view.polite.textContent")
    time.sleep(1.5)
    assert not chrome.execute_script("return view.playing")


def test_a_queue_has_a_place_and_a_reset_empties(open_view: Callable[..., Any], race_of: Any) -> None:
    chrome = open_view([state_message("queued", position=3)])
    assert "Place 3" in chrome.execute_script("return view.notice.card.innerText")
    chrome.execute_script("view.feed(arguments[0]); view.reset()", race_of())
    painted(chrome)
    assert "Nothing has run yet" in chrome.execute_script("return view.notice.card.innerText")
    assert chrome.execute_script("return view.text('plain') + view.text('dspark') + view.prompt.textContent") == ""


def test_a_second_run_takes_the_place_of_the_first(open_view: Callable[..., Any], race_of: Any) -> None:
    first, second = race_of(), race_of(["other "], 12, prompt="Another one")
    chrome = open_view([*first, *second])
    painted(chrome)
    assert chrome.execute_script("return view.text('dspark')") == "other " * 12
    assert chrome.execute_script("return view.prompt.innerText") == "Another one"


@pytest.mark.parametrize("end", ["error", "finished"])
def test_waiting_again_after_a_run_starts_anew(open_view: Callable[..., Any], race_of: Any, end: Any) -> None:
    chrome = open_view([*([] if end == "error" else race_of()), state_message(end, text="It failed.")])
    painted(chrome)
    chrome.execute_script("view.feed(arguments[0])", [state_message("queued", position=1)])
    assert "Place 1" in chrome.execute_script("return view.notice.card.innerText")
    assert chrome.execute_script("return view.live && view.text('plain') === ''")
    chrome.execute_script("view.feed(arguments[0])", race_of()[:20])
    painted(chrome)
    assert chrome.execute_script("return view.mode.innerText") == "Live: the Plain decoding lane is running"


def test_the_live_region_never_says_tokens(open_view: Callable[..., Any], race_of: Any) -> None:
    messages = race_of(["unmistakable "], 60)
    chrome = open_view()
    chrome.execute_script(
        """window.said = [];
        new MutationObserver(() => said.push(view.polite.textContent)).observe(view.polite, {childList: true});"""
    )
    for at in range(0, len(messages), 10):
        chrome.execute_script("view.feed(arguments[0])", messages[at : at + 10])
        painted(chrome)
    said = chrome.execute_script("return said")
    assert said and len(said) < 6
    assert "unmistakable" not in " ".join(said)
    live = chrome.execute_script(
        "return [...view.root.querySelectorAll('[aria-live],[role=status],[role=alert]')].length"
    )
    assert live == 1


def test_a_replay_is_played_by_keyboard_alone(open_view: Callable[..., Any], race_of: Any) -> None:
    chrome = open_view(race_of(), replay=True, autoplay=False)
    body = chrome.find_element("tag name", "body")
    body.send_keys(KEYS["tab"])
    focus = chrome.switch_to.active_element
    assert focus.text.strip() == "Play again"
    outline = chrome.execute_script("return getComputedStyle(document.activeElement).outlineWidth")
    assert outline == "3px"
    focus.send_keys(KEYS["space"])
    assert chrome.execute_script("return view.playing")
    focus.send_keys(KEYS["space"])
    assert not chrome.execute_script("return view.playing")
    focus.send_keys(KEYS["tab"])
    slider = chrome.switch_to.active_element
    assert slider.get_attribute("aria-label") == "Position in the replay"
    slider.send_keys(KEYS["home"])
    assert chrome.execute_script("return view.now") == 0
    slider.send_keys(KEYS["arrow"])
    assert chrome.execute_script("return view.now / view.end_s") == pytest.approx(0.02)
    slider.send_keys(KEYS["end"])
    assert chrome.execute_script("return view.now === view.end_s")
    slider.send_keys(KEYS["tab"])
    assert chrome.execute_script("return document.activeElement === view.pace")
    chrome.switch_to.active_element.send_keys("4")
    assert chrome.execute_script("return view.rate") == 4
    chrome.switch_to.active_element.send_keys(KEYS["tab"])
    assert chrome.switch_to.active_element.text == "Skip to end"


def test_reduced_motion_is_respected(chrome: Any, open_view: Callable[..., Any], race_of: Any) -> None:
    media(chrome, prefers_reduced_motion="reduce")
    messages = race_of()
    open_view(messages, replay=True)
    painted(chrome)
    assert not chrome.execute_script("return view.playing")
    assert chrome.execute_script("return view.text('dspark')") == lane_text(messages, "dspark")
    assert chrome.execute_script("return document.getAnimations().length") == 0


def test_a_replay_keeps_true_time(open_view: Callable[..., Any], race_of: Any) -> None:
    chrome = open_view(race_of(count=400), replay=True, autoplay=False)
    for rate in (1, 0.25, 4):
        took = chrome.execute_async_script(
            """const [rate, done] = arguments; view.seek(0); view.speed(rate); view.play();
            requestAnimationFrame((began) => { const from = view.now; setTimeout(() => requestAnimationFrame((ended) =>
              { view.pause(); done(1000 * (view.now - from) / (ended - began)); }), 700); });""",
            rate,
        )
        assert took == pytest.approx(rate, rel=0.01)


def test_the_interface_speaks_korean_and_switches(open_view: Callable[..., Any], race_of: Any) -> None:
    chrome = open_view(race_of(), replay=True, autoplay=False, language="ko-KR")
    painted(chrome)
    korean = chrome.execute_script("return view.root.innerText")
    for name in ("plain", "mode_replay", "survival", "memory", "legend_rejected"):
        assert view.strings()["ko"][name] in korean
        assert view.strings()["en"][name] not in korean
    assert "동일: 토큰 81개" in korean
    chrome.execute_script("view.language('en')")
    painted(chrome)
    assert "Identical: all 81 tokens" in chrome.execute_script("return view.root.innerText")
    assert not re.search("[가-힣]", chrome.execute_script("return view.root.querySelector('.panels').innerText"))


def test_lines_have_their_own_direction_and_code_looks_like_code(open_view: Callable[..., Any], race_of: Any) -> None:
    chrome = open_view(race_of(), replay=True, autoplay=False)
    script = """return [...view.lanes.dspark.text.box.querySelectorAll('.line')].map((line) => [line.textContent,
        getComputedStyle(line).direction, getComputedStyle(line).fontFamily.includes("mono")])"""
    lines = {text: (direction, mono) for text, direction, mono in chrome.execute_script(script)}
    assert lines["حارس المنارة يعد الأمواج."] == ("rtl", False)
    assert lines["    return angle % 360  # 👩‍🚀 🇰🇷"] == ("ltr", True)
    assert lines["```"] == ("ltr", True)
    assert next(v for k, v in lines.items() if k.startswith("And `then`")) == ("ltr", False)


def test_a_replay_starts_anew_outside_code(open_view: Callable[..., Any], race_of: Any) -> None:
    chrome = open_view(race_of(["Words first.\n", "```"], 2), replay=True, autoplay=False)
    chrome.execute_script("view.seek(0); view.end()")
    script = (
        "return [...view.lanes.plain.text.box.querySelectorAll('.line')].map((line) => line.classList.contains('code'))"
    )
    assert chrome.execute_script(script) == [False, True]


def test_the_end_is_followed_until_the_reader_scrolls_away(open_view: Callable[..., Any], race_of: Any) -> None:
    messages = race_of(["word ", "and\n"], 600)
    chrome = open_view(messages[:200])
    painted(chrome)
    box = "view.lanes.plain.text.box"
    at_end = f"return {box}.scrollHeight - {box}.scrollTop - {box}.clientHeight < 4"
    assert chrome.execute_script(f"return {box}.scrollHeight > 2 * {box}.clientHeight")
    assert chrome.execute_script(at_end)
    chrome.execute_script(f"{box}.scrollTop = 40")
    painted(chrome)
    chrome.execute_script("view.feed(arguments[0])", messages[200:300])
    painted(chrome)
    assert chrome.execute_script(f"return {box}.scrollTop") == 40
    chrome.execute_script(f"{box}.scrollTop = 1e6")
    painted(chrome)
    chrome.execute_script("view.feed(arguments[0])", messages[300:400])
    painted(chrome)
    assert chrome.execute_script(at_end)


@pytest.mark.parametrize("width", [360, 760, 1280])
def test_nothing_sticks_out(chrome: Any, open_view: Callable[..., Any], race_of: Any, width: int) -> None:
    resize(chrome, width, 800)
    long = "An unbroken " + "x" * 500
    open_view(race_of(["x" * 90, "-"], 9, prompt=long, machine="y" * 300), replay=True, autoplay=False)
    painted(chrome)
    boxes = "return [...view.root.querySelectorAll('.text')].map((box) => box.scrollWidth - box.clientWidth)"
    assert chrome.execute_script(boxes) == [0, 0]
    assert chrome.execute_script("return document.documentElement.scrollWidth") == width


def hostile_race(race_of: Any) -> list[Any]:
    every = " ".join(HOSTILE)
    memory = [{"part": every, "bytes": 5, "pool": every}]
    fields = dict.fromkeys(("id", "title", "prompt", "pair", "engine", "device", "dtype", "machine", "schedule"), every)
    messages: list[Any] = race_of([f"{h}\n" for h in HOSTILE], 64, memory=memory, **fields)
    messages[-2] = verdict_message(False, 0.5, every, {"position": 1, "margin": 1.0, "noise": 0.1, "numerics": False})
    return messages


def test_hostile_text_is_shown_as_it_is(open_view: Callable[..., Any], race_of: Any) -> None:
    messages = hostile_race(race_of)
    chrome = open_view(messages, replay=True, autoplay=False)
    tags = "return [...new Set([...view.root.querySelectorAll('*')].map((e) => e.localName))]"
    seen = set(chrome.execute_script(tags))
    for share in (0.2, 0.5, 1.0):
        chrome.execute_script("view.seek(arguments[0] * view.end_s)", share)
        painted(chrome)
        assert set(chrome.execute_script(tags)) <= seen
    chrome.execute_script("view.feed(arguments[0])", [state_message("error", text=" ".join(HOSTILE))])
    time.sleep(0.3)
    assert not chrome.execute_script("return window.hit")
    assert not seen & {"script", "img", "iframe", "style", "math", "body", "a", "table", "b"}
    text = chrome.execute_script("return view.root.textContent")
    for h in HOSTILE:
        assert text.count(h) >= 5, h
    assert chrome.execute_script("return view.text('dspark')") == lane_text(messages, "dspark")
    attributes = "return [...view.root.querySelectorAll('*')].flatMap((e) => [...e.attributes].map((a) => a.name))"
    assert not [a for a in chrome.execute_script(attributes) if a.startswith("on") or a in ("href", "src", "srcdoc")]


def test_hostile_text_does_nothing_in_an_export(chrome: Any, race_of: Any, tmp_path: Any) -> None:
    messages = hostile_race(race_of)
    page = tmp_path / "race.html"
    page.write_text(export_html(messages), encoding="utf-8")
    chrome.get(page.as_uri())
    chrome.execute_script("race.end()")
    time.sleep(0.3)
    assert not chrome.execute_script("return window.hit")
    assert chrome.execute_script("return document.scripts.length") == 3
    assert chrome.execute_script("return race.text('plain')") == lane_text(messages, "plain")

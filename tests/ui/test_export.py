import base64
import hashlib
import json
import re
import time
from pathlib import Path
from typing import Any

import pytest

from ui.export import export_html, export_jsonl, summary
from ui.messages import lane_text, run_message, state_message, verdict_message

HOSTILE = "</script><script>x()</script><!-- <script> \u2028 & ]]>"


def recording_of(page: str) -> Any:
    """What a browser would read: the text up to the first end of a script after the block's start."""
    start = page.index('<script type="application/json" id="recording">')
    body = page[page.index(">", start) + 1 :]
    return json.loads(body[: body.lower().index("</script")])


def test_texts_cannot_end_the_block_they_are_in(race_of: Any) -> None:
    messages = race_of([HOSTILE, "a"], 12, prompt=HOSTILE, title=HOSTILE)
    page = export_html(messages)
    assert recording_of(page) == messages
    assert page.count("<script") == 3
    assert page.count("</script") == 3
    assert "<!--" not in page


def test_the_policy_allows_these_scripts_and_no_request(race_of: Any) -> None:
    page = export_html(race_of())
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', page)
    assert policy is not None
    assert policy[1].startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in policy[1]
    for body in re.findall(r"<(?:script|style)>(.*?)</(?:script|style)>", page, re.S):
        assert base64.b64encode(hashlib.sha256(body.encode()).digest()).decode() in policy[1]
    outside = re.findall(r"https?://[^\s\"'<>]+", page)
    assert set(outside) <= {"http://www.w3.org/2000/svg"}


def test_nothing_that_makes_html_of_text_is_in_the_view() -> None:
    page = export_html([run_message()])
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function|srcdoc", page)


def test_lines_are_messages(race_of: Any) -> None:
    messages = race_of()
    assert [json.loads(line) for line in export_jsonl(messages).splitlines()] == messages


def test_the_summary_says_what_ran_and_how_it_ended(race_of: Any) -> None:
    text = summary(race_of())
    assert "made-up" in text
    assert "Prompt: Tell me of the sea." in text
    assert "DSpark: 81 tokens in" in text
    assert "Identical: every token" in text
    assert "DSpark is " in text and "× as fast." in text
    assert text.endswith("Because it is so.\n")


def test_the_summary_of_what_was_lost_and_of_what_failed() -> None:
    difference = {"position": 7, "margin": 0.0123, "noise": 0.05, "numerics": True}
    text = summary([run_message(), verdict_message(False, 0.8, "Rows cost too much.", difference)])
    assert "First difference (arithmetic noise, token 7, where the two best tokens are 0.0123 apart)." in text
    assert "Plain decoding wins: 0.80×." in text
    assert summary([run_message(), state_message("error", text="No memory.")]) == "The run ended: error. No memory.\n"


@pytest.mark.slow
def test_an_export_replays_from_disk_with_no_request(chrome: Any, race_of: Any, tmp_path: Path) -> None:
    messages = race_of()
    file = tmp_path / "race.html"
    file.write_text(export_html(messages), encoding="utf-8")
    chrome.execute_cdp_cmd("Network.enable", {})
    offline = {"offline": True, "latency": 0, "downloadThroughput": 0, "uploadThroughput": 0}
    chrome.execute_cdp_cmd("Network.emulateNetworkConditions", offline)
    try:
        chrome.get(file.as_uri())
        assert chrome.execute_script("return race.playing && race.now < race.end_s")
        chrome.execute_script("race.speed(4)")
        until = time.monotonic() + 20
        while chrome.execute_script("return race.banner.dataset.kind") != "identical":
            assert time.monotonic() < until, "the replay never came to its verdict"
            time.sleep(0.05)
        for lane in ("plain", "dspark"):
            assert chrome.execute_script("return race.text(arguments[0])", lane) == lane_text(messages, lane)
        assert chrome.execute_script("return performance.getEntriesByType('resource').length") == 0
        sent = [json.loads(e["message"])["message"] for e in chrome.get_log("performance")]
        asked = [m["params"]["request"]["url"] for m in sent if m["method"] == "Network.requestWillBeSent"]
        assert {url for url in asked if not url.startswith("about:")} == {file.as_uri()}
    finally:
        online = {"offline": False, "latency": 0, "downloadThroughput": -1, "uploadThroughput": -1}
        chrome.execute_cdp_cmd("Network.emulateNetworkConditions", online)

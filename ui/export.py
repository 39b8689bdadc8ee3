"""A run to take away: one HTML file that replays it, its messages as JSONL, a few lines of summary."""

from __future__ import annotations

import base64
import hashlib
import html
import json
from collections.abc import Iterable, Sequence
from string import Template

from sglang_dspark.decoding.rounds import Summary, summarise
from ui import view
from ui.messages import LANES, Lane, Message, lane_rounds

NAMES: dict[Lane, str] = {"plain": "Plain decoding", "dspark": "DSpark"}

# Only the two scripts and the style sheet with these hashes run, and nothing is fetched from anywhere.
PAGE = Template("""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; script-src $scripts; style-src $styles; \
base-uri 'none'; form-action 'none'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="referrer" content="no-referrer">
<title>$title</title>
<style>$css</style>
</head>
<body>
<main id="race"></main>
<script type="application/json" id="recording">$recording</script>
<script>$script</script>
<script>$start</script>
</body>
</html>
""")
STYLE = """
html { color-scheme: light dark; background: light-dark(#f6f7f9, #0e1217); }
body { margin: 0; }
main { max-width: 1280px; margin: 0 auto; }
"""
START = """
const race = DSparkView.mount(document.getElementById("race"), { replay: true });
race.feed(JSON.parse(document.getElementById("recording").textContent));
"""


def export_html(messages: Sequence[Message]) -> str:
    """One HTML file that replays `messages` in any browser, and makes no request.

    Texts stand in a block of JSON in which `<`, `>` and `&` are escaped, so none of them can end it.
    """
    recording = json.dumps(list(messages), ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    for character in "<>&\u2028\u2029":
        recording = recording.replace(character, f"\\u{ord(character):04x}")
    script, css = view.script(), STYLE + view.css()
    if "</" in script or "</" in css:
        raise ValueError("the view's own script or style sheet could end the element that it is in")
    run = next((m for m in messages if m["type"] == "run"), {})
    return PAGE.substitute(
        title=html.escape(run.get("title") or run.get("prompt") or "Plain decoding and DSpark")[:200],
        scripts=f"{_hash(script)} {_hash(START)}",
        styles=_hash(css),
        css=css,
        recording=recording,
        script=script,
        start=START,
    )


def export_jsonl(messages: Iterable[Message]) -> str:
    """The messages, one a line; `ui.recording` reads them."""
    return "".join(json.dumps(m, ensure_ascii=False, allow_nan=False) + "\n" for m in messages)


def summary(messages: Sequence[Message]) -> str:
    """What ran and how it ended, in a few lines of plain text."""
    run = next((m for m in messages if m["type"] == "run"), {})
    lines = []
    what = [run.get(k) for k in ("pair", "engine", "dtype", "device", "machine")]
    if any(what):
        lines.append(" · ".join(str(w) for w in what if w))
    if run.get("prompt"):
        lines.append(f"Prompt: {run['prompt']}")
    lines += [_lane(lane, summarise(rounds)) for lane in LANES if (rounds := lane_rounds(messages, lane))]
    verdict = next((m for m in messages if m["type"] == "verdict"), None)
    if verdict:
        lines += _verdict(verdict)
    else:
        last = next((m for m in reversed(messages) if m["type"] == "state" and m["lane"] is None), None)
        lines += [f"The run ended: {last['state']}. {last['text']}".strip()] if last else []
    return "\n".join(lines) + "\n"


def _lane(lane: Lane, made: Summary) -> str:
    parts = [f"{made.tokens} tokens in {made.ttft_s + made.seconds:.2f} s", f"{made.tokens_per_s:.1f} tokens/s"]
    if made.drafted and made.mean_accepted_length is not None:
        rate = made.draft_acceptance_rate or 0.0
        parts.append(f"τ {made.mean_accepted_length:.2f}, {rate:.0%} of {made.scheduled} verified drafts accepted")
    return f"{NAMES[lane]}: {', '.join(parts)}, first token after {made.ttft_s:.2f} s."


def _verdict(verdict: Message) -> list[str]:
    lines = []
    difference = verdict["first_difference"]
    if verdict["identical"]:
        lines.append("Identical: every token is that of plain decoding.")
    elif difference:
        numerics = "arithmetic noise, " if difference["numerics"] else ""
        margin = "" if difference["margin"] is None else f", where the two best tokens are {difference['margin']:.4g}"
        lines.append(
            f"First difference ({numerics}token {difference['position']}{margin + ' apart' if margin else ''})."
        )
    speedup = verdict["speedup"]
    if speedup:
        lines.append(f"DSpark is {speedup:.2f}× as fast." if speedup >= 1 else f"Plain decoding wins: {speedup:.2f}×.")
    return [*lines, verdict["reason"]] if verdict["reason"] else lines


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"

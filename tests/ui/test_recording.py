import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sglang_dspark.errors import InputError
from ui import recording
from ui.export import export_jsonl
from ui.messages import lane_rounds, lane_text


def write(path: Path, rounds: Any) -> Path:
    path.write_text("".join(r.to_json() + "\n" for r in rounds), encoding="utf-8")
    return path


def test_a_recording_is_read_as_it_was_written(tmp_path: Path, race_of: Any) -> None:
    messages = race_of()
    path = tmp_path / "r.jsonl"
    path.write_text(export_jsonl(messages), encoding="utf-8")
    assert recording.read(path) == messages


def test_one_file_of_rounds_is_a_lane_of_ids(tmp_path: Path, rounds_of: Any) -> None:
    for lane in ("plain", "dspark"):
        rounds = rounds_of(lane, 30)
        messages = recording.read(write(tmp_path / "x.jsonl", rounds))
        assert messages[0]["lanes"] == [lane]
        assert lane_rounds(messages, lane) == rounds
        assert lane_text(messages, lane) == "".join(f" {t}" for r in rounds for t in r.committed)
        assert not [m for m in messages if m["type"] == "verdict"]
        assert messages[-1]["state"] == "finished"


def test_two_files_of_rounds_in_either_order_are_a_race(tmp_path: Path, rounds_of: Any) -> None:
    plain = write(tmp_path / "a.jsonl", rounds_of("plain", 40))
    dspark = write(tmp_path / "b.jsonl", rounds_of("dspark", 40))
    messages = recording.read(dspark, plain)
    assert messages == recording.read(plain, dspark)
    verdict = next(m for m in messages if m["type"] == "verdict")
    assert verdict["identical"] is True
    assert verdict["speedup"] > 1
    assert messages[0]["block"] == 7


def test_where_rounds_part_is_found(tmp_path: Path, rounds_of: Any) -> None:
    verdict = recording.compare(rounds_of("plain", 40), rounds_of("dspark", 30))
    assert verdict["identical"] is False
    assert verdict["first_difference"]["position"] == 30
    plain = rounds_of("plain", 40)
    plain[20] = replace(plain[20], next_token=99, committed=(99,))
    verdict = recording.compare(plain, rounds_of("dspark", 40))
    assert verdict["identical"] is False
    assert verdict["first_difference"]["position"] == 20


def test_two_files_of_one_lane_are_refused(tmp_path: Path, rounds_of: Any) -> None:
    path = write(tmp_path / "a.jsonl", rounds_of("plain", 9))
    with pytest.raises(InputError, match="second plain lane"):
        recording.read(path, path)


def test_two_recordings_are_refused(recorded: Path) -> None:
    with pytest.raises(InputError, match="2 recordings"):
        recording.read(recorded, recorded)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "it is not JSON"),
        ("[" * 100_000, "it is not JSON"),
        ("3", "JSON object"),
        ('{"type": "state", "state": "asleep"}', "'state' must be one of"),
        ('{"type": "round", "lane": "plain", "round": {"committed": 3}}', "lacks"),
        ('{"committed": [1]}', "lacks"),
    ],
)
def test_a_bad_line_is_named_in_one_sentence(recorded: Path, line: str, says: str) -> None:
    lines = recorded.read_text(encoding="utf-8").split("\n")
    recorded.write_text("\n".join([*lines[:4], line, *lines[4:]]), encoding="utf-8")
    with pytest.raises(InputError) as error:
        recording.read(recorded)
    text = str(error.value)
    assert says in text
    assert f"Line 5 of {recorded}" in text
    assert text.endswith(".") and "\n" not in text and len(text) < 400


def test_rounds_come_in_order(recorded: Path) -> None:
    lines = recorded.read_text(encoding="utf-8").split("\n")
    recorded.write_text("\n".join([*lines[:5], lines[3], *lines[5:]]), encoding="utf-8")
    with pytest.raises(InputError, match=r"Line 6 .* round 1 follows round 2"):
        recording.read(recorded)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "holds no rounds"),
        (b'{"type": "applause"}\n', "holds no rounds"),
        (b"\xff\xfe", "UTF-8"),
    ],
)
def test_what_is_no_recording_is_refused(tmp_path: Path, content: bytes, says: str) -> None:
    path = tmp_path / "x"
    path.write_bytes(content)
    with pytest.raises(InputError, match=says):
        recording.read(path)


def test_a_recording_starts_with_its_run(recorded: Path) -> None:
    recorded.write_text("\n".join(recorded.read_text(encoding="utf-8").split("\n")[1:]), encoding="utf-8")
    with pytest.raises(InputError, match="does not start with a run"):
        recording.read(recorded)


def test_bare_rounds_and_messages_do_not_mix(recorded: Path, rounds_of: Any) -> None:
    recorded.write_text(recorded.read_text(encoding="utf-8") + rounds_of("plain", 2)[0].to_json(), encoding="utf-8")
    with pytest.raises(InputError, match="mixes"):
        recording.read(recorded)


def test_what_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        recording.read(tmp_path / "none.jsonl")


def test_sizes_are_bounded(recorded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "MAX_LINES", 10)
    with pytest.raises(InputError, match="more than 10 are not read"):
        recording.read(recorded)
    monkeypatch.setattr(recording, "MAX_BYTES", 10)
    with pytest.raises(InputError, match="bytes"):
        recording.read(recorded)


def test_a_recording_that_was_cut_off_is_ended(recorded: Path) -> None:
    lines = recorded.read_text(encoding="utf-8").splitlines()[:20]
    recorded.write_text("\n".join(lines), encoding="utf-8")
    assert recording.read(recorded)[-1]["state"] == "finished"


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["type", "round", "lane", "committed", "drafted", "pieces", "state", "version", "lanes"])
            | st.text(max_size=3),
            inner | st.sampled_from(["run", "round", "state", "verdict", "plain"]),
            max_size=6,
        )
    ),
    max_leaves=12,
)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(json_values.map(json.dumps) | st.text(max_size=20), max_size=4), st.integers(0, 8))
def test_nothing_but_input_errors(recorded: Path, lines: list[str], at: int) -> None:
    good = recorded.read_text(encoding="utf-8").split("\n")[:8]
    path = recorded.with_name("fuzz.jsonl")
    path.write_text("\n".join([*good[:at], *lines]), encoding="utf-8", errors="surrogatepass")
    try:
        messages = recording.read(path)
    except InputError:
        return
    assert export_jsonl(messages)

import json
from collections import Counter
from pathlib import Path

import pytest

from local_runner.prompts import parse_ids, read_prompts, take
from sglang_dspark.errors import InputError


def test_built_in_prompts_are_distinct_and_in_equal_parts() -> None:
    prompts = read_prompts()
    assert len(prompts) >= 24
    assert set(Counter(p.domain for p in prompts)) == {"chat", "code", "maths"}
    assert len(set(Counter(p.domain for p in prompts).values())) == 1
    assert len({p.id for p in prompts}) == len({p.turns for p in prompts}) == len(prompts)


@pytest.mark.parametrize("limit", [1, 3, 4, 12, 29, 30, 99, None])
def test_a_limit_keeps_domains_balanced_and_the_order(limit: int | None) -> None:
    prompts = read_prompts()
    kept = take(prompts, limit)
    assert len(kept) == min(limit or 30, 30)
    counts = Counter(p.domain for p in kept)
    assert max(counts.values()) - min(counts.values()) <= 1
    assert kept == [p for p in prompts if p in kept]


def test_reads_prompts_and_turns_with_names_or_without(tmp_path: Path) -> None:
    file = tmp_path / "mine.jsonl"
    lines = [{"prompt": "a\u2028b"}, {"turns": ["x", "y"], "id": "two", "domain": "talk"}, {"prompt": "c", "id": 7}]
    file.write_text("\n\n".join(json.dumps(line, ensure_ascii=False) for line in lines) + "\n", encoding="utf-8")
    one, two, three = read_prompts(file)
    assert (one.id, one.domain, one.turns) == ("1", "mine", ("a\u2028b",))
    assert (two.id, two.domain, two.turns) == ("two", "talk", ("x", "y"))
    assert three.id == "7"


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "Line 2 of"),
        ("[1]", "not a JSON object"),
        ("{}", "either 'prompt' or 'turns'"),
        ('{"prompt": "a", "turns": ["b"]}', "either 'prompt' or 'turns'"),
        ('{"prompt": "  "}', "empty prompt"),
        ('{"prompt": 5}', "not text"),
        ('{"turns": []}', "empty prompt"),
        ('{"turns": "abc"}', "not text"),
        ('{"prompt": "a", "promt": "b"}', "unknown key 'promt'"),
        ('{"prompt": "a", "domain": null}', "'domain' that is not text"),
        ('{"prompt": "a", "id": "first"}', "already on line 1"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, says: str) -> None:
    file = tmp_path / "Bad.jsonl"
    file.write_text('{"prompt": "fine", "id": "first"}\n' + line + "\n", encoding="utf-8")
    with pytest.raises(InputError) as caught:
        read_prompts(file)
    assert says in str(caught.value) and str(file) in str(caught.value)
    assert "line 2 of" in str(caught.value).lower()


@pytest.mark.parametrize("content", [None, b"", b"\n \n", b"\xff\xfe"])
def test_a_file_without_prompts_is_refused(tmp_path: Path, content: bytes | None) -> None:
    file = tmp_path / "none.jsonl"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(InputError, match=r"none\.jsonl"):
        read_prompts(file)


def test_token_ids() -> None:
    assert parse_ids("1, 22,3") == (1, 22, 3)
    for bad in ("", "1,,2", "1,-2", "x", "1.5", "²"):
        with pytest.raises(InputError, match="--prompt-ids"):
            parse_ids(bad)

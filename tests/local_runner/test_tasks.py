from pathlib import Path

import pytest

from local_runner.prompts import Prompt
from local_runner.tasks import Task, read_tasks
from sglang_dspark.errors import InputError


def test_tasks_are_named_after_their_files_and_limited_each(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(
        '{"turns": ["One.\u2028Still one."]}\n\n{"turns": ["b", "c"], "domain": "code"}\n'
    )
    (tmp_path / "b.jsonl").write_text('{"turns": ["x"], "category": "maths", "id": 7}\n{"turns": ["y"]}\n')
    files = f"{tmp_path / 'a.jsonl'}, {tmp_path / 'b.jsonl'},"
    assert read_tasks(files) == [
        Task("a", (Prompt("1", "", ("One.\u2028Still one.",)), Prompt("3", "code", ("b", "c")))),
        Task("b", (Prompt("7", "maths", ("x",)), Prompt("2", "", ("y",)))),
    ]
    assert [len(task.prompts) for task in read_tasks(files, 1)] == [1, 1]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "Line 2 of .* is not JSON"),
        ("[" * 100_000, "Line 2 of .* is not JSON"),
        ("[1]", "Line 2 of .* needs 'turns'"),
        ("{}", "needs 'turns'"),
        ('{"turns": []}', "needs 'turns'"),
        ('{"turns": ["a", " "]}', "needs 'turns'"),
        ('{"turns": "a"}', "needs 'turns'"),
        ('{"turns": ["a", 1]}', "needs 'turns'"),
        ('{"turns": ["a"], "answer": "b"}', "Line 2 .* unknown key 'answer'"),
        ('{"turns": ["a"], "domain": "x", "category": "y"}', "both 'domain' and 'category'"),
        ('{"turns": ["a"], "domain": true}', "'domain' that is not text"),
        ('{"turns": ["a"], "id": ""}', "'id' that is not text"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, line: str, says: str) -> None:
    file = tmp_path / "t.jsonl"
    file.write_text('{"turns": ["a"]}\n' + line)
    with pytest.raises(InputError, match=says):
        read_tasks(str(file))


def test_wrong_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"none\.jsonl cannot be read"):
        read_tasks(str(tmp_path / "none.jsonl"))
    (tmp_path / "empty.jsonl").write_text("\n \n")
    with pytest.raises(InputError, match=r"empty\.jsonl holds no prompt"):
        read_tasks(str(tmp_path / "empty.jsonl"))
    (tmp_path / "latin.jsonl").write_bytes(b'{"turns": ["\xe9"]}')
    with pytest.raises(InputError, match="not UTF-8"):
        read_tasks(str(tmp_path / "latin.jsonl"))
    with pytest.raises(InputError, match="names no file"):
        read_tasks(" , ")
    (tmp_path / "a.jsonl").write_text('{"turns": ["a"]}')
    with pytest.raises(InputError, match="Two tasks are called 'a'"):
        read_tasks(f"{tmp_path / 'a.jsonl'},{tmp_path / 'a.jsonl'}")

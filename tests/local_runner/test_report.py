import json
import subprocess
import sys
import threading
from pathlib import Path
from types import ModuleType

import pytest

from local_runner.board import Board
from local_runner.engine import Decoding
from local_runner.identity import judge
from local_runner.prompts import Prompt
from local_runner.race import race
from local_runner.report import check, main, refresh
from local_runner.result import race_result
from local_runner.watch import LineWatcher
from sglang_dspark.decoding.sampling import SamplingParams
from sglang_dspark.decoding.schedule import Fixed
from sglang_dspark.errors import CheckFailed, InputError

README = Path(__file__).parents[2] / "README.md"
PAGE = """# Page

<!-- table:race r/one.json -->
<!-- /table -->

Between.

<!-- table:steps r/two.json -->
old
<!-- /table -->
End.
"""


@pytest.fixture
def page(tmp_path: Path, fake: ModuleType) -> Path:
    engine, decoding = fake.FakeEngine(), Decoding(30, SamplingParams(), Fixed())
    prompts = [Prompt("a", "chat", ids=(1,)), Prompt("b", "code", ids=(2,))]
    watcher = LineWatcher(Board(engine, ""), lambda line: None)
    runs = race(engine, prompts, decoding, repeats=1, watcher=watcher, cancelled=threading.Event())
    (tmp_path / "r").mkdir()
    result = race_result(engine, "a-pair", runs, judge(engine, runs, decoding), decoding)
    (tmp_path / "r/one.json").write_text(json.dumps(result))
    (tmp_path / "r/two.json").write_text(
        json.dumps({"tables": {"steps": {"columns": ["rows", "ms"], "rows": [[1, 9]]}}})
    )
    (tmp_path / "page.md").write_text(PAGE)
    return tmp_path / "page.md"


def test_tables_are_made_from_results_and_the_rest_is_left_alone(page: Path) -> None:
    assert main([str(page)]) == 0
    text = page.read_text()
    assert "| chat | 50.0 |" in text and "| mean of domains |" in text and "a-pair" in text
    assert "| rows | ms |\n| --- | ---: |\n| 1 | 9 |\n<!-- /table -->" in text and "old" not in text
    assert text.startswith("# Page\n\n<!-- table:race") and "\nBetween.\n" in text and text.endswith("\nEnd.\n")
    assert refresh(page) == text, "making them again changes nothing"
    check(page)


def test_a_stale_table_is_found(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(CheckFailed, match="stale"):
        check(page)
    assert main([str(page)]) == 0
    result = json.loads((page.parent / "r/one.json").read_text())
    result["speedup"] += 0.5
    (page.parent / "r/one.json").write_text(json.dumps(result))
    before = page.read_text()
    assert main(["--check", str(page)]) == 1
    assert page.read_text() == before
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("<!-- table:race r/none.json -->\n<!-- /table -->\n", "none.json"),
        ("<!-- table:race page.md -->\n<!-- /table -->\n", "not JSON"),
        ("<!-- table:nosuch r/two.json -->\n<!-- /table -->\n", "no table 'nosuch'"),
        ("<!-- table:race r/two.json -->\n<!-- /table -->\n", "no table 'race'"),
        ("<!-- table:race r/one.json -->\n", "without its partner"),
        ("<!-- table:steps r/two.json -->\n<!-- table:race r/one.json -->\n<!-- /table -->\n", "without its partner"),
    ],
)
def test_what_is_wrong_is_said_and_nothing_is_written(page: Path, text: str, says: str) -> None:
    page.write_text(text)
    with pytest.raises(InputError, match=says):
        refresh(page)
    assert main([str(page)]) == 2 and page.read_text() == text


def test_usage() -> None:
    assert main([]) == main(["--wrong", "x.md"]) == 2
    done = subprocess.run([sys.executable, "-m", "local_runner.report", "nowhere.md"], capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith("Error: nowhere.md") and done.stderr.count("\n") == 1


@pytest.mark.skipif(not README.exists(), reason="there is no README.md beside the packages")
def test_the_tables_of_the_readme_are_not_stale() -> None:
    check(README)

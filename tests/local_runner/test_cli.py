import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from local_runner import options, watchdog
from local_runner.cli import app
from local_runner.options import Settings
from sglang_dspark.decoding.adaptive import Adaptive
from sglang_dspark.decoding.rounds import Round
from sglang_dspark.errors import InputError

ROOT = Path(__file__).parents[2]
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def dspark(*arguments: object, stdin: str | None = None) -> Result:
    return CliRunner().invoke(app, [str(a) for a in arguments], input=stdin)


@pytest.fixture
def engine(fake: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A scripted engine that `dspark` opens; a test may set its attributes beforehand."""
    made = fake.FakeEngine()
    fake.install(made, monkeypatch)
    return made


def refused(result: Result, says: str) -> None:
    """Exit code 2, one sentence on standard error, nothing on standard output, no traceback."""
    assert result.exit_code == 2, result.output
    assert says in result.stderr and result.stderr.startswith("Error: ") and result.stderr.count("\n") == 1
    assert result.stdout == ""


def test_generate_streams_the_text_and_nothing_else(engine: Any) -> None:
    result = dspark("generate", "--prompt", "hi", "--max-new-tokens", 5)
    assert (result.exit_code, result.stdout, result.stderr) == (0, " turns slowly and the sea\n", "")
    assert engine.requests[0].schedule is not None
    assert dspark("generate", "--prompt", "hi", "--max-new-tokens", 5, "--plain").stdout == result.stdout
    assert engine.requests[1].schedule is None


def test_generate_without_a_draft_is_plain(engine: Any) -> None:
    engine.block = 0
    assert dspark("generate", "--prompt", "hi", "--json").exit_code == 0
    assert engine.requests[0].schedule is None


def test_generate_json_is_one_object(engine: Any) -> None:
    result = dspark("generate", "--prompt-ids", "1,2", "--max-new-tokens", 9, "--json", "--stop", "sea")
    answer = json.loads(result.stdout)
    assert answer["text"] == " slowly and the " and answer["stop"] == "stop_string" and answer["mode"] == "dspark"
    assert answer["engine"]["engine"] == "fake" and answer["prompt_tokens"] == 2
    assert answer["rounds"]["tokens"] == len(answer["tokens"])
    assert engine.requests[0].prompt_ids == (1, 2) and engine.conversations == []


def test_generate_writes_events_one_round_a_line(engine: Any, tmp_path: Path) -> None:
    file = tmp_path / "rounds.jsonl"
    assert dspark("generate", "--prompt", "hi", "--max-new-tokens", 9, "--events", file).exit_code == 0
    rounds = [Round.from_dict(json.loads(line)) for line in file.read_text().splitlines()]
    assert [r.index for r in rounds] == list(range(len(rounds))) and sum(len(r.committed) for r in rounds) == 9
    assert os.listdir(tmp_path) == ["rounds.jsonl"]


def test_generate_reads_standard_input(engine: Any) -> None:
    assert dspark("generate", stdin="from a pipe").exit_code == 0
    assert engine.conversations == [[{"role": "user", "content": "from a pipe"}]]


def test_every_option_reaches_the_request(engine: Any) -> None:
    given = "--temperature .5 --top-k 3 --top-p .9 --min-p .1 --repetition-penalty 1.1 --presence-penalty .2"
    more = "--frequency-penalty .3 --seed 7 --stop a --stop b --draft-style sampled --confidence-threshold .4"
    assert dspark("generate", "--prompt", "x", "--max-new-tokens", 3, *given.split(), *more.split()).exit_code == 0
    request = engine.requests[0]
    s = request.sampling
    assert (s.temperature, s.top_k, s.top_p, s.min_p, s.seed) == (0.5, 3, 0.9, 0.1, 7)
    assert (s.repetition_penalty, s.presence_penalty, s.frequency_penalty) == (1.1, 0.2, 0.3)
    assert (request.max_new_tokens, request.draft_style, request.stop_strings) == (3, "sampled", ("a", "b"))
    assert str(request.schedule) == "threshold:0.4" and request.stop_ids == engine.stop_ids


def test_the_adaptive_schedule_opens_a_runner(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def open_runner(models: Any, **given: Any) -> Any:
        asked.append((models, given))
        return engine

    monkeypatch.setattr(sys.modules["local_runner.runner"], "open_runner", open_runner)
    settings = Settings(schedule="adaptive", threads=3, block=2, dtype="float32")
    assert options.open_engine(settings, lambda line: None)[0] is engine
    (models, given), *others = asked
    assert not others and models.block == 2 and given["threads"] == 3 and given["dtype"] == "float32"
    assert type(settings.decoding().schedule).__name__ == "Adaptive"


@pytest.mark.parametrize(
    ("command", "arguments", "opens", "schedule"),
    [
        ("race", [], True, "adaptive"),
        ("race", ["--schedule", "fixed"], False, "fixed"),
        ("race", ["--confidence-threshold", ".5"], False, "threshold:0.5"),
        ("chat", [], True, "adaptive"),
        ("chat", ["--plain"], False, None),
        ("generate", [], False, "fixed"),
    ],
)
def test_what_adapts_is_the_default_but_in_generate(
    command: str,
    arguments: list[str],
    opens: bool,
    schedule: str | None,
    engine: Any,
    fake: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A runner is opened, says in one sentence why it computes as it does, and its schedule is what has paid so far."""
    runner = fake.FakeEngine()
    runner.adapts, runner.notes = True, ["torch promises 9 tokens/s with drafting (8 without)."]
    seen: list[Any] = []

    def open_runner(models: Any, **given: Any) -> Any:
        seen.append(given)
        return runner

    monkeypatch.setattr(sys.modules["local_runner.runner"], "open_runner", open_runner)
    monkeypatch.setattr(Adaptive, "length", lambda self, confidence, drafted: drafted)
    asked = [] if command == "chat" else ["--prompt", "a"]
    result = dspark(command, *asked, "--max-new-tokens", 9, *arguments, stdin="hi\n")
    assert result.exit_code == 0, result.output
    assert bool(seen) == opens == ("promises 9 tokens/s" in result.stderr) and all(g["kind"] is None for g in seen)
    used = {str(r.schedule) for r in (runner if opens else engine).requests if r.schedule}
    assert used == ({schedule} if schedule else set())
    assert (runner if opens else engine).reuse_prefix == (command == "chat")


class Short(watchdog.Watchdog):
    """A watchdog that barks at its second look."""

    looks = 0

    def _trouble(self) -> str:
        self.looks += 1
        return "1 MiB of memory are left" if self.looks > 1 else ""


@pytest.fixture
def short_of_memory(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine.sleep_s = 0.05
    monkeypatch.setattr(watchdog, "Watchdog", partial(Short, every_s=0.1))


@pytest.mark.usefixtures("short_of_memory")
def test_memory_that_runs_short_ends_an_answer_at_its_next_round(engine: Any) -> None:
    result = dspark("generate", "--prompt", "hi", "--max-new-tokens", 4000)
    assert result.exit_code == 1 and result.stdout.startswith(" turns slowly")
    assert result.stderr.splitlines()[-1].startswith("Error: Stopped: 1 MiB of memory are left.")
    as_json = dspark("generate", "--prompt", "hi", "--max-new-tokens", 4000, "--json")
    answer = json.loads(as_json.stdout)
    assert as_json.exit_code == 1 and answer["stop"] == "cancelled" and answer["tokens"]
    assert answer["cut_short"].startswith("Stopped: 1 MiB") and answer["memory"]["measured_peak_bytes"] > 0


@pytest.mark.usefixtures("short_of_memory")
def test_memory_that_runs_short_ends_a_chat_and_a_race(engine: Any, tmp_path: Path) -> None:
    chat = dspark("chat", "--max-new-tokens", 4000, stdin="one\ntwo\n")
    assert chat.exit_code == 1 and chat.stdout and "1 MiB of memory" in chat.stderr and len(engine.requests) == 1
    race = dspark("race", "--prompt", "a", "--max-new-tokens", 4000, "--json", tmp_path / "race.json")
    assert race.exit_code == 1 and "1 MiB of memory" in race.stderr and not list(tmp_path.iterdir())


def test_a_race_states_the_memory_it_took(engine: Any, tmp_path: Path) -> None:
    limits = {"available": 1, "pressure_some": 1e3, "pressure_full": 1e3, "swap_growth": 1 << 60}
    engine.description["plan"] = {"peak_bytes": 5 << 20, "parts": {"target": 5 << 20}, "thresholds": limits}
    out = tmp_path / "race.json"
    assert dspark("race", "--prompt", "a", "--max-new-tokens", 9, "--json", out).exit_code == 0
    memory = json.loads(out.read_text())["memory"]
    assert memory["predicted_peak_bytes"] == 5 << 20 and memory["measured_peak_bytes"] > 1 << 20


def test_sampling_without_a_seed_draws_one_and_a_race_shares_it(engine: Any) -> None:
    assert dspark("race", "--limit", 1, "--max-new-tokens", 5, "--temperature", 1, "--repeats", 2).exit_code == 0
    seeds = {r.sampling.seed for r in engine.requests}
    assert len(seeds) == 1 and None not in seeds


@pytest.mark.parametrize("command", ["generate", "race"])
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--prompt", "  "], "prompt is empty"),
        (["--prompt", "a", "--prompt-ids", "1"], "one of them"),
        (["--prompt-ids", "1,x"], "'x'"),
        (["--prompt", "a", "--top-p", "2"], "top_p is 2.0"),
        (["--prompt", "a", "--schedule", "often"], "'often' is no schedule"),
        (["--prompt", "a", "--schedule", "fixed", "--confidence-threshold", ".5"], "schedule of its own"),
        (["--prompt", "a", "--pair", "p", "--target", "t"], "either --pair or --target"),
        (["--prompt", "a", "--draft", "d"], "--draft needs a target"),
        (["--prompt", "a", "--stop", ""], "--stop is empty"),
        (["--prompt-ids", ",".join(["1"] * 5000)], "more tokens than the context"),
    ],
)
def test_bad_input_is_one_sentence(engine: Any, command: str, arguments: list[str], says: str) -> None:
    result = dspark(command, *arguments)
    assert result.exit_code == 2 and result.stdout == ""
    last = result.stderr.splitlines()[-1]
    assert last.startswith("Error: ") and says in last and "Traceback" not in result.stderr


def test_what_does_not_fit_together_is_refused(engine: Any, tmp_path: Path) -> None:
    refused(dspark("generate", stdin=""), "prompt is empty")
    refused(dspark("race", "--prompts", tmp_path / "none.jsonl"), "none.jsonl")
    refused(dspark("race", "--max-new-tokens", 1), "at least 2")
    refused(dspark("race", "--json", tmp_path / "no/such.json"), "cannot be written")
    (tmp_path / "bad.jsonl").write_text("{}\n")
    refused(dspark("race", "--prompts", tmp_path / "bad.jsonl"), "Line 1 of")
    engine.tokenizer = None
    refused(dspark("generate", "--prompt", "a"), "--prompt-ids")
    engine.block = 0
    refused(dspark("race", "--prompt-ids", "1"), "needs a draft")


def test_usage_errors_exit_with_2() -> None:
    for arguments in (["generate", "--nosuch"], ["race", "--repeats", "0"], ["nosuch"], ["chat", "--dtype", "int3"]):
        result = dspark(*arguments)
        assert result.exit_code == 2 and "Traceback" not in result.output


def test_events_are_not_left_half_written(engine: Any, tmp_path: Path) -> None:
    file = tmp_path / "rounds.jsonl"
    file.write_text("before")
    refused(dspark("generate", "--prompt-ids", ",".join(["1"] * 5000), "--events", file), "context")
    assert file.read_text() == "before" and os.listdir(tmp_path) == ["rounds.jsonl"]


def test_race_stores_its_result_its_runs_and_a_picture(engine: Any, tmp_path: Path) -> None:
    out, runs, svg = tmp_path / "race.json", tmp_path / "runs", tmp_path / "race.svg"
    result = dspark("race", "--limit", 3, "--max-new-tokens", 20, "--json", out, "--record", runs, "--screenshot", svg)
    assert result.exit_code == 0
    stored = json.loads(out.read_text())
    assert (
        stored["prompts"] == 3 and stored["pair"] == "fake-pair" and set(stored["domains"]) == {"chat", "code", "maths"}
    )
    assert len(list(runs.glob("*.jsonl"))) == 6 and svg.read_text().startswith("<svg")
    assert "speed-up" in result.stdout and "Identical" in result.stdout
    assert not CONTROL.search(result.stdout + result.stderr)
    assert len([line for line in result.stderr.splitlines() if line.startswith("[")]) == 3


def test_race_json_on_standard_output_is_alone_there(engine: Any) -> None:
    result = dspark("race", "--prompt", "a", "--max-new-tokens", 20, "--json", "-")
    assert json.loads(result.stdout)["identity"]["verdict"] == "identical"
    assert "speed-up" in result.stderr


def test_a_target_without_tokenizer_races_on_token_ids(engine: Any, tmp_path: Path) -> None:
    engine.tokenizer = engine.text_stream = engine.decode = None
    svg = tmp_path / "race.svg"
    result = dspark("race", "--prompt-ids", "1,2", "--max-new-tokens", 20, "--screenshot", svg)
    assert result.exit_code == 0 and "2&#160;token&#160;ids" in svg.read_text()


def test_race_says_that_dspark_is_slower(engine: Any) -> None:
    engine.dspark_s = 0.5
    result = dspark("race", "--prompt", "a", "--max-new-tokens", 20)
    assert result.exit_code == 0 and "SLOWER" in result.stdout


def test_a_difference_that_noise_does_not_explain_exits_with_1_and_is_stored(engine: Any, tmp_path: Path) -> None:
    engine.flip = 7
    out = tmp_path / "race.json"
    result = dspark("race", "--prompt", "a", "--max-new-tokens", 20, "--json", out)
    assert result.exit_code == 1 and "FAILURE" in result.stdout
    assert json.loads(out.read_text())["first_difference"]["position"] == 7
    engine._margin = 0.01
    result = dspark("race", "--prompt", "a", "--max-new-tokens", 20)
    assert result.exit_code == 0 and "Numerics" in result.stdout


def test_race_on_algorithm1_measures_the_cost_curve(engine: Any) -> None:
    from sglang_dspark.decoding.schedule import CostCurve

    curve = CostCurve((1, 8), (0.02, 0.021))
    engine.cost_curve = lambda: curve
    engine.has_confidence = True
    assert dspark("race", "--prompt", "a", "--max-new-tokens", 9, "--schedule", "algorithm1").exit_code == 0
    assert engine.requests[-1].schedule.curve == curve or engine.requests[-2].schedule.curve == curve


def test_algorithm1_needs_a_draft_that_judges_itself(engine: Any) -> None:
    result = dspark("race", "--prompt", "a", "--schedule", "algorithm1")
    assert result.exit_code == 2 and "confidence head" in result.stderr and not engine.requests
    assert dspark("race", "--prompt", "a", "--max-new-tokens", 9).exit_code == 0
    assert all(str(r.schedule) == "fixed" for r in engine.requests if r.schedule)


def test_chat_on_a_pipe_keeps_the_conversation(engine: Any) -> None:
    said = "one\n\n/what\ntwo\n/reset\nthree\n/quit\nnever\n"
    result = dspark("chat", "--max-new-tokens", 3, "--system", "Be brief.", stdin=said)
    assert result.exit_code == 0
    answers = [engine.decode([engine._token(r.prompt_ids, i) for i in range(3)]) for r in engine.requests]
    assert result.stdout == "".join(a + "\n" for a in answers) and len(answers) == 3
    assert engine.conversations[0][0] == {"role": "system", "content": "Be brief."}
    assert [[m["content"] for m in c] for c in engine.conversations] == [
        ["Be brief.", "one"],
        ["Be brief.", "one", answers[0], "two"],
        ["Be brief.", "three"],
    ]
    assert result.stderr.count("tok/s") == 3 and "/reset forgets" in result.stderr
    assert not CONTROL.search(result.output)


def test_chat_on_a_pipe_ends_with_what_cannot_be_answered(engine: Any) -> None:
    engine.context = 3
    result = dspark("chat", "--max-new-tokens", 3, stdin="one\ntwo\nthree\n")
    assert result.exit_code == 2 and "Error: The prompt has more tokens" in result.stderr


def test_a_pair_a_target_and_a_draft_are_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    target, draft = tmp_path / "t", tmp_path / "d"
    target.mkdir()
    draft.mkdir()
    assert options._paths(Settings(target=str(target))) == (target, None, "t")
    both = Settings(target=str(target), draft=str(draft))
    assert options._paths(both) == (target, draft, "t + d")
    for wrong in (Settings(pair="nosuch"), Settings(target="nosuch"), Settings(target=str(target), draft="./nosuch")):
        with pytest.raises(InputError):
            options._paths(wrong)


# What follows runs the program in a process of its own: pipes, terminals and signals are only real there.


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm-256color", "OMP_NUM_THREADS": "1"}


def test_help_is_quick_because_it_does_not_load_torch() -> None:
    code = (
        "import sys; from typer.testing import CliRunner; from local_runner.cli import app;"
        "assert CliRunner().invoke(app, ['race', '--help']).exit_code == 0;"
        "print([m for m in ('torch', 'transformers', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment(), cwd=ROOT)
    assert done.stdout.strip() == "[]", done.stderr


def test_nothing_steers_a_pipe(fake_program: Path) -> None:
    command = [sys.executable, str(fake_program), "race", "--limit", "3", "--max-new-tokens", "30"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=60)
    assert done.returncode == 0 and "speed-up" in done.stdout
    assert not CONTROL.search(done.stdout + done.stderr)


def test_an_interrupted_answer_keeps_its_rounds(fake_program: Path, tmp_path: Path) -> None:
    file = tmp_path / "rounds.jsonl"
    command = [sys.executable, str(fake_program), "generate", "--prompt", "x", "--sleep-s", "0.05"]
    child = subprocess.Popen(
        [*command, "--max-new-tokens", "2000", "--events", str(file)], stdout=subprocess.PIPE, env=environment()
    )
    assert child.stdout is not None and child.stdout.read(10)
    child.send_signal(signal.SIGINT)
    assert child.wait(timeout=20) == 130
    child.stdout.close()
    rounds = [Round.from_dict(json.loads(line)) for line in file.read_text().splitlines()]
    assert rounds[-1].stop is None and len(rounds) < 100 and os.listdir(tmp_path) == ["rounds.jsonl"]


def on_terminal(program: Path, arguments: list[str], replies: list[tuple[str, str]]) -> tuple[int, str]:
    """Run `dspark` on a terminal of 80×24; type each reply when its cue has appeared. Returns exit code and output."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.execve(
            sys.executable, [sys.executable, str(program), *arguments], environment() | {"COLUMNS": "80", "LINES": "24"}
        )
    output, seen, deadline = "", 0, time.monotonic() + 40
    while time.monotonic() < deadline:
        if select.select([terminal], [], [], 0.2)[0]:
            try:
                output += os.read(terminal, 1 << 16).decode(errors="replace")
            except OSError:
                break
        if replies and (at := output.find(replies[0][0], seen)) >= 0:
            seen = at + 1
            os.write(terminal, replies.pop(0)[1].encode())
    else:
        os.kill(pid, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    os.close(terminal)
    return code, output


def test_a_race_on_a_terminal_is_live_and_leaves_the_table(fake_program: Path) -> None:
    code, output = on_terminal(
        fake_program, ["race", "--limit", "2", "--max-new-tokens", "40", "--sleep-s", "0.01"], []
    )
    assert code == 0
    live, _, after = output.partition("\x1b[?1049l")
    assert "\x1b[?1049h" in live and live.count("╭─") > 4
    assert "speed-up" in after and "Identical" in after and "\x1b[4;32m" in after


def test_an_interrupted_race_restores_the_terminal(fake_program: Path) -> None:
    code, output = on_terminal(fake_program, ["race", "--sleep-s", "0.02"], [("tok/s", "\x03")])
    assert code == 130
    assert output.rindex("\x1b[?1049l") > output.rindex("\x1b[?1049h") and output.rindex("\x1b[?25h") > 0
    assert "Cancelled; nothing was stored." in output


def test_in_a_chat_ctrl_c_stops_the_answer_and_not_the_program(fake_program: Path) -> None:
    replies = [("> ", "hello\n"), ("lamp", "\x03"), ("> ", "again\n"), ("> ", "/quit\n")]
    code, output = on_terminal(fake_program, ["chat", "--max-new-tokens", "30", "--sleep-s", "0.08"], replies)
    assert code == 0 and not replies
    assert output.count("cancelled") == 1 and output.count("length limit") == 1


def test_generate_on_a_terminal_adds_statistics(fake_program: Path) -> None:
    code, output = on_terminal(fake_program, ["generate", "--prompt", "x", "--max-new-tokens", "9"], [])
    assert code == 0 and re.search(r"9 tokens · [\d.]+ tok/s · τ [\d.]+ · first token after", output)

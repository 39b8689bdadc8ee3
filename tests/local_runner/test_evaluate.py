"""`evaluate` and `calibrate` by the command line, on golden pairs with a made-up tokenizer and on a scripted engine."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import typer
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner, Result

from local_runner.calibrate_command import calibrate, halves
from local_runner.cli import Program
from local_runner.engine import Decoding
from local_runner.engines.base import Request
from local_runner.engines.torch import TorchEngine, load_engine
from local_runner.evaluate_command import evaluate
from local_runner.evaluation import converse, decode_tasks
from local_runner.pairs import DEFAULT_PAIR
from local_runner.prompts import Prompt
from local_runner.report import table
from local_runner.store import resolve_pair
from local_runner.tasks import read_tasks
from sglang_dspark.decoding.calibrate import Calibration
from sglang_dspark.decoding.rounds import Round, summarise
from sglang_dspark.decoding.sampling import SamplingParams
from sglang_dspark.decoding.schedule import Fixed
from sglang_dspark.errors import InputError

GOLDEN = Path(os.environ.get("DSPARK_GOLDEN", Path(__file__).parents[3] / "shared" / "golden"))
VOCAB, BLOCK = 192, 7
TEMPLATE = "{% for m in messages %}w{{ 1 if m.role == 'user' else 2 }} {{ m.content }} {% endfor %}w3"

app = typer.Typer(cls=Program, pretty_exceptions_enable=False)
app.command()(evaluate)
app.command()(calibrate)


def dspark(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(a) for a in arguments])


@pytest.fixture(autouse=True)
def same_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Path]]:
    """pair(name): copies of a golden target, with a tokenizer whose words are w0, w1, …, and of its draft."""
    if not GOLDEN.is_dir():
        pytest.skip(f"there are no golden runs at {GOLDEN}; set DSPARK_GOLDEN to their folder")

    def make(name: str) -> tuple[Path, Path]:
        folder = tmp_path_factory.mktemp(name)
        for part in ("target", "draft"):
            shutil.copytree(GOLDEN / name / part, folder / part)
        words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0"))
        words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token=f"w{VOCAB - 1}", unk_token="w0")
        tokenizer.chat_template = TEMPLATE
        tokenizer.save_pretrained(folder / "target")
        return folder / "target", folder / "draft"

    return make


@pytest.fixture(scope="module")
def vanilla(pair: Callable[[str], tuple[Path, Path]]) -> tuple[Path, Path]:
    return pair("qwen3-vanilla")


@pytest.fixture
def tasks(tmp_path: Path) -> str:
    """Two tasks of short conversations, some of them of two turns and some with a domain."""
    first = [{"turns": ["w5 w6 w7"]}, {"turns": ["w8", "w9 w10"], "domain": "two"}, {"turns": ["w90 w91"]}]
    second = [{"turns": [f"w{20 + i} w{30 + i}"], "category": "two"} for i in range(2)]
    for name, lines in (("first", first), ("second", second)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return f"{tmp_path / 'first.jsonl'},{tmp_path / 'second.jsonl'}"


def options(vanilla: tuple[Path, Path], tokens: int = 24) -> list[object]:
    return [
        *("--target", vanilla[0], "--draft", vanilla[1], "--dtype", "float32", "--device", "cpu", "--threads", 1),
        *("--max-new-tokens", tokens, "--context-length", 200),
    ]


def test_a_golden_pair_is_evaluated(vanilla: tuple[Path, Path], tasks: str, tmp_path: Path) -> None:
    file, plot = tmp_path / "out.json", tmp_path / "out.svg"
    result = dspark("evaluate", *options(vanilla), "--tasks", tasks, "--json", file, "--plot", plot)
    assert result.exit_code == 0, result.output
    found = json.loads(file.read_text())
    assert [*found["tasks"]] == ["first", "second"] and [*found["domains"]] == ["two"]
    assert found["algorithm"] == "dspark" and found["schedule"] == "fixed" and found["block"] == BLOCK

    # The same by hand: the same requests through the engine, and the definitions.
    engine = load_engine(*vanilla, dtype="float32", device="cpu", threads=1, context_length=200)
    decoding = Decoding(24, SamplingParams(), Fixed())
    rounds: dict[str, list[Round]] = {}
    for task in read_tasks(tasks):
        for prompt in task.prompts:
            messages: list[dict[str, str]] = []
            for turn in prompt.turns:
                messages.append({"role": "user", "content": turn})
                ids = engine.encode_chat(messages)
                answer = list(engine.generate(decoding.request(engine, ids, "dspark", "x")))
                rounds.setdefault(task.name, []).extend(answer)
                messages.append(
                    {"role": "assistant", "content": engine.decode([t for r in answer for t in r.committed])}
                )
    means = []
    for name, made in rounds.items():
        task_ = found["tasks"][name]
        after = [r for r in made if r.index]
        tau = sum(r.accepted + 1 for r in after) / len(after)
        means.append(tau)
        assert task_["mean_accepted_length"] == pytest.approx(tau)
        assert task_["mean_accepted_length_95"][0] <= tau <= task_["mean_accepted_length_95"][1]
        assert (task_["rounds"], task_["tokens"]) == (len(after), sum(len(r.committed) for r in made))
        assert task_["draft_acceptance_rate"] == pytest.approx(
            sum(r.accepted for r in after) / sum(r.scheduled for r in after)
        )
        assert len(task_["survival"]) == len(task_["conditional"]) == len(task_["confidence"]["judged"]) == BLOCK
        assert task_["survival"][0] == pytest.approx(sum(r.accepted > 0 for r in after) / len(after))
        assert task_["confidence"]["judged"][0] == len(after) and task_["tokens_per_s"] > 0
    assert found["mean_accepted_length"] == pytest.approx(sum(means) / 2)
    assert found["tasks"]["first"]["prompts"] == 3 and found["domains"]["two"]["prompts"] == 3
    assert plot.read_text().startswith("<svg") and "Reliability" in plot.read_text()
    assert "mean of tasks" in result.stdout and f"{found['mean_accepted_length']:.2f}" in result.stdout
    assert sum(line.startswith("[") for line in result.stderr.splitlines()) == 5
    assert "| first | 3 |" in table("evaluate", found)
    assert sorted(os.listdir(tmp_path)) == ["first.jsonl", "out.json", "out.svg", "second.jsonl"]


@pytest.mark.parametrize("algorithm", ["lookup", "none"])
def test_look_up_and_plain_decoding_need_no_draft(
    vanilla: tuple[Path, Path], tasks: str, tmp_path: Path, algorithm: str
) -> None:
    file, plot = tmp_path / "out.json", tmp_path / "out.svg"
    target = [*options(vanilla)[:2], *options(vanilla)[4:]]
    common = ["evaluate", *target, "--tasks", tasks, "--json", file, "--plot", plot]
    assert dspark(*common, "--algorithm", algorithm).exit_code == 0
    found = json.loads(file.read_text())
    assert found["algorithm"] == algorithm and found["tasks"]["first"]["tokens"] == 4 * 24
    if algorithm == "none":
        assert found["mean_accepted_length"] == 1.0 and found["draft_acceptance_rate"] is None
        assert found["tasks"]["first"]["confidence"] is None and found["schedule"] is None
        assert dspark(*common).exit_code == 0 and json.loads(file.read_text())["algorithm"] == "none"
    else:
        assert found["mean_accepted_length"] >= 1.0 and found["block"] == BLOCK
        assert found["engine"]["draft"] == "prompt look-up"
        assert dspark(*common, "--algorithm", "lookup", "--schedule", "algorithm1", "--block", 3).exit_code == 0
        assert json.loads(file.read_text())["block"] == 3


def test_a_draft_without_a_confidence_head_is_evaluated(
    pair: Callable[[str], tuple[Path, Path]], tasks: str, tmp_path: Path
) -> None:
    plot = tmp_path / "p.svg"
    result = dspark("evaluate", *options(pair("qwen3-dflash"), 9), "--tasks", tasks, "--json", "-", "--plot", plot)
    found = json.loads(result.stdout)
    assert found["tasks"]["first"]["confidence"] is None and found["tasks"]["first"]["rounds"] > 0
    assert "Reliability" not in plot.read_text() and "mean of tasks" in result.stderr


def test_sampling_is_seeded(vanilla: tuple[Path, Path], tasks: str) -> None:
    given = [
        "evaluate",
        *options(vanilla),
        "--tasks",
        tasks,
        "--json",
        "-",
        "--temperature",
        1,
        "--seed",
        4,
        "--limit",
        1,
    ]
    once, again = (json.loads(dspark(*given, "--draft-style", "sampled").stdout) for _ in range(2))
    assert once["sampling"]["seed"] == 4 and once["tasks"]["first"]["prompts"] == 1
    assert once["tasks"]["first"]["accepted"] == again["tasks"]["first"]["accepted"]


# A scripted engine is quicker where models do not matter.


@pytest.fixture
def engine(fake: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Any:
    made = fake.FakeEngine()
    fake.install(made, monkeypatch)
    return made


def test_later_turns_follow_the_own_answers(engine: Any) -> None:
    prompt = Prompt("1", "", ("one", "two", "three"))
    decoding = Decoding(5, SamplingParams(), Fixed())
    rounds, left_out = converse(engine, prompt, decoding, "dspark", "t/1", threading.Event())
    said = [[m["content"] for m in c] for c in engine.conversations]
    answers = [engine.decode([engine._token(r.prompt_ids, i) for i in range(5)]) for r in engine.requests]
    assert said == [["one"], ["one", answers[0], "two"], ["one", answers[0], "two", answers[1], "three"]]
    assert [m["role"] for m in engine.conversations[-1]] == ["user", "assistant", "user", "assistant", "user"]
    assert left_out == 0 and summarise(rounds).tokens == 15
    assert [r.name for r in engine.requests] == ["t/1#1", "t/1#2", "t/1#3"]


def test_turns_that_no_longer_fit_are_counted_and_said(engine: Any, tasks: str, tmp_path: Path) -> None:
    engine.description["context_length"] = 3
    (tmp_path / "long.jsonl").write_text('{"turns": ["a", "b", "c"]}\n')
    result = dspark("evaluate", "--tasks", tmp_path / "long.jsonl", "--json", "-")
    assert result.exit_code == 0 and json.loads(result.stdout)["turns_left_out"] == 2
    assert "2 turns were left out" in result.stderr
    engine.description["context_length"] = 1
    refused(dspark("evaluate", "--tasks", tasks), "Prompt 1 of the task first has 1 tokens")


def refused(result: Result, says: str) -> None:
    assert result.exit_code == 2 and result.stdout == "", result.output
    assert says in result.stderr and result.stderr.startswith("Error: ") and result.stderr.count("\n") == 1


def test_what_cannot_be_evaluated_is_refused(engine: Any, tasks: str, tmp_path: Path) -> None:
    refused(dspark("evaluate", "--tasks", tmp_path / "none.jsonl"), "none.jsonl cannot be read")
    (tmp_path / "bad.jsonl").write_text('{"turns": ["a"]}\n{"turns": ["a"], "reference": 3}\n')
    refused(dspark("evaluate", "--tasks", tmp_path / "bad.jsonl"), "Line 2 of")
    refused(dspark("evaluate", "--tasks", tasks, "--json", tmp_path / "no/such.json"), "cannot be written")
    given = ["evaluate", "--tasks", tasks, "--target", "t"]
    refused(dspark(*given, "--draft", "d", "--algorithm", "none"), "uses no draft")
    refused(dspark(*given, "--algorithm", "lookup"), "torch engine only")
    refused(dspark(*given, "--pair", "p", "--algorithm", "none"), "either --pair or --target")
    refused(dspark("evaluate", "--tasks", tasks, "--schedule", "algorithm1"), "confidence head")
    engine.block = 0
    refused(dspark(*given, "--algorithm", "dspark"), "needs a draft")
    engine.tokenizer = None
    refused(dspark("evaluate", "--tasks", tasks), "no tokenizer")
    assert not engine.requests
    for wrong in (["--limit", "0"], ["--algorithm", "magic"], []):
        result = dspark("evaluate", *wrong, *(["--tasks", tasks] if wrong else []))
        assert result.exit_code == 2 and "Traceback" not in result.output


@pytest.mark.parametrize("command", [["evaluate", "--json"], ["calibrate", "--out"]])
def test_an_interrupt_leaves_nothing_half_written(
    engine: Any, tasks: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    generate = engine.generate

    def interrupted(request: Any, cancelled: threading.Event) -> Iterator[Round]:
        for round_ in generate(request, cancelled):
            yield round_
            if len(engine.requests) == 3:
                os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(engine, "generate", interrupted)
    engine.has_confidence = True
    (tmp_path / "d").mkdir()
    (tmp_path / "out.json").write_text("before")
    monkeypatch.chdir(tmp_path)
    files = {"evaluate": "--tasks", "calibrate": "--prompts"}[command[0]], tasks.split(",")[0]
    result = dspark(command[0], *files, command[1], tmp_path / "out.json", "--plot", tmp_path / "d/out.svg")
    assert result.exit_code == 130 and "Cancelled; nothing was stored." in result.stderr
    assert (tmp_path / "out.json").read_text() == "before" and os.listdir(tmp_path / "d") == []


def test_the_cancelled_conversation_is_left_out(engine: Any, tasks: str) -> None:
    cancelled = threading.Event()
    talks = decode_tasks(
        engine, read_tasks(tasks), Decoding(5, SamplingParams(), Fixed()), "dspark",
        say=lambda line: cancelled.set() if line.startswith("[2/3] first") else None, cancelled=cancelled,
    )  # fmt: skip
    assert [t.prompt.id for t in talks] == ["1", "2"]


# Calibration.


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.jsonl"
    lines = [{"prompt": f"w{i} w{2 * i} w{i + 3}", "domain": "ab"[i % 2]} for i in range(4, 12)]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def confidences(engine: TorchEngine) -> list[tuple[float, ...]]:
    rounds = engine.generate(Request((1, 5, 6), 30, SamplingParams(), schedule=Fixed()))
    return [r.confidence for r in rounds if r.index]


def test_a_golden_draft_is_calibrated_and_engines_use_it(
    pair: Callable[[str], tuple[Path, Path]], prompts: Path, tmp_path: Path
) -> None:
    target, draft = pair("qwen3-vanilla")
    out, plot = tmp_path / "c.json", tmp_path / "c.svg"
    common = ["calibrate", *options((target, draft), 40), "--prompts", prompts, "--out", out, "--plot", plot]
    result = dspark(*common)
    assert result.exit_code == 0, result.output
    found = Calibration.load(out)
    assert found.block == BLOCK and "fewer than 1000 blocks" in result.stderr and "survival ECE" in result.stdout
    about = found.provenance
    assert about["temperature"] == 0.0 and about["target"]["name"] == "target" and len(about["data"]["sha256"]) == 64
    assert about["data"]["fitted"]["prompts"] == about["data"]["held out"]["prompts"] == 4
    assert about["data"]["fitted"]["blocks"] > 50 and "sglang-dspark" in about["engine"]["versions"]
    assert [len(about["ece"][w][k]) for w in ("before", "after") for k in ("survival", "conditional")] == [BLOCK] * 4
    assert plot.read_text().startswith("<svg") and str(tmp_path) not in json.dumps(about["target"])

    def open_(**more: Any) -> TorchEngine:
        return load_engine(target, draft, dtype="float32", device="cpu", threads=1, context_length=200, **more)

    raw = confidences(open_())
    shutil.copy(out, draft / "calibration.json")
    calibrated = open_()
    assert calibrated.description["calibrated"] and "calibrated, at temperature 0.0" in calibrated.notes[-1]
    for c, given in zip(confidences(calibrated), raw, strict=True):
        assert c == pytest.approx(found.apply(given)) and c != pytest.approx(given)
    calibrated.calibrate(None)
    assert confidences(calibrated) == raw
    assert "not calibrated" in open_(block=3).notes[-1]

    assert dspark(*common).exit_code == 0
    again = Calibration.load(out)
    assert again.temperatures == found.temperatures, "what is there is not calibrated a second time"

    text = (draft / "config.json").read_text()
    (draft / "config.json").write_text(text + "\n")
    with pytest.raises(InputError, match="another draft"):
        open_()


def test_at_a_temperature_labels_are_what_was_accepted(
    vanilla: tuple[Path, Path], prompts: Path, tmp_path: Path
) -> None:
    given = ["--temperature", 1, "--seed", 3, "--draft-style", "sampled", "--limit", 4, "--out", tmp_path / "c.json"]
    assert dspark("calibrate", *options(vanilla), "--prompts", prompts, *given).exit_code == 0
    about = Calibration.load(tmp_path / "c.json").provenance
    assert (about["temperature"], about["draft_style"], about["sampling"]["seed"]) == (1.0, "sampled", 3)
    assert about["data"]["fitted"]["prompts"] == 2


def test_halves_share_the_domains() -> None:
    prompts = [Prompt(str(i), "ab"[i % 2]) for i in range(8)]
    one, other = halves(prompts)
    assert [p.domain for p in one] == [p.domain for p in other] == ["a", "a", "b", "b"]
    assert {p.id for p in one} | {p.id for p in other} == set("01234567")


def test_what_cannot_be_calibrated_is_refused(engine: Any, prompts: Path, tmp_path: Path) -> None:
    given = ["calibrate", "--prompts", prompts, "--out", tmp_path / "c.json"]
    refused(dspark(*given, "--schedule", "fixed:2"), "whole blocks")
    refused(dspark(*given, "--confidence-threshold", ".5"), "whole blocks")
    refused(dspark(*given), "confidence head")
    engine.has_confidence, engine.tokenizer = True, None
    refused(dspark(*given), "no tokenizer")
    prompts.write_text('{"prompt": "one"}')
    refused(dspark(*given), "at least two prompts")
    assert not (tmp_path / "c.json").exists()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_default_pair_is_evaluated_and_calibrated(tmp_path: Path) -> None:
    try:
        resolve_pair(DEFAULT_PAIR)
    except InputError as error:
        pytest.skip(str(error))
    texts = ["Name three rivers.", "Write a function that adds two numbers.", "What is 12 times 7?", "Say hello."]
    task = tmp_path / "t.jsonl"
    task.write_text("".join(json.dumps({"turns": [t]}) + "\n" for t in texts))
    common = ["--max-new-tokens", 48, "--threads", 1]
    taus = {}
    for algorithm in ("dspark", "lookup", "none"):
        result = dspark("evaluate", "--tasks", task, *common, "--algorithm", algorithm, "--json", "-")
        assert result.exit_code == 0, result.output
        taus[algorithm] = json.loads(result.stdout)["mean_accepted_length"]
    assert taus["dspark"] > 1.1 and taus["lookup"] >= 1.0 and taus["none"] == 1.0
    result = dspark("calibrate", "--prompts", task, *common, "--out", tmp_path / "c.json")
    assert result.exit_code == 0, result.output
    assert Calibration.load(tmp_path / "c.json").block == BLOCK

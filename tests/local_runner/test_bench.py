"""The bench on a tiny pair: what it stores, that its tables render, that turns rotate, that nothing half is left."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from local_runner import bench, report
from local_runner.baselines import Decoded, Transformers
from local_runner.bench_tables import Answer, ways_result
from local_runner.engine import Decoding
from local_runner.engines.torch import load_engine
from local_runner.placement.plan import Thresholds
from local_runner.prompts import Prompt
from local_runner.watchdog import Watchdog
from sglang_dspark.decoding.sampling import SamplingParams
from sglang_dspark.decoding.schedule import Fixed
from sglang_dspark.errors import CheckFailed

GOLDEN = Path(os.environ.get("DSPARK_GOLDEN", Path(__file__).parents[3] / "shared" / "golden"))
PAIR = GOLDEN / "qwen3-vanilla"

needs_golden = pytest.mark.skipif(not GOLDEN.is_dir(), reason=f"no golden runs at {GOLDEN}; set DSPARK_GOLDEN")


@pytest.fixture(autouse=True)
def same_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def arguments(out: Path, target: Path = PAIR / "target") -> list[str]:
    return [
        *("--target", str(target), "--draft", str(PAIR / "draft"), "--out", str(out), "--threads", "1"),
        *("--prompt-ids", "1,2,3", "--prompt-ids", "9,8", "--max-new-tokens", "8"),
        *("--repeats", "1", "--step-repeats", "2"),
    ]


@pytest.mark.slow
@needs_golden
def test_the_command_stores_a_result_whose_tables_render(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "find_compiler", lambda: None)
    assert bench.main(arguments(tmp_path / "bench.json")) == 0
    result = json.loads((tmp_path / "bench.json").read_text(encoding="utf-8"))
    out, err = capsys.readouterr()
    assert "compiled mode is left out" in err and [*result["modes"]] == ["bfloat16", "float32"]
    for mode in result["modes"].values():
        steps = mode["step_s"]
        assert [*steps] == [str(k) for k in range(1, 17)] and all(s["count"] == 2 for s in steps.values())
        assert mode["block_rows"] == 8
        assert mode["block_over_one_row"] == pytest.approx(steps["8"]["median"] / steps["1"]["median"])
        assert mode["draft_over_one_row"] == pytest.approx(mode["draft_s"]["median"] / steps["1"]["median"])
        assert 0 < mode["shares"]["overhead_share"] < 0.5
    # The target of the pair: 8 layers of width 64, lm_head of 192 rows or an embedding that serves as one.
    read, speed = result["parameters_read"], result["bandwidth"]["bytes_per_s"]
    assert result["modes"]["float32"]["weights_s"] == pytest.approx(4 * read / speed)
    assert result["modes"]["bfloat16"]["weights_s"] == pytest.approx(2 * read / speed)
    assert result["race"]["bfloat16"]["plain"]["tokens"] == 2 * 8
    assert [*result["ways"]] == sorted(["plain, bfloat16", "DSpark, bfloat16", *bench.OTHERS])
    for name in ("steps", "costs", "ways"):
        assert report.table(name, result) in out


def test_ratios_are_taken_within_a_repeat() -> None:
    """The machine is twice as slow in the second repeat and the third is odd: medians of rates would mislead."""
    seconds = {"plain, x": (10, 20, 10), "DSpark, x": (5, 10, 50), "transformers generate": (20, 40, 20)}
    answers = [
        Answer(way, domain, repeat, 50, s / 2)
        for way, by_repeat in seconds.items()
        for repeat, s in enumerate(by_repeat)
        for domain in ("code", "chat")
    ]
    ways = ways_result(answers)
    assert [*ways["plain, x"]] == ["code", "chat", "all"]
    assert ways["DSpark, x"]["all"] == {"tokens_per_s": 10.0, "over_generate": 4.0, "over_plain": 2.0}
    assert ways["plain, x"]["code"] == {"tokens_per_s": 10.0, "over_generate": 2.0, "over_plain": None}
    assert ways["transformers generate"]["all"]["over_generate"] == 1.0


def test_a_way_that_decoded_nothing_has_no_figures() -> None:
    answers = [Answer("plain, x", "code", 0, 0, 0.0), Answer("DSpark, x", "code", 0, 5, 1.0)]
    ways = ways_result(answers)
    assert ways["plain, x"]["all"] == {"tokens_per_s": None, "over_generate": None, "over_plain": None}
    assert ways["DSpark, x"]["all"] == {"tokens_per_s": 5.0, "over_generate": None, "over_plain": None}


class FakeTransformers(Transformers):
    """Takes no time and no model."""

    def __init__(self, order: list[str]) -> None:
        self._order = order

    def generate(self, prompt_ids: Any, max_new_tokens: int, stop_ids: Any, lookup: int | None = None) -> Decoded:
        self._order.append("generate" if lookup is None else "lookup")
        return Decoded(7, 1.0)


def test_every_way_decodes_every_prompt_and_the_first_turn_moves_on(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    run_heat = bench.run_heat

    def watched(engine: Any, heat: Any, decoding: Decoding, cancelled: threading.Event) -> Any:
        order.append(heat.mode)
        return run_heat(engine, heat, decoding, cancelled)

    monkeypatch.setattr(bench, "run_heat", watched)
    prompts = [(Prompt(name, "code", ids=(n,)), (n,)) for n, name in enumerate("ab", start=1)]
    decoding = Decoding(20, SamplingParams(), Fixed())
    calm = Watchdog(Thresholds(0), threading.Event())
    answers, runs = bench.compete(
        {"x": fake.FakeEngine()}, FakeTransformers(order), prompts, decoding, 2, lambda message: None, calm
    )
    ways = ["plain", "dspark", "generate", "lookup"]
    assert [order[i : i + 4] for i in range(0, 16, 4)] == [ways[t:] + ways[:t] for t in (0, 1, 1, 2)]
    assert [(r.heat.name, r.heat.repeat, r.heat.mode) for r in runs["x"]] == [
        (name, repeat, mode) for repeat in (0, 1) for name in "ab" for mode in ("plain", "dspark")
    ]
    calm.thresholds = Thresholds(1 << 60)
    assert not calm.check()
    with pytest.raises(CheckFailed, match="MiB of memory are left"):
        bench.compete(
            {"x": fake.FakeEngine()}, FakeTransformers(order), prompts, decoding, 1, lambda message: None, calm
        )
    # Of twenty tokens the first comes with the prompt; its time, 0.02 s, does not count either.
    plain = [a for a in answers if a.way == "plain, x"]
    assert [(a.tokens, a.seconds) for a in plain] == [(19, pytest.approx(19 * 0.02))] * 4


@needs_golden
def test_transformers_decodes_the_engines_tokens_and_stops_where_it_does() -> None:
    others = Transformers(PAIR / "target", torch.float32)
    engine = load_engine(PAIR / "target", dtype="float32", device="cpu", threads=1)
    decoding = Decoding(12, SamplingParams(), Fixed())
    tokens = [t for r in engine.generate(decoding.request(engine, (1, 2, 3), "plain", "0")) for t in r.committed]
    assert others.generate((1, 2, 3), 12, ()).tokens == 11
    stop = tokens[5]
    assert others.generate((1, 2, 3), 12, {stop}).tokens == tokens.index(stop)
    # Lookup may take several tokens in the step that reads the prompt, which do not count then.
    assert 0 < others.generate((1, 2, 3), 12, (), lookup=3).tokens <= 11


@needs_golden
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda a: a[:2] + a[4:], "--target and --draft belong together"),
        (lambda a: ["--target", "/nowhere", *a[2:]], "There is no folder or .gguf file /nowhere"),
        (lambda a: [*a, "--prompt-ids", "1,x"], "'x' where a token id belongs"),
    ],
)
def test_wrong_input_is_one_sentence_and_stores_nothing(
    change: Callable[[list[str]], list[str]], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench.main(change(arguments(tmp_path / "bench.json"))) == 2
    assert said in capsys.readouterr().err
    assert not [*tmp_path.iterdir()]


def test_an_interrupt_stores_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*given: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(bench, "bench", interrupted)
    assert bench.main(["--out", str(tmp_path / "bench.json")]) == 130
    assert "nothing was stored" in capsys.readouterr().err and not [*tmp_path.iterdir()]

"""The loop learns, stops and goes on to the bit, and refuses what it cannot continue."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from sglang_dspark.errors import InputError
from sglang_dspark.training.conversations import Conversation, is_held_out, read_shard, shards, write_shard
from sglang_dspark.training.features import FeatureCache, TargetReader
from sglang_dspark.training.head import Shape, head_config, head_fields
from sglang_dspark.training.model import TrainableDraft
from sglang_dspark.training.train import Recipe, Trainer

SHORT = Recipe(steps=12, sequences=2, anchors=4, evaluate_every=4, warm_up=3, held_out=4, held_out_share=5)


@pytest.fixture
def trainer(llama: Any, data: Path) -> Callable[..., Trainer]:
    def make(out: Path, recipe: Recipe = SHORT, budget: int = 10**7, **options: Any) -> Trainer:
        config = head_config(head_fields(llama.config, Shape(block=4, rank=8, layers=1), 0))
        torch.manual_seed(0)
        model = TrainableDraft(config, llama.model.embed_tokens.weight, 96)
        cache = FeatureCache(TargetReader(llama, config.target_layer_ids), budget)
        return Trainer(model, cache, recipe, data, out, **options)

    return make


def weights(out: Path) -> dict[str, torch.Tensor]:
    return load_file(out / "checkpoint" / "state.safetensors")


def test_it_learns(trainer: Callable, tmp_path: Path) -> None:
    made = trainer(
        tmp_path / "head", Recipe(steps=150, sequences=4, anchors=8, evaluate_every=150, held_out=8, held_out_share=5)
    )
    made._take_new_shards()
    before = made.measure(made.model)
    made.run(threading.Event())
    after = made.measure()
    assert after.accepted_length > before.accepted_length + 0.05
    assert after.conditional[0] > before.conditional[0]


def test_threads_change_no_bit(trainer: Callable, tmp_path: Path) -> None:
    for threads in (1, 3):
        trainer(tmp_path / str(threads), replace(SHORT, sequences=5), threads=threads).run(threading.Event())
    one, three = weights(tmp_path / "1"), weights(tmp_path / "3")
    assert one.keys() == three.keys() and all(torch.equal(one[name], three[name]) for name in one)


def test_an_interrupted_run_ends_as_one_without_a_break(trainer: Callable, tmp_path: Path) -> None:
    trainer(tmp_path / "whole").run(threading.Event())
    for stop_after in (5, 7, 12):  # in the middle of an interval, again, and to the end
        cancelled = threading.Event()
        part = trainer(tmp_path / "parts")
        step = part._step

        def counted(n: int, done: float, step: Any = step, at: int = stop_after, event: Any = cancelled) -> Any:
            if n + 1 >= at:
                event.set()
            return step(n, done)

        part._step = counted  # type: ignore[method-assign]
        part.run(cancelled)
        assert part.progress.step == stop_after
    whole, parts = weights(tmp_path / "whole"), weights(tmp_path / "parts")
    assert whole.keys() == parts.keys()
    assert any(name.startswith("optimiser.1.") for name in whole)
    for name, tensor in whole.items():
        assert torch.equal(tensor, parts[name]), name

    def curve(out: Path) -> list[dict[str, Any]]:
        lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        return [{k: v for k, v in line.items() if k != "seconds"} for line in lines]

    assert curve(tmp_path / "whole") == curve(tmp_path / "parts")
    assert [line["step"] for line in curve(tmp_path / "whole")] == [4, 8, 12]


def test_kept_features_change_nothing(trainer: Callable, tmp_path: Path) -> None:
    kept, anew = trainer(tmp_path / "kept"), trainer(tmp_path / "anew", budget=0)
    kept.run(threading.Event())
    anew.run(threading.Event())
    assert anew.cache.used == 0 and anew.cache.misses > kept.cache.misses
    for name, tensor in weights(tmp_path / "kept").items():
        assert torch.equal(tensor, weights(tmp_path / "anew")[name]), name


def test_features_keep_to_their_budget(trainer: Callable, tmp_path: Path) -> None:
    made = trainer(tmp_path / "head", budget=60_000)
    made.run(threading.Event())
    assert 0 < made.cache.used <= 60_000
    assert made.cache.used == sum(r.size for r in made.cache._kept.values())


def test_another_recipe_is_refused_by_name(trainer: Callable, tmp_path: Path) -> None:
    trainer(tmp_path / "head").run(threading.Event())
    with pytest.raises(InputError, match=r"another recipe \(ema, seed differ\)"):
        trainer(tmp_path / "head", replace(SHORT, seed=9, ema=0.5)).run(threading.Event())


def test_a_checkpoint_is_there_whole_at_every_moment(
    trainer: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer(tmp_path / "head").run(threading.Event())
    there = weights(tmp_path / "head")
    made = trainer(tmp_path / "head", SHORT)

    def fails(*_: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("sglang_dspark.training.train.save_file", fails)
    made._resume()
    with pytest.raises(OSError, match="disk full"):
        made.save()
    assert all(torch.equal(there[n], t) for n, t in weights(tmp_path / "head").items())


def test_new_shards_join_and_are_remembered(trainer: Callable, data: Path, tmp_path: Path) -> None:
    second = data / "1.jsonl"
    second.rename(tmp_path / "1.jsonl")
    made = trainer(tmp_path / "head", replace(SHORT, steps=8))
    made._take_new_shards()
    few = len(made.train)
    (tmp_path / "1.jsonl").rename(second)
    made.run(threading.Event())
    assert made.progress.files == ["0.jsonl", "1.jsonl"] and len(made.train) > few


def test_a_limit_of_time_ends_the_schedule(trainer: Callable, tmp_path: Path) -> None:
    made = trainer(tmp_path / "head", replace(SHORT, steps=10**9, evaluate_every=10**9))
    made.run(threading.Event(), seconds=1.5)
    assert 0 < made.progress.step < 10**6
    rates = [g["lr"] for o in made.optimisers for g in o.param_groups]
    assert all(rate < 0.5 * full for rate, full in zip(rates, (2e-3, 0.01), strict=True))


def test_it_stops_early_when_nothing_gets_better(trainer: Callable, tmp_path: Path) -> None:
    said: list[str] = []
    recipe = replace(SHORT, steps=100, learning_rate=0.0, matrix_learning_rate=0.0, weight_decay=0.0, patience=2)
    made = trainer(tmp_path / "head", recipe, say=said.append)
    made.run(threading.Event())
    assert made.progress.step == 12 and "stopping early" in said[-1]


def test_held_out_prompts_are_never_trained_on(trainer: Callable, data: Path, tmp_path: Path) -> None:
    made = trainer(tmp_path / "head")
    made._take_new_shards()
    everything = [c for shard in shards(data) for c in read_shard(shard)]
    assert {c.number for c in made.train} == {c.number for c in everything if not is_held_out(c, 5)}
    assert all(is_held_out(c, 5) for c in made.held_out) and made.held_out


@pytest.mark.parametrize(
    ("line", "says"), [("nonsense", "line 2"), ('{"number": 1}', "line 2"), ('{"tokens": [1], "answer": 5}', "line 2")]
)
def test_a_bad_shard_is_named(tmp_path: Path, line: str, says: str) -> None:
    shard = tmp_path / "a.jsonl"
    write_shard(shard, [Conversation(0, "text", 0.0, 1, (1, 2, 3))])
    shard.write_text(shard.read_text() + line + "\n")
    with pytest.raises(InputError, match=rf"a.jsonl, {says}"):
        list(read_shard(shard))


def test_no_conversations_is_one_sentence(trainer: Callable, data: Path, tmp_path: Path) -> None:
    for shard in data.iterdir():
        shard.unlink()
    with pytest.raises(InputError, match="no conversations"):
        trainer(tmp_path / "head").run(threading.Event())

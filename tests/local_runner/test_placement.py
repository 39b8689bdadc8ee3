"""Placements: never over budget, no worse with more memory, the brute-force best, and three plans reckoned by hand."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from local_runner.footprint import Cache, DraftPrint, Footprint, Part
from local_runner.footprint.shapes import published, shape_files
from local_runner.machine import Cpu, Machine, Pool, load_machine, machine_files
from local_runner.placement import place
from local_runner.placement.items import Wishes, items, touched
from local_runner.placement.packing import pack
from local_runner.placement.plan import Plan, budget, reserve

GB = 10**9
CPU = Cpu("a test's", 4, ())


def two_pools(gpu: float, system: float) -> Machine:
    """A card and system memory, with so many GB free."""
    return Machine(
        "m",
        CPU,
        (
            Pool("gpu", "gpu", int(gpu * GB), int(gpu * GB), 1000e9, "", "cuda:0"),
            Pool("system", "system", int(system * GB), int(system * GB), 50e9, ""),
        ),
    )


def unified(size: float) -> Machine:
    return Machine("m", CPU, (Pool("unified", "unified", int(size * GB), int(size * GB), 273e9, "", "cuda:0"),))


def fill(pools: Plan) -> dict[str, int]:
    used: dict[str, int] = {}
    for placed in pools.placed:
        used[placed.pool] = used.get(placed.pool, 0) + placed.bytes
    return used


# ------------------------------------------------------------------------------------------------------------ packing


def brute(items_: list[tuple[int, float]], budgets: list[int], rates: list[float]) -> float | None:
    """The least cost over every assignment."""
    costs = []
    for pools in itertools.product(range(len(budgets)), repeat=len(items_)):
        room = list(budgets)
        for (size, _), pool in zip(items_, pools, strict=True):
            room[pool] -= size
        if min(room) >= 0:
            costs.append(sum(t / rates[p] for (_, t), p in zip(items_, pools, strict=True)))
    return min(costs) if costs else None


ITEMS = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 30).map(float)), max_size=7)


@settings(max_examples=150, deadline=None)
@given(ITEMS, st.lists(st.integers(0, 25), min_size=1, max_size=3), st.data())
def test_packing_is_the_brute_force_best(found: list[tuple[int, float]], budgets: list[int], data: Any) -> None:
    rates = sorted(data.draw(st.lists(st.integers(1, 9).map(float), min_size=len(budgets), max_size=len(budgets))))[
        ::-1
    ]
    best, packing = brute(found, budgets, rates), pack(found, budgets, rates)
    assert (best is None) == (packing is None)
    if packing is None or best is None:
        return
    assert packing.proven and packing.cost == pytest.approx(best)
    room = list(budgets)
    cost = 0.0
    for (size, traffic), pool in zip(found, packing.pools, strict=True):
        room[pool] -= size
        cost += traffic / rates[pool]
    assert min([*room, 0]) == 0 and cost == pytest.approx(packing.cost)


def test_greedy_filling_would_not_do() -> None:
    """By density the small item goes first and leaves room for neither of the others."""
    found = [(6, 60.0), (10, 90.0)]
    packing = pack(found, [10, 100], [10.0, 1.0])
    assert packing is not None and packing.pools == (1, 0)


def test_many_layers_are_packed_at_once() -> None:
    found = [(100 + n % 3, 90.0 + n % 5) for n in range(60)] + [(3, 21.0), (7, 0.1), (50, 100.0)]
    packing = pack(found, [3000, 10_000], [20.0, 1.0])
    assert packing is not None and packing.cost <= packing.bound * 1.01, "cut short or not, it is near the least"


def test_whether_there_is_a_filling_is_the_same_question() -> None:
    assert pack([(6, 60.0), (10, 90.0)], [10, 5], [10.0, 1.0], any_will_do=True) is None
    assert pack([(6, 60.0), (10, 90.0)], [10, 6], [10.0, 1.0], any_will_do=True) is not None


def test_every_known_machine_and_shape_is_proven() -> None:
    for machine in map(load_machine, machine_files()):
        for name in shape_files():
            assert place(machine, published(name), Wishes(), explain=False).proven, f"{name} on {machine.name}"


# ---------------------------------------------------------------------------------------------------------- properties


def small(layers: int, layer_mb: int, head_mb: int, table_mb: int, row: int, experts: int) -> Footprint:
    """A made-up pair whose sizes are in megabytes, with a W2 of table_mb."""
    mb = 10**6
    parts = [Part("target embedding", "embedding", table_mb * mb, table_mb * mb, "BF16")]
    for i in range(layers):
        parts.append(Part(f"target layer {i}", "layer", layer_mb * mb, layer_mb * mb, "BF16", i))
        if experts:
            parts.append(Part(f"target experts {i}", "experts", 4 * layer_mb * mb, 4 * layer_mb * mb, "BF16", i))
    draft = DraftPrint(
        "head",
        (
            Part("draft backbone", "backbone", head_mb * mb, head_mb * mb, "BF16"),
            Part("Markov W1", "W1", table_mb * mb, table_mb * mb, "BF16"),
            Part("Markov W2", "W2", table_mb * mb, table_mb * mb, "BF16"),
        ),
        (Cache(0, "full", row),),
        block=7,
        taps=3,
        rank=64,
        shares_lm_head=True,
    )
    caches = tuple(Cache(i, "full", row) for i in range(layers))
    return Footprint("small", tuple(parts), caches, 1000, 64, 128, layers, experts, experts // 4, layer_mb * mb, draft)


PAIRS = st.builds(
    small,
    layers=st.integers(1, 6),
    layer_mb=st.integers(50, 900),
    head_mb=st.integers(10, 900),
    table_mb=st.integers(1, 300),
    row=st.integers(1, 2000),
    experts=st.sampled_from([0, 8]),
)
WISHES = st.builds(
    Wishes,
    context=st.integers(1, 20_000),
    users=st.integers(1, 8),
    goal=st.sampled_from(["latency", "throughput"]),
    cache_dtype=st.sampled_from(["bfloat16", "int8"]),
    head_dtype=st.sampled_from([None, "int8"]),
    mapped=st.booleans(),
)
MACHINES = st.one_of(
    st.builds(two_pools, st.floats(0.1, 9), st.floats(0.1, 12)), st.builds(unified, st.floats(0.5, 16))
)


@settings(max_examples=60, deadline=None)
@given(MACHINES, PAIRS, WISHES)
def test_never_over_budget_and_nothing_forgotten(machine: Machine, f: Footprint, w: Wishes) -> None:
    plan = place(machine, f, w)
    used = fill(plan)
    for pool in machine.pools:
        assert used.get(pool.name, 0) <= budget(pool) <= pool.free
    if plan.fits:
        assert {p.name for i in items(f, w) for p in i.pieces} <= {p.part for p in plan.placed}
        assert sum(used.values()) >= f.bytes, "every byte of the target has a place"
        assert plan.round_s is not None and plan.round_s > plan.plain_s > 0
    else:
        assert plan.placed == () and plan.changes and plan.round_s is None
    assert plan == place(machine, f, w), "the same question has the same answer"


@settings(max_examples=60, deadline=None)
@given(MACHINES, PAIRS, WISHES, st.floats(0, 8), st.integers(0, 1))
def test_more_memory_is_never_worse(machine: Machine, f: Footprint, w: Wishes, more: float, which: int) -> None:
    pools = list(machine.pools)
    old = pools[which % len(pools)]
    pools[which % len(pools)] = replace(old, size=old.size + int(more * GB), free=old.free + int(more * GB))
    before = place(machine, f, w, explain=False)
    after = place(replace(machine, pools=tuple(pools)), f, w, explain=False)
    if before.fits:
        assert after.fits and after.round_s is not None and before.round_s is not None
        assert after.round_s <= before.round_s * (1 + 1e-9)


@settings(max_examples=40, deadline=None)
@given(PAIRS, WISHES, st.floats(0.1, 9), st.floats(0.3, 12))
def test_a_card_added_to_a_machine_is_never_worse(f: Footprint, w: Wishes, gpu: float, system: float) -> None:
    machine = two_pools(gpu, system)
    without = place(replace(machine, pools=machine.pools[1:]), f, w, explain=False)
    added = place(machine, f, w, explain=False)
    if without.fits:
        assert added.fits and (added.round_s or 0) <= (without.round_s or 0) * (1 + 1e-9)


@settings(max_examples=60, deadline=None)
@given(MACHINES, PAIRS, WISHES)
def test_proposed_changes_fit(machine: Machine, f: Footprint, w: Wishes) -> None:
    for change in place(machine, f, w).changes:
        if change.wishes is not None:
            assert place(machine, f, change.wishes, explain=False).fits, change.what


# ------------------------------------------------------------------------------------------------------------- reasons


def test_w2_has_the_fastest_pool_and_w1_makes_room() -> None:
    f = small(layers=4, layer_mb=500, head_mb=300, table_mb=150, row=10, experts=0)
    plan = place(two_pools(2.4, 20), f, Wishes(context=1024))
    assert plan.fits and plan.pool_of("Markov W2") == "gpu" and plan.pool_of("Markov W1") == "system"
    assert "7 times" in next(p.reason for p in plan.placed if p.part == "Markov W2")
    refused = {r.what: r.why for r in plan.rejected}
    assert "costs 19.95 ms a round" in refused["Markov W2 in system"], "7 · 150 MB · (1/50 − 1/1000 GB/s)"
    assert "Markov W1 in gpu" in refused


def test_a_card_too_small_for_the_work_spaces_is_left_alone() -> None:
    f, w = small(layers=2, layer_mb=100, head_mb=20, table_mb=10, row=10, experts=0), Wishes(context=1024)
    plan = place(two_pools(0.8, 8), f, w)
    assert plan.fits and {p.pool for p in plan.placed} == {"system"}
    assert {p.pool for p in place(two_pools(4, 8), f, w).placed} == {"gpu"}


def test_offloading_frees_nothing_on_unified_memory() -> None:
    for gb in (4, 40):
        plan = place(unified(gb), published("qwen3-4b"), Wishes())
        assert any("frees nothing" in r.why for r in plan.rejected)
        assert {p.pool for p in plan.placed} <= {"unified"}
    assert not any("offload" in r.what for r in place(two_pools(4, 40), published("qwen3-4b"), Wishes()).rejected)


def test_unified_memory_keeps_a_larger_reserve() -> None:
    size = 128 * GB
    kinds = {kind: reserve(Pool("p", kind, size, size, 1e9, "")) for kind in ("gpu", "system", "unified")}
    assert kinds["unified"] > kinds["system"] > kinds["gpu"]
    assert place(unified(128), published("qwen3-4b"), Wishes()).thresholds.available == kinds["unified"] // 2


def test_mapping_files_doubles_the_peak_and_is_not_done() -> None:
    """A pair that fits when its files are read and dropped, and not when they are mapped."""
    f = published("qwen3-8b")
    read, mapped = (place(unified(32), f, Wishes(mapped=m)) for m in (False, True))
    assert read.fits and read.loading == "read and drop" and not mapped.fits
    assert any(r.what == "mapping the files" for r in read.rejected)


def test_a_spark_may_hang_on_too_many_rows_and_the_plan_says_so() -> None:
    spark = load_machine("dgx-spark")
    many = place(spark, published("qwen3-4b"), Wishes(users=16, goal="throughput", context=2048))
    assert many.verify_rows == 128
    assert any("at most 3 drafts of each user" in r.why for r in many.rejected), "16 · (3 + 1) = 64"
    assert not any(
        "hang" in r.why for r in place(spark, published("qwen3-4b"), Wishes(users=8, goal="throughput")).rejected
    )
    assert not any("hang" in r.why for r in place(load_machine("h200"), published("qwen3-4b"), many.wishes).rejected)


def test_reasons_name_the_alternatives_that_lose() -> None:
    plan = place(load_machine("dgx-spark"), published("gemma-4-12b"), Wishes())
    refused = {r.what: r.why for r in plan.rejected}
    assert "would be lost" in refused["dropping rows outside sliding windows"]
    assert "1.23" in refused["decoding without the draft"]


@pytest.mark.parametrize(
    ("free", "w", "said"),
    [
        (14.0, Wishes(context=40960), "a context of"),
        (14.0, Wishes(users=6), "users at once"),
        (14.0, Wishes(context=40960), "caches in int8"),
        (13.0, Wishes(context=4096), "the draft's weights in int8"),
        (13.0, Wishes(context=4096), "in files of at most 3.70 GB"),
        (13.0, Wishes(context=4096), "decode without the draft"),
        (9.0, Wishes(), "bits a weight"),
        (15.0, Wishes(dtype="float32"), "as it is stored"),
        (1.0, Wishes(), "more memory"),
    ],
)
def test_the_smallest_changes_are_named(free: float, w: Wishes, said: str) -> None:
    """`free` GB may be given out. Weights take 9.28 GB, reading a file 4 GB more, and later caches and work spaces."""
    plan = place(unified(free + 2.147483648), published("qwen3-4b"), w)
    assert plan.uses[0].budget == pytest.approx(free * GB, abs=1)
    assert not plan.fits and any(said in c.what for c in plan.changes), [c.what for c in plan.changes]


def test_the_context_that_is_proposed_is_the_longest() -> None:
    machine, f, w = unified(16.5), published("qwen3-4b"), Wishes(context=40960)
    change = next(c for c in place(machine, f, w).changes if c.wishes and c.wishes.context != w.context)
    assert change.wishes is not None and place(machine, f, change.wishes, explain=False).fits
    longer = replace(change.wishes, context=change.wishes.context + 256)
    assert longer.context <= w.context and not place(machine, f, longer, explain=False).fits


def test_throughput_counts_all_users_and_latency_one() -> None:
    f, machine = published("qwen3-4b"), load_machine("h200")
    one, all_ = (place(machine, f, Wishes(users=8, goal=goal)) for goal in ("latency", "throughput"))
    assert fill(one)["gpu"] == pytest.approx(fill(all_)["gpu"], rel=0.02), "room for eight in both"
    assert all_.plain_s > one.plain_s, "eight caches are read"


def test_experts_are_read_by_the_rows_that_use_them() -> None:
    assert touched(128, 8, 1) == pytest.approx(1 / 16)
    assert touched(128, 8, 8) == pytest.approx(1 - (15 / 16) ** 8)
    assert touched(0, 0, 8) == 1.0


def test_a_plan_needs_no_pytorch() -> None:
    code = "import sys, local_runner.placement, local_runner.watchdog; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_plan_is_json() -> None:
    data = place(load_machine("rtx-4090-64gb"), published("qwen3-14b"), Wishes()).to_dict()
    assert json.loads(json.dumps(data)) == data
    assert {"fits", "parts", "pools", "rejected", "changes", "thresholds", "step_s", "round_s"} <= set(data)


# ------------------------------------------------------------------------------------- three plans, reckoned by hand


def test_by_hand_qwen3_4b_on_a_spark() -> None:
    """Everything in one pool of 273 GB/s: bytes read over bytes a second."""
    # a layer: q and o 4096·2560 each, k and v 1024·2560 each, three of 9728·2560, norms 2·128 + 2·2560; two bytes each
    layer = 2 * (2 * 10_485_760 + 2 * 2_621_440 + 3 * 24_903_680 + 256 + 5120)
    assert layer == 201_861_632
    table = 151_936 * 2560 * 2  # embedding and lm_head are one
    cache = 36 * 2 * 8 * 128 * 2  # 147,456 bytes a token
    step = 36 * layer + table + 2 * 2560 + 8192 * cache
    # a round reads the table again for the draft, its backbone (fc 2560·12800, five layers, two norms) and cache once,
    # W2 seven times, seven rows of W1, and the confidence head
    backbone = 2560 * 12_800 * 2 + 5 * layer + 2 * 2560 * 2
    markov = 151_936 * 256 * 2
    round_ = step + table + backbone + 8192 * 5 * 2 * 8 * 128 * 2 + 7 * markov + 7 * 256 * 2 + (2560 + 256 + 1) * 2
    plan = place(load_machine("dgx-spark"), published("qwen3-4b"), Wishes())
    assert plan.fits and plan.round_s is not None
    assert plan.plain_s == pytest.approx(step / 273e9, rel=1e-12) == pytest.approx(33.89e-3, rel=1e-3)
    assert plan.round_s == pytest.approx(round_ / 273e9, rel=1e-12) == pytest.approx(43.29e-3, rel=1e-3)
    sizes = {p.part: p.bytes for p in plan.placed}
    assert sizes["cache 0"] == (8192 + 8) * 4096, "the context, and eight rows that may be taken back"
    assert sizes["draft cache"] == (8192 + 7) * 20_480
    assert sizes["logits"] == 15 * 151_936 * 4 * 2 and sizes["tapped features"] == 256 * 5 * 2560 * 2


def test_by_hand_qwen3_14b_on_a_4090() -> None:
    """24 of 40 layers or 25? What is read for each of its bytes decides, and the last room goes to W1."""
    # 23 GiB are free; 4 % of 24 GiB stay so
    budget_ = 23 * 2**30 - 1_030_792_151
    # 256 rows of five features of 5120, logits of 15 rows, activations of 6·5120 + 3·17408, and the program
    spaces = 256 * 5 * 5120 * 2 + 15 * 151_936 * 8 + 256 * (30_720 + 52_224) * 4 + 600 * 2**20
    layer = 2 * (2 * 5120 * 5120 + 2 * 1024 * 5120 + 3 * 17_408 * 5120 + 256 + 2 * 5120)
    assert layer == 660_623_872
    with_cache = layer + 4096 * (8192 + 8)
    draft = 5 * layer + 5120 * 25_600 * 2 + 2 * 5120 * 2 + 20_480 * (8192 + 7)
    w2, lm_head = 151_936 * 256 * 2, 151_936 * 5120 * 2
    # first what is read more than once for each byte, then the backbone (0.99996 times, layers 0.99995), then layers
    room = budget_ - spaces - w2 - lm_head - (5120 + 257) * 2 - 5120 * 2 - draft
    on_card = room // with_cache
    assert on_card == 25
    assert w2 <= room - on_card * with_cache < lm_head, "W1, as large as W2, still fits; the embedding does not"
    plan = place(load_machine("rtx-4090-64gb"), published("qwen3-14b"), Wishes())
    where = {p.part: p.pool for p in plan.placed}
    assert [where[f"target layer {i}"] for i in range(40)] == ["gpu"] * 25 + ["system"] * 15
    assert all(where[f"cache {i}"] == where[f"target layer {i}"] for i in range(40))
    assert where["Markov W2"] == where["Markov W1"] == where["draft backbone"] == where["target lm_head"] == "gpu"
    assert where["target embedding"] == "system"
    read = layer + 4096 * 8192
    step = (25 * read + lm_head + 5120 * 2) / 1008e9 + (15 * read + 5120 * 2) / 89.6e9
    assert plan.plain_s == pytest.approx(step, rel=1e-12)
    assert plan.proven


def test_by_hand_deepseek_v4_flash_on_one_spark_and_on_two() -> None:
    """A layer's 256 experts of 3·4096·2048 in 4.25 bits are 3.42 GB; 43 of them exceed one Spark and not two."""
    experts = 256 * 3 * 4096 * 2048 * 17 // 32
    assert experts == 3_422_552_064
    one = 116 * 2**30 - round(0.1 * round(121.7 * 2**30))
    assert one == 111_486_613_586
    assert 43 * experts > one
    single, double = (
        place(load_machine(m), published("deepseek-v4-flash"), Wishes()) for m in ("dgx-spark", "dgx-spark-2")
    )
    assert not single.fits and any("bits a weight" in c.what for c in single.changes)
    assert double.fits and {p.pool for p in double.placed} == {"spark 1", "spark 2"}
    assert single.uses[0].budget == double.uses[0].budget == one
    # a step reads 6 of 256 experts a layer, whichever Spark has them
    read = sum(p.plain_s for p in double.placed if p.kind == "experts") * 273e9
    assert read == pytest.approx(43 * experts * 6 / 256, rel=1e-9)
    # a round of 6 rows touches 1 − (250/256)^6 of them, were rows to choose independently
    read = sum(p.round_s for p in double.placed if p.kind == "experts") * 273e9
    assert read == pytest.approx(43 * experts * (1 - (250 / 256) ** 6), rel=1e-9)

"""Machine files: those that ship, and faulty ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from local_runner.machine import GIB, load_machine, machine_files, parse_machine
from sglang_dspark.errors import InputError

GOOD = """
name = "m"
description = "A machine."
[cpu]
name = "c"
cores = 4
instructions = ["avx2"]
[[pools]]
name = "system"
kind = "system"
gib = 8
gb_per_s = 20
source = "a test"
"""


def test_those_that_ship() -> None:
    names = {"dgx-spark", "dgx-spark-2", "rtx-4090-64gb", "rtx-5090", "h200", "macbook-32gb", "small-cpu"}
    assert names <= set(machine_files())
    for name in names:
        machine = load_machine(name)
        assert machine.name == name
        assert all(p.source and p.bandwidth > 1e9 and p.free <= p.size for p in machine.pools)


def test_the_spark_is_one_pool_as_it_was_reported() -> None:
    (pool,) = load_machine("dgx-spark").pools
    assert pool.kind == "unified" and pool.bandwidth == 273e9
    assert pool.size == pytest.approx(121.7 * GIB) and load_machine("dgx-spark").max_rows == 64


def test_a_file_of_ones_own(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(GOOD)
    pool = load_machine(str(file)).pools[0]
    assert (pool.size, pool.free, pool.bandwidth, pool.device) == (8 * GIB, 8 * GIB, 20e9, "cpu")


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("cores = 4", 'cores = "four"', "'cores'"),
        ("gib = 8", "gibs = 8", "unknown key 'gibs'"),
        ("gib = 8", "", "'gib'"),
        ('kind = "system"', 'kind = "tape"', "'tape'"),
        ("gb_per_s = 20", "gb_per_s = 0", "bandwidth"),
        ("gib = 8", "gib = 8\nfree_gib = 9", "free"),
        ("[[pools]]", "[pools]", "'pools'"),
        ("name =", "name", "valid TOML"),
    ],
)
def test_faulty_files_are_refused_by_name(tmp_path: Path, old: str, new: str, said: str) -> None:
    file = tmp_path / "bad.toml"
    file.write_text(GOOD.replace(old, new))
    with pytest.raises(InputError, match=r"bad\.toml") as error:
        parse_machine(file)
    assert said in str(error.value)


def test_slow_pools_first_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "bad.toml"
    file.write_text(GOOD + GOOD[GOOD.index("[[pools]]") :].replace('"system"\nkind', '"gpu"\nkind').replace("20", "40"))
    with pytest.raises(InputError, match="fastest first"):
        parse_machine(file)


def test_an_unknown_name_gets_the_nearest() -> None:
    with pytest.raises(InputError, match="dgx-spark"):
        load_machine("dgx-sprk")

"""SGLang's own parser takes every recipe of configs/serving."""

from __future__ import annotations

from argparse import ArgumentParser
from pathlib import Path

import pytest

from local_runner.pairs import config_root
from sglang_dspark.serving import launch

RECIPES = sorted((config_root() / "serving").glob("*.toml"))


@pytest.mark.usefixtures("sglang")
@pytest.mark.parametrize("file", RECIPES, ids=[f.stem for f in RECIPES])
def test_sglang_parses_every_recipe(file: Path) -> None:
    from sglang.srt.server_args import ServerArgs

    recipe = launch.read_recipe(file)
    found = launch.prepare(None if "--model-path" in recipe.arguments else "a/b", None, recipe, [], local=True)
    parser = ArgumentParser()
    ServerArgs.add_cli_args(parser)
    parsed = parser.parse_args(list(found.command[3:]))
    assert parsed.speculative_algorithm == "DSPARK" and recipe.description

"""The command line of an SGLang server with DSPARK, from a recipe, the two checkpoints and whatever else is asked for.

A recipe is a TOML file: a `description`, a table `arguments` of SGLang's options without their dashes, and a table
`environment` if it needs one. Nothing here imports SGLang.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from sglang_dspark.errors import InputError
from sglang_dspark.serving import drafts, hooks
from sglang_dspark.serving.fingerprints import known
from sglang_dspark.serving.hooked import HOOKS, PARTS
from sglang_dspark.serving.plugin import option
from sglang_dspark.toml import read_toml

ALGORITHM, TARGET, DRAFT, DEVICE = (
    "--speculative-algorithm",
    "--model-path",
    "--speculative-draft-model-path",
    "--device",
)
KEYS = {"description", "arguments", "environment"}
Value = str | int | float | bool


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a server is started somewhere: SGLang's arguments, and settings of the environment."""

    description: str = ""
    arguments: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


def read_recipe(file: Path) -> Recipe:
    """Read a recipe. Raises InputError that names the file and what is wrong in it."""
    data = read_toml(file)
    if unknown := data.keys() - KEYS:
        raise InputError(f"{file} has the unknown key '{min(unknown)}'; it may have {', '.join(sorted(KEYS))}.")
    arguments, environment = data.get("arguments", {}), data.get("environment", {})
    if not (isinstance(arguments, dict) and isinstance(environment, dict)):
        raise InputError(f"{file} needs 'arguments' and 'environment' to be tables.")
    for name, value in (arguments | environment).items():
        if not isinstance(value, Value):
            raise InputError(f"{file}: '{name}' must be a text, a number, true or false, not {value!r}.")
    words = [word for name, value in arguments.items() for word in _words(name, value)]
    return Recipe(str(data.get("description", "")), tuple(words), {k: str(v) for k, v in environment.items()})


def _words(name: str, value: Value) -> list[str]:
    """An argument as words of a command line; false leaves a flag out."""
    if isinstance(value, bool):
        return [f"--{name}"] if value else []
    return [f"--{name}", str(value)]


@dataclass(frozen=True, slots=True)
class Launch:
    """A server that may be started: the words of its command, its environment, and what was found out about it."""

    command: tuple[str, ...]
    environment: Mapping[str, str]
    notes: tuple[str, ...]


def prepare(
    target: str | None, draft: str | None, recipe: Recipe, more: Sequence[str], *, local: bool = False
) -> Launch:
    """Judge the draft, and say how to start the server. `more` are arguments of SGLang's, which win over the recipe's.
    With `local`, checkpoints on a hub are not looked at.

    Raises InputError for a draft that is none for this target or for SGLang.
    """
    given = [*recipe.arguments, *more]
    target = target or option(given, TARGET) or option(given, "--model")
    draft = draft or option(given, DRAFT)
    if target is None:
        raise InputError("There is no target; give --target MODEL, or a recipe that has model-path.")
    if (option(given, ALGORITHM) or "DSPARK").upper() != "DSPARK":
        raise InputError(f"{ALGORITHM} is {option(given, ALGORITHM)}; dspark launch starts servers with DSPARK only.")
    words = [TARGET, target, ALGORITHM, "DSPARK", *([DRAFT, draft] if draft else [])]
    for name in (TARGET, "--model", DRAFT, ALGORITHM):
        given = without(given, name)
    asked = option(given, "--speculative-dspark-block-size")
    block = int(asked) if asked is not None and asked.isdigit() else None
    if draft is None:
        summary = "in the target's own checkpoint"
    elif local and not (Path(draft).exists() and Path(target).exists()):
        summary = "not judged, because it or the target is on a hub"
    else:
        read, _, config = drafts.judge(draft, target, block)
        summary = drafts.summary(read, config, block)
    command = (sys.executable, "-m", "sglang.launch_server", *words, *given)
    return Launch(command, recipe.environment, (f"draft: {summary}", f"parts: {', '.join(_parts(given))}"))


def check_sglang() -> str:
    """The version of SGLang that is here and that this package fits.

    Raises InputError where there is none, or one that it does not fit.
    """
    if importlib.util.find_spec("sglang") is None:
        raise InputError(
            f"SGLang is not installed in {sys.prefix}; run `make sglang` and start .venv-sglang/bin/dspark launch, or"
            " install 'sglang-dspark[sglang]' where SGLang's requirements are met."
        )
    version = importlib.metadata.version("sglang")
    wrong = hooks.misfits(HOOKS, version, known())
    if wrong and os.environ.get(hooks.WARN) != "warn":
        raise InputError(f"This SGLang cannot be used: {next(iter(wrong.values()))}; install a supported version.")
    return version


def _parts(arguments: Sequence[str]) -> list[str]:
    return [p for p in PARTS if p != "cpu" or option(arguments, DEVICE) == "cpu"]


def without(arguments: Sequence[str], name: str) -> list[str]:
    """A command line without an option and its value."""
    left, skip = [], False
    for word in arguments:
        if skip:
            skip = False
        elif word == name:
            skip = True
        elif not word.startswith(f"{name}="):
            left.append(word)
    return left

"""How a function or class of SGLang is recognised as the one that a hook was written for."""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import os
import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

FINGERPRINTS = Path(__file__).with_name("fingerprints.toml")
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """How a function or class of SGLang is recognised: its signature as text, and a hash of its source."""

    signature: str
    source: str


def fingerprint(target: str) -> Fingerprint:
    """The fingerprint of the function or class at a dotted path, from its file: nothing is imported but the packages
    around it, so that every process can afford to look, and what others hooked onto it does not matter.

    Raises LookupError where there is no such thing.
    """
    node, source = definition(target)
    if isinstance(node, ast.ClassDef):
        signature = ", ".join(ast.unparse(base) for base in node.bases)
    else:
        returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
        signature = f"({ast.unparse(node.args)}){returns}"
    return Fingerprint(signature, hashlib.sha256(source.encode()).hexdigest()[:16])


def definition(target: str) -> tuple[Definition, str]:
    """The statement that defines the function or class at a dotted path, and its source with decorators.

    Raises LookupError where there is none.
    """
    names = target.split(".")
    spec, used = None, 0
    for used in range(1, len(names)):
        spec = importlib.util.find_spec(".".join(names[:used]))
        if spec is None or spec.submodule_search_locations is None:
            break
    if spec is None or spec.origin is None:
        raise LookupError(f"there is no module {'.'.join(names[:used])}")
    lines, scope = _parsed(spec.origin, os.stat(spec.origin).st_mtime_ns)
    for name in names[used:]:
        found = [n for n in ast.iter_child_nodes(scope) if isinstance(n, Definition) and n.name == name]
        if not found:
            raise LookupError(f"{spec.name} does not define {'.'.join(names[used:])}")
        scope = found[-1]
    assert isinstance(scope, Definition)
    first = min([scope.lineno, *(d.lineno for d in scope.decorator_list)])
    return scope, "\n".join(line.rstrip() for line in lines[first - 1 : scope.end_lineno])


@cache
def _parsed(path: str, stamp: int) -> tuple[list[str], ast.AST]:
    """The lines and the syntax tree of a file as it was at `stamp`."""
    text = Path(path).read_text(encoding="utf-8")
    return text.splitlines(), ast.parse(text)


def known(path: Path = FINGERPRINTS) -> dict[str, dict[str, Fingerprint]]:
    """Fingerprints by version of SGLang and target."""
    with path.open("rb") as stream:
        data = tomllib.load(stream)
    return {version: {t: Fingerprint(**f) for t, f in targets.items()} for version, targets in data.items()}

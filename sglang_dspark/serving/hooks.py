"""Whether the SGLang at hand is the one that the hooks were written for, and putting them in place.

`hooked.HOOKS` is the table. `fingerprints.toml` holds, for each supported version, the signature and a hash of the
source of everything in it. Supporting a version in which nothing moved is a new section of that file, which
`python -m sglang_dspark.serving.hooks` prints; where something moved, the hook is read again first.
"""

from __future__ import annotations

import importlib.metadata
import json
import logging
import os
import pkgutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from sglang_dspark.serving.fingerprints import Fingerprint, fingerprint, known
from sglang_dspark.serving.hooked import HOOKS, Hook, Part

WARN = "DSPARK_UNSUPPORTED_SGLANG"
PACKAGE = "sglang_dspark.serving"


def misfits(hooks: Iterable[Hook], version: str, table: Mapping[str, Mapping[str, Fingerprint]]) -> dict[Hook, str]:
    """Which of `hooks` do not fit the SGLang that is installed as `version`, each with why it does not."""
    if version not in table:
        supported = ", ".join(table)
        return {hook: f"SGLang {version} is not one of the supported versions ({supported})" for hook in hooks}
    found = {hook: _misfit(hook, table[version]) for hook in hooks}
    return {hook: why for hook, why in found.items() if why}


def _misfit(hook: Hook, expected: Mapping[str, Fingerprint]) -> str | None:
    if hook.target not in expected:
        return f"{hook.target} has no fingerprint for this version"
    try:
        actual = fingerprint(hook.target)
    except LookupError as error:
        return f"{hook.target} is not there: {error}"
    if actual.signature != expected[hook.target].signature:
        return f"the signature of {hook.target} has changed to {actual.signature}"
    if actual.source != expected[hook.target].source:
        return f"the source of {hook.target} has changed"
    return None


class Unsupported(SystemExit):
    """Ends the process: plug-ins of SGLang that fail in any other way are only logged, and the server goes on."""


def verified(parts: Sequence[Part], table: Mapping[str, Mapping[str, Fingerprint]] | None = None) -> list[Part]:
    """The parts whose hooks all fit the installed SGLang.

    Raises Unsupported if one does not; with DSPARK_UNSUPPORTED_SGLANG=warn its part is left out instead.
    """
    version = importlib.metadata.version("sglang")
    wrong = misfits([h for h in HOOKS if h.part in parts], version, known() if table is None else table)
    _complain(wrong)
    return [part for part in parts if all(hook.part != part for hook in wrong)]


def apply(parts: Sequence[Part]) -> None:
    """Put the hooks of verified `parts` in place in this process. Raises Unsupported if one did not take hold, which
    SGLang only logs.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    hooks = [h for h in HOOKS if h.part in parts and h.by is not None]
    for hook in hooks:
        if implementation(hook) not in [by for _, by, _ in HookRegistry._hooks[hook.target]]:
            HookRegistry.register(hook.target, implementation(hook), HookType(hook.kind))
    HookRegistry.apply_hooks()
    _complain(
        {
            hook: f"SGLang could not apply the hook on {hook.target}"
            for hook in hooks
            if not hasattr(pkgutil.resolve_name(hook.target), "__wrapped__")
        }
    )


def implementation(hook: Hook) -> Callable[..., Any]:
    """The function of this package that `hook` puts in place."""
    assert hook.by is not None
    found: Callable[..., Any] = pkgutil.resolve_name(f"{PACKAGE}.{hook.by}")
    return found


def _complain(wrong: Mapping[Hook, str]) -> None:
    """Stop the process over the first misfit, or warn of all of them."""
    if not wrong:
        return
    if os.environ.get(WARN) != "warn":
        hook, why = next(iter(wrong.items()))
        raise Unsupported(
            f"Error: sglang-dspark does not fit this SGLang: {why}. It {hook.reason}. Install a supported version, or"
            f" set {WARN}=warn to go on without the part '{hook.part}'."
        )
    for hook, why in wrong.items():
        logging.getLogger(__name__).warning("DSPARK goes on without the part '%s': %s.", hook.part, why)


def main() -> None:
    """Print the section of fingerprints.toml for the SGLang that is installed."""
    print(f'["{importlib.metadata.version("sglang")}"]')
    for target in dict.fromkeys(hook.target for hook in HOOKS):
        f = fingerprint(target)
        # A string of JSON is one of TOML too.
        print(f'"{target}" = {{ signature = {json.dumps(f.signature)}, source = "{f.source}" }}')


if __name__ == "__main__":
    main()

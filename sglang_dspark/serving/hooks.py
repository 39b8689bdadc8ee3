"""What is hooked in SGLang, why, and whether the SGLang at hand is the one that it was written for.

`HOOKS` is the one table. `fingerprints.toml` holds, for each supported version, the signature and a hash of the source
of everything in it. Supporting a version in which nothing moved is a new section of that file, which
`python -m sglang_dspark.serving.hooks` prints; where something moved, the hook is read again first.
"""

from __future__ import annotations

import importlib.metadata
import json
import logging
import os
import pkgutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from sglang_dspark.serving.fingerprints import Fingerprint, fingerprint, known

Kind = Literal["before", "around", "replace", "uses"]
Part = Literal["checkpoints", "models", "cpu"]
WARN = "DSPARK_UNSUPPORTED_SGLANG"
PACKAGE = "sglang_dspark.serving"


@dataclass(frozen=True, slots=True)
class Hook:
    """One thing of SGLang's that a part of this package replaces, wraps or, as `uses`, relies on without touching it.

    `by` is the function of this package, as module:name; None for what is only relied on.
    """

    target: str
    kind: Kind
    part: Part
    by: str | None
    reason: str


HOOKS: tuple[Hook, ...] = (
    Hook(
        "sglang.srt.arg_groups.speculative_hook.handle_speculative_decoding",
        "around",
        "checkpoints",
        "arguments:handle_speculation",
        "judges the draft before weights load",
    ),
    Hook(
        "sglang.srt.arg_groups.speculative_hook._handle_dspark",
        "around",
        "cpu",
        "arguments:admit_cpu",
        "refuses devices that it does not know",
    ),
    Hook(
        "sglang.srt.arg_groups.model_hook.handle_model_specific_adjustments",
        "around",
        "cpu",
        "arguments:admit_gemma4",
        "refuses attention backends that it does not know for Gemma 4",
    ),
    Hook(
        "sglang.srt.mem_cache.memory_pool.MHATokenToKVPool._init_kv_copy_and_warmup",
        "replace",
        "cpu",
        "cpu:native_kv_copy",
        "warms up a Triton kernel; SGLang's own copy in torch serves",
    ),
    Hook(
        "sglang.srt.mem_cache.allocation.assign_req_to_token_pool_func",
        "replace",
        "cpu",
        "kernels:assign_token_slots",
        "launches a Triton kernel",
    ),
    Hook(
        "sglang.kernels.ops.memory.common.get_last_loc_triton",
        "replace",
        "cpu",
        "kernels:last_slots",
        "launches a Triton kernel",
    ),
    Hook(
        "sglang.kernels.ops.speculative.reject_sampling.chain_speculative_sampling_triton",
        "replace",
        "cpu",
        "kernels:accept_chain",
        "launches a Triton kernel",
    ),
    Hook(
        "sglang.kernels.ops.activation.softcap._softcap_logits",
        "replace",
        "cpu",
        "kernels:softcap",
        "launches a Triton kernel",
    ),
    Hook(
        "sglang.srt.models.dflash.DFlashAttention.__init__",
        "around",
        "cpu",
        "cpu:plain_norm_rope",
        "chooses a Triton kernel for bfloat16",
    ),
    Hook(
        "sglang.srt.models.dspark.DSparkDraftMixin._build_fused_kv_write_bundle",
        "replace",
        "cpu",
        "cpu:no_fused_write",
        "chooses a Triton kernel for bfloat16",
    ),
    Hook(
        "sglang.srt.speculative.dspark_components.dspark_worker_v2.DSparkWorkerV2._forward_decode",
        "before",
        "cpu",
        "cpu:ignore_streams",
        "records a stream on a tensor, which CPU tensors cannot",
    ),
    Hook(
        "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend",
        "uses",
        "cpu",
        None,
        "is the base of the attention backend",
    ),
    Hook("sglang.srt.platforms.cpu.CpuDeviceMixin", "uses", "cpu", None, "is the base of the platform"),
    Hook(
        "sglang.srt.speculative.dspark_components.dspark_config.parse_dspark_draft_config",
        "uses",
        "checkpoints",
        None,
        "reads the configuration that drafts are shown with",
    ),
    Hook("sglang.srt.models.dspark.DSparkDraftMixin", "uses", "models", None, "is the base of the model classes"),
    Hook("sglang.srt.models.dflash.DFlashDraftModel", "uses", "models", None, "is the base of the model classes"),
)


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
        if hook.target not in HookRegistry._hooks:
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
    for hook in HOOKS:
        f = fingerprint(hook.target)
        # A string of JSON is one of TOML too.
        print(f'"{hook.target}" = {{ signature = {json.dumps(f.signature)}, source = "{f.source}" }}')


if __name__ == "__main__":
    main()

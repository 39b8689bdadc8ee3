"""What is hooked in SGLang, and why: the one table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

Kind = Literal["before", "after", "around", "replace", "uses"]
Part = Literal["checkpoints", "models", "cpu", "requests", "rounds", "http"]
PARTS: tuple[Part, ...] = get_args(Part)
FRONT: tuple[Part, ...] = ("http",)
"""Parts of the process that answers HTTP; the others are of those that run models."""


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
        "sglang.srt.speculative.dspark_components.dspark_worker_v2.DSparkWorkerV2.forward_batch_generation",
        "around",
        "requests",
        "requests:step",
        "looks at penalties, limits and seeds of none of its requests",
    ),
    Hook(
        "sglang.srt.speculative.dspark_components.dspark_verify.TargetVerifyExecutor.run_non_compact",
        "around",
        "requests",
        "requests:adjusted",
        "adjusts all rows of a block alike",
    ),
    Hook(
        "sglang.srt.speculative.dspark_components.dspark_verify.TargetVerifyExecutor.run_compact",
        "around",
        "requests",
        "requests:adjusted",
        "adjusts all rows of a block alike",
    ),
    Hook(
        "sglang.srt.speculative.dspark_components.dspark_verify.TargetVerifyExecutor.accept_and_finalize",
        "around",
        "requests",
        "requests:accepted",
        "knows neither min-p nor seeds",
    ),
    Hook(
        "sglang.srt.speculative.dspark_components.dspark_verify.verify_logits_adjustments_are_noop",
        "around",
        "requests",
        "requests:needs_no_care",
        "lets captured graphs accept without penalties, min-p and seeds",
    ),
    Hook(
        "sglang.srt.layers.sampler.Sampler.forward",
        "around",
        "requests",
        "requests:first_token",
        "looks at seeds in deterministic mode only",
    ),
    Hook(
        "sglang.srt.managers.schedule_batch.Req.update_finish_state",
        "around",
        "requests",
        "requests:finish",
        "finds stop strings after a stop token of the same round",
    ),
    Hook(
        "sglang.srt.managers.tokenizer_manager.TokenizerManager._validate_one_request",
        "before",
        "http",
        "requests:refuse",
        "lets requests through that DSPARK cannot honour",
    ),
    Hook(
        "sglang.srt.speculative.dspark_components.dspark_observability.DsparkStepObservers.__init__",
        "after",
        "rounds",
        "rounds:equip",
        "knows who observes rounds",
    ),
    Hook(
        "sglang.srt.speculative.dspark_components.dspark_observability.DsparkStepObservers.segment",
        "before",
        "rounds",
        "rounds:verifying",
        "tells drafting from verifying",
    ),
    Hook(
        "sglang.srt.speculative.dspark_components.dspark_observability.DsparkStepObservers.observe_verify_step",
        "before",
        "rounds",
        "rounds:seen",
        "shows what was drafted and accepted",
    ),
    Hook(
        "sglang.srt.speculative.dspark_components.dspark_worker_v2.DSparkWorkerV2.forward_batch_generation",
        "before",
        "rounds",
        "rounds:begin",
        "begins rounds",
    ),
    Hook(
        "sglang.srt.speculative.dspark_components.dspark_worker_v2.DSparkWorkerV2.forward_batch_generation",
        "after",
        "rounds",
        "rounds:attach",
        "ends rounds",
    ),
    Hook(
        "sglang.srt.models.dspark.build_confidence_head",
        "around",
        "rounds",
        "rounds:confident",
        "leaves confidences out in static mode",
    ),
    Hook(
        "sglang.srt.managers.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor.process_batch_result_prefill",
        "after",
        "rounds",
        "rounds:prefilled",
        "settles what was answered",
    ),
    Hook(
        "sglang.srt.managers.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor.process_batch_result_decode",
        "after",
        "rounds",
        "rounds:decoded",
        "settles what was answered",
    ),
    Hook(
        "sglang.srt.entrypoints.http_server._setup_and_run_http_server",
        "before",
        "http",
        "watch:routes",
        "runs the HTTP server",
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

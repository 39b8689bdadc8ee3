"""The CPU as a platform of SGLang's in plain torch: no AMX, no sgl_kernel, no Triton."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import PlatformCapabilities, SRTPlatform
from torch import Tensor

from sglang_dspark.serving.kernels import assign_extend_cache_locs
from sglang_dspark.serving.plugin import PLATFORM

DEFAULTS = ("intel_amx", "torch_native")
"""Attention backends that SGLang chooses for CPUs by itself, neither of which verifies."""


class TorchCpuPlatform(CpuDeviceMixin, SRTPlatform):  # type: ignore[misc]
    """What SGLang asks a platform, answered for a CPU on which DSPARK runs, or plain decoding for comparison."""

    _enum = PlatformEnum.OOT
    capabilities = PlatformCapabilities(supports_triton=False, graph_capture=False)

    def apply_server_args_defaults(self, server_args: Any) -> None:
        """One attention backend for everything, and no captured graphs."""
        from sglang.srt.model_executor.cuda_graph_config import Backend, Phase, with_phase

        if server_args.attention_backend in (None, *DEFAULTS):
            server_args.attention_backend = PLATFORM
        if server_args.speculative_draft_attention_backend is None:
            server_args.speculative_draft_attention_backend = PLATFORM
        graphs = server_args.cuda_graph_config
        for phase in (Phase.PREFILL, Phase.DECODE):
            graphs = with_phase(graphs, phase, backend=Backend.DISABLED)
        server_args.cuda_graph_config = graphs

    def is_pin_memory_available(self, device: Any = None) -> bool:
        """Nothing is copied to another device."""
        return False

    def get_default_attention_backend(self) -> str:
        """Where SGLang has no choice of its own."""
        return PLATFORM

    def get_dispatch_key_name(self) -> str:
        """Operators in torch."""
        return "native"

    def get_compile_backend(self, mode: str | None = None) -> str:
        """Nothing is compiled: it would take longer than it saves at the sizes that a CPU serves."""
        return "eager"

    def supports_speculative_algorithm(self, algorithm: str) -> bool:
        """DSPARK, which is what this platform is for."""
        return algorithm == "DSPARK"

    def supports_speculative_draft_attention_backend(self, algorithm: str, backend: str) -> bool:
        """The platform's own only."""
        return backend == PLATFORM

    def get_default_speculative_draft_attention_backend(self, algorithm: str) -> str:
        """The platform's own."""
        return PLATFORM

    def get_speculative_cache_locs_fn(self) -> Callable[..., Tensor]:
        """In place of a Triton kernel."""
        return assign_extend_cache_locs

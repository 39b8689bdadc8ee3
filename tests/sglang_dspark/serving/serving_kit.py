"""Real servers for tests: golden pairs as SGLang wants them, and a server on a free port of the loopback."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from safetensors.torch import load_file, save_file

GOLDEN = Path(os.environ.get("DSPARK_GOLDEN", Path(__file__).parents[4] / "shared" / "golden"))
START = 600
"""Seconds that a server may take to start where the processor is shared."""


def golden_pair(name: str, folder: Path) -> tuple[Path, Path]:
    """A golden pair's target, with a configuration as SGLang needs it, and its draft, copied into `folder`."""
    for part in ("target", "draft"):
        (folder / part).mkdir(parents=True)
        for file in (GOLDEN / name / part).iterdir():
            shutil.copyfile(file, folder / part / file.name)
    config = folder / "target" / "config.json"
    data = json.loads(config.read_text())
    if data["model_type"] == "gemma4_text":
        data = within_multimodal(data, folder / "target" / "model.safetensors")
    else:
        data["architectures"] = ["Qwen3ForCausalLM"]
    config.write_text(json.dumps(data))
    return folder / "target", folder / "draft"


def with_tokenizer(target: Path, vocabulary: int) -> Path:
    """`target` with a tokenizer of one character a token, printable ones where ASCII has them, and a chat template."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {chr(i if 32 <= i < 127 else 0x4E00 + i): i for i in range(vocabulary - 1)} | {"<end>": vocabulary - 1}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token=chr(0x4E00)))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    whole = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", unk_token=chr(0x4E00))
    whole.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    whole.save_pretrained(target)
    return target


def within_multimodal(text: dict[str, Any], weights: Path) -> dict[str, Any]:
    """A Gemma 4 text model's configuration inside that of a multimodal one, the only form that SGLang 0.5.23 reads; its
    weights are renamed accordingly. The tower for pictures has no weights and is never used.
    """
    tensors = load_file(weights)
    save_file({n.replace("model.", "model.language_model.", 1): t for n, t in tensors.items()}, weights)
    tower = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "head_dim": 8,
    }
    return {
        "architectures": ["Gemma4ForConditionalGeneration"],
        "model_type": "gemma4",
        "text_config": text | {"pad_token_id": 0},
        "vision_config": {"model_type": "gemma4_vision", "num_key_value_heads": 2, **tower},
        "audio_config": None,
        "tie_word_embeddings": text["tie_word_embeddings"],
        "language_model_only": True,
    }


def runs(name: str) -> list[dict[str, Any]]:
    """The golden runs of a pair."""
    data: list[dict[str, Any]] = json.loads((GOLDEN / name / "golden.json").read_text())
    return data


@dataclass
class Server:
    """A server of SGLang's in processes of its own; `log` is what it has said."""

    target: Path
    arguments: list[str]
    folder: Path
    environment: dict[str, str] = field(default_factory=dict)
    dtype: str = "float32"

    def __enter__(self) -> Server:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.folder.mkdir(parents=True, exist_ok=True)
        self.log_file = self.folder / "server.log"
        settings = {
            "OMP_NUM_THREADS": "1",
            "DSPARK_HOME": str(self.folder / "home"),
            "HF_HUB_OFFLINE": "1",
            "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
            **self.environment,
        }
        with self.log_file.open("w") as log:
            self.process = subprocess.Popen(
                self.command(),
                env={**os.environ, **settings},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                cwd=self.folder,
            )
        try:
            self._wait()
        except BaseException:
            self.stop()
            raise
        return self

    def command(self) -> list[str]:
        """The command line of a small server on a CPU."""
        return [
            *(sys.executable, "-m", "sglang.launch_server", "--model-path", str(self.target), "--device", "cpu"),
            *("--host", "127.0.0.1", "--port", str(self.port), "--dtype", self.dtype),
            *(() if (self.target / "tokenizer.json").exists() else ("--skip-tokenizer-init",)),
            *("--mem-fraction-static", "0.3", "--max-total-tokens", "8192", "--context-length", "512"),
            *("--max-running-requests", "8", "--skip-server-warmup", *self.arguments),
        ]

    def _wait(self) -> None:
        end = time.monotonic() + START
        while time.monotonic() < end:
            if self.process.poll() is not None:
                raise AssertionError(f"the server ended with {self.process.returncode}:\n{self.log[-3000:]}")
            try:
                # One that asks for a key is up too.
                if httpx.get(f"http://127.0.0.1:{self.port}/get_model_info", timeout=5).status_code in (200, 401):
                    return
            except httpx.HTTPError:
                pass
            time.sleep(0.5)
        raise AssertionError(f"the server did not start:\n{self.log[-3000:]}")

    @property
    def log(self) -> str:
        """Everything that the server has printed."""
        return self.log_file.read_text(errors="replace")

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """End the server and the processes that it started, which share its session."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(30)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    @property
    def url(self) -> str:
        """Where it answers."""
        return f"http://127.0.0.1:{self.port}"

    def ask(self, prompt: list[int], more: dict[str, Any] | None = None, **sampling: Any) -> httpx.Response:
        """What it replies to `prompt`, of exactly max_new_tokens tokens, greedy unless `sampling` says otherwise; with
        `more` beside the sampling parameters.
        """
        body = {"input_ids": prompt, "sampling_params": {"temperature": 0, "ignore_eos": True, **sampling}}
        return httpx.post(f"{self.url}/generate", json=body | (more or {}), timeout=300)

    def generate(self, prompt: list[int], more: dict[str, Any] | None = None, **sampling: Any) -> Any:
        """The answer to what `ask` asks, a list where n is greater than 1."""
        reply = self.ask(prompt, more, **sampling)
        assert reply.status_code == 200, reply.text
        return reply.json()

    def together(self, prompts: list[list[int]], most: int = 32, **sampling: Any) -> list[list[int]]:
        """The answers to prompts that are sent at the same time, `most` at once."""
        with ThreadPoolExecutor(most) as pool:
            return [a["output_ids"] for a in pool.map(lambda p: self.generate(p, **sampling), prompts)]


def stream(server: Server, prompt: list[int], tokens: int) -> list[int]:
    """The tokens of a streamed greedy answer, as its last event gives them."""
    body = {"input_ids": prompt, "stream": True}
    body["sampling_params"] = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    last: list[int] = []
    with httpx.stream("POST", f"http://127.0.0.1:{server.port}/generate", json=body, timeout=300) as reply:
        for line in reply.iter_lines():
            if line.startswith("data: {"):
                last = json.loads(line.removeprefix("data: "))["output_ids"]
    return last


def fits(seen: Counter[tuple[int, ...]], exact: dict[tuple[int, ...], float], freedom: int) -> bool:
    """χ² of the outcomes `seen` against their `exact` chances, rare ones pooled, on more than `freedom` degrees. The
    bound, by Wilson and Hilferty's approximation, is exceeded once in 10⁴ runs.
    """
    count = seen.total()
    assert set(seen) <= set(exact)
    cells = [(seen[outcome], p * count) for outcome, p in exact.items() if p * count >= 5]
    rest = count - sum(n for n, _ in cells), count - sum(e for _, e in cells)
    cells += [rest] if rest[1] > 1 else []
    free = len(cells) - 1
    assert free > freedom, "too few cells to tell anything"
    bound = free * (1 - 2 / (9 * free) + 3.719 * (2 / (9 * free)) ** 0.5) ** 3
    return sum((n - e) ** 2 / e for n, e in cells) < bound

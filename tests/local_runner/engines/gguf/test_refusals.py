"""Everything that llama.cpp would answer by ending the process, or by drafting worse in silence, is a sentence."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch

from local_runner.engines.gguf import LlamaEngine
from local_runner.engines.gguf.files import converted, read_draft_file, read_target_file
from sglang_dspark.checkpoints import convert
from sglang_dspark.checkpoints.gguf_file import Kind, encode, write_gguf
from sglang_dspark.checkpoints.outputs import OutTensor, Request
from sglang_dspark.checkpoints.registry import read_draft
from sglang_dspark.errors import InputError

Make = Callable[..., Path]
Open = Callable[..., LlamaEngine]


@pytest.fixture
def variant(target: Make, draft: Make, tmp_path: Path) -> Callable[..., Path]:
    """variant(drop, fields, kinds): the tiny draft's file without some fields, with others, some tensors retyped."""

    def make(drop: str = "", fields: tuple[bytes, ...] = (), kinds: dict[str, str] | None = None) -> Path:
        file = read_target_file(target())
        plan = convert.plan(
            read_draft(draft()), "gguf", Request(tokenizer=file.target.tokenizer(), tokenizer_size=96), 4
        )
        assert plan.fields is not None
        kept = [f for f in plan.fields if not (drop and drop.encode() in f[: 8 + len(drop)])]
        assert len(kept) < len(plan.fields) or not drop
        tensors = []
        for t in plan.tensors:
            kind = (kinds or {}).get(t.name, t.kind)
            data = b"".join(t.data)
            if kind != t.kind:
                data = torch.frombuffer(bytearray(data), dtype=torch.float32).half().numpy().tobytes()
            tensors.append(OutTensor(t.name, t.shape, kind, len(data), iter([data])))
        path = tmp_path / "draft.gguf"
        with path.open("wb") as stream:
            list(write_gguf(stream, [*kept, *fields], tensors))
        return path

    return make


def field(name: str, value: Any, kind: Kind = Kind.UINT32) -> bytes:
    return encode(name, kind, value)


def judge(target: Path, draft: Path) -> None:
    """Judge both files as the engine does before llama.cpp sees them."""
    file = read_target_file(target)
    read_draft_file(converted(draft, file), file)


def test_the_unchanged_variant_is_accepted(variant: Make, target: Make) -> None:
    judge(target(), variant())


def test_llama_cpp_accepts_what_was_judged_sound(variant: Make, target: Make, open_: Open) -> None:
    assert open_(target(), variant()).block == 5


@pytest.mark.parametrize(
    ("drop", "fields", "says"),
    [
        ("general.architecture", (field("general.architecture", "eagle3", Kind.STRING),), "no draft of a known format"),
        ("general.architecture", (field("general.architecture", "dspark", Kind.STRING),), "'dflash', the one that"),
        ("dflash.block_size", (), "block_size"),
        ("dflash.block_size", (field("dflash.block_size", 0),), "block_size"),
        ("dflash.target_layers", (), "target_layers"),
        ("dflash.target_layers", (field("dflash.target_layers", [1, 9], Kind.ARRAY),), "leave -1..3"),
        ("dflash.target_layers", (field("dflash.target_layers", [1, 4], Kind.ARRAY),), "the last of 4 layers"),
        ("dflash.embedding_length", (field("dflash.embedding_length", 64),), "hidden size is 64"),
        ("dflash.vocab_size", (field("dflash.vocab_size", 95),), "vocabulary is 95"),
        ("dflash.attention.head_count_kv", (field("dflash.attention.head_count_kv", 3),), "head"),
        ("dflash.rope.dimension_count", (field("dflash.rope.dimension_count", 32),), "turns 32 of the 16"),
        ("dflash.sample_from_anchor", (field("dflash.sample_from_anchor", False, Kind.BOOL),), "mask rows only"),
        ("tokenizer.ggml.mask_token_id", (), "mask_token_id"),
        ("tokenizer.ggml.mask_token_id", (field("tokenizer.ggml.mask_token_id", 96),), "outside the vocabulary of 96"),
        ("tokenizer.ggml.tokens", (), "has no tokenizer"),
        ("sglang_dspark.num_target_layers", (field("sglang_dspark.num_target_layers", 6),), "target layers is 6"),
        ("", (field("dflash.attention.causal", True, Kind.BOOL),), "causal"),
        ("", (field("dflash.hyper_connection.count", 4),), "DeepSeek-V4"),
        ("", (field("dflash.selector_rank", 4),), "DFlash2"),
    ],
)
def test_headers(drop: str, fields: Any, says: str, variant: Make, target: Make) -> None:
    with pytest.raises(InputError) as refused:
        judge(target(), variant(drop, fields))
    assert says in str(refused.value) and str(refused.value).count(". ") == 0


@pytest.mark.parametrize("name", ["output_norm.weight", "blk.1.attn_q_norm.weight", "conf_proj.bias"])
def test_types_that_the_graph_cannot_add(name: str, variant: Make, target: Make) -> None:
    with pytest.raises(InputError, match=f"'{name}' in .* is F16, but llama.cpp needs F32"):
        judge(target(), variant("", (), {name: "F16"}))


@pytest.mark.parametrize("length", [20, 5000])
def test_damaged_files(length: int, variant: Make, target: Make, tmp_path: Path) -> None:
    whole = variant().read_bytes()
    (tmp_path / "cut.gguf").write_bytes(whole[:length])
    with pytest.raises(InputError, match=r"GGUF"):
        judge(target(), tmp_path / "cut.gguf")
    with pytest.raises(InputError, match=r"GGUF"):
        read_target_file(tmp_path / "cut.gguf")


def test_a_draft_is_no_target(variant: Make, target: Make) -> None:
    with pytest.raises(InputError, match="is a draft, not a target"):
        read_target_file(variant())
    with pytest.raises(InputError):
        judge(target(), target())


def test_drafts_that_lose_something(draft: Make, target: Make) -> None:
    with pytest.raises(InputError, match=r"no gated Markov head.*use --engine torch"):
        judge(target(), draft(markov_head_type="gated"))


def test_a_target_of_another_size(draft: Make, target: Make) -> None:
    with pytest.raises(InputError, match="number of target layers"):
        judge(target(num_hidden_layers=5), draft())


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"block": 6}, "A block of 6 was asked"),
        ({"block": 0}, "A block of 0 was asked"),
        ({"context_length": 129}, "A context of 129 tokens does not fit"),
        ({"context_length": 0}, "A context of 0 tokens does not fit"),
        ({"dtype": "float32"}, "leave --dtype out"),
        ({"compile": True}, "leave --compile out"),
        ({"device": "cuda"}, "computes on the CPU only"),
    ],
)
def test_options(options: dict[str, Any], says: str, draft: Make, target: Make, open_: Open) -> None:
    with pytest.raises(InputError, match=says):
        open_(target(), draft(), **options)


def test_targets_that_are_no_file(family: Make) -> None:
    with pytest.raises(InputError, match="use --engine torch for it"):
        read_target_file(family("Llama"))


def test_a_state_that_cannot_be_cut(open_: Open, target: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("local_runner.engines.gguf.context.Model.forgets", lambda self: False)
    with pytest.raises(InputError, match="cannot forget a rejected draft"):
        open_(target())


def test_layers_that_are_not_shown(open_: Open, target: Make, draft: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """As for an architecture whose graph gives its layers' outputs other names."""
    monkeypatch.setattr("local_runner.engines.gguf.target.TAPPED", frozenset())
    engine = open_(target(), draft())
    monkeypatch.setattr(type(engine.target), "_watch", lambda self, tensor, ask: False)
    with pytest.raises(InputError, match="does not show the output of layer 0"):
        open_(target(), draft())


def test_conversions_are_kept_and_repaired(target: Make, draft: Make) -> None:
    file = read_target_file(target())
    made = converted(draft(), file)
    before, stamp = made.read_bytes(), made.stat().st_mtime_ns
    assert converted(draft(), file) == made and made.stat().st_mtime_ns == stamp
    made.write_bytes(before[:-100])
    assert converted(draft(), file) == made and made.read_bytes() == before
    assert converted(draft(block_size=4), file) != made
    assert gguf.GGUFReader(made).fields["general.architecture"].contents() == "dflash"

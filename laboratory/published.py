"""Outlines of published GGUF files: real headers, and holes in place of the weights.

Dimensions are those of each model's config.json on the hub. Numbers of tensors agree with llama.cpp's log of loading
the file where that is public (gpt-oss-20b: 459 tensors and 11.27 GiB; Qwen3-32B: 707 tensors; gemma-3-27b-it: 808
tensors, 262,208 tokens). Quantization types follow llama.cpp's llama_tensor_get_type for Q4_K_M, and for Q4_0 with an
importance matrix. Vocabularies have the real size, kind, special tokens and number of merges; all other words are
invented.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import gguf
import numpy as np

from edgespec.formats.gguf import GGML_TYPES, GgmlType

NORMAL, UNKNOWN, CONTROL, UNUSED, BYTE = 1, 2, 3, 5, 6  # tokenizer.ggml.token_type
ALIGNMENT = 32
TYPES = {kind.name: (number, kind) for number, kind in GGML_TYPES.items()}
VALUE_TYPES = {
    int: gguf.GGUFValueType.UINT32,
    float: gguf.GGUFValueType.FLOAT32,
    str: gguf.GGUFValueType.STRING,
}
# llama.cpp's types for rows that are not whole blocks of 256.
FALLBACK = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}


@dataclass(frozen=True)
class Vocabulary:
    """`special` tokens by id; ids from `padding` on are unused. Without merges it is a SentencePiece vocabulary."""

    pre: str
    size: int
    merges: int
    special: dict[int, str]
    eos: int
    bos: int | None = None
    add_bos: bool = False
    padding: int | None = None

    def columns(self) -> tuple[list[str], list[int]]:
        """(tokens, token types), both [size]."""
        tokens, types = [_word(n) for n in range(self.size)], [NORMAL] * self.size
        if self.merges:
            tokens[:256] = _byte_characters()
        else:
            for byte in range(256):  # Gemma's place for byte tokens
                tokens[238 + byte], types[238 + byte] = f"<0x{byte:02X}>", BYTE
        for n in range(self.size if self.padding is None else self.padding, self.size):
            tokens[n], types[n] = f"[PAD{n}]", UNUSED
        for n, text in self.special.items():
            tokens[n], types[n] = text, UNKNOWN if text == "<unk>" else CONTROL
        return tokens, types


@dataclass(frozen=True)
class Shape:
    """Dimensions of a transformer; `experts` is (count, used) of a mixture; `keys` are further metadata."""

    architecture: str
    blocks: int
    width: int
    ffn: int
    heads: int
    kv_heads: int
    head: int
    context: int
    vocabulary: Vocabulary
    rope_base: float
    epsilon: float
    tied: bool = False
    experts: tuple[int, int] | None = None
    rope_freqs: bool = False
    keys: dict[str, int | float | str] = field(default_factory=dict)

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Every tensor's name and shape, fastest dimension first."""
        yield "token_embd.weight", (self.width, self.vocabulary.size)
        yield "output_norm.weight", (self.width,)
        if not self.tied:
            yield "output.weight", (self.width, self.vocabulary.size)
        if self.rope_freqs:
            yield "rope_freqs.weight", (self.head // 2,)
        parts = {**self._attention(), **(self._mixture() if self.experts else self._dense())}
        for block in range(self.blocks):
            for name, shape in parts.items():
                yield f"blk.{block}.{name}", shape

    def _attention(self) -> dict[str, tuple[int, ...]]:
        w, queries, keys = self.width, self.heads * self.head, self.kv_heads * self.head
        parts: dict[str, tuple[int, ...]] = {
            "attn_norm.weight": (w,),
            "attn_q.weight": (w, queries),
            "attn_k.weight": (w, keys),
            "attn_v.weight": (w, keys),
            "attn_output.weight": (queries, w),
        }
        if self.architecture in ("qwen3", "gemma3"):
            parts |= {"attn_q_norm.weight": (self.head,), "attn_k_norm.weight": (self.head,)}
        return parts

    def _dense(self) -> dict[str, tuple[int, ...]]:
        w = self.width
        parts: dict[str, tuple[int, ...]] = {
            "ffn_norm.weight": (w,),
            "ffn_gate.weight": (w, self.ffn),
            "ffn_up.weight": (w, self.ffn),
            "ffn_down.weight": (self.ffn, w),
        }
        if self.architecture == "gemma3":
            parts |= {"post_attention_norm.weight": (w,), "post_ffw_norm.weight": (w,)}
        return parts

    def _mixture(self) -> dict[str, tuple[int, ...]]:
        """The other tensors of a gpt-oss block."""
        assert self.experts is not None
        w, n = self.width, self.experts[0]
        return {
            "attn_q.bias": (self.heads * self.head,),
            "attn_k.bias": (self.kv_heads * self.head,),
            "attn_v.bias": (self.kv_heads * self.head,),
            "attn_output.bias": (w,),
            "attn_sinks.weight": (self.heads,),
            "post_attention_norm.weight": (w,),
            "ffn_gate_inp.weight": (w, n),
            "ffn_gate_inp.bias": (n,),
            "ffn_gate_exps.weight": (w, self.ffn, n),
            "ffn_gate_exps.bias": (self.ffn, n),
            "ffn_up_exps.weight": (w, self.ffn, n),
            "ffn_up_exps.bias": (self.ffn, n),
            "ffn_down_exps.weight": (self.ffn, w, n),
            "ffn_down_exps.bias": (w, n),
        }


@dataclass(frozen=True)
class PublishedFile:
    """One file of a repository: `gigabytes` (10^9) is its published size, `quant` is Q4_K_M, Q4_0 or MXFP4."""

    repo: str
    path: str
    gigabytes: float
    quant: str
    shape: Shape

    def write(self, root: Path) -> int:
        """Write ROOT/repo/path with the real file's length; returns where its data begins (bytes)."""
        path = root / self.repo / self.path
        path.parent.mkdir(parents=True, exist_ok=True)
        writer = gguf.GGUFWriter(path, self.shape.architecture)
        _add_metadata(writer, self.shape)
        size = 0
        for name, shape in self.shape.tensors():
            number, kind = TYPES[self._type_name(name, shape)]
            rows, nbytes = _rows(shape, kind), kind.nbytes(math.prod(shape))
            raw = gguf.GGMLQuantizationType(number)
            writer.add_tensor_info(name, rows, np.dtype(np.uint8), nbytes, raw_dtype=raw)
            size += -(-nbytes // ALIGNMENT) * ALIGNMENT
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        writer.close()
        start = -(-path.stat().st_size // ALIGNMENT) * ALIGNMENT
        os.truncate(path, start + size)
        return start

    def _type_name(self, name: str, shape: tuple[int, ...]) -> str:
        """The type that llama.cpp chooses for one tensor."""
        part = name.split(".", 2)[-1] if name.startswith("blk.") else name
        if len(shape) == 1 or not part.endswith(".weight") or part == "ffn_gate_inp.weight":
            return "F32"
        if self.quant == "MXFP4":
            return "MXFP4" if "_exps." in part else "Q8_0"
        last = "token_embd.weight" if self.shape.tied else "output.weight"
        block, n = int(name.split(".")[1]) if part != name else 0, self.shape.blocks
        kind = "Q4_K" if self.quant == "Q4_K_M" else "Q4_0"
        if part == last:
            kind = "Q6_K"
        elif self.quant == "Q4_0":
            kind = "Q4_1" if part == "ffn_down.weight" and block < n // 8 else "Q4_0"
        elif part in ("attn_v.weight", "ffn_down.weight"):
            if block < n // 8 or block >= 7 * n // 8 or (block - n // 8) % 3 == 2:
                kind = "Q6_K"
            elif part == "attn_v.weight" and (self.shape.architecture, n) == ("llama", 80):
                kind = "Q5_K"
        return FALLBACK.get(kind, kind) if shape[0] % 256 else kind


def _byte_characters() -> list[str]:
    """[256] characters that byte-level BPE writes bytes with, printable ones first, in the order of vocabularies."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    return [chr(byte) for byte in plain] + [chr(256 + n) for n in range(256 - len(plain))]


def _word(n: int) -> str:
    """A unique invented word, about as long as a token."""
    return "\u0120" + "".join(chr(97 + (n // 26**place) % 26) for place in range(4))


def _rows(shape: tuple[int, ...], kind: GgmlType) -> tuple[int, ...]:
    """Dimensions, slowest first; the row is in bytes."""
    return (*reversed(shape[1:]), kind.nbytes(shape[0]))


def _add_metadata(writer: gguf.GGUFWriter, shape: Shape) -> None:
    writer.add_block_count(shape.blocks)
    writer.add_context_length(shape.context)
    writer.add_embedding_length(shape.width)
    writer.add_feed_forward_length(shape.ffn)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head)
    writer.add_value_length(shape.head)
    writer.add_rope_freq_base(shape.rope_base)
    writer.add_layer_norm_rms_eps(shape.epsilon)
    if shape.architecture == "llama":
        writer.add_rope_dimension_count(shape.head)
        writer.add_vocab_size(shape.vocabulary.size)
    if shape.experts:
        count, used = shape.experts
        writer.add_expert_count(count)
        writer.add_expert_used_count(used)
        writer.add_expert_feed_forward_length(shape.ffn)
    for key, value in shape.keys.items():
        writer.add_key_value(f"{shape.architecture}.{key}", value, VALUE_TYPES[type(value)])
    vocabulary = shape.vocabulary
    tokens, types = vocabulary.columns()
    writer.add_tokenizer_model("gpt2" if vocabulary.merges else "llama")
    writer.add_tokenizer_pre(vocabulary.pre)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    if vocabulary.merges:
        writer.add_token_merges([f"{_word(n)} {_word(n // 2)}" for n in range(vocabulary.merges)])
    else:
        writer.add_token_scores([-float(n) for n in range(vocabulary.size)])
    if vocabulary.bos is not None:
        writer.add_bos_token_id(vocabulary.bos)
    writer.add_eos_token_id(vocabulary.eos)
    writer.add_add_bos_token(vocabulary.add_bos)

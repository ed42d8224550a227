"""Paths of real models, and makers of tiny random-weight GGUF files of other architectures."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from pathlib import Path

import gguf
import numpy as np

REPOSITORY = Path(__file__).resolve().parent.parent
ASSETS = REPOSITORY / "edgespec" / "assets" / "python-6m"
TARGET, DRAFT = ASSETS / "target.gguf", ASSETS / "draft.gguf"


def find_trained(name: str) -> Path:
    """The f16 file of the trained pair's 'target' or 'draft', or the packaged quantized one where that is missing."""
    folder = Path(os.environ.get("EDGESPEC_TEST_MODELS", REPOSITORY.parent / "shared" / "models"))
    file = folder / name / "model-f16.gguf"
    return file if file.is_file() else ASSETS / f"{name}.gguf"


class GgufBuilder:
    """Writes a GGUF file with the packaged vocabulary and random weights of unit gain."""

    def __init__(self, path: Path, architecture: str, *, layers: int, width: int, seed: int = 0) -> None:
        self.writer = gguf.GGUFWriter(path, architecture)
        self.rng = np.random.default_rng(seed)
        self.vocab_size = _copy_vocabulary(self.writer)
        self.writer.add_context_length(2048)
        self.writer.add_embedding_length(width)
        self.writer.add_block_count(layers)
        self.writer.add_vocab_size(self.vocab_size)
        self.writer.add_layer_norm_rms_eps(1e-5)
        self.writer.add_file_type(0)

    def attention(self, *, heads: int, kv_heads: int, head_width: int) -> None:
        self.writer.add_head_count(heads)
        self.writer.add_head_count_kv(kv_heads)
        self.writer.add_key_length(head_width)
        self.writer.add_value_length(head_width)
        self.writer.add_rope_dimension_count(head_width)
        self.writer.add_rope_freq_base(10000.0)

    def matrix(self, name: str, rows: int, columns: int, gain: float = 1.0) -> None:
        weights = self.rng.standard_normal((rows, columns), dtype=np.float32) * np.float32(gain / np.sqrt(columns))
        self.writer.add_tensor(f"{name}.weight", weights)

    def ones(self, name: str, n: int) -> None:
        self.writer.add_tensor(f"{name}.weight", np.ones(n, np.float32))

    def embeddings(self, width: int) -> None:
        """Token embedding, final norm and head; logits have a standard deviation of about 3."""
        self.matrix("token_embd", self.vocab_size, width, gain=8.0)
        self.ones("output_norm", width)
        self.matrix("output", self.vocab_size, width, gain=3.0)

    def save(self) -> None:
        self.writer.write_header_to_file()
        self.writer.write_kv_data_to_file()
        self.writer.write_tensors_to_file()
        self.writer.close()


def _copy_vocabulary(writer: gguf.GGUFWriter) -> int:
    fields = vocabulary_fields()
    tokens = fields["tokens"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(fields["token_type"])
    writer.add_token_merges(fields["merges"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    writer.add_add_bos_token(True)
    return len(tokens)


@cache
def vocabulary_fields() -> dict[str, list]:
    fields = gguf.GGUFReader(TARGET).fields
    return {name: fields[f"tokenizer.ggml.{name}"].contents() for name in ("tokens", "token_type", "merges")}


def llama(path: Path, *, seed: int = 0, layers: int = 2, width: int = 64, template: str | None = None) -> None:
    """A dense llama, perhaps with a chat template."""
    m = GgufBuilder(path, "llama", layers=layers, width=width, seed=seed)
    if template is not None:
        m.writer.add_chat_template(template)
    m.attention(heads=4, kv_heads=2, head_width=width // 4)
    m.writer.add_feed_forward_length(2 * width)
    _dense(m, layers, width=width, heads=4, kv_heads=2, head_width=width // 4, ffn=2 * width)
    m.save()


def llama3(path: Path) -> None:
    """A llama whose lower frequencies are divided, as those of Llama 3 are."""
    m = GgufBuilder(path, "llama", layers=2, width=64)
    m.attention(heads=4, kv_heads=2, head_width=16)
    m.writer.add_feed_forward_length(128)
    m.writer.add_tensor("rope_freqs.weight", np.array([1, 1, 1, 2, 4, 8, 8, 8], np.float32))
    _dense(m, 2, width=64, heads=4, kv_heads=2, head_width=16, ffn=128)
    m.save()


def qwen(path: Path, architecture: str) -> None:
    """A qwen2, with biases of queries, keys and values, or a qwen3, with norms of queries and keys."""
    m = GgufBuilder(path, architecture, layers=2, width=64)
    m.attention(heads=4, kv_heads=2, head_width=16)
    m.writer.add_feed_forward_length(128)
    _dense(m, 2, width=64, heads=4, kv_heads=2, head_width=16, ffn=128)
    for i in range(2):
        for name, n in (("q", 64), ("k", 32), ("v", 32)):
            if architecture == "qwen2":
                bias = m.rng.standard_normal(n, dtype=np.float32)
                m.writer.add_tensor(f"blk.{i}.attn_{name}.bias", bias)
            elif name != "v":
                norm = m.rng.uniform(0.5, 2, 16).astype(np.float32)
                m.writer.add_tensor(f"blk.{i}.attn_{name}_norm.weight", norm)
    m.save()


def mixture(path: Path) -> None:
    """A llama with four experts in each of two layers, of which two see a token."""
    m = GgufBuilder(path, "llama", layers=2, width=64)
    m.attention(heads=4, kv_heads=2, head_width=16)
    m.writer.add_feed_forward_length(64)
    m.writer.add_expert_count(4)
    m.writer.add_expert_used_count(2)
    _dense(m, 2, width=64, heads=4, kv_heads=2, head_width=16, ffn=0)
    for i in range(2):
        m.matrix(f"blk.{i}.ffn_gate_inp", 4, 64)
        for name in ("gate", "up", "down"):
            weights = m.rng.standard_normal((4, 64, 64), dtype=np.float32) / np.float32(8)
            m.writer.add_tensor(f"blk.{i}.ffn_{name}_exps.weight", weights)
    m.save()


def sliding_window(path: Path, *, pattern: list[int] | None = None) -> None:
    """A gemma3 with a window of 24 tokens in all layers but every sixth, or those of `pattern`."""
    layers, width = 7, 64
    m = GgufBuilder(path, "gemma3", layers=layers, width=width)
    m.attention(heads=4, kv_heads=2, head_width=16)
    m.writer.add_feed_forward_length(128)
    m.writer.add_sliding_window(24)
    if pattern is not None:
        m.writer.add_array("gemma3.attention.sliding_window_pattern", pattern)
    _dense(m, layers, width=width, heads=4, kv_heads=2, head_width=16, ffn=128)
    for i in range(layers):
        for name in ("attn_q_norm", "attn_k_norm"):
            m.ones(f"blk.{i}.{name}", 16)
        for name in ("post_attention_norm", "post_ffw_norm"):
            m.ones(f"blk.{i}.{name}", width)
    m.save()


def cogvlm(path: Path) -> None:
    """A cogvlm: llama.cpp scores every row of a batch, and takes the first scores for those that were asked for."""
    layers, width, ffn = 2, 64, 128
    m = GgufBuilder(path, "cogvlm", layers=layers, width=width)
    m.attention(heads=4, kv_heads=4, head_width=16)
    m.writer.add_feed_forward_length(ffn)
    m.embeddings(width)
    for i in range(layers):
        for name in ("attn_norm", "ffn_norm"):
            m.ones(f"blk.{i}.{name}", width)
        for kind in ("", "vis_"):  # of the text, and of images
            m.matrix(f"blk.{i}.{kind}attn_qkv", 3 * width, width)
            m.matrix(f"blk.{i}.{kind}attn_output", width, width)
            m.matrix(f"blk.{i}.{kind}{'' if kind else 'ffn_'}gate", ffn, width)
            m.matrix(f"blk.{i}.{kind}{'' if kind else 'ffn_'}up", ffn, width)
            m.matrix(f"blk.{i}.{kind}{'' if kind else 'ffn_'}down", width, ffn)
    m.save()


def mamba(path: Path) -> None:
    """A purely recurrent model, whose state llama.cpp cannot roll back."""
    layers, width, inner, state, rank, kernel = 2, 64, 128, 16, 8, 4
    m = GgufBuilder(path, "mamba", layers=layers, width=width)
    m.writer.add_feed_forward_length(0)
    m.writer.add_head_count(0)
    m.writer.add_ssm_conv_kernel(kernel)
    m.writer.add_ssm_inner_size(inner)
    m.writer.add_ssm_state_size(state)
    m.writer.add_ssm_time_step_rank(rank)
    m.embeddings(width)
    for i in range(layers):
        b = f"blk.{i}"
        m.ones(f"{b}.attn_norm", width)
        m.matrix(f"{b}.ssm_in", 2 * inner, width)
        m.matrix(f"{b}.ssm_conv1d", inner, kernel)
        m.writer.add_tensor(f"{b}.ssm_conv1d.bias", np.zeros(inner, np.float32))
        m.matrix(f"{b}.ssm_x", rank + 2 * state, inner)
        m.matrix(f"{b}.ssm_dt", inner, rank)
        m.writer.add_tensor(f"{b}.ssm_dt.bias", np.zeros(inner, np.float32))
        m.writer.add_tensor(f"{b}.ssm_a", -np.tile(np.arange(1, state + 1, dtype=np.float32), (inner, 1)))
        m.writer.add_tensor(f"{b}.ssm_d", np.ones(inner, np.float32))
        m.matrix(f"{b}.ssm_out", width, inner)
    m.save()


def hybrid(path: Path, *, recurrent: list[int] | None = None) -> None:
    """A qwen35 with three recurrent layers and one of attention; llama.cpp keeps a ring of its recurrent states.

    `recurrent` states the same in the metadata.
    """
    layers, width, ffn, heads, kv_heads = 4, 128, 128, 2, 1
    state, groups, rank = 32, 2, 4
    head_width = width // heads
    m = GgufBuilder(path, "qwen35", layers=layers, width=width)
    m.attention(heads=heads, kv_heads=kv_heads, head_width=head_width)
    m.writer.add_feed_forward_length(ffn)
    m.writer.add_array("qwen35.rope.dimension_sections", [head_width // 2 - 16, 8, 8, 0])
    m.writer.add_ssm_conv_kernel(4)
    m.writer.add_ssm_inner_size(state * rank)
    m.writer.add_ssm_state_size(state)
    m.writer.add_ssm_time_step_rank(rank)
    m.writer.add_ssm_group_count(groups)
    m.writer.add_uint32("qwen35.full_attention_interval", 4)
    if recurrent is not None:
        m.writer.add_array("qwen35.attention.recurrent_layers", recurrent)
    m.embeddings(width)
    keys, values = state * groups, state * rank
    for i in range(layers):
        b = f"blk.{i}"
        m.ones(f"{b}.attn_norm", width)
        m.ones(f"{b}.post_attention_norm", width)
        if (i + 1) % 4 == 0:
            m.matrix(f"{b}.attn_q", 2 * width, width)
            m.matrix(f"{b}.attn_k", head_width * kv_heads, width)
            m.matrix(f"{b}.attn_v", head_width * kv_heads, width)
            m.matrix(f"{b}.attn_output", width, width)
            m.ones(f"{b}.attn_q_norm", head_width)
            m.ones(f"{b}.attn_k_norm", head_width)
        else:
            m.matrix(f"{b}.attn_qkv", 2 * keys + values, width)
            m.matrix(f"{b}.attn_gate", values, width)
            m.matrix(f"{b}.ssm_conv1d", 2 * keys + values, 4)
            m.writer.add_tensor(f"{b}.ssm_dt.bias", np.zeros(rank, np.float32))
            m.writer.add_tensor(f"{b}.ssm_a", -np.ones(rank, np.float32))
            m.matrix(f"{b}.ssm_beta", rank, width)
            m.matrix(f"{b}.ssm_alpha", rank, width)
            m.ones(f"{b}.ssm_norm", state)
            m.matrix(f"{b}.ssm_out", width, values)
        if ffn:
            m.matrix(f"{b}.ffn_gate", ffn, width)
            m.matrix(f"{b}.ffn_up", ffn, width)
            m.matrix(f"{b}.ffn_down", width, ffn)
    m.save()


def _dense(m: GgufBuilder, layers: int, *, width: int, heads: int, kv_heads: int, head_width: int, ffn: int) -> None:
    m.embeddings(width)
    for i in range(layers):
        b = f"blk.{i}"
        m.ones(f"{b}.attn_norm", width)
        m.ones(f"{b}.ffn_norm", width)
        m.matrix(f"{b}.attn_q", heads * head_width, width, gain=1.5)
        m.matrix(f"{b}.attn_k", kv_heads * head_width, width, gain=1.5)
        m.matrix(f"{b}.attn_v", kv_heads * head_width, width)
        m.matrix(f"{b}.attn_output", width, heads * head_width)
        if ffn:
            m.matrix(f"{b}.ffn_gate", ffn, width)
            m.matrix(f"{b}.ffn_up", ffn, width)
            m.matrix(f"{b}.ffn_down", width, ffn)


MAKERS: dict[str, Callable[[Path], None]] = {
    "llama": llama,
    "sliding-window": sliding_window,
    "mamba": mamba,
    "hybrid": hybrid,
}

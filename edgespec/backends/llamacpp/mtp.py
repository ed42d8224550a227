"""MTP layers on llama.cpp (GGUF `nextn`): one layer that drafts from the target's last hidden state, after its norm.

The layer lies in the target's own file, behind the layers of the target, or in a file of its own, with copies of the
embeddings and the output matrix. llama.cpp runs it in a context of its own, whose rows are a token and the state of the
token before. A pair has the position of that state; rotary positions are relative.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from edgespec.backends.attached_draft import Unsupported
from edgespec.backends.llamacpp.head_context import HeadContext
from edgespec.backends.llamacpp.library import Library
from edgespec.backends.llamacpp.pair_session import OTHER_HEAD, PairHead
from edgespec.backends.llamacpp.session import LlamaSession
from edgespec.backends.llamacpp.shape import count_blocks
from edgespec.backends.llamacpp.weights import LlamaWeights, load_weights
from edgespec.core.protocols import CheckCancelled
from edgespec.formats.gguf import Header, join_parts
from edgespec.formats.gguf_validate import read_file
from edgespec.formats.heads import HeadSpec

# Architectures with an MTP graph, of 0.3.36, and the tensors without which that aborts the process although the file
# loads. deepseek4's hidden states are wider than those of other layers, glm5-next's graph is not written yet.
_TENSORS: dict[str, tuple[str, ...]] = {
    "bailingmoe3": (),
    "cohere2moe": ("ffn_gate_inp",),
    "deepseek2": ("ffn_gate_inp", "attn_k_b"),
    "deepseek32": ("ffn_gate_inp", "attn_k_b"),
    "glm-dsa": ("ffn_gate_inp", "attn_k_b"),
    "glm4moe": ("ffn_gate_inp",),
    "hy_v3": (),
    "mimo2": ("attn_qkv", "ffn_gate", "ffn_up", "ffn_down"),
    "nemotron_h_moe": ("ffn_gate_inp", "nextn.shared_head_norm"),
    "qwen35": (),
    "qwen35moe": ("ffn_gate_inp",),
    "qwen3next": ("ffn_gate_inp",),
    "step35": (),
}
_ALWAYS = ("nextn.eh_proj", "nextn.enorm", "nextn.hnorm")
_SAME_SHAPE = (
    *("embedding_length", "attention.key_length", "attention.value_length", "rope.dimension_count"),
    *("attention.key_length_mla", "attention.value_length_mla"),
)


def open_head(
    target: LlamaWeights,
    path: Path,
    spec: HeadSpec,
    progress: Callable[[float], None] = lambda fraction: None,
    check: CheckCancelled = lambda: None,
) -> PairHead:
    """Load the MTP layer that `spec` describes for `target`: in its own file, or another GGUF file.

    Raises Unsupported for a layer that llama.cpp cannot run on this target, InvalidModelFile, Cancelled.
    """
    if spec.hidden_size != target.hidden_size:
        raise Unsupported(
            f"{path.name} has MTP layers for a hidden size of {spec.hidden_size}; the model has {target.hidden_size}.",
            hint=OTHER_HEAD,
        )
    header = _read_model(path)
    _check_layer(header, path)
    if not spec.in_target:
        _check_same(header, _read_model(target.path), path)
        options = replace(target.options, mtp=True)
        weights = load_weights(LlamaWeights, path, options, progress=progress, check=check)
        if weights.tokenizer.vocab_size != target.tokenizer.vocab_size:
            weights.close()
            raise Unsupported(f"{path.name} has another vocabulary than the model.", hint=OTHER_HEAD)
        return PairHead("mtp", target, (), _opener(weights), extra_bytes=path.stat().st_size, weights=weights)
    if path != target.path:
        raise Unsupported(f"the MTP layers in {path.name} draft for the model in that file alone.", hint=OTHER_HEAD)
    if not target.options.mtp:
        raise Unsupported(f"{path.name} was loaded without its MTP layers.", hint="Load it with LoadOptions(mtp=True).")
    return PairHead("mtp", target, (), _opener(target), extra_bytes=0, weights=None)


def _opener(weights: LlamaWeights) -> Callable[[LlamaSession, CheckCancelled], HeadContext]:
    def open_context(session: LlamaSession, check: CheckCancelled) -> HeadContext:
        def make(lib: Library, model: Any, params: Any) -> HeadContext:
            params.ctx_type = lib.api.LLAMA_CONTEXT_TYPE_MTP
            return HeadContext(lib, model, params, vocab_size=weights.tokenizer.vocab_size, check=check)

        return weights.open_beside(session, make)

    return open_context


def _read_model(path: Path) -> Header:
    """The header of a file, or of all parts of a split one. Raises InvalidModelFile, CacheError."""
    first = read_file(path)
    count = first.integer("split.count") or 1
    names = [path.name.replace("-00001-of-", f"-{part:05}-of-") for part in range(2, count + 1)]
    return join_parts([first, *(read_file(path.with_name(name)) for name in names)])


def _check_layer(header: Header, path: Path) -> None:
    """Raises Unsupported, InvalidModelFile where llama.cpp would abort the process."""
    architecture = header.architecture
    if architecture not in _TENSORS:
        raise Unsupported(f"llama.cpp runs no MTP layers of '{architecture}' models.", hint="Use --draft auto.")
    count, blocks = header.own("nextn_predict_layers") or 0, header.own("block_count") or 0
    if count != 1:
        raise Unsupported(f"{path.name} has {count} MTP layers in a chain; one is run.", hint="Use --draft auto.")
    if blocks < 2:
        raise header.invalid("it states no layers but the MTP layer")
    held = {tensor.name for tensor in header.tensors}
    for name in (*_ALWAYS, *_TENSORS[architecture]):
        if f"blk.{blocks - 1}.{name}.weight" not in held:
            raise header.invalid(f"its MTP layer lacks {name}")
    if header.metadata.get(f"{architecture}.attention.temperature_scale"):
        raise Unsupported("llama.cpp runs no MTP layers with a temperature of attention.", hint="Use --draft auto.")


def _check_same(header: Header, target: Header, path: Path) -> None:
    """That an MTP layer in a file of its own states the shapes of the target; llama.cpp aborts on some others."""
    is_same = header.architecture == target.architecture and all(
        header.own(key) == target.own(key) for key in _SAME_SHAPE
    )
    if not is_same or count_blocks(header) != count_blocks(target):
        raise Unsupported(f"{path.name} has the MTP layer of another model.", hint=OTHER_HEAD)

"""MTP layers on llama.cpp (GGUF `nextn`): they draft from the target's last hidden state, after its norm.

They lie in the target's own file, behind the layers of the target, or in a file of their own, with copies of the
embeddings and the output matrix. llama.cpp runs one in a context of its own, whose rows are a token and the state of
the token before. A pair has the position of that state; rotary positions are relative.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from edgespec.backends.attached_draft import Unsupported
from edgespec.backends.llamacpp.experimental import find_function
from edgespec.backends.llamacpp.head_context import HeadContext
from edgespec.backends.llamacpp.head_weights import OTHER_HEAD, load_head_weights, require_size
from edgespec.backends.llamacpp.library import Library
from edgespec.backends.llamacpp.pair_session import PairHead
from edgespec.backends.llamacpp.session import LlamaSession
from edgespec.backends.llamacpp.shape import count_blocks
from edgespec.backends.llamacpp.taps import Floats
from edgespec.backends.llamacpp.weights import LlamaWeights
from edgespec.core.arrays import Logits
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
_CHAINS = ("hy_v3", "mimo2", "step35")  # whose graphs run several layers, one for each drafted token
_ALWAYS = ("nextn.eh_proj", "nextn.enorm", "nextn.hnorm")
_SAME_SHAPE = (
    *("embedding_length", "attention.key_length", "attention.value_length", "rope.dimension_count"),
    *("attention.key_length_mla", "attention.value_length_mla"),
)


class ChainContext(HeadContext):
    """Several MTP layers, of which each drafts one token. A layer has keys and values of its own.

    Follows common/speculative.cpp of llama.cpp: every layer reads all pairs of the text with the target's states, and
    the drafted ones with the state of the layer that drafted them.
    """

    def __init__(
        self, lib: Library, model: Any, params: Any, *, count: int, vocab_size: int, check: CheckCancelled
    ) -> None:
        super().__init__(lib, model, params, vocab_size=vocab_size, check=check)
        self._select = find_function("llama_set_nextn_layer_offset")
        self._count = count
        self._base = 0  # position of the first drafted pair
        self._drafted: list[tuple[int, Floats]] = []

    def read(self, tokens: Sequence[int], states: Floats, position: int) -> None:
        for layer in range(self._count):
            self._begin(layer, position)
            super().read(tokens, states, position)

    def decode(self, tokens: Sequence[int], states: Floats, position: int) -> tuple[Logits, Floats]:
        """The scores are those of the first layer."""
        for layer in range(1, self._count):
            self._begin(layer, position)
            super().read(tokens, states, position)
        self._begin(0, position)
        self._base, self._drafted = position + len(tokens), []
        return super().decode(tokens, states, position)

    def step(self, token: int, state: Floats, position: int) -> tuple[Logits, Floats] | None:
        layer = len(self._drafted) + 1
        if layer == self._count:
            return None
        self._drafted.append((token, state))
        self._begin(layer, self._base)
        tokens, states = [each for each, _ in self._drafted], np.concatenate([each for _, each in self._drafted])
        return super().decode(tokens, states, self._base)

    def _begin(self, layer: int, position: int) -> None:
        """The next rows are those of `layer`, in the cells that the pairs from `position` on have in all layers."""
        self.trim(position)
        self._select(self._native.handle, layer)


def open_head(
    target: LlamaWeights,
    path: Path,
    spec: HeadSpec,
    progress: Callable[[float], None] = lambda fraction: None,
    check: CheckCancelled = lambda: None,
) -> PairHead:
    """Load the MTP layers that `spec` describes for `target`: in its own file, or another GGUF file.

    Raises Unsupported for layers that llama.cpp cannot run on this target, InvalidModelFile, Cancelled.
    """
    require_size(spec, target, path)
    header = _read_model(path)
    count = _check_layers(header, path)
    if not spec.in_target:
        _check_same(header, _read_model(target.path), path)
        weights = load_head_weights(path, target, progress, check, mtp=True)
        return PairHead("mtp", target, (), _opener(weights, count), extra_bytes=path.stat().st_size, weights=weights)
    if path != target.path:
        raise Unsupported(f"the MTP layers in {path.name} draft for the model in that file alone.", hint=OTHER_HEAD)
    if not target.options.mtp:
        raise Unsupported(f"{path.name} was loaded without its MTP layers.", hint="Open it again with --draft mtp.")
    return PairHead("mtp", target, (), _opener(target, count), extra_bytes=0, weights=None)


def _opener(weights: LlamaWeights, count: int) -> Callable[[LlamaSession, CheckCancelled], HeadContext]:
    def open_context(session: LlamaSession, check: CheckCancelled) -> HeadContext:
        def make(lib: Library, model: Any, params: Any) -> HeadContext:
            params.ctx_type = lib.api.LLAMA_CONTEXT_TYPE_MTP
            vocab_size = weights.tokenizer.vocab_size
            if count == 1:
                return HeadContext(lib, model, params, vocab_size=vocab_size, check=check)
            return ChainContext(lib, model, params, count=count, vocab_size=vocab_size, check=check)

        return weights.open_beside(session, make)

    return open_context


def _read_model(path: Path) -> Header:
    """The header of a file, or of all parts of a split one. Raises InvalidModelFile, CacheError."""
    first = read_file(path)
    count = first.integer("split.count") or 1
    names = [path.name.replace("-00001-of-", f"-{part:05}-of-") for part in range(2, count + 1)]
    return join_parts([first, *(read_file(path.with_name(name)) for name in names)])


def _check_layers(header: Header, path: Path) -> int:
    """The number of MTP layers. Raises Unsupported, InvalidModelFile where llama.cpp would abort the process."""
    architecture = header.architecture
    if architecture not in _TENSORS:
        raise Unsupported(f"llama.cpp runs no MTP layers of '{architecture}' models.", hint="Use --draft auto.")
    count, blocks = header.own("nextn_predict_layers") or 0, header.own("block_count") or 0
    if count > 1 and architecture not in _CHAINS:
        raise Unsupported(
            f"{path.name} has {count} MTP layers; llama.cpp runs one for '{architecture}'.", hint="Use --draft auto."
        )
    if not 0 < count < blocks:
        raise header.invalid(f"{count} of its {blocks} layers are MTP layers")
    held = {tensor.name for tensor in header.tensors}
    for block in range(blocks - count, blocks):
        for name in (*_ALWAYS, *_TENSORS[architecture]):
            if f"blk.{block}.{name}.weight" not in held:
                raise header.invalid(f"its MTP layer lacks {name}")
    if header.metadata.get(f"{architecture}.attention.temperature_scale"):
        raise Unsupported("llama.cpp runs no MTP layers with a temperature of attention.", hint="Use --draft auto.")
    return count


def _check_same(header: Header, target: Header, path: Path) -> None:
    """That an MTP layer in a file of its own states the shapes of the target; llama.cpp aborts on some others."""
    is_same = header.architecture == target.architecture and all(
        header.own(key) == target.own(key) for key in _SAME_SHAPE
    )
    if not is_same or count_blocks(header) != count_blocks(target):
        raise Unsupported(f"{path.name} has the MTP layer of another model.", hint=OTHER_HEAD)

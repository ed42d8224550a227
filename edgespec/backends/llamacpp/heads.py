"""Trained heads on llama.cpp, by kind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from edgespec.backends.attached_draft import AttachedHead, Unsupported
from edgespec.backends.llamacpp import dflash
from edgespec.backends.llamacpp.context import Floats, NativeBatch
from edgespec.backends.llamacpp.library import Library, find_function
from edgespec.backends.llamacpp.pair_session import (
    MAX_ROWS,
    OTHER_HEAD,
    HeadContext,
    PairHead,
    check_ids,
    float_pointer,
    load_head_weights,
    require_size,
)
from edgespec.backends.llamacpp.session import LlamaSession
from edgespec.backends.llamacpp.shape import count_blocks
from edgespec.backends.llamacpp.weights import LlamaWeights
from edgespec.core.protocols import CheckCancelled
from edgespec.core.sampling import Logits
from edgespec.formats.gguf import Header, join_parts
from edgespec.formats.gguf_validate import read_file
from edgespec.formats.heads import HeadKind, HeadSpec, usual_layers

# EAGLE-3 heads on llama.cpp (Li et al. 2025): one layer that drafts from hidden states of the target.


_N_LAYERS = 3  # whose inputs llama.cpp's encoder takes


class Eagle3Context(HeadContext):
    """Follows src/models/eagle3.cpp of llama.cpp, whose encoder fuses the inputs of the target's layers.

    It takes the embeddings and the output matrix of the target's context where the head has none.
    """

    def __init__(
        self, lib: Library, model: Any, params: Any, *, width: int, vocab_size: int, check: CheckCancelled
    ) -> None:
        """`width`: numbers of a target's row. Raises BackendError, Unsupported."""
        super().__init__(lib, model, params, vocab_size=vocab_size, check=check)
        self._features = np.zeros((MAX_ROWS, width), np.float32)
        self._encoded = NativeBatch(lib.api, MAX_ROWS, 1)
        self._encoded.native.token = None
        self._encoded.native.embd = float_pointer(self._features)

    def encode(self, features: Floats, position: int) -> Floats:
        n = len(features)
        self._features[:n] = features
        self._encoded.chain([0] * n, position, 0, outputs=n)
        self._native.encode(self._encoded)
        return self._read_states(n)


def open_eagle3(
    target: LlamaWeights,
    path: Path,
    spec: HeadSpec,
    progress: Callable[[float], None] = lambda fraction: None,
    check: CheckCancelled = lambda: None,
) -> PairHead:
    """Load the EAGLE-3 head in a GGUF file, which `spec` describes, for `target`.

    Raises Unsupported for a head that llama.cpp cannot run on this target, InvalidModelFile, Cancelled.
    """
    layers = usual_layers(target.layer_count) if spec.layers is None else spec.layers
    if spec.feeds_normed or spec.norm_before_fc == "each" or len(layers) != _N_LAYERS:
        raise Unsupported(
            f"llama.cpp runs EAGLE-3 heads over {_N_LAYERS} layers of the target, and no other dialect.",
            hint="Use --draft auto.",
        )
    require_size(spec, target, path)
    _check_eagle3_file(read_file(path), path, spec, target.tokenizer.vocab_size)
    head = load_head_weights(path, target, progress, check)
    width, vocab_size = len(layers) * spec.hidden_size, target.tokenizer.vocab_size

    def open_context(session: LlamaSession, check: CheckCancelled) -> HeadContext:
        make = partial(Eagle3Context, width=width, vocab_size=vocab_size, check=check)
        return head.open_beside(session, make)

    return PairHead("eagle3", target, layers, open_context, extra_bytes=path.stat().st_size, weights=head)


def _check_eagle3_file(header: Header, path: Path, spec: HeadSpec, vocab_size: int) -> None:
    """Raises InvalidModelFile where llama.cpp would load the file and abort later."""
    tensors = {tensor.name: tensor for tensor in header.tensors}
    if header.own("block_count") != 1:
        raise header.invalid("an EAGLE-3 head has one layer")
    if header.own("attention.key_length") != header.own("attention.value_length"):
        raise header.invalid("its keys and values differ in size")
    embedding, output = tensors.get("token_embd.weight"), tensors.get("output.weight")
    if (embedding is None or output is None) and spec.size != spec.hidden_size:
        raise header.invalid("it needs embeddings and an output matrix of its own size")
    if embedding is not None and embedding.shape[-1] != vocab_size:
        raise header.invalid(f"its embeddings have {embedding.shape[-1]} rows, and the model {vocab_size} tokens")
    rows = vocab_size if output is None else output.shape[-1]
    if (d2t := tensors.get("d2t")) is not None:
        check_ids(header, path, d2t, rows, vocab_size)
    elif rows != vocab_size:
        raise header.invalid(f"its output matrix has {rows} rows, and the model {vocab_size} tokens")


# MTP layers on llama.cpp (GGUF `nextn`): they draft from the target's last hidden state, after its norm.
#
# They lie in the target's own file, behind the layers of the target, or in a file of their own, with copies of the
# embeddings and the output matrix. llama.cpp runs one in a context of its own, whose rows are a token and the state of
# the token before. A pair has the position of that state; rotary positions are relative.


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


def open_mtp(
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
        _check_same_mtp(header, _read_model(target.path), path)
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


def _check_same_mtp(header: Header, target: Header, path: Path) -> None:
    """That an MTP layer in a file of its own states the shapes of the target; llama.cpp aborts on some others."""
    is_same = header.architecture == target.architecture and all(
        header.own(key) == target.own(key) for key in _SAME_SHAPE
    )
    if not is_same or count_blocks(header) != count_blocks(target):
        raise Unsupported(f"{path.name} has the MTP layer of another model.", hint=OTHER_HEAD)


# Gemma 4 assistants on llama.cpp: a few layers that draft with the target's own keys and values.
#
# Their layers have queries alone, and attend to what the target's last two layers hold: those with a window to the last
# but one, the others to the last. A row is a token and the hidden state before it, as for an MTP layer; every drafted
# token has the position of the root, since the cache ends there.


_SAME = ("key_length", "value_length", "key_length_swa", "value_length_swa", "sliding_window")  # of attention
_WINDOWS = "attention.sliding_window_pattern"


class AssistantContext(HeadContext):
    """Its cache is the target's, so that no pairs are read and none are dropped."""

    _position = 0  # of the root

    def read(self, tokens: Sequence[int], states: Floats, position: int) -> None:
        """Nothing is cached."""

    def decode(self, tokens: Sequence[int], states: Floats, position: int) -> tuple[Logits, Floats]:
        """As HeadContext, of the last pair alone. The target holds the tokens before the root."""
        self._position = position + len(tokens)
        return super().decode(tokens[-1:], states[-1:], self._position)

    def step(self, token: int, state: Floats, position: int) -> tuple[Logits, Floats] | None:
        return super().decode([token], state, self._position)

    def trim(self, position: int) -> None:
        """The target trims its cache."""


def open_assistant(
    target: LlamaWeights,
    path: Path,
    spec: HeadSpec,
    progress: Callable[[float], None] = lambda fraction: None,
    check: CheckCancelled = lambda: None,
) -> PairHead:
    """Load the assistant in a GGUF file, which `spec` describes, for `target`.

    Raises Unsupported for one that llama.cpp cannot run on this target, InvalidModelFile, Cancelled.
    """
    require_size(spec, target, path)
    header = read_file(path)
    _check_assistant_file(header)
    _check_same_assistant(header, read_file(target.path), path)
    weights = load_head_weights(path, target, progress, check, mtp=True)

    def open_context(session: LlamaSession, check: CheckCancelled) -> HeadContext:
        def make(lib: Library, model: Any, params: Any) -> HeadContext:
            params.ctx_type = lib.api.LLAMA_CONTEXT_TYPE_MTP
            vocab_size = weights.tokenizer.vocab_size
            return AssistantContext(lib, model, params, vocab_size=vocab_size, check=check, sequence=session.sequence)

        return weights.open_beside(session, make)

    head = PairHead("mtp", target, (), open_context, extra_bytes=path.stat().st_size, weights=weights)
    head.shares_kv = True
    return head


def _check_assistant_file(header: Header) -> None:
    """Raises InvalidModelFile where llama.cpp would load the file and abort later."""
    if header.own("nextn_predict_layers") != header.own("block_count"):
        raise header.invalid("not all of its layers are the assistant's")
    if header.own("embedding_length_out") == header.own("embedding_length"):
        raise header.invalid("its embedding_length_out is not the target's hidden size")


def _check_same_assistant(header: Header, target: Header, path: Path) -> None:
    """That the layers attend to keys and values as the target's last two layers hold them. Raises Unsupported."""
    is_same = target.architecture == "gemma4" and all(
        header.own(f"attention.{key}") == target.own(f"attention.{key}") for key in _SAME
    )
    if is_same:
        ends = dict(zip(_windows(target)[-2:], _kv_heads(target)[-2:], strict=True))  # by whether there is a window
        is_same = _windows(target)[-2:] == [True, False] and all(
            ends[window] == count for window, count in zip(_windows(header), _kv_heads(header), strict=True)
        )
    if not is_same:
        raise Unsupported(f"{path.name} is the assistant of another model.", hint=OTHER_HEAD)


def _windows(header: Header) -> list[bool]:
    """Which layers have a window. Raises InvalidModelFile."""
    found = header.metadata.get(f"{header.architecture}.{_WINDOWS}")
    blocks = header.own("block_count") or 0
    if not isinstance(found, np.ndarray) or len(found) < blocks:
        raise header.invalid(f"{header.architecture}.{_WINDOWS} does not name {blocks} layers")
    return [bool(each) for each in found[:blocks]]


def _kv_heads(header: Header) -> tuple[int, ...]:
    """Of each layer. Raises InvalidModelFile."""
    found = header.per_block("attention.head_count_kv")
    if found is None:
        raise header.invalid(f"{header.architecture}.attention.head_count_kv is missing")
    return found


Opener = Callable[[LlamaWeights, Path, HeadSpec, Callable[[float], None], CheckCancelled], AttachedHead]

_OPENERS: dict[HeadKind, Opener] = {
    "eagle3": open_eagle3,
    "mtp": open_mtp,
    "gemma4-assistant": open_assistant,
    "dflash": dflash.open_dflash,
    "dspark": dflash.open_dflash,
}


def open_head(
    target: LlamaWeights, path: Path, spec: HeadSpec, progress: Callable[[float], None], check: CheckCancelled
) -> AttachedHead:
    """Load the head in a GGUF file, which `spec` describes, for `target`.

    Raises Unsupported for a head that llama.cpp cannot run on this target, InvalidModelFile, Cancelled.
    """
    opener = _OPENERS.get(spec.kind)
    if opener is None:
        raise Unsupported(f"llama.cpp runs no heads of the kind '{spec.kind}'.", hint="Use --draft ngram, or another.")
    return opener(target, path, spec, progress, check)

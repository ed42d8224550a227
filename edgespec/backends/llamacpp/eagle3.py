"""EAGLE-3 heads on llama.cpp (Li et al. 2025): one layer that drafts from hidden states of the target."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from edgespec.backends.attached_draft import Unsupported
from edgespec.backends.llamacpp.batch import NativeBatch
from edgespec.backends.llamacpp.draft_context import MAX_ROWS
from edgespec.backends.llamacpp.draft_ids import check_ids
from edgespec.backends.llamacpp.head_context import HeadContext, float_pointer
from edgespec.backends.llamacpp.head_weights import load_head_weights, require_size
from edgespec.backends.llamacpp.library import Library
from edgespec.backends.llamacpp.pair_session import PairHead
from edgespec.backends.llamacpp.session import LlamaSession
from edgespec.backends.llamacpp.taps import Floats
from edgespec.backends.llamacpp.weights import LlamaWeights
from edgespec.core.protocols import CheckCancelled
from edgespec.formats.gguf import Header
from edgespec.formats.gguf_validate import read_file
from edgespec.formats.heads import HeadSpec, usual_layers

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


def open_head(
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
    _check_file(read_file(path), path, spec, target.tokenizer.vocab_size)
    head = load_head_weights(path, target, progress, check)
    width, vocab_size = len(layers) * spec.hidden_size, target.tokenizer.vocab_size

    def open_context(session: LlamaSession, check: CheckCancelled) -> HeadContext:
        make = partial(Eagle3Context, width=width, vocab_size=vocab_size, check=check)
        return head.open_beside(session, make)

    return PairHead("eagle3", target, layers, open_context, extra_bytes=path.stat().st_size, weights=head)


def _check_file(header: Header, path: Path, spec: HeadSpec, vocab_size: int) -> None:
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

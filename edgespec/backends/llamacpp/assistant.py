"""Gemma 4 assistants on llama.cpp: a few layers that draft with the target's own keys and values.

Their layers have queries alone, and attend to what the target's last two layers hold: those with a window to the last
but one, the others to the last. A row is a token and the hidden state before it, as for an MTP layer; every drafted
token has the position of the root, since the cache ends there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from edgespec.backends.attached_draft import Unsupported
from edgespec.backends.llamacpp.head_context import HeadContext
from edgespec.backends.llamacpp.head_weights import OTHER_HEAD, load_head_weights, require_size
from edgespec.backends.llamacpp.library import Library
from edgespec.backends.llamacpp.pair_session import PairHead
from edgespec.backends.llamacpp.session import LlamaSession
from edgespec.backends.llamacpp.taps import Floats
from edgespec.backends.llamacpp.weights import LlamaWeights
from edgespec.core.arrays import Logits
from edgespec.core.protocols import CheckCancelled
from edgespec.formats.gguf import Header
from edgespec.formats.gguf_validate import read_file
from edgespec.formats.heads import HeadSpec

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


def open_head(
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
    _check_file(header)
    _check_same(header, read_file(target.path), path)
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


def _check_file(header: Header) -> None:
    """Raises InvalidModelFile where llama.cpp would load the file and abort later."""
    if header.own("nextn_predict_layers") != header.own("block_count"):
        raise header.invalid("not all of its layers are the assistant's")
    if header.own("embedding_length_out") == header.own("embedding_length"):
        raise header.invalid("its embedding_length_out is not the target's hidden size")


def _check_same(header: Header, target: Header, path: Path) -> None:
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

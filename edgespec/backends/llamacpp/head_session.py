"""Trained heads in llama.cpp contexts of their own, and the sessions that read a target's hidden states for them."""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np

from edgespec.backends.attached_draft import Block, Features
from edgespec.backends.llamacpp.context import Floats, NativeBatch, NativeContext, SequenceSlot, float_rows
from edgespec.backends.llamacpp.library import Library, find_function
from edgespec.backends.llamacpp.session import LlamaSession
from edgespec.backends.sequence import shared_prefix
from edgespec.core.protocols import CheckCancelled, Draft
from edgespec.core.sampling import Logits, non_finite_error
from edgespec.core.scores import HostScores, Scores
from edgespec.errors import BackendError, RollbackError

MAX_ROWS = 64  # of one call; llama.cpp reserves logits for all of them
_SCORED = 8  # pairs that are read in one call although all are scored
_ROPE_SECTIONS = 4  # positions of a row of states where the rotary embedding has sections


class DraftContext:
    """What the heads' contexts share: calls of at most MAX_ROWS rows, which are cancelled as `check` says."""

    def __init__(
        self, lib: Library, model: Any, params: Any, *, vocab_size: int, check: CheckCancelled, sequence: int = 0
    ) -> None:
        """`params` have the sizes and types of the cache. Raises BackendError."""
        slot = SequenceSlot(sequence, check)
        self._api = lib.api
        self._sequence = sequence
        self._native = NativeContext(
            lib,
            model,
            params,
            vocab_size,
            max_outputs=MAX_ROWS,
            sequences=sequence + 1,
            is_cancelled=lambda: slot.is_cancelled,
            max_tokens=MAX_ROWS,
        )

    def trim(self, position: int) -> None:
        """Drop what the cache has from `position` on. Raises RollbackError."""
        if not self._api.llama_memory_seq_rm(self._native.memory, self._sequence, position, -1):
            raise RollbackError("llama.cpp could not trim the head's cache.", hint="Start a new chat.")

    def _open_features(self, width: int) -> NativeBatch:
        """A batch whose rows are those of `_features` [MAX_ROWS, width] in place of tokens."""
        self._features = np.zeros((MAX_ROWS, width), np.float32)
        batch = NativeBatch(self._api, MAX_ROWS, 1)
        batch.native.token = None
        batch.native.embd = _float_pointer(self._features)
        return batch

    def free(self) -> None:
        self._native.free()


class HeadContext(DraftContext):
    """Its cache keeps pairs by position; a pair's own state stands for the target's where there is none yet."""

    def __init__(
        self, lib: Library, model: Any, params: Any, *, vocab_size: int, check: CheckCancelled, sequence: int = 0
    ) -> None:
        """`params` have the sizes and types of the cache. Raises BackendError, Unsupported."""
        enable, self._states = find_function("llama_set_embeddings_nextn"), find_function("llama_get_embeddings_nextn")
        super().__init__(lib, model, params, vocab_size=vocab_size, check=check, sequence=sequence)
        self.size: int = lib.api.llama_model_n_embd_out(model)
        enable(self._native.handle, True, True)  # the states of rows with scores
        self._inputs = np.zeros((MAX_ROWS, self.size), np.float32)
        self._native.batch.native.embd = _float_pointer(self._inputs)

    def encode(self, features: Floats, position: int) -> Floats:
        """[n, size] what pairs are made of, of the target's rows [n, width] of consecutive positions: the same.

        Raises Cancelled, BackendError.
        """
        return features

    def read(self, tokens: Sequence[int], states: Floats, position: int) -> None:
        """Add the pairs of encoded `states` [n, size] and `tokens`, without scores. Raises Cancelled, BackendError."""
        self._stage(tokens, states, position, outputs=0)
        self._native.decode()

    def decode(self, tokens: Sequence[int], states: Floats, position: int) -> tuple[Logits, Floats]:
        """Add the pairs of `states` [n, size] and `tokens`; (logits [V] after the last, its state [1, size] to go on).

        `states` are encoded rows, or the state of the pair before. llama.cpp scores all pairs. Raises Cancelled,
        BackendError.
        """
        n = len(tokens)
        self._stage(tokens, states, position, outputs=n)
        logits = self._native.decode()[n - 1].copy()
        if np.isnan(logits.max()):
            raise non_finite_error()
        return logits, self._read_states(n)[n - 1 :]

    def step(self, token: int, state: Floats, position: int) -> tuple[Logits, Floats] | None:
        """`decode` of a drafted token and the state of the pair before; None where the head drafts no further."""
        return self.decode([token], state, position)

    def _stage(self, tokens: Sequence[int], states: Floats, position: int, *, outputs: int) -> None:
        self._inputs[: len(tokens)] = states
        self._native.batch.chain(tokens, position, self._sequence, outputs=outputs)

    def _read_states(self, n: int) -> Floats:
        return float_rows(self._states(self._native.handle), n, self.size).copy()


def _float_pointer(array: Floats) -> Any:
    """A pointer for a llama_batch's embeddings; `array` must stay alive."""
    return array.ctypes.data_as(ctypes.POINTER(ctypes.c_float))


class Eagle3Context(HeadContext):
    """Follows src/models/eagle3.cpp of llama.cpp, whose encoder fuses the inputs of the target's layers.

    It takes the embeddings and the output matrix of the target's context where the head has none.
    """

    def __init__(
        self, lib: Library, model: Any, params: Any, *, width: int, vocab_size: int, check: CheckCancelled
    ) -> None:
        """`width`: numbers of a target's row. Raises BackendError, Unsupported."""
        super().__init__(lib, model, params, vocab_size=vocab_size, check=check)
        self._encoded = self._open_features(width)

    def encode(self, features: Floats, position: int) -> Floats:
        n = len(features)
        self._features[:n] = features
        self._encoded.chain([0] * n, position, 0, outputs=n)
        self._native.encode(self._encoded)
        return self._read_states(n)


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


class AssistantContext(HeadContext):
    """Its cache is the target's, so that no pairs are read and none are dropped."""

    _position = 0  # of the root

    def read(self, tokens: Sequence[int], states: Floats, position: int) -> None:
        """Nothing is cached."""

    def decode(self, tokens: Sequence[int], states: Floats, position: int) -> tuple[Logits, Floats]:
        """Decodes the last pair alone: the target holds the tokens before the root."""
        self._position = position + len(tokens)
        return super().decode(tokens[-1:], states[-1:], self._position)

    def step(self, token: int, state: Floats, position: int) -> tuple[Logits, Floats] | None:
        return super().decode([token], state, self._position)

    def trim(self, position: int) -> None:
        """The target trims its cache."""


class BlockContext(DraftContext):
    """Its cache has the keys and values of the target's states by position, and while it drafts those of a block.

    Follows src/models/dflash.cpp of llama.cpp, which takes the embeddings and the output matrix of `ctx_other` where
    the head has none.
    """

    def __init__(
        self,
        lib: Library,
        model: Any,
        params: Any,
        *,
        width: int,
        vocab_size: int,
        is_causal: bool,
        check: CheckCancelled,
    ) -> None:
        """`width`: numbers of a target's row. `is_causal`: whether a block's rows see only those before.

        Raises BackendError.
        """
        super().__init__(lib, model, params, vocab_size=vocab_size, check=check)
        lib.api.llama_set_causal_attn(self._native.handle, is_causal)
        self._positions = np.zeros(_ROPE_SECTIONS * MAX_ROWS, np.int32)
        self._states = self._open_features(width)
        self._states.native.pos = self._positions.ctypes.data_as(ctypes.POINTER(ctypes.c_int32))

    def inject(self, features: Floats, position: int) -> None:
        """Add the target's rows [n, width] of consecutive positions, at most MAX_ROWS. Raises Cancelled, BackendError.

        Where the rotary embedding has sections, those of text have one position and the last has none.
        """
        n = len(features)
        self._features[:n] = features
        self._states.chain([0] * n, position, 0, outputs=0)
        sections = self._positions[: _ROPE_SECTIONS * n].reshape(_ROPE_SECTIONS, n)
        sections[:-1] = np.arange(position, position + n)
        sections[-1] = 0
        self._native.decode(self._states)

    def draft(self, tokens: Sequence[int], position: int) -> Logits:
        """[n, V] of the rows of a block: a view that the next call overwrites. Its rows stay in the cache until `trim`.

        Raises Cancelled, BackendError.
        """
        self._native.batch.chain(tokens, position, 0, outputs=len(tokens))
        return self._native.decode()[: len(tokens)]


class _HeadReader(ABC):
    """Adds a row for each token of a text to a head's cache. Drafted tokens are read again once they are accepted.

    Row p has the target's state of token p; a pair has token p + 1 too. Where the target has gone back behind states
    that were released, the rows before are not read.
    """

    reads_pairs = True

    def __init__(self, head: Any, target: LlamaSession, features: Features[Floats]) -> None:
        """`features` are those of `target`, whose tap ends with this session.

        `head` is a context that holds as many rows as the target tokens, and is freed.
        """
        self._head = head
        self._target = target
        self._features = features
        self.text: list[int] = []  # the `_base` tokens that were read, then the drafted ones
        self._base = self._first = self._held = 0  # rows from `_first` to `_held` are those of the text

    def begin(self, text: Sequence[int]) -> None:
        """Keeps the rows of the prefix that `text` shares with the last one."""
        self._base = shared_prefix(self.text[: self._base], text, len(text))
        self._held = min(self._held, self._base - self.reads_pairs)

    def pending_tokens(self, text: Sequence[int]) -> int:
        """Rows of `text` that are not in the cache, the last pair or a block's root always among them."""
        return len(text) - self.reads_pairs - max(self._settle(text), self._features.start)

    def close(self) -> None:
        self._target.untap()
        self._head.free()

    @abstractmethod
    def _add(self, text: Sequence[int], first: int) -> int:
        """Add rows of `text` from position `first` on; returns the position after them."""

    def _settle(self, text: Sequence[int]) -> int:
        """Forget drafted tokens; returns the position after the last row that need not be read again."""
        self._base = min(self._base, len(text))
        del self.text[self._base :]
        self._held = min(self._held, len(text) - 1 - self.reads_pairs)
        if self._held <= self._first:
            self._first = self._held = 0
        return self._held

    def _read(self, text: Sequence[int], window: int) -> bool:
        """Hold the rows of `text`, or of its end in the window; False where none was added.

        Raises Cancelled, BackendError.
        """
        first, last = max(self._settle(text), self._features.start), len(text) - 1
        if self._features.end < last:
            raise BackendError("the head has no hidden states of the text.", hint="Report this as a bug.")
        cells = self._target.capabilities.context_size
        most = max(1, min(window, cells // 2)) if self.reads_pairs else max(0, window - 1)
        if first > self._held or last - first > most or last - self._first > cells:
            self._base = self._held = 0
            self._first = first = max(self._features.start, last - most)
        self._head.trim(self._held)
        is_added = first < last
        while first < last:
            first = self._add(text, first)
        self.text, self._base, self._held = list(text), len(text), last
        self._features.release(last - self.reads_pairs)  # another token may follow the last state of a pair
        return is_added


class PairSession(_HeadReader):
    """A DraftSession. The pairs of drafted tokens have the head's own states."""

    is_async = False
    _state: Floats | None = None  # of the last pair
    _logits: Logits | None = None

    def read(self, text: Sequence[int], window: int) -> Logits | None:
        """[V] after `text`. None where no pair can be made, such as for a text of one token."""
        return self._logits if self._read(text, window) else None

    def step(self, token: int) -> Logits | None:
        position = len(self.text) - 1
        if position - self._first >= self._target.capabilities.context_size:
            return None
        assert self._state is not None, "read comes first"
        if (found := self._head.step(token, self._state, position)) is None:
            return None
        self._logits, self._state = found
        self.text.append(token)
        return self._logits

    def rollout(self, text: Sequence[int], window: int, n: int) -> tuple[Draft, Scores] | None:
        logits = self.read(text, window)
        rows: list[Logits] = []
        while logits is not None and len(rows) < n:
            rows.append(logits)
            logits = self.step(int(logits.argmax())) if len(rows) < n else None
        return (Draft.chain([int(row.argmax()) for row in rows]), HostScores(rows)) if rows else None

    def _add(self, text: Sequence[int], first: int) -> int:
        last = len(text) - 1
        end = min(first + MAX_ROWS, last if last - first <= _SCORED else last - 1)
        states, tokens = self._head.encode(self._features.take(first, end), first), text[first + 1 : end + 1]
        if end < last:
            self._head.read(tokens, states, first)
        else:
            self._logits, self._state = self._head.decode(tokens, states, first)
        return end


class BlockHeadSession(_HeadReader):
    """A BlockSession of DFlash or DSpark.

    A block always has the rows that the head was trained with, even if fewer are asked for: they see each other, so
    the logits of the first ones depend on how many follow.
    """

    reads_pairs = False

    def __init__(self, head: BlockContext, target: LlamaSession, features: Features[Floats], *, block: Block) -> None:
        super().__init__(head, target, features)
        self.block_size = block.n_drafts
        self._block = block

    def block(self, text: Sequence[int], window: int, n: int) -> list[Logits] | None:
        """Up to `n` rows [V]. Each is a distribution of its own, whatever the others turn out to be."""
        self._read(text, window)
        rows = self._head.draft(self._block.fill(text[-1]), len(text) - 1)[self._block.first_row :]
        return [row.copy() for row in rows[:n]]

    def _add(self, text: Sequence[int], first: int) -> int:
        end = min(first + MAX_ROWS, len(text) - 1)
        self._head.inject(self._features.take(first, end), first)
        return end

"""Trained heads in llama.cpp contexts of their own."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np

from edgespec.backends.features import Features
from edgespec.backends.head_session import HeadRunner
from edgespec.backends.llamacpp.abi import find_function
from edgespec.backends.llamacpp.batch import NativeBatch
from edgespec.backends.llamacpp.hidden_states import Floats, float_rows
from edgespec.backends.llamacpp.library import Library
from edgespec.backends.llamacpp.native_context import NativeContext
from edgespec.cancel import is_cancelled
from edgespec.core.arrays import Logits
from edgespec.core.drafter import MAX_TREE
from edgespec.core.protocols import Draft
from edgespec.core.truncate import non_finite_error
from edgespec.errors import RollbackError

MAX_ROWS = 64  # of one call; llama.cpp reserves logits for all of them
_SCORED = 8  # pairs that are read in one call although all are scored
_ROPE_SECTIONS = 4  # positions of a row of states if the rotary embedding has sections


class DraftContext(HeadRunner):
    """What the heads' contexts share: calls of at most MAX_ROWS rows, which can be cancelled."""

    def __init__(
        self, lib: Library, model: Any, params: Any, *, vocab_size: int, sequence: int = 0, n_branches: int = 1
    ) -> None:
        """`params` have the sizes and types of the cache, `n_branches` is the most leaves of a tree. Raises
        BackendError.
        """
        self._api = lib.api
        self._sequence = sequence
        self._native = NativeContext(
            lib,
            model,
            params,
            vocab_size,
            max_outputs=MAX_ROWS,
            sequences=sequence + n_branches,
            is_cancelled=is_cancelled,
            max_tokens=MAX_ROWS,
        )

    def restart(self, first: int, last: int) -> None:
        self.trim(0)

    def trim(self, position: int) -> None:
        """Raises RollbackError if llama.cpp cannot drop the rows."""
        if not self._api.llama_memory_seq_rm(self._native.memory, self._sequence, position, -1):
            raise RollbackError("llama.cpp could not trim the head's cache.", hint="Start a new chat.")

    def close(self) -> None:
        self._native.free()

    def _open_features(self, width: int) -> NativeBatch:
        """A batch whose rows are those of `_features` [MAX_ROWS, width] in place of tokens."""
        self._features = np.zeros((MAX_ROWS, width), np.float32)
        batch = NativeBatch(self._api, MAX_ROWS, 1)
        batch.native.token = None
        batch.native.embd = _float_pointer(self._features)
        return batch


class HeadContext(DraftContext):
    """A head over pairs, which its cache keeps by position.

    A pair joins a token with the target's hidden state of the token before. If the target has not read that token, the
    head's own state of the pair before stands in for it.
    """

    def __init__(self, lib: Library, model: Any, params: Any, **settings: Any) -> None:
        """`settings` are those of DraftContext. Raises BackendError, Unsupported."""
        enable, self._states = find_function("llama_set_embeddings_nextn"), find_function("llama_get_embeddings_nextn")
        super().__init__(lib, model, params, **settings)
        self.size: int = lib.api.llama_model_n_embd_out(model)
        enable(self._native.handle, True, True)  # the states of rows with scores
        self._inputs = np.zeros((MAX_ROWS, self.size), np.float32)
        self._native.batch.native.embd = _float_pointer(self._inputs)
        self._next = 0  # position of the next drafted pair
        self._logits: Logits = np.empty(0, np.float32)  # after the last pair
        self._state: Floats = np.empty(0, np.float32)  # [1, size] of that pair

    def read(self, text: Sequence[int], first: int, features: Features[Floats]) -> int:
        last = len(text) - 1
        end = min(first + MAX_ROWS, last if last - first <= _SCORED else last - 1)
        states, tokens = self.encode(features.take(first, end), first), text[first + 1 : end + 1]
        if end < last:
            self.add(tokens, states, first)
        else:
            self._logits, self._state = self.decode(tokens, states, first)
            self._next = last
        return end

    def score(self) -> Logits:
        return self._logits

    def step(self, token: int) -> Logits:
        self._logits, self._state = self.decode([token], self._state, self._next)
        self._next += 1
        return self._logits

    def encode(self, features: Floats, position: int) -> Floats:
        """The states [n, size] of pairs, from the target's rows [n, width] of consecutive positions: here the same."""
        return features

    def add(self, tokens: Sequence[int], states: Floats, position: int) -> None:
        """Add the pairs of encoded `states` [n, size] and `tokens`, without scores."""
        self._run(tokens, states, position, outputs=0)

    def decode(self, tokens: Sequence[int], states: Floats, position: int) -> tuple[Logits, Floats]:
        """Add the pairs of `states` [n, size] and `tokens`; returns (logits [V], state [1, size]) of the last pair.

        `states` are encoded rows, or the state of the pair before. llama.cpp scores all pairs.
        """
        n = len(tokens)
        logits = self._run(tokens, states, position, outputs=n)[n - 1].copy()
        if np.isnan(logits.max()):
            raise non_finite_error()
        return logits, self._read_states(n)[n - 1 :]

    def _run(self, tokens: Sequence[int], states: Floats, position: int, *, outputs: int) -> Logits:
        self._inputs[: len(tokens)] = states
        self._native.batch.chain(tokens, position, self._sequence, outputs=outputs)
        if self.takes_trees:
            self._native.batch.share()
        return self._native.decode()

    def _read_states(self, n: int) -> Floats:
        return float_rows(self._states(self._native.handle), n, self.size).copy()


def _float_pointer(array: Floats) -> Any:
    """A pointer for a llama_batch's embeddings; `array` must stay alive."""
    return array.ctypes.data_as(ctypes.POINTER(ctypes.c_float))


class Eagle3Context(HeadContext):
    """Follows src/models/eagle3.cpp of llama.cpp, whose encoder fuses the inputs of the target's layers.

    The text is in all sequences. A drafted node is in one: that of its parent or, if another child of it has that, a
    copy of the parent's path. So a node runs once, and attends to its path alone.
    """

    takes_trees = True

    def __init__(self, lib: Library, model: Any, params: Any, *, width: int, **settings: Any) -> None:
        """`width`: numbers of a target's row. Raises BackendError, Unsupported."""
        super().__init__(lib, model, params, n_branches=MAX_TREE, **settings)
        self._encoded = self._open_features(width)
        self._places: list[tuple[int, int]] = []  # (sequence, position) of each drafted node
        self._ends: dict[int, int] = {}  # of the sequences that have such nodes, the position of the last one
        self._outputs: list[Floats] = []  # [1, size] of each of them

    def trim(self, position: int) -> None:
        self._api.llama_memory_seq_rm(self._native.memory, -1, position, -1)
        self._places, self._ends, self._outputs = [], {}, []

    def step(self, token: int) -> Logits:
        self._logits = self._grow([token], [len(self._places) - 1])[0]
        return self._logits

    def branch(self, tree: Draft, n: int) -> list[Logits]:
        return list(self._grow(tree.tokens[-n:].tolist(), tree.parents[-n:].tolist()))

    def _grow(self, tokens: list[int], parents: list[int]) -> Logits:
        """[n, V] after new nodes below `parents`, of which -1 is the root."""
        n = len(tokens)
        places = [self._place(parent) for parent in parents]
        self._inputs[:n] = np.concatenate([self._outputs[p] if p >= 0 else self._state for p in parents])
        self._native.batch.tree(tokens, [position for _, position in places], [[sequence] for sequence, _ in places])
        rows = self._native.decode()[:n].copy()
        if np.isnan(rows.max()):
            raise non_finite_error()
        self._outputs += np.split(self._read_states(n), n)
        self._places += places
        return rows

    def _place(self, parent: int) -> tuple[int, int]:
        """The place of a new node below `parent`."""
        sequence, position = self._places[parent] if parent >= 0 else (0, self._next - 1)
        if self._ends.get(sequence, position) > position:  # another child has it
            copied, sequence = sequence, len(self._ends)
            self._api.llama_memory_seq_cp(self._native.memory, copied, sequence, self._next, position + 1)
        self._ends[sequence] = position + 1
        return sequence, position + 1

    def encode(self, features: Floats, position: int) -> Floats:
        n = len(features)
        self._features[:n] = features
        self._encoded.chain([0] * n, position, 0, outputs=n)
        self._native.run(self._api.llama_encode, self._encoded)
        return self._read_states(n)


class ChainContext(HeadContext):
    """Several MTP layers, of which each drafts one token. A layer has keys and values of its own.

    Follows common/speculative.cpp of llama.cpp: every layer reads all pairs of the text with the target's states, and
    the drafted ones with the state of the layer that drafted them.
    """

    def __init__(self, lib: Library, model: Any, params: Any, *, count: int, **settings: Any) -> None:
        super().__init__(lib, model, params, **settings)
        self._select = find_function("llama_set_nextn_layer_offset")
        self.max_drafts = count
        self._base = 0  # position of the first drafted pair
        self._drafted: list[tuple[int, Floats]] = []

    def add(self, tokens: Sequence[int], states: Floats, position: int, first_layer: int = 0) -> None:
        for layer in range(first_layer, self.max_drafts or 0):
            self._begin(layer, position)
            super().add(tokens, states, position)

    def decode(self, tokens: Sequence[int], states: Floats, position: int) -> tuple[Logits, Floats]:
        """The scores are those of the first layer."""
        self.add(tokens, states, position, first_layer=1)
        self._begin(0, position)
        self._base, self._drafted = position + len(tokens), []
        return super().decode(tokens, states, position)

    def step(self, token: int) -> Logits:
        self._drafted.append((token, self._state))
        self._begin(len(self._drafted), self._base)
        tokens, states = [each for each, _ in self._drafted], np.concatenate([each for _, each in self._drafted])
        self._logits, self._state = super().decode(tokens, states, self._base)
        return self._logits

    def _begin(self, layer: int, position: int) -> None:
        """The next rows are those of `layer`, in the cells that the pairs from `position` on have in all layers."""
        self.trim(position)
        self._select(self._native.handle, layer)


class AssistantContext(HeadContext):
    """A head over the target's cache: all rows have the position of the root, and none are dropped."""

    has_cache = False
    _root = 0

    def restart(self, first: int, last: int) -> None:
        self._root = last

    def trim(self, position: int) -> None:
        """The target trims its cache."""

    def decode(self, tokens: Sequence[int], states: Floats, position: int) -> tuple[Logits, Floats]:
        return super().decode(tokens, states, self._root)


class BlockContext(DraftContext):
    """A head that drafts blocks. Its cache has keys and values of the target's states by position and, during a draft,
    those of a block.

    Follows src/models/dflash.cpp of llama.cpp, which takes the embeddings and the output matrix of `ctx_other` if
    the head has none.
    """

    reads_pairs = False

    def __init__(
        self,
        lib: Library,
        model: Any,
        params: Any,
        *,
        width: int,
        block: tuple[list[int], int],
        is_causal: bool,
        **settings: Any,
    ) -> None:
        """`width`: numbers of a target's row; `block`: as `read_block` says. Raises BackendError."""
        super().__init__(lib, model, params, **settings)
        lib.api.llama_set_causal_attn(self._native.handle, is_causal)
        self._masks, self._first_row = block
        self.max_drafts = 1 + len(self._masks) - self._first_row
        self._rows: list[Logits] = []
        self._positions = np.zeros(_ROPE_SECTIONS * MAX_ROWS, np.int32)
        self._states = self._open_features(width)
        self._states.native.pos = self._positions.ctypes.data_as(ctypes.POINTER(ctypes.c_int32))

    def read(self, text: Sequence[int], first: int, features: Features[Floats]) -> int:
        """Adds the target's states.

        Of a rotary embedding with sections, the last section has the position 0, and the others have the token's.
        """
        end = min(first + MAX_ROWS, len(text) - 1)
        n = end - first
        self._features[:n] = features.take(first, end)
        self._states.chain([0] * n, first, 0, outputs=0)
        sections = self._positions[: _ROPE_SECTIONS * n].reshape(_ROPE_SECTIONS, n)
        sections[:-1] = np.arange(first, end)
        sections[-1] = 0
        self._native.decode(self._states)
        return end

    def start(self, text: Sequence[int]) -> None:
        """The rows of the block stay in the cache until `trim`."""
        tokens = [text[-1], *self._masks]
        self._rows = self._decode_block(tokens, len(text) - 1)

    def block(self, n: int) -> list[Logits]:
        return self._rows[:n]

    def _decode_block(self, tokens: list[int], position: int) -> list[Logits]:
        """The logits [V] of each row that predicts a token, of a block that begins at `position`."""
        self._native.batch.chain(tokens, position, 0, outputs=len(tokens))
        rows = self._native.decode()[self._first_row : len(tokens)]
        return list(rows.copy())


class SelectorContext(BlockContext):
    """DFlash2: each row has a few candidates, whose scores depend on which candidate of the row before is chosen.

    In place of logits the graph gives, as numbers of a state, the ids of a row's candidates and then their scores after
    each candidate of the row before, in its order; after the root, the first scores of the first row hold. As for
    DSpark, a row's distribution is that after the best candidates of the rows before.
    """

    def __init__(self, lib: Library, model: Any, params: Any, *, candidates: int, **settings: Any) -> None:
        """`candidates`: of each row. Raises BackendError, Unsupported."""
        enable, self._read = find_function("llama_set_embeddings_nextn"), find_function("llama_get_embeddings_nextn")
        super().__init__(lib, model, params, **settings)
        self._candidates, self._size = candidates, lib.api.llama_model_n_embd_out(model)
        enable(self._native.handle, True, False)  # of all rows, without logits

    def _decode_block(self, tokens: list[int], position: int) -> list[Logits]:
        self._native.batch.chain(tokens, position, 0, outputs=0)
        vocab_size = self._native.decode().shape[-1]
        lattice = float_rows(self._read(self._native.handle), len(tokens), self._size)
        n, chosen, rows = self._candidates, 0, []
        for numbers in lattice[1:]:
            scores = numbers[n * (1 + chosen) :][:n]
            if np.isnan(scores.max()):
                raise non_finite_error()
            row = np.full(vocab_size, -np.inf, np.float32)
            row[numbers[:n].astype(np.intp)] = scores
            rows.append(row)
            chosen = int(scores.argmax())
        return rows

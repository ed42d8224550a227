"""Heads on llama.cpp that draft from pairs of a token and the hidden state before it: EAGLE-3, MTP."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from edgespec.backends.attached_draft import AttachedHead, Features, Unsupported
from edgespec.backends.llamacpp.context import Floats, NativeContext, SequenceSlot, float_rows
from edgespec.backends.llamacpp.library import Library, find_function
from edgespec.backends.llamacpp.session import LlamaSession
from edgespec.backends.llamacpp.weights import LlamaWeights, load_weights
from edgespec.backends.sequence import shared_prefix
from edgespec.core.protocols import CheckCancelled, Draft, Session
from edgespec.core.sampling import Logits, non_finite_error
from edgespec.core.scores import HostScores, Scores
from edgespec.errors import BackendError, InvalidModelFile, RollbackError
from edgespec.formats.gguf import Header, TensorInfo
from edgespec.formats.heads import HeadSpec

# A llama_context of a trained head, with one sequence.


MAX_ROWS = 64  # of one call; llama.cpp reserves logits for all of them


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

    def free(self) -> None:
        self._native.free()


# A llama_context over a trained head whose rows are pairs of a hidden state and the token after it.


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
        self._native.batch.native.embd = float_pointer(self._inputs)

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


def float_pointer(array: Floats) -> Any:
    """For a llama_batch's embeddings; `array` must stay alive."""
    return array.ctypes.data_as(ctypes.POINTER(ctypes.c_float))


_SCORED = 8  # pairs that are read in one call although all are scored

ContextOpener = Callable[[LlamaSession, CheckCancelled], HeadContext]
"""Opens a head's context beside a session of its target, as large as it. Raises BackendError, Unsupported."""


class PairSession:
    """A DraftSession. Its cache has a pair of each position: the target's state there and the token after it.

    The pairs of drafted tokens have the head's own states. They are read again, with the target's, once the target has
    accepted them.
    """

    is_async = False

    def __init__(self, head: HeadContext, target: LlamaSession, features: Features[Floats]) -> None:
        """`features` are those of `target`, whose tap ends with this session.

        `head` holds as many pairs as the target tokens, and is freed.
        """
        self._head = head
        self._target = target
        self._features = features
        self._context_size = target.capabilities.context_size
        self._text: list[int] = []  # the `_base` tokens that were emitted, then the drafted ones
        self._base = 0
        self._first = 0  # position of the first pair; those from there to the last token but one are held
        self._state: Floats | None = None  # of the last pair

    @property
    def text(self) -> Sequence[int]:
        return self._text

    def begin(self, text: Sequence[int]) -> None:
        """Keeps the pairs of the prefix that `text` shares with the last one."""
        self._base = shared_prefix(self._text[: self._base], text, len(text) - 1)
        del self._text[self._base :]

    def pending_tokens(self, text: Sequence[int]) -> int:
        """Pairs of `text` that are not in the cache."""
        return len(text) - 1 - max(self._settle(text), self._features.start)

    def read(self, text: Sequence[int], window: int) -> Logits | None:
        """As core.drafter.DraftSession. None where no pair can be made, such as for a text of one token.

        Where the target has gone back behind states that were released, the pairs before are not read.
        """
        held, last = self._settle(text), len(text) - 1
        if self._features.end < last:
            raise BackendError("the head has no hidden states of the text.", hint="Report this as a bug.")
        window = max(1, min(window, self._context_size // 2))
        first = max(held, self._features.start)
        if first > held or last - first > window or last - self._first > self._context_size:
            self._text, self._base = [], 0
            self._first = first = max(self._features.start, last - window)
            held = 0
        self._head.trim(held)
        logits = None
        while first < last:
            end = min(first + MAX_ROWS, last if last - first <= _SCORED else last - 1)
            states = self._head.encode(self._features.take(first, end), first)
            if end < last:
                self._head.read(text[first + 1 : end + 1], states, first)
            else:
                logits, self._state = self._head.decode(text[first + 1 : end + 1], states, first)
            first = end
        self._text += text[len(self._text) :]
        self._base = len(text)
        self._features.release(last - 1)  # another token may follow the last row
        return logits

    def step(self, token: int) -> Logits | None:
        position = len(self._text) - 1
        if position - self._first >= self._context_size:
            return None
        assert self._state is not None, "read comes first"
        if (found := self._head.step(token, self._state, position)) is None:
            return None
        logits, self._state = found
        self._text.append(token)
        return logits

    def rollout(self, text: Sequence[int], window: int, n: int) -> tuple[Draft, Scores] | None:
        logits = self.read(text, window)
        rows: list[Logits] = []
        while logits is not None and len(rows) < n:
            rows.append(logits)
            logits = self.step(int(logits.argmax())) if len(rows) < n else None
        return (Draft.chain([int(row.argmax()) for row in rows]), HostScores(rows)) if rows else None

    def close(self) -> None:
        self._target.untap()
        self._head.free()

    def _settle(self, text: Sequence[int]) -> int:
        """Forget drafted tokens; returns the position after the last pair whose token is in `text`."""
        self._base = min(self._base, len(text) - 1)
        del self._text[self._base :]
        held = self._base - 1
        if held <= self._first:
            self._first = held = 0
        return held


class PairHead(AttachedHead):
    """A head beside its target."""

    def __init__(
        self,
        name: str,
        target: LlamaWeights,
        layers: Sequence[int],
        opener: ContextOpener,
        *,
        extra_bytes: int,
        weights: LlamaWeights | None,
    ) -> None:
        """The head reads `layers` of the target. `close` frees `weights`, None where they are the target's."""
        self.tokenizer = target.tokenizer
        self.name = name
        self.extra_bytes = extra_bytes
        self._layers = layers
        self._opener = opener
        self._weights = weights

    def open_session(self, target: Session, check: CheckCancelled) -> PairSession:
        """A DraftSession for `target`, which holds no tokens yet. Raises BackendError, Unsupported."""
        assert isinstance(target, LlamaSession)
        features = target.tap(self._layers)
        try:
            context = self._opener(target, check)
        except BaseException:
            target.untap()
            raise
        return PairSession(context, target, features)

    def close(self) -> None:
        if self._weights is not None:
            self._weights.close()


# Weights of heads in files of their own, which must be for the target's sizes.


OTHER_HEAD = "Use a head that was trained for this model, or --draft auto."


def require_size(spec: HeadSpec, target: LlamaWeights, path: Path) -> None:
    """Raises Unsupported for a head that reads hidden states of another size than the target's."""
    if spec.hidden_size != target.hidden_size:
        raise Unsupported(
            f"{path.name} is a head for a hidden size of {spec.hidden_size}; the model has {target.hidden_size}.",
            hint=OTHER_HEAD,
        )


def load_head_weights(
    path: Path, target: LlamaWeights, progress: Callable[[float], None], check: CheckCancelled, *, mtp: bool = False
) -> LlamaWeights:
    """Load the head in a GGUF file; `mtp`: with its MTP layers. Raises Unsupported, and what `load_weights` raises."""
    options = replace(target.options.alone, mtp=mtp)
    weights = load_weights(LlamaWeights, path, options, progress=progress, check=check)
    if weights.tokenizer.vocab_size != target.tokenizer.vocab_size:
        weights.close()
        raise Unsupported(f"{path.name} has another vocabulary than the model.", hint=OTHER_HEAD)
    return weights


# The ids of a head's reduced vocabulary, which llama.cpp uses as they are.


def check_ids(header: Header, path: Path, d2t: TensorInfo, rows: int, vocab_size: int) -> None:
    """That `d2t` names a token of the target for each of the `rows` of the output matrix. Raises InvalidModelFile."""
    if d2t.type.name != "I64" or d2t.shape != (rows,):
        raise header.invalid(f"d2t does not name a token for each of the {rows} rows of its output matrix")
    try:
        ids = np.fromfile(path, "<i8", rows, offset=header.data_offset + d2t.offset)
    except OSError as error:
        raise InvalidModelFile(f"{path.name} cannot be read: {error}.", hint="Pull it again.") from error
    if len(ids) < rows or ids.min() < 0 or ids.max() >= vocab_size:
        raise header.invalid("d2t names tokens that the model does not have")

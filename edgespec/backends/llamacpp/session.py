"""One llama.cpp context as a Session: prefill, forward of chains and trees in one decode, commit, rewind."""

from __future__ import annotations

import ctypes
from collections.abc import Generator, Sequence
from typing import Any

import numpy as np

from edgespec.backends.llamacpp.batch import Batch
from edgespec.backends.llamacpp.library import Library
from edgespec.backends.llamacpp.rollback import CutCache, Rollback
from edgespec.backends.sequence import check_ids, check_prompt, shared_prefix
from edgespec.core.protocols import (
    Capabilities,
    CheckCancelled,
    Draft,
    Ints,
    Logits,
    PrefillProgress,
    Scores,
)
from edgespec.core.rollout import step_by_step
from edgespec.core.sampling import SamplingParams, not_numbers
from edgespec.core.tree import branches, check_draft, depths, is_path, leaves
from edgespec.errors import BackendError, Cancelled, ContextOverflow, RollbackError

PREFILL_CHUNK = 512
MAX_ROWS = 64  # a root and 63 draft nodes; sizes the logits buffers and the number of sequences

_ABORTED, _NO_ROOM = 2, 1


class LlamaScores:
    """Logits [rows, V] of the last decode, read from llama.cpp's own buffer."""

    waited_s = 0.0

    def __init__(self, rows: Logits) -> None:
        self._rows = rows

    def argmax(self) -> Ints:
        best: Ints = self._rows.argmax(axis=1).astype(np.int32)
        if not np.isfinite(self._rows[np.arange(len(best)), best]).all():
            raise not_numbers()
        return best

    def logits(self, row: int) -> Logits:
        z: Logits = self._rows[row]
        return z

    def draw(self, params: SamplingParams, uniforms: Sequence[float]) -> Ints | None:
        return None  # the logits are in host memory already

    def hidden(self) -> object:
        return None


class LlamaSession:
    """A Session over a llama.cpp context. Not thread-safe: one thread owns it."""

    def __init__(
        self,
        lib: Library,
        context: Any,
        abort: Any,
        rollback: Rollback,
        vocab_size: int,
        context_size: int,
        check: CheckCancelled,
    ) -> None:
        api = lib.api
        self._lib = lib
        self._context = context
        self._abort = abort  # the context keeps only a pointer to it
        self._rollback = rollback
        self._check = check
        self._decode = api.llama_decode
        self._get_logits = api.llama_get_logits
        self._batch = Batch(api, PREFILL_CHUNK, MAX_ROWS)
        self._capabilities = Capabilities(vocab_size, context_size, rollback.tree, frozenset())
        self._tokens: list[int] = []  # what the cache holds
        self.revision = 0  # changes with them
        self._pending: tuple[int, Draft] | None = None
        self._view: Logits = np.empty((0, vocab_size), np.float32)
        self._address = 0

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    @property
    def context(self) -> Any:
        """The native context, for sessions that copy from it."""
        return self._context

    @property
    def tokens(self) -> Sequence[int]:
        """What the cache holds; not to be changed."""
        return self._tokens

    @property
    def position(self) -> int:
        return len(self._tokens)

    @property
    def draft_limit(self) -> int:
        room = self._capabilities.context_size - len(self._tokens) - 1
        return max(0, min(room, MAX_ROWS - 1, self._rollback.max_draft))

    def prefill(self, tokens: Sequence[int]) -> Generator[PrefillProgress, None, Scores]:
        self._require_open()
        check_prompt(tokens, self._capabilities)
        done = self.rewind(shared_prefix(self._tokens, tokens, len(tokens) - 1))
        while done < len(tokens):
            self._check()
            chunk = tokens[done : done + PREFILL_CHUNK]
            self._run(self._batch.chain(chunk, done, outputs=1))
            self._tokens += chunk
            self.revision += 1
            done += len(chunk)
            yield PrefillProgress(done, len(tokens))
        return self._scores(1)

    def forward(self, root: int, draft: Draft, *, run_ahead: bool = False) -> Scores:
        self._require_open()
        if self._pending is not None:
            raise RollbackError("a forward was not committed before the next.", hint="Report this as a bug.")
        check_ids((root,), self._capabilities.vocab_size)
        n, position = len(draft), len(self._tokens)
        if n > self.draft_limit or position >= self._capabilities.context_size:
            raise ContextOverflow(f"{n} drafted tokens do not fit after {position}.", hint="Report this as a bug.")
        if not n:
            batch = self._batch.chain((root,), position, outputs=1)
        else:
            check_draft(draft, self._capabilities.vocab_size)
            batch = self._draft_batch(root, draft, position)
        self._rollback.before_forward(position, n)
        self._pending = (root, draft)
        self._run(batch)
        return self._scores(n + 1)

    def commit(self, path: Sequence[int]) -> None:
        if self._pending is None:
            raise RollbackError("nothing was forwarded to commit.", hint="Report this as a bug.")
        root, draft = self._pending
        if not is_path(draft, tuple(path)):
            raise ValueError(f"{tuple(path)} is not a path of the draft")
        start = len(self._tokens)
        kept = [root, *draft.tokens[list(path)].tolist()]
        end = start + len(kept)
        if draft.is_chain:
            reached = self._rollback.keep(end, start + 1 + len(draft))
        else:
            assert isinstance(self._rollback, CutCache)
            member = branches(draft)
            winner = member[path[-1]][0] if path else 0
            in_order = list(path) == list(range(len(path)))
            reached = self._rollback.keep_branch(len(leaves(draft)), winner, start, end, in_order=in_order)
        self._pending = None
        self._tokens += kept
        self.revision += 1
        if reached < end:
            replay = self._tokens[reached:]
            del self._tokens[reached:]
            self._extend(replay)

    def rollout(self, tokens: Sequence[int], n: int, vocab_size: int) -> tuple[Draft, Scores]:
        return step_by_step(self, tokens, n, vocab_size)

    def checkpoint(self) -> None:
        self._require_open()
        self._rollback.checkpoint(len(self._tokens))

    def rewind(self, position: int) -> int:
        self._require_open()
        self.revision += 1
        if self._pending is not None:
            self._recover()
        if position < len(self._tokens):
            reached = self._rollback.rewind(position) if position else self._empty()
            del self._tokens[reached:]
        return len(self._tokens)

    def close(self) -> None:
        if self._context:
            self._lib.api.llama_free(self._context)
            self._context = None
            self._pending = None

    def _require_open(self) -> None:
        if not self._context:
            raise BackendError("the session is closed.", hint="Open another.")

    def _draft_batch(self, root: int, draft: Draft, position: int) -> Any:
        tokens = [root, *draft.tokens.tolist()]
        if draft.is_chain:
            return self._batch.chain(tokens, position, outputs=len(tokens))
        if not isinstance(self._rollback, CutCache):
            raise ValueError("this model takes chains only")
        n_branches = len(leaves(draft))
        self._rollback.open_branches(n_branches)
        positions = [position, *(depths(draft) + position).tolist()]
        return self._batch.tree(tokens, positions, [range(n_branches), *branches(draft)])

    def _extend(self, tokens: Sequence[int]) -> None:
        """Run tokens that are certain to stay."""
        for i in range(0, len(tokens), PREFILL_CHUNK):
            chunk = tokens[i : i + PREFILL_CHUNK]
            self._run(self._batch.chain(chunk, len(self._tokens), outputs=1))
            self._tokens += chunk

    def _run(self, batch: Any) -> None:
        self._lib.log.clear_errors()
        code = self._decode(self._context, batch)
        if code == 0:
            return
        if code == _ABORTED:
            self._recover()
            raise Cancelled
        if code == _NO_ROOM:
            raise BackendError("llama.cpp found no room in its cache.", hint="Set a larger --ctx, or start a new chat.")
        raise BackendError(
            f"llama.cpp failed to decode (code {code}): {self._lib.log.reason()}.",
            hint="Try again; if it persists, run with --verbose and report the log.",
        )

    def _recover(self) -> None:
        """Forget an unfinished forward: cut to what was committed, or to less where the cache cannot."""
        pending, self._pending = self._pending, None
        if isinstance(self._rollback, CutCache):
            if pending is not None and not pending[1].is_chain:
                at = len(self._tokens)
                self._rollback.keep_branch(len(leaves(pending[1])), 0, at, at, in_order=True)
            self._rollback.rewind(len(self._tokens))
        else:
            del self._tokens[self._rollback.rewind(len(self._tokens)) :]

    def _empty(self) -> int:
        self._rollback.reset()
        return 0

    def _scores(self, rows: int) -> LlamaScores:
        pointer = self._get_logits(self._context)
        if not pointer:
            raise BackendError("llama.cpp returned no logits.", hint="Report this as a bug, with --verbose output.")
        address = ctypes.addressof(pointer.contents)
        if address != self._address:  # making a view costs 20 us; only the rows of the last forward are ever read
            self._address = address
            self._view = np.ctypeslib.as_array(pointer, (MAX_ROWS, self._capabilities.vocab_size))
        return LlamaScores(self._view[:rows])

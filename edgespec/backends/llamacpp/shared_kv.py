"""Draft sessions that copy what they can of the target's cache instead of computing it."""

from __future__ import annotations

import ctypes
from collections.abc import Generator, Sequence
from dataclasses import replace

from edgespec.backends.llamacpp.context import MAX_ROWS
from edgespec.backends.llamacpp.session import LlamaSession
from edgespec.backends.sequence import check_prompt, shared_prefix
from edgespec.core.batching import Yield
from edgespec.core.greedy import HostScores
from edgespec.core.protocols import Draft, PrefillProgress, Scores
from edgespec.errors import RollbackError

SLACK = 2 * MAX_ROWS  # cells of a sparse cache beside its sink and window


class SharedKVSession(LlamaSession):
    """Holds the target's text by copies of its cells, so that none of it is read twice.

    Its position is never below the target's. For contexts whose caches have equal layers and types.
    """

    def follow(self, target: LlamaSession) -> None:
        """Called once, before anything else."""
        self._target = target
        self._capabilities = replace(self._capabilities, follows=True)
        self._seen = -1  # the target's revision that has been taken over

    @property
    def position(self) -> int:
        self._catch_up()
        return len(self._tokens)

    @property
    def draft_limit(self) -> int:
        self._catch_up()
        return super().draft_limit

    def prefill(self, tokens: Sequence[int]) -> Generator[PrefillProgress | Yield, None, Scores]:
        """The scores have no row where the target holds all of `tokens`."""
        check_prompt(tokens, self._capabilities)
        self._catch_up()
        theirs = self._target.tokens
        if len(self._tokens) < len(tokens) or shared_prefix(theirs, tokens, len(tokens)) < len(tokens):
            return (yield from self._read(tokens))
        self._cut(len(theirs))
        yield PrefillProgress(len(tokens), len(tokens))
        return HostScores(())

    def rewind(self, position: int) -> int:
        self._catch_up()
        return self._cut(max(position, len(self._target.tokens)))

    def forward(self, root: int, draft: Draft, *, run_ahead: bool = False) -> Scores:
        self._catch_up()
        return super().forward(root, draft)

    def _read(self, tokens: Sequence[int]) -> Generator[PrefillProgress | Yield, None, Scores]:
        """Run what the target does not hold."""
        self._cut(shared_prefix(self._tokens, tokens, len(tokens) - 1))
        return (yield from super().prefill(tokens))

    def _catch_up(self) -> None:
        target = self._target
        if self._seen == target.revision or not self._context:
            return
        self._seen = target.revision
        theirs = target.tokens
        held = self._cut(shared_prefix(self._tokens, theirs, len(theirs)))
        if held < len(theirs) and self._take(self._wanted(held, len(theirs))):
            self._tokens = list(theirs)

    def _cut(self, position: int) -> int:
        """LlamaSession.rewind, without regard to the target."""
        return super().rewind(position)

    def _wanted(self, start: int, end: int) -> list[range]:
        """The positions to copy, now that the target has gone on from `start` to `end`."""
        return [range(start, end)]

    def _take(self, positions: list[range]) -> bool:
        """Copy these cells; False where llama.cpp does not, and the text has to be read."""
        api, context, target = self._lib.api, self.context, self._target.context
        theirs, ours = api.llama_get_memory(target.native), api.llama_get_memory(context.native)
        (excerpt,), (arrived,) = target.borrow(1), context.borrow(1)
        for each in positions:
            api.llama_memory_seq_cp(theirs, self._target.sequence, excerpt, each.start, each.stop)
        size = api.llama_state_seq_get_size(target.native, excerpt)
        buffer = (ctypes.c_uint8 * size)()
        copied = api.llama_state_seq_get_data(target.native, buffer, size, excerpt)
        api.llama_memory_seq_rm(theirs, excerpt, -1, -1)
        is_taken = bool(copied == size and api.llama_state_seq_set_data(context.native, buffer, size, arrived))
        if is_taken:
            api.llama_memory_seq_cp(ours, arrived, self.sequence, -1, -1)
        api.llama_memory_seq_rm(ours, arrived, -1, -1)
        target.give_back([excerpt])
        context.give_back([arrived])
        return is_taken


class SparseSession(SharedKVSession):
    """Sees the first `sink` and about the last `window` tokens alone, in a cache of sink + window + SLACK cells."""

    def keep_to(self, sink: int, window: int) -> None:
        """Called once, before anything else."""
        self._sink, self._window = sink, window
        self._front = sink  # the first position behind the sink that the cache holds

    def forward(self, root: int, draft: Draft, *, run_ahead: bool = False) -> Scores:
        self._catch_up()
        self._make_room(1 + len(draft))
        return super().forward(root, draft)

    def _read(self, tokens: Sequence[int]) -> Generator[PrefillProgress | Yield, None, Scores]:
        done = self._cut(shared_prefix(self._tokens, tokens, len(tokens) - 1))
        while True:
            self._member.check()
            chunk = list(tokens[done : done + MAX_ROWS])
            self._make_room(len(chunk))
            scores = self.context.chain(self._member, chunk, done, outputs=1, reads=True)
            self._finish(scores)
            self._grow(chunk)
            done += len(chunk)
            yield PrefillProgress(done, len(tokens))
            if done == len(tokens):
                return scores

    def _cut(self, position: int) -> int:
        if position < self._front:  # llama.cpp wants positions one after another: nothing may be missing before the end
            position = min(position, self._sink)
            self._front = self._sink
        return super()._cut(position)

    def _wanted(self, start: int, end: int) -> list[range]:
        first = max(self._front, end - self._window)
        self._drop_middle(first)
        return [each for each in (range(start, min(end, self._sink)), range(max(start, first), end)) if each]

    def _make_room(self, rows: int) -> None:
        if len(self._tokens) + rows - self._front > self._window + SLACK:
            self._drop_middle(len(self._tokens) - self._window)

    def _drop_middle(self, first: int) -> None:
        """Drop what lies between the sink and position `first`."""
        if first > self._front:
            memory = self._lib.api.llama_get_memory(self.context.native)
            if not self._lib.api.llama_memory_seq_rm(memory, self.sequence, self._front, first):
                raise RollbackError("llama.cpp could not drop the middle of its cache.", hint="Use --draft ngram.")
            self._front = first

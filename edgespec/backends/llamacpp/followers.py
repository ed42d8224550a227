"""Draft sessions that copy what they can of the target's cache instead of computing it."""

from __future__ import annotations

import ctypes
from collections.abc import Generator, Sequence
from dataclasses import replace

from edgespec.backends.llamacpp.session import MAX_ROWS, LlamaScores, LlamaSession
from edgespec.backends.sequence import check_prompt, shared_prefix
from edgespec.core.protocols import Draft, PrefillProgress, Scores
from edgespec.errors import RollbackError

_ASIDE = MAX_ROWS - 1  # a sequence that no tree has a branch for: 63 nodes have 63 leaves at most
SLACK = 2 * MAX_ROWS  # cells of a sparse cache beside its sink and window


class FollowingSession(LlamaSession):
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

    def prefill(self, tokens: Sequence[int]) -> Generator[PrefillProgress, None, Scores]:
        """The scores have no row where the target holds all of `tokens`."""
        self._require_open()
        check_prompt(tokens, self._capabilities)
        self._catch_up()
        theirs = self._target.tokens
        if len(self._tokens) < len(tokens) or shared_prefix(theirs, tokens, len(tokens)) < len(tokens):
            return (yield from self._read(tokens))
        self._cut(len(theirs))
        yield PrefillProgress(len(tokens), len(tokens))
        return LlamaScores(self._view[:0])

    def rewind(self, position: int) -> int:
        self._catch_up()
        return self._cut(max(position, len(self._target.tokens)))

    def forward(self, root: int, draft: Draft, *, run_ahead: bool = False) -> Scores:
        self._catch_up()
        return super().forward(root, draft)

    def _read(self, tokens: Sequence[int]) -> Generator[PrefillProgress, None, Scores]:
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
        api, source = self._lib.api, self._target.context
        theirs, ours = api.llama_get_memory(source), api.llama_get_memory(self._context)
        for each in positions:
            api.llama_memory_seq_cp(theirs, 0, _ASIDE, each.start, each.stop)
        size = api.llama_state_seq_get_size(source, _ASIDE)
        buffer = (ctypes.c_uint8 * size)()
        copied = api.llama_state_seq_get_data(source, buffer, size, _ASIDE)
        api.llama_memory_seq_rm(theirs, _ASIDE, -1, -1)
        if copied != size or api.llama_state_seq_set_data(self._context, buffer, size, _ASIDE) == 0:
            return False
        api.llama_memory_seq_cp(ours, _ASIDE, 0, -1, -1)
        return bool(api.llama_memory_seq_rm(ours, _ASIDE, -1, -1))


class SparseSession(FollowingSession):
    """Sees the first `sink` and about the last `window` tokens alone, in a cache of sink + window + SLACK cells."""

    def keep_to(self, sink: int, window: int) -> None:
        """Called once, before anything else."""
        self._sink, self._window = sink, window
        self._front = sink  # the first position behind the sink that the cache holds

    def forward(self, root: int, draft: Draft, *, run_ahead: bool = False) -> Scores:
        self._catch_up()
        self._make_room(1 + len(draft))
        return super().forward(root, draft)

    def _read(self, tokens: Sequence[int]) -> Generator[PrefillProgress, None, Scores]:
        done = self._cut(shared_prefix(self._tokens, tokens, len(tokens) - 1))
        while done < len(tokens):
            self._check()
            chunk = list(tokens[done : done + MAX_ROWS])
            self._make_room(len(chunk))
            self._run(self._batch.chain(chunk, done, outputs=1))
            self._tokens += chunk
            done += len(chunk)
            yield PrefillProgress(done, len(tokens))
        return self._scores(1)

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
            memory = self._lib.api.llama_get_memory(self._context)
            if not self._lib.api.llama_memory_seq_rm(memory, 0, self._front, first):
                raise RollbackError("llama.cpp could not drop the middle of its cache.", hint="Use --draft ngram.")
            self._front = first

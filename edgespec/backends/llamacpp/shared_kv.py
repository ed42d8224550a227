"""Draft sessions that copy cells of the target's cache instead of computing them."""

from __future__ import annotations

import ctypes
from collections.abc import Generator, Sequence
from dataclasses import replace

from edgespec.backends.llamacpp.sequences import MAX_ROWS
from edgespec.backends.llamacpp.session import LlamaSession
from edgespec.backends.sequence import check_prompt, shared_prefix
from edgespec.core.batching import Yield
from edgespec.core.protocols import Draft, PrefillProgress
from edgespec.core.scores import HostScores, Scores
from edgespec.errors import RollbackError

SLACK = 2 * MAX_ROWS  # cells of a sparse cache beyond its sink and window


class SharedKVSession(LlamaSession):
    """Holds the target's text by copies of its cells, for contexts whose caches have equal layers and types.

    Its position is never below the target's.
    """

    def attach(self, target: LlamaSession) -> None:
        """Draft for `target`. Called once, before any other method."""
        self._target = target
        self._capabilities = replace(self._capabilities, shares_kv=True)
        self._target_revision = -1  # the last one whose text is held

    @property
    def position(self) -> int:
        self._sync()
        return len(self._tokens)

    @property
    def draft_limit(self) -> int:
        self._sync()
        return super().draft_limit

    def prefill(self, tokens: Sequence[int]) -> Generator[PrefillProgress | Yield, None, Scores]:
        """The scores have no row where the target holds all of `tokens`."""
        check_prompt(tokens, self._capabilities)
        self._sync()
        target_tokens = self._target.tokens
        if len(self._tokens) < len(tokens) or shared_prefix(target_tokens, tokens, len(tokens)) < len(tokens):
            return (yield from self._compute(tokens))
        self._trim_to(len(target_tokens))
        yield PrefillProgress(len(tokens), len(tokens))
        return HostScores(())

    def rewind(self, position: int) -> int:
        self._sync()
        return self._trim_to(max(position, len(self._target.tokens)))

    def forward(self, root: int, draft: Draft, *, run_ahead: bool = False) -> Scores:
        self._sync()
        return super().forward(root, draft)

    def _compute(self, tokens: Sequence[int]) -> Generator[PrefillProgress | Yield, None, Scores]:
        """Run the part of `tokens` that the cache does not hold."""
        self._trim_to(shared_prefix(self._tokens, tokens, len(tokens) - 1))
        return (yield from super().prefill(tokens))

    def _sync(self) -> None:
        """Hold what the target holds, if it has changed."""
        target = self._target
        if self._target_revision == target.revision or not self._context:
            return
        self._target_revision = target.revision
        tokens = target.tokens
        held = self._trim_to(shared_prefix(self._tokens, tokens, len(tokens)))
        if held < len(tokens) and self._copy_cells(self._missing_positions(held, len(tokens))):
            self._tokens = list(tokens)

    def _trim_to(self, position: int) -> int:
        """`LlamaSession.rewind`, which may go below the target's position."""
        return super().rewind(position)

    def _missing_positions(self, start: int, end: int) -> list[range]:
        """The positions to copy after the target went on from `start` to `end`."""
        return [range(start, end)]

    def _copy_cells(self, positions: list[range]) -> bool:
        """Copy these cells of the target; False where llama.cpp cannot, and the text has to be computed."""
        api, context, target = self._lib.api, self.context, self._target.context
        if target.has_streams:  # a part of a sequence cannot be copied out of its stream
            return False
        (source,), (copy,) = target.sequences.acquire_spare(1), context.sequences.acquire_spare(1)
        for span in positions:
            api.llama_memory_seq_cp(target.native.memory, self._target.sequence, source, span.start, span.stop)
        size = api.llama_state_seq_get_size(target.native.handle, source)
        buffer = (ctypes.c_uint8 * size)()
        n_read = api.llama_state_seq_get_data(target.native.handle, buffer, size, source)
        api.llama_memory_seq_rm(target.native.memory, source, -1, -1)
        is_copied = bool(n_read == size and api.llama_state_seq_set_data(context.native.handle, buffer, size, copy))
        if is_copied:
            api.llama_memory_seq_cp(context.native.memory, copy, self.sequence, -1, -1)
        api.llama_memory_seq_rm(context.native.memory, copy, -1, -1)
        target.sequences.release_spare([source])
        context.sequences.release_spare([copy])
        return is_copied


class SparseSession(SharedKVSession):
    """Sees only the first `sink` and about the last `window` tokens, in a cache of sink + window + SLACK cells."""

    def set_window(self, sink: int, window: int) -> None:
        """Called once, before any other method."""
        self._sink, self._window = sink, window
        self._window_start = sink  # position of the first cell behind the sink

    def forward(self, root: int, draft: Draft, *, run_ahead: bool = False) -> Scores:
        self._sync()
        self._reserve(1 + len(draft))
        return super().forward(root, draft)

    def _compute(self, tokens: Sequence[int]) -> Generator[PrefillProgress | Yield, None, Scores]:
        done = self._trim_to(shared_prefix(self._tokens, tokens, len(tokens) - 1))
        while True:
            self._slot.check()
            chunk = list(tokens[done : done + MAX_ROWS])
            self._reserve(len(chunk))
            scores = self.context.stage_chain(self._slot, chunk, done, outputs=1, is_prefill=True)
            self._wait(scores)
            self._append(chunk, None)
            done += len(chunk)
            yield PrefillProgress(done, len(tokens))
            if done == len(tokens):
                return scores

    def _trim_to(self, position: int) -> int:
        if position < self._window_start:  # llama.cpp needs consecutive positions: without the window, only the sink
            position = min(position, self._sink)
            self._window_start = self._sink
        return super()._trim_to(position)

    def _missing_positions(self, start: int, end: int) -> list[range]:
        first = max(self._window_start, end - self._window)
        self._drop_middle(first)
        return [span for span in (range(start, min(end, self._sink)), range(max(start, first), end)) if span]

    def _reserve(self, rows: int) -> None:
        """Make the cache take `rows` more."""
        if len(self._tokens) + rows - self._window_start > self._window + SLACK:
            self._drop_middle(len(self._tokens) - self._window)

    def _drop_middle(self, first: int) -> None:
        """Drop the cells between the sink and position `first`."""
        if first > self._window_start:
            memory = self.context.native.memory
            if not self._lib.api.llama_memory_seq_rm(memory, self.sequence, self._window_start, first):
                raise RollbackError("llama.cpp could not drop the middle of its cache.", hint="Use --draft ngram.")
            self._window_start = first

"""A draft model that goes on drafting in a thread of its own while the target verifies (PEARL, Liu et al. 2024).

`benchmarks.overlap` measures where that pays. The thread reads the token drafted last and the draft's own best tokens
after it. It keeps the logits after each of them. Where the text grows by these tokens, and whatever part of the draft
was verified, the next draft takes logits from there and runs no forward. The logits depend on the text alone, so
neither best nor drawn proposals change.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from time import perf_counter

from edgespec.core.arrays import Logits
from edgespec.core.draft_tree import DraftTree
from edgespec.core.protocols import Budget, Draft
from edgespec.core.scores import Scores
from edgespec.drafters.sequential import ModelDraftSession, SequentialDrafter
from edgespec.errors import Cancelled


class TruncatedSession(ModelDraftSession):
    """A draft model's session whose provisional tokens can be dropped. Its cache must allow trimming anywhere."""

    def truncate(self, n: int) -> None:
        """Keep the first `n` tokens of the text and of the provisional tokens after it."""
        self.session.rewind(self.session.position - (len(self.text) - n))
        del self.text[n:]


class AheadSession:
    """A DraftSession over a draft model that another thread may use between two drafts.

    n_forecasts, n_right  how often it ran ahead, and how often the next text was one that it had reached
    forwards              (started, ended) of each forward of the thread, in perf_counter's seconds
    waited_s              seconds in which the drafter waited for the thread
    """

    is_async = takes_trees = False

    def __init__(self, session: TruncatedSession, core: int | None = None) -> None:
        """The thread runs on `core` alone, where that is given. Closes `session` when it is closed."""
        pin = None if core is None else lambda: os.sched_setaffinity(0, {core})
        self._session = session
        self._pool = ThreadPoolExecutor(1, initializer=pin)
        self._running: Future[None] | None = None
        self._is_stopping = False
        self._rows: dict[int, Logits] = {}  # by the number of tokens that they follow
        self._start = self._end = 0  # tokens of the text when it was read, and with those stepped over since
        self.n_forecasts = self.n_right = 0
        self.forwards: list[tuple[float, float]] = []
        self.waited_s = 0.0

    @property
    def text(self) -> Sequence[int]:
        return self._session.text[: self._end]

    def begin(self, text: Sequence[int]) -> None:
        with suppress(Cancelled):  # that was the last generation
            self.stop()
        self._rows.clear()
        self._session.begin(text)

    def pending_tokens(self, text: Sequence[int]) -> int:
        self.stop()
        if self._holds(text):
            return 0
        self._rows.clear()
        return self._session.pending_tokens(text)

    def read(self, text: Sequence[int], window: int) -> Logits | None:
        self.stop()
        is_right = self._holds(text)
        self.n_right += is_right
        self._start = self._end = len(text)
        self._rows = {n: row for n, row in self._rows.items() if is_right and n >= self._end}
        return self._rows[self._end] if is_right else self._keep(self._session.read(text, window))

    def step(self, token: int) -> Logits | None:
        """Raises what a forward of the thread has raised."""
        self.stop()
        if not self._follow(token):
            return self._keep(self._session.step(token), 1)
        self._end += 1
        return self._rows[self._end]

    def rollout(self, text: Sequence[int], window: int, n: int) -> tuple[Draft, Scores] | None:
        return None

    def run_ahead(self, token: int, n: int) -> None:
        """Read `token`, the one drafted last, and the best tokens after it in the thread: `n` of them in all."""
        self.stop()
        self._follow(token)
        self._is_stopping = False
        self.n_forecasts += 1
        self._running = self._pool.submit(self._run, token, self._end + n)

    def stop(self) -> None:
        """Wait until the thread has ended its forward. Raises what that has raised."""
        if (running := self._running) is not None:
            self._running, self._is_stopping = None, True
            started = perf_counter()
            try:
                running.result()
            finally:
                self.waited_s += perf_counter() - started

    def close(self) -> None:
        with suppress(Exception):
            self.stop()
        self._pool.shutdown()
        self._session.close()

    def _holds(self, text: Sequence[int]) -> bool:
        """Whether the logits after `text` are known."""
        n = len(text)
        return n in self._rows and list(self._session.text[self._start : n]) == list(text[self._start :])

    def _follow(self, token: int) -> bool:
        """Whether the thread has read `token` at the end of the text; if it has read another, that is dropped."""
        read = self._session.text
        if len(read) > self._end and read[self._end] == token:
            return True
        if len(read) > self._end:
            self._session.truncate(self._end)
        self._rows = {n: row for n, row in self._rows.items() if n <= self._end}
        return False

    def _keep(self, row: Logits | None, n: int = 0) -> Logits | None:
        """`row` follows the text and `n` more tokens."""
        if row is not None:
            self._end += n
            self._rows[self._end] = row
        return row

    def _run(self, token: int, limit: int) -> None:
        """Read until the session holds `limit` tokens: `token`, unless that was read before, and best ones."""
        n = len(self._session.text)
        while n < limit and not self._is_stopping:
            started = perf_counter()
            row = self._session.step(token if n == self._end else int(self._rows[n].argmax()))
            if row is None:  # the end of the context
                return
            self.forwards.append((started, perf_counter()))
            n += 1
            self._rows[n] = row


class AheadDrafter(SequentialDrafter):
    """Its session runs ahead after each draft, by as many tokens as the next draft of that length takes."""

    def __init__(self, name: str, session: AheadSession) -> None:
        super().__init__(name, session)
        self._ahead = session
        self._last = 0  # the token drafted last

    def expand(self, tree: DraftTree, text: Sequence[int], limit: Budget) -> Iterator[None]:
        n = 0
        try:
            for _ in super().expand(tree, text, limit):
                n += 1
                yield
        except GeneratorExit:
            self._ahead.run_ahead(self._last, n + 1)
            raise
        if n:
            self._ahead.run_ahead(self._last, n + 1)

    def _propose(self, tree: DraftTree, parent: int, logits: Logits) -> list[tuple[int, float]]:
        found = super()._propose(tree, parent, logits)
        self._last = tree.tokens[found[0][0]]
        return found

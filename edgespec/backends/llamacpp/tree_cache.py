"""The cache of the one text that is alone in a context with streams, so that its drafts may be trees."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import TYPE_CHECKING

from edgespec.backends.llamacpp.cells import Cells
from edgespec.errors import BackendError

if TYPE_CHECKING:
    from edgespec.backends.llamacpp.session import LlamaSession

_PAYBACK = 10.0  # seconds alone for each second of copying
_PAUSE_S = 1.0  # between two rounds: the text has ended, and another has begun
_LEAST_TIMED = 256  # tokens of a copy whose time is not mostly that of its beginning
_TOKEN_S = 1e-4  # to copy a token's cells before it is measured: 128 KiB, as of an 8B model, at 1.3 GB/s


class TreeCache:
    """A context beside a shared one, which holds the text of one session at a time.

    Texts are copied in and out. As in ski rental, a text moves in once it has been alone for ten times as long as the
    copies take, so that they cost little however the requests come. A new text begins there without a copy.
    """

    def __init__(self, open_cells: Callable[[], Cells]) -> None:
        """`open_cells` opens the context when it is needed. If it raises BackendError, drafts stay chains."""
        self._open_cells = open_cells
        self._cells: Cells | None = None
        self._occupant: LlamaSession | None = None
        self._sessions: set[LlamaSession] = set()
        self._waiting: LlamaSession | None = None  # is alone, and not here yet
        self._since_s = self._seen_s = 0.0
        self._token_s = _TOKEN_S
        self._is_refused = False  # there was no memory for it

    def add(self, session: LlamaSession) -> None:
        """A session of the shared context was opened."""
        self._sessions.add(session)

    def remove(self, session: LlamaSession) -> None:
        """A session is closed. The context is freed with the last one."""
        self._sessions.discard(session)
        if session is self._occupant:
            self._occupant = None
        if self._waiting is session:
            self._waiting = None
        if not self._sessions and self._cells is not None:
            self._cells.context.release(self._cells.slot)
            self._cells = None

    def settle(self, session: LlamaSession, *, alone: bool) -> None:
        """Move a session between two rounds: in if it is `alone` and that pays, out if it is not."""
        if not alone:
            self._waiting = None
            if session is self._occupant:
                self._move_out(session)
        elif session is not self._occupant and not self._is_refused and self._pays(session):
            self._move_in(session)

    def _pays(self, session: LlamaSession) -> bool:
        now_s = perf_counter()
        if session is not self._waiting or now_s - self._seen_s > _PAUSE_S:
            self._waiting, self._since_s = session, now_s
        self._seen_s = now_s
        n = session.position + (self._occupant.position if self._occupant is not None else 0)
        return now_s - self._since_s >= _PAYBACK * n * self._token_s

    def _move_in(self, session: LlamaSession) -> None:
        if self._occupant is not None:
            self._move_out(self._occupant)
        if self._occupant is not None:  # its own cells are being copied to
            return
        if self._cells is not None and not self._cells.context.is_usable:
            self._cells.context.release(self._cells.slot)
            self._cells = None
        if self._cells is None:
            try:
                self._cells = self._open_cells()
            except BackendError:  # drafts stay chains
                self._is_refused = True
                return
        if self._copy(session, self._cells):
            self._occupant = session

    def _move_out(self, session: LlamaSession) -> None:
        if self._copy(session, session.home):
            self._occupant = None

    def _copy(self, session: LlamaSession, cells: Cells) -> bool:
        started_s, n = perf_counter(), session.position
        has_moved = session.move(cells)
        if has_moved and n >= _LEAST_TIMED:
            self._token_s = (perf_counter() - started_s) / n
        return has_moved

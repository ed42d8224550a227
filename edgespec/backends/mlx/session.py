"""One sequence on an MLX model as a Session: prefill, forward of chains and trees, commit, rewind."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any

import mlx.core as mx

from edgespec.backends.mlx.lazy_draft import DeviceDraft, chain_rows
from edgespec.backends.mlx.library import computing
from edgespec.backends.mlx.scores import MlxScores
from edgespec.backends.mlx.steps import Ahead, Attached, Mark, Pending
from edgespec.backends.mlx.tree_layouts import Form, ModelRunner
from edgespec.backends.sequence import check_ids, check_prompt, shared_prefix
from edgespec.core.batching import SOLO, BatchPeers, Yield
from edgespec.core.protocols import Capabilities, CheckCancelled, Draft, PrefillProgress, Scores, Session
from edgespec.core.tree import check_draft, is_path
from edgespec.errors import BackendError, Cancelled, ContextOverflow, RollbackError

PREFILL_CHUNK = 512
MAX_ROWS = 64  # a root and 63 draft nodes
_TIDY = 256  # tokens
_MOST_LAG = 16  # tokens run again along with the next draft; more of them get a forward of their own


class MlxSession:
    """A Session over mlx-lm's models. The thread that made it owns it.

    Caches that cannot be cut (recurrent layers) go back to the state before a forward whose draft was not accepted in
    full; what was accepted then lags behind, and is run again as the first rows of the next forward.
    """

    def __init__(
        self,
        open_forwards: Callable[[], ModelRunner],
        form: Form | None,
        capabilities: Capabilities,
        check: CheckCancelled,
    ) -> None:
        self._open_forwards = open_forwards
        self._forwards = open_forwards()
        self._form = form
        self._capabilities = capabilities
        self._check = check
        self._tokens: list[int] = []  # what the sequence holds
        self._lag = 0  # how many of them, at the end, the caches do not hold
        self._pending: Pending | None = None
        self._ahead: Ahead | None = None
        self._marks: dict[str, Mark] = {}  # of the prompt, and of the last rollout
        self._unread: DeviceDraft | None = None  # of the last rollout; all but its last token follow `_tokens`
        self._closed = False
        self.attached: Attached | None = None  # until this session runs or forgets anything itself

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    @property
    def position(self) -> int:
        return len(self._tokens) + (len(self._unread) - 1 if self._unread is not None else 0)

    @property
    def peers(self) -> BatchPeers:
        return SOLO

    @property
    def draft_limit(self) -> int:
        return max(0, min(self._capabilities.context_size - self.position - 1, MAX_ROWS - 1))

    @property
    def tokens(self) -> Sequence[int]:
        """What the sequence holds."""
        return self._tokens

    @property
    def network(self) -> Any:
        """The model that runs it, as mlx-lm made it."""
        self._require_open()
        return self._forwards.model

    def attach(self, attached: Attached) -> ModelRunner:
        """The caches, up to date, to be cut back to `position` after every use: rows behind it are the borrower's."""
        if self._pending is not None:
            raise RollbackError("a forward was not committed before a draft.", hint="Report this as a bug.")
        self._require_open()
        self._drop_ahead()
        self._settle()
        self.attached = attached
        return self._forwards

    def prefill(self, tokens: Sequence[int]) -> Generator[PrefillProgress | Yield, None, Scores]:
        self._require_open()
        check_prompt(tokens, self._capabilities)
        done = reused = self.rewind(shared_prefix(self._tokens, tokens, len(tokens) - 1))
        self._settle()
        while done < len(tokens) - 1:  # the last token alone is scored
            self._check()
            chunk = tokens[done : min(done + PREFILL_CHUNK, len(tokens) - 1)]
            self._run_unscored(chunk)
            self._tokens += chunk
            done += len(chunk)
            yield PrefillProgress(done, len(tokens), reused)
        self._check()
        logits = self._started(self._forwards.chain, tokens[-1:])
        self._tokens.append(tokens[-1])
        yield PrefillProgress(len(tokens), len(tokens), reused)
        return MlxScores(logits)

    def adopt(self, other: Session, n: int) -> bool:
        return False

    def forward(self, root: int, draft: Draft, *, run_ahead: bool = False) -> Scores:
        self._require_open()
        if self._pending is not None:
            raise RollbackError("a forward was not committed before the next.", hint="Report this as a bug.")
        check_ids((root,), self._capabilities.vocab_size)
        n, position = len(draft), len(self._tokens)
        if n > self.draft_limit or position >= self._capabilities.context_size:
            raise ContextOverflow(f"{n} drafted tokens do not fit after {position}.", hint="Report this as a bug.")
        if n and not isinstance(draft, DeviceDraft):
            check_draft(draft, self._capabilities.vocab_size)
        self._check()
        ahead_fits = run_ahead and not n and position + 2 <= self._capabilities.context_size
        known = self._run_ahead if ahead_fits else None
        ahead = self._ahead
        if ahead is not None and not n and ahead.scores.first == root:
            self._ahead = None
            self._pending = Pending(root, draft, ahead.before)
            return MlxScores(ahead.logits, known)
        self._drop_ahead()
        if not draft.is_chain or self._lag > _MOST_LAG:
            self._settle()
        mark = self._mark()
        if draft.is_chain:
            certain = [*self._tokens[position - self._lag :], root]
            resumed = self.attached.resuming(root, draft) if self.attached is not None else None
            run = resumed or self._forwards.rows
            logits = self._started(run, chain_rows(certain, draft), undo=mark)[self._lag :]
        elif self._form is None:
            raise ValueError("this model takes chains only")
        else:
            logits = self._started(self._forwards.tree, self._form, position, root, draft, undo=mark)
        self._pending = Pending(root, draft, mark)
        return MlxScores(logits, known)

    def commit(self, path: Sequence[int]) -> None:
        if self._pending is None:
            raise RollbackError("nothing was forwarded to commit.", hint="Report this as a bug.")
        root, draft, mark = self._pending.root, self._pending.draft, self._pending.before
        if not is_path(draft, tuple(path)):
            raise ValueError(f"{tuple(path)} is not a path of the draft")
        caches, start = self._forwards.caches, len(self._tokens)
        end = start + 1 + len(path)
        self._tokens += [root, *draft.tokens[list(path)].tolist()]
        self._pending = None
        if end // _TIDY > start // _TIDY:
            mx.clear_cache()  # buffers that the caches have outgrown
        if not draft.is_chain and self._form == "branches":
            self._lag = end - start  # it ran on copies
        elif len(path) < len(draft) and not caches.can_cut:
            caches.restore(mark.saved)
            self._lag = end - mark.position
        else:
            self._lag = 0
            if list(path) != list(range(len(path))):
                caches.gather(start, [0, *(node + 1 for node in path)])
            elif len(path) < len(draft):
                caches.cut(end)

    def rollout(self, tokens: Sequence[int], n: int, vocab_size: int) -> tuple[Draft, Scores]:
        self._require_open()
        if self._pending is not None:
            raise RollbackError("a forward was not committed before a rollout.", hint="Report this as a bug.")
        check_ids(tokens, self._capabilities.vocab_size)
        if len(self._tokens) + len(tokens) + n - 1 > self._capabilities.context_size:
            raise ContextOverflow(f"{n} drafted tokens do not fit.", hint="Report this as a bug.")
        self._check()
        self._drop_ahead()
        before = self._mark()
        lag = self._lagging
        rows = [self._started(self._forwards.chain, [*lag, *tokens], undo=before)[-1:]]
        self._tokens += tokens
        self._lag = 0
        start = self._marks["rollout"] = self._mark()
        best = [mx.argmax(rows[0][:, :vocab_size], axis=-1)]
        while len(best) < n:  # nothing waits for the device until all are under way
            rows.append(self._started(self._forwards.rows, best[-1][None], undo=start))
            best.append(mx.argmax(rows[-1][:, :vocab_size], axis=-1))
        self._unread = DeviceDraft(mx.concatenate(best))
        return self._unread, MlxScores(mx.concatenate(rows))

    def checkpoint(self) -> None:
        self._require_open()
        if self._pending is not None:
            raise RollbackError("a forward was not committed before a checkpoint.", hint="Report this as a bug.")
        self._drop_ahead()
        self._settle()
        self._marks["prompt"] = Mark(len(self._tokens), self._forwards.caches.mark(deep=True))

    def rewind(self, position: int) -> int:
        self._require_open()
        self._drop_pending()
        self._drop_ahead()
        if position >= len(self._tokens):
            return len(self._tokens)
        self.attached = None
        caches, held = self._forwards.caches, len(self._tokens) - self._lag
        if position >= held:
            reached, self._lag = position, position - held
        elif caches.reaches(position):
            caches.cut(position)
            reached, self._lag = position, 0
        else:
            reached = self._restored(position)
        del self._tokens[reached:]
        self._marks = {name: mark for name, mark in self._marks.items() if mark.position <= reached}
        return reached

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._pending = self._ahead = self._unread = None
            self._marks = {}
            del self._forwards
            mx.clear_cache()

    def _restored(self, position: int) -> int:
        """Go back to the latest mark at or before `position`, else to nothing; returns how many tokens are left."""
        caches = self._forwards.caches
        within = [m for m in self._marks.values() if m.position <= position and caches.holds(m.saved)]
        self._lag = 0
        if within:
            mark = max(within, key=lambda m: m.position)
            caches.restore(mark.saved)
            return mark.position
        self._forwards = self._open_forwards()
        self._marks = {}
        return 0

    @property
    def _lagging(self) -> list[int]:
        """The last tokens, which the caches do not hold."""
        return self._tokens[len(self._tokens) - self._lag :]

    def _mark(self) -> Mark:
        return Mark(len(self._tokens) - self._lag, self._forwards.caches.mark())

    def _started(self, run: Callable[..., Any], *given: Any, undo: Mark | None = None) -> Any:
        """Scores of a forward that has been handed to the device. On failure the caches are as in `undo`."""
        try:
            with computing():
                logits = run(*given)
                mx.async_eval(logits, self._forwards.caches.recurrent)
        except (BackendError, Cancelled):
            if undo is not None:
                self._forwards.caches.restore(undo.saved)
            raise
        finally:
            self.attached = None
        return logits

    def _run_unscored(self, tokens: Sequence[int]) -> None:
        """Run tokens that are certain to stay, and wait. Cancelled leaves the caches as they were."""
        before = self._forwards.caches.mark()
        try:
            with computing(), self._forwards.layout.polling(self._check):
                self._forwards.chain(tokens)  # nothing asks for its scores, so they are never computed
                mx.eval(self._forwards.caches.state)
        except (BackendError, Cancelled):
            self._forwards.caches.restore(before)
            raise
        finally:
            self.attached = None
        mx.clear_cache()

    def _settle(self) -> None:
        """Let the caches catch up with the sequence."""
        if self._lag:
            self._run_unscored(self._lagging)
            self._lag = 0

    def _run_ahead(self, scores: MlxScores, token: Any) -> None:
        """Start the next plain forward on the token [1] that `scores` have just decided on."""
        before = Mark(len(self._tokens) + 1, self._forwards.caches.mark())  # the root is in the caches already
        self._ahead = Ahead(scores, self._started(self._forwards.rows, token[None], undo=before), before)

    def _drop_ahead(self) -> None:
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            self._forwards.caches.restore(ahead.before.saved)

    def _drop_pending(self) -> None:
        pending, self._pending = self._pending, None
        if pending is not None:
            self._ahead = None  # it went further than what is undone here
            self._forwards.caches.restore(pending.before.saved)

    def _require_open(self) -> None:
        """And catch up with what the device has drafted."""
        if self._closed:
            raise BackendError("the session is closed.", hint="Open another.")
        if self._unread is not None:
            self._tokens += self._unread.tokens[:-1].tolist()
            self._unread = None

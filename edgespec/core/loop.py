"""The one decoding loop: draft, score in one target forward, verify exactly, keep what was accepted.

It serves every runtime (a `Session`) and every drafter. Plain decoding is the same loop with an empty draft.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from time import perf_counter

from edgespec.cancel import check_cancelled
from edgespec.core.peers import YIELD, Yield
from edgespec.core.protocols import (
    NO_DRAFT,
    Budget,
    Controller,
    Draft,
    PrefillProgress,
    Round,
    Session,
    Step,
    Verdict,
    Verifier,
)

TokenSink = Callable[[int, str], bool]
"""Takes an emitted token and the source that drafted it ('' for the target's own); returns whether the text ends."""

RowCost = Callable[[int], float | None]
"""Callable(n_drafted): plain steps that take as long as a forward with a draft; None where that is unknown."""


def speculate(
    session: Session,
    controller: Controller,
    verifier: Verifier,
    prompt: Sequence[int],
    *,
    max_tokens: int,
    stop: frozenset[int],
    emit: TokenSink = lambda token, source: False,
    row_cost: RowCost = lambda n_drafted: None,
) -> Generator[PrefillProgress | Step | Yield, None, None]:
    """Yield PrefillProgress, then Steps, with a Yield after the first one, if more follow, and after each forward is
    started.

    Generation ends with a token of `stop`, with a token for which `emit` returns True, after `max_tokens` tokens, or at
    the end of the context. The emitted tokens follow the distribution that `verifier` samples from, whatever is
    drafted. Without max_tokens, the prompt is read and no Step follows. Needs len(prompt) >= 1. Raises Cancelled
    between steps and from the session.
    """
    scores = yield from session.prefill(prompt)
    session.checkpoint()  # the next turn may return here
    if not max_tokens:
        return
    t0 = perf_counter()
    verdict = verifier.verify(NO_DRAFT, scores, prompt)
    # The last emitted token is never cached, so the context holds one token more than its cache.
    limit = min(len(prompt) + max_tokens, session.capabilities.context_size + 1)
    text = _Text(prompt, limit, stop, emit)
    first, _, _ = text.extend(NO_DRAFT, verdict, "")
    t1 = perf_counter()
    sample_s = t1 - t0 - scores.waited_s
    yield Step(0, first, 0, 0, 0, t1, sample_s=sample_s)
    index, own_s = 0, 0.0  # the controller's time since its last step
    if not text.has_ended:
        yield YIELD  # so that the first token can be shown before the next forward
        t1 = perf_counter()
        controller.begin(prompt)
        own_s = perf_counter() - t1
    while not text.has_ended:
        check_cancelled()
        index += 1
        step = yield from _round(session, controller, verifier, text, index, own_s, row_cost)
        t1 = perf_counter()
        controller.record(step)
        own_s = perf_counter() - t1
        yield step


def _round(
    session: Session,
    controller: Controller,
    verifier: Verifier,
    text: _Text,
    index: int,
    own_s: float,
    row_cost: RowCost,
) -> Generator[Yield, None, Step]:
    """Draft, forward, verify and commit once; extends `text`. `own_s` is the controller's time since the last round."""
    t0 = perf_counter()
    draft = controller.propose(text.tokens, Budget(depth=text.room - 1, nodes=session.draft_limit))
    decision = controller.decision
    t1 = perf_counter()
    run_ahead = not len(draft) and controller.expects_plain and text.room > 1
    scores = session.forward(text.tokens[-1], draft, run_ahead=run_ahead)
    forward_s = perf_counter() - t1
    yield YIELD
    t2 = perf_counter()
    verdict = verifier.verify(draft, scores, text.tokens)
    tokens, n_accepted, n_tested = text.extend(draft, verdict, decision.source)
    path = verdict.path[: len(tokens) - 1]  # the last emitted token is not cached
    t3 = perf_counter()
    waited_s, peer_wait_s = scores.waited_s, scores.peer_wait_s  # without the reads of drafters, which are drafting
    controller.observe(Round(text.tokens, tokens, draft, verdict.path[:n_accepted], n_tested, scores))
    t4 = perf_counter()
    session.commit(path)
    assert session.position == len(text.tokens) - 1
    t5 = perf_counter()
    verify_s, sample_s, commit_s = forward_s + waited_s + peer_wait_s, t3 - t2 - waited_s, t5 - t4
    n_peer_rows = None if peer_wait_s else scores.peer_rows
    return Step(
        index,
        tokens,
        len(draft),
        n_accepted,
        n_tested,
        t5,
        draft_s=own_s + (t1 - t0) + (t4 - t3),
        verify_s=verify_s,
        sample_s=sample_s,
        commit_s=commit_s,
        decision=decision,
        n_peer_rows=n_peer_rows,
        plain_steps=row_cost(len(draft)) if len(draft) else 1.0,
    )


class _Text:
    """Prompt and emitted tokens, and where they end."""

    def __init__(self, prompt: Sequence[int], limit: int, stop: frozenset[int], emit: TokenSink) -> None:
        self.tokens = list(prompt)
        self.has_ended = False
        self._limit = limit
        self._stop = stop
        self._emit = emit

    @property
    def room(self) -> int:
        return self._limit - len(self.tokens)

    def extend(self, draft: Draft, verdict: Verdict, source: str) -> tuple[tuple[int, ...], int, int]:
        """Append the verdict's tokens up to the first that ends the text.

        Returns (appended tokens, how many of them were drafted, tested depths).
        """
        drafted = [int(draft.tokens[node]) for node in verdict.path]
        origins = [draft.sources[node] if draft.sources else source for node in verdict.path]
        n_path, start = len(drafted), len(self.tokens)
        for i, token in enumerate([*drafted, verdict.next_token]):
            self.tokens.append(token)
            is_last = self._emit(token, origins[i] if i < n_path else "")
            if is_last or token in self._stop or not self.room:
                self.has_ended = True
                break
        tokens = tuple(self.tokens[start:])
        if len(tokens) <= n_path:  # cut within the path: nothing is known of the tokens behind
            return tokens, len(tokens), len(tokens)
        # A token that was drafted and is the last one of a verdict that was cut was no rejection.
        others = {int(draft.tokens[child]) for child in draft.children(verdict.path[-1] if n_path else -1)}
        return tokens, n_path, n_path + bool(others and verdict.next_token not in others)

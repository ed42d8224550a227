"""The one decoding loop: draft, score in one target forward, verify exactly, keep what was accepted.

It serves every runtime (a `Session`) and every drafter. Plain decoding is the same loop with an empty draft.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from itertools import count
from time import perf_counter
from typing import NamedTuple

from edgespec.cancel import check_cancelled
from edgespec.core.peers import YIELD, Yield
from edgespec.core.protocols import (
    NO_DRAFT,
    Budget,
    Controller,
    Decision,
    Draft,
    PrefillProgress,
    Round,
    Session,
    Step,
    Verdict,
    Verifier,
)
from edgespec.core.scores import Scores

TokenSink = Callable[[int, str], bool]
"""Takes an emitted token and the drafter that proposed it ('' for the target's own); returns whether the text ends."""

RowCost = Callable[[int], float | None]
"""Takes a number of draft nodes; returns how many plain steps take as long as a forward with them, None if unknown."""


def speculate(
    session: Session,
    controller: Controller,
    verifier: Verifier,
    prompt: Sequence[int],
    *,
    max_tokens: int,
    stop: frozenset[int],
    emit: TokenSink = lambda token, drafter: False,
    row_cost: RowCost = lambda n_drafted: None,
) -> Generator[PrefillProgress | Step | Yield, None, None]:
    """Yield PrefillProgress, then Steps, with a Yield after the first one, if more follow, and after each forward is
    started.

    Generation ends with a token of `stop`, with a token for which `emit` returns True, after `max_tokens` tokens, or at
    the end of the context. The emitted tokens follow the distribution that `verifier` samples from, whatever is
    drafted. If max_tokens is 0, the prompt is read and no Step follows. Needs len(prompt) >= 1. Raises Cancelled
    between steps and from the session.
    """
    scores = yield from session.prefill(prompt)
    session.checkpoint()  # the next turn may return here
    if not max_tokens:
        return
    # The last emitted token is never cached, so the context holds one token more than its cache.
    limit = min(len(prompt) + max_tokens, session.capabilities.context_size + 1)
    text, clock = EmittedText(prompt, limit, stop, emit), StepClock()
    first = text.extend(NO_DRAFT, verifier.verify(NO_DRAFT, scores, prompt), "")
    clock.lap("sample")
    yield Step(0, first.tokens, 0, 0, 0, clock.now_s, sample_s=clock.take()["sample"] - scores.waited_s)
    if not text.has_ended:
        yield YIELD  # so that the first token can be shown before the next forward
        clock.start()
        controller.begin(prompt)
        clock.lap("draft")
    for index in count(1):
        if text.has_ended:
            return
        check_cancelled()
        step = yield from _round(session, controller, verifier, text, clock, index, row_cost)
        clock.start()
        controller.record(step)
        clock.lap("draft")
        yield step


def _round(
    session: Session,
    controller: Controller,
    verifier: Verifier,
    text: EmittedText,
    clock: StepClock,
    index: int,
    row_cost: RowCost,
) -> Generator[Yield, None, Step]:
    """Draft, forward, verify and commit once; extends `text`."""
    clock.start()
    draft = controller.propose(text.tokens, Budget(depth=text.room - 1, nodes=session.draft_limit))
    decision = controller.decision
    clock.lap("draft")
    run_ahead = not len(draft) and controller.expects_plain and text.room > 1
    scores = session.forward(text.tokens[-1], draft, run_ahead=run_ahead)
    clock.lap("verify")
    yield YIELD  # peers stage their rows before anyone reads
    clock.start()
    verdict = verifier.verify(draft, scores, text.tokens)
    kept = text.extend(draft, verdict, decision.drafter)
    clock.lap("sample")
    waited_s = scores.waited_s  # taken before drafters read the scores, which counts as drafting
    peer_wait_s = scores.peer_wait_s
    accepted = verdict.path[: kept.n_accepted]
    controller.observe(Round(text.tokens, kept.tokens, draft, accepted, kept.n_tested, scores))
    clock.lap("draft")
    session.commit(verdict.path[: len(kept.tokens) - 1])  # the last emitted token is not cached
    assert session.position == len(text.tokens) - 1
    clock.lap("commit")
    plain_steps = row_cost(len(draft)) if len(draft) else 1.0
    return clock.step(index, draft, kept, scores, decision, plain_steps, waited_s=waited_s, peer_wait_s=peer_wait_s)


class StepClock:
    """The seconds of each part of a step. What the controller does after a step is drafting of the next one."""

    def __init__(self) -> None:
        self._seconds = dict.fromkeys(("draft", "verify", "sample", "commit"), 0.0)
        self.now_s = perf_counter()

    def start(self) -> None:
        """A part begins. The time since the last lap counts for none: other generations or a reader of events ran."""
        self.now_s = perf_counter()

    def lap(self, part: str) -> None:
        """`part` ends, and the next one begins."""
        now_s = perf_counter()
        self._seconds[part] += now_s - self.now_s
        self.now_s = now_s

    def take(self) -> dict[str, float]:
        """The seconds of each part since the last call."""
        seconds, self._seconds = self._seconds, dict.fromkeys(self._seconds, 0.0)
        return seconds

    def step(
        self,
        index: int,
        draft: Draft,
        kept: Kept,
        scores: Scores,
        decision: Decision,
        plain_steps: float | None,
        *,
        waited_s: float,
        peer_wait_s: float,
    ) -> Step:
        """The step whose parts have ended.

        `waited_s`, part of its sampling, and `peer_wait_s`, part of a peer's, were spent waiting for the scores. Both
        count as verification.
        """
        seconds = self.take()
        return Step(
            index,
            kept.tokens,
            len(draft),
            kept.n_accepted,
            kept.n_tested,
            self.now_s,
            draft_s=seconds["draft"],
            verify_s=seconds["verify"] + waited_s + peer_wait_s,
            sample_s=seconds["sample"] - waited_s,
            commit_s=seconds["commit"],
            decision=decision,
            n_peer_rows=None if peer_wait_s else scores.peer_rows,
            plain_steps=plain_steps,
        )


class Kept(NamedTuple):
    """What a verdict has added to the text: its tokens, how many of them were drafted, and the tested depths."""

    tokens: tuple[int, ...]
    n_accepted: int
    n_tested: int


class EmittedText:
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

    def extend(self, draft: Draft, verdict: Verdict, drafter: str) -> Kept:
        """Append the verdict's tokens up to the first that ends the text."""
        drafted = [int(draft.tokens[node]) for node in verdict.path]
        drafters = [draft.drafters[node] if draft.drafters else drafter for node in verdict.path]
        n_path, start = len(drafted), len(self.tokens)
        for i, token in enumerate([*drafted, verdict.next_token]):
            self.tokens.append(token)
            is_last = self._emit(token, drafters[i] if i < n_path else "")
            if is_last or token in self._stop or not self.room:
                self.has_ended = True
                break
        tokens = tuple(self.tokens[start:])
        if len(tokens) <= n_path:  # cut within the path: nothing is known of the tokens behind
            return Kept(tokens, len(tokens), len(tokens))
        # A verifier may cut a verdict at an accepted token, which is then its next_token: that is no rejection.
        others = {int(draft.tokens[child]) for child in draft.children(verdict.path[-1] if n_path else -1)}
        return Kept(tokens, n_path, n_path + bool(others and verdict.next_token not in others))

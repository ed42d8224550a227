"""The one decoding loop: draft, score in one target forward, verify exactly, keep what was accepted.

It serves every runtime (a `Session`) and every `Drafter`. Plain decoding is the same loop with an empty draft.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from time import perf_counter

from edgespec.core.batching import YIELD, Yield
from edgespec.core.protocols import (
    NO_DRAFT,
    Budget,
    CheckCancelled,
    Controller,
    Draft,
    PrefillProgress,
    Session,
    Step,
    Verdict,
    Verifier,
)


def speculate(
    session: Session,
    controller: Controller,
    verifier: Verifier,
    prompt: Sequence[int],
    *,
    max_tokens: int,
    stop: frozenset[int],
    check: CheckCancelled = lambda: None,
) -> Generator[PrefillProgress | Step | Yield, None, None]:
    """Yield PrefillProgress, then Steps, until a token of `stop`, `max_tokens`, or the end of the context; Pauses among
    them.

    The emitted tokens follow the law that `verifier` samples from, whatever is proposed. Needs len(prompt) >=
    1 and max_tokens >= 1. Raises Cancelled from `check`, between steps, or from within the session.
    """
    scores = yield from session.prefill(prompt)
    session.checkpoint()  # the next turn may return here
    started = perf_counter()
    verdict = verifier.verify(NO_DRAFT, scores, prompt)
    ready = perf_counter()
    yield Step(0, (verdict.next_token,), 0, 0, 0, ready, sample_s=ready - started - scores.waited_s)

    history = [*prompt, verdict.next_token]
    # The last emitted token is never cached, so the context holds one token more than it has room for.
    end = min(len(prompt) + max_tokens, session.capabilities.context_size + 1)
    index = 0
    begin_s = 0.0  # counted as drafting, in the first step that drafts
    if len(history) < end and history[-1] not in stop:
        controller.begin(prompt, scores)
        begin_s = perf_counter() - ready
    while len(history) < end and history[-1] not in stop:
        check()
        index += 1
        t0 = perf_counter()
        draft = controller.propose(history, Budget(depth=end - len(history) - 1, nodes=session.draft_limit))
        t1 = perf_counter()
        run_ahead = not len(draft) and controller.expects_plain and len(history) + 1 < end
        scores = session.forward(history[-1], draft, run_ahead=run_ahead)
        forward_s = perf_counter() - t1
        yield YIELD
        t2 = perf_counter()
        verdict = verifier.verify(draft, scores, history)
        tokens, n_accepted, n_tested = _clip(draft, verdict, end - len(history), stop)
        t3 = perf_counter()
        verdict = Verdict(verdict.path[: len(tokens) - 1], tokens[-1])
        controller.observe(verdict, scores)
        session.commit(verdict.path)
        history += tokens
        assert session.position == len(history) - 1
        t4 = perf_counter()
        waited_s, beside_s = scores.waited_s, scores.peer_wait_s  # the former within t3 - t2, but the forward's
        step = Step(
            index,
            tokens,
            len(draft),
            n_accepted,
            n_tested,
            t4,
            draft_s=begin_s + t1 - t0,
            verify_s=forward_s + waited_s + beside_s,
            sample_s=t3 - t2 - waited_s,
            commit_s=t4 - t3,
            decision=controller.decision,
            n_peer_rows=None if beside_s else scores.peer_rows,
        )
        begin_s = 0.0
        controller.record(step)
        yield step


def _clip(draft: Draft, verdict: Verdict, room: int, stop: frozenset[int]) -> tuple[tuple[int, ...], int, int]:
    """The verdict's tokens cut at `room` and after a stop token; how many of them were drafted; depths tested."""
    n_path = len(verdict.path)
    tokens = [*(int(draft.tokens[node]) for node in verdict.path), verdict.next_token][:room]
    for i, token in enumerate(tokens):
        if token in stop:
            del tokens[i + 1 :]
            break
    if len(tokens) <= n_path:  # cut within the path: nothing is known of what would have followed
        return tuple(tokens), len(tokens), len(tokens)
    was_rejected = bool(draft.children(verdict.path[-1] if n_path else -1))
    return tuple(tokens), n_path, n_path + was_rejected

"""Drives a drafter beside a session of its target, as the loop does, and compares it with fresh ones."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any, cast

import numpy as np
import pytest

from edgespec.autopilot.adaptive import Adaptive
from edgespec.autopilot.cost_model import CostModel
from edgespec.autopilot.fixed import FixedLength
from edgespec.autopilot.profile import DraftCost, Profile
from edgespec.autopilot.stats import DraftStats
from edgespec.backends.attached_draft import AttachedDraft, AttachedHead
from edgespec.core.arrays import Logits
from edgespec.core.decoding import read_prompt
from edgespec.core.draft_tree import DraftTree
from edgespec.core.drafter import BlockSession, Drafter, DraftSession, Outcome, TokenDraw
from edgespec.core.peers import Yield
from edgespec.core.protocols import NO_DRAFT, AsyncSession, Budget, Draft, PrefillProgress, Round, Session
from edgespec.core.rng import Rng
from edgespec.core.sampling import Sampler, SamplingParams
from edgespec.core.scores import Scores
from edgespec.core.tree import path_to
from edgespec.drafters.candidates import RequestDraw
from edgespec.drafters.registry import SlotResources
from tests.contract.drafter_subjects import Subject
from tests.contract.runtimes import ON_DEVICE

PROMPT = [97, 98, 99, 97, 98, 99, 100, 97, 98, 99, 97, 98, 101, 102, 97, 98]  # repeats, for lookups
LIMIT = Budget(4, 4)
MAX_ROUNDS = 8
MAX_TOKENS = 5  # of a round


class Computed:
    """A draft's session that counts the tokens that it computes."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self.tokens = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def prefill(self, tokens: Sequence[int]) -> Generator[PrefillProgress | Yield, None, Scores]:
        held = self._session.position if self._session.capabilities.shares_kv else 0
        events = self._session.prefill(tokens)
        while True:
            try:
                event = next(events)
            except StopIteration as end:
                scores: Scores = end.value
                return scores
            if isinstance(event, PrefillProgress) and event.done == event.total:
                self.tokens += max(0, event.total - max(held, event.reused))
            yield event

    def forward(self, root: int, draft: Draft, *, run_ahead: bool = False) -> Scores:
        self.tokens += 1 + len(draft)
        return self._session.forward(root, draft, run_ahead=run_ahead)


class ComputedAhead(Computed):
    """Likewise of a session that makes chains which the host has not read."""

    def rollout(self, tokens: Sequence[int], n: int, vocab_size: int) -> tuple[Draft, Scores]:
        self.tokens += len(tokens) + n - 1
        assert isinstance(self._session, AsyncSession)
        return self._session.rollout(tokens, n, vocab_size)


class ComputedHead:
    """A head's session that counts the pairs that it computes."""

    def __init__(self, session: DraftSession) -> None:
        self._session = session
        self.tokens = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def read(self, text: Sequence[int], window: int) -> Logits | None:
        self.tokens += min(self._session.pending_tokens(text), window)
        return self._session.read(text, window)

    def step(self, token: int) -> Logits | None:
        self.tokens += 1
        return self._session.step(token)

    def rollout(self, text: Sequence[int], window: int, n: int) -> tuple[Draft, Scores] | None:
        self.tokens += min(self._session.pending_tokens(text), window) + n - 1
        return self._session.rollout(text, window, n)


class ComputedBlocks:
    """A session that drafts blocks and counts the tokens of the text that it computes."""

    def __init__(self, session: BlockSession) -> None:
        self._session = session
        self.block_size = session.block_size
        self.tokens = 0

    def begin(self, text: Sequence[int]) -> None:
        self._session.begin(text)

    def pending_tokens(self, text: Sequence[int]) -> int:
        return self._session.pending_tokens(text)

    def block(self, text: Sequence[int], window: int, n: int) -> list[Logits] | None:
        self.tokens += min(self._session.pending_tokens(text), window)
        return self._session.block(text, window, n)

    def close(self) -> None:
        self._session.close()


class Pair:
    """A session of the target and a drafter for it, driven as the loop drives them."""

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self.target = subject.target.open_session()
        source, session, head = subject.loaded.source, None, None
        if isinstance(source, AttachedHead):
            opened = source.open_session(self.target)
            head = ComputedBlocks(opened) if isinstance(opened, BlockSession) else ComputedHead(opened)
        elif isinstance(source, AttachedDraft):
            session = source.open_session(self.target)
        elif source is not None:
            session = source.open_session()
        self.is_attached = session is not None and session.capabilities.shares_kv
        self.is_recurrent = "recurrent" in subject.name
        counter = ComputedAhead if isinstance(session, AsyncSession) else Computed
        self.computed = head if session is None else counter(session)
        computed: Any = None if session is None else self.computed
        resources = SlotResources(
            self.target,
            subject.vocab_size,
            computed,
            subject.loaded.plan.mask_token,
            head=cast(DraftSession, head),
            memory=subject.open_slot_memory(),
        )
        self.drafter = subject.loaded.spec.open(resources)
        self.listeners: list[Drafter] = []  # that hear what `drafter` hears
        self.text: list[int] = []

    def begin(self, prompt: Sequence[int], root: int, draw: TokenDraw | None = None) -> None:
        read_prompt(self.target, prompt)
        self.target.checkpoint()
        for drafter in (self.drafter, *self.listeners):
            drafter.begin(prompt, draw)
        self.text = [*prompt, root]

    def expand(self, limit: Budget = LIMIT, units: int | None = None) -> DraftTree:
        """Drive the drafter for `units`, or to the end."""
        tree = DraftTree()
        if units != 0:
            for n, _ in enumerate(self.drafter.expand(tree, self.text, limit), 1):
                if n == units:
                    break
        return tree

    def finish(self, draft: Draft, node: int, next_token: int) -> Sequence[Outcome]:
        """The round in which the path to `node` was accepted, and `next_token` emitted after it."""
        scores = self.target.forward(self.text[-1], draft)
        path = path_to(draft, node)
        emitted = (*draft.tokens[list(path)].tolist(), next_token)
        self.text += emitted
        n_tested = len(path) + bool(draft.children(node))
        scores.argmax()  # the loop has read them
        done = Round(list(self.text), emitted, draft, path, n_tested, scores)
        outcomes = self.drafter.observe(done)
        for each in self.listeners:
            each.observe(done)
        self.target.commit(path)
        return outcomes

    def select(self, tree: DraftTree) -> Draft:
        """What the target takes of the tree: all that fits, or the chain to the deepest node."""
        if self.target.capabilities.tree:
            return tree.select(range(min(len(tree), self.target.draft_limit)))
        chain, node = [], tree.deepest(self.drafter.name)
        while node >= 0:
            chain.append(node)
            node = tree.parents[node]
        return tree.select(chain[::-1][: self.target.draft_limit])

    def close(self) -> None:
        self.drafter.close()
        self.target.close()


class Reference:
    """Freshly opened drafters, beside one session of the target.

    A drafter that learns from scores is compared with one that hears of the same rounds and is asked here alone.
    """

    def __init__(self, pair: Pair) -> None:
        self._subject = pair.subject
        self._target = pair.subject.target.open_session()
        self._twin = self._subject.open(self._target) if pair.subject.learns_from_scores else None
        if self._twin is not None:
            pair.listeners.append(self._twin)

    def check(self, found: DraftTree, text: Sequence[int], limit: Budget = LIMIT) -> None:
        """`found` is what a drafter proposes that knows nothing but `text`, or has heard of the same rounds."""
        drafter = self._twin or self._subject.open(self._target)
        if drafter is not self._twin:
            read_prompt(self._target, text[:-1])
            drafter.begin(text[:-1], None)
        wanted = DraftTree()
        for _ in drafter.expand(wanted, text, limit):
            pass
        if drafter is not self._twin:
            drafter.close()
        check_same(found, wanted, drafter, self._subject.tolerance)

    def close(self) -> None:
        if self._twin is not None:
            self._twin.close()
        self._target.close()


def check_same(found: DraftTree, wanted: DraftTree, drafter: Drafter, tolerance: float) -> None:
    """The same proposals; where rounding may change probabilities, the same on the path that both agree to be best."""
    name = drafter.name
    if not tolerance or drafter.confidence == "length":
        assert list_paths(found, name) == pytest.approx(list_paths(wanted, name), rel=1e-5)
        return
    ours = theirs = -1
    while True:
        a, b = found.proposals(ours, name), wanted.proposals(theirs, name)
        assert bool(a) == bool(b), (found.tokens, wanted.tokens)
        if not a:
            return
        first, other = confidences(found, a, name), confidences(wanted, b, name)
        for token in first.keys() | other.keys():
            lowest = min((other if len(other) <= len(first) else first).values())  # the last candidate may differ
            if ON_DEVICE and not (token in first and token in other):  # where rounding decides how many there are
                assert max(first.get(token, 0.0), other.get(token, 0.0)) <= lowest + tolerance, (first, other)
                continue
            assert first.get(token, lowest) == pytest.approx(other.get(token, lowest), abs=tolerance), (first, other)
        ours, theirs = a[0], b[0]
        if found.tokens[ours] != wanted.tokens[theirs]:  # as probable as each other
            return


def confidences(tree: DraftTree, nodes: Sequence[int], name: str) -> dict[int, float]:
    return {tree.tokens[node]: tree.votes[node][name] for node in nodes}


def list_paths(tree: DraftTree, name: str) -> dict[tuple[int, ...], float]:
    """The confidence of `name` in each path that it proposes."""
    return {tuple(tree.path_tokens(node)): votes[name] for node, votes in enumerate(tree.votes) if name in votes}


def random_token(rng: Rng) -> int:
    """A letter that the prompt has, so that lookups find something."""
    return int(rng.integers(97, 103))


def play_round(pair: Pair, rng: Rng, tree: DraftTree) -> None:
    """The target accepts any part of what it takes of `tree`."""
    draft = pair.select(tree)
    pair.finish(draft, int(rng.integers(-1, len(draft))), random_token(rng))


def play_without(pair: Pair, rng: Rng) -> None:
    """A round that the drafter was not asked for: plain, forced by a grammar, or drafted by another."""
    n = int(rng.integers(0, MAX_TOKENS))
    draft = Draft.chain([random_token(rng) for _ in range(n)]) if n else NO_DRAFT
    node = n - 1 if rng.random() < 0.7 else int(rng.integers(-1, n))
    pair.finish(draft, node, random_token(rng))


def make_draw(subject: Subject, seed: int) -> RequestDraw:
    sampler = Sampler(SamplingParams(temperature=0.9, top_k=40), subject.vocab_size)
    return RequestDraw(sampler, np.random.default_rng(seed))


class Cheap(CostModel):
    """Rows and drafted tokens cost next to nothing, whatever the clock says, so that as much as possible is drafted."""

    def observe(self, rows: int, position: int, seconds: float) -> None:
        super().observe(rows, position, 1.0 + 0.01 * rows)

    def observe_drafting(self, drafter: str, seconds: float, expected_s: float) -> None: ...


def make_cheap_stats(drafter: str) -> DraftStats:
    units = {1: 0.01, 16: 0.02} if drafter == "pard" else {1: 0.01}
    stats = DraftStats(Profile({1: 1.0, 16: 1.1}, {drafter: DraftCost(units, 0.001)}))
    stats.costs = Cheap(stats.costs.profile)
    for _ in range(3):
        stats.costs.observe(1, 0, 1.0)
    return stats


def make_policies(
    subject: Subject, drafter: Drafter, budget: Budget, draw: TokenDraw | None
) -> tuple[FixedLength, Adaptive]:
    """Both policies over `drafter` alone; a drawn draft is always a chain."""
    size = subject.vocab_size
    chain = Budget(budget.depth, budget.depth) if draw is not None else budget
    stats = make_cheap_stats(drafter.name)
    adaptive = Adaptive([drafter], stats, "test", size, takes_trees=lambda: subject.takes_trees, draw=draw)
    return FixedLength([drafter], chain, size, draw), adaptive

"""The adaptive controller: chooses in each round who drafts and how many tokens, from measured costs and acceptance.

A round is worth its expected tokens less the price of its seconds (`controller/round.py`); plain decoding is one of the
choices. A round takes five steps:

1. Ask the drafters that take no time, such as lookups. They report what they would have said about every emitted token,
   so that their acceptance is known whether or not they drafted.
2. Choose a drafter that takes time (`controller/gate.py`); again after it, given what is in the tree.
3. Have it draft while a further unit is expected to pay (`controller/gate.py`).
4. Verify as many of the most probable nodes as are worth most (`controller/round.py`).
5. Record the cost and the gain of the round (`controller/review.py`).

A regret budget (`controller/gate.py`) limits what drafting may lose against plain decoding. docs/autopilot.md gives
the reasons and a worked round.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from operator import attrgetter
from time import perf_counter
from typing import NamedTuple

from edgespec.controller.cost_model import MarginalCost
from edgespec.controller.drafter_set import DrafterSet
from edgespec.controller.gate import DraftGate, DraftRequest, TreeBuilder
from edgespec.controller.own_time import Pace
from edgespec.controller.review import Review
from edgespec.controller.round import MAX_NODES, Asked, DraftSize, RoundPlan, ScoredTree, list_counts
from edgespec.controller.stats import DraftStats, TextStats
from edgespec.core.drafter import Drafter, Outcome, TokenDraw
from edgespec.core.protocols import NO_DRAFT, SOLO, BatchPeers, Budget, Decision, Draft, Round, Step
from edgespec.core.tree import DraftTree

# Chains of lookups for rounds so short that weighing a draft tree would take a large part of one.


_CHEAP = (1, 3)  # drafted tokens of the cheapest rounds: four rows may take less time than two


class Chain(NamedTuple):
    """A chain of `drafter`, and what a round with it is expected to emit and to take."""

    drafter: Drafter
    size: DraftSize


class QuickLookups:
    """Asks drafters that take no time what they promise, and the one that promises most for a chain.

    Its length is that of most tokens per second by the learned rates. It is computed once for each promise, until
    `forget`.
    """

    def __init__(self, cost: MarginalCost, stats: TextStats, drafters: DrafterSet) -> None:
        self._cost = cost
        self._stats = stats
        self._drafters = drafters
        self._seconds: dict[int, float] = {}  # by drafted tokens
        self._sizes: dict[tuple[str, float], DraftSize] = {}  # by drafter and promise
        self.is_unsure = False  # whether one of them could not say what it promises

    def choose(self, tokens: Sequence[int]) -> Chain | None:
        """The chain that is worth most after `tokens`; None where plain decoding is."""
        best: Chain | None = None
        self.is_unsure = False
        for drafter in self._drafters.free:
            confidence = self._drafters.predict_confidence(drafter, tokens)
            if confidence is None:
                self.is_unsure = True
            elif confidence > 0:
                size = self._choose_size(drafter, confidence)
                if size.nodes and (best is None or size.speed > best.size.speed):
                    best = Chain(drafter, size)
        return best

    def draft(self, chain: Chain, tokens: Sequence[int], limit: int) -> list[int]:
        """[n] what the chain's drafter proposes after `tokens`; at most `limit` and as many as the chain has."""
        n = min(chain.size.nodes, limit)
        tree = DraftTree()
        for _ in self._drafters.expand(chain.drafter, tree, tokens, Budget(n, n)):
            break
        return tree.path_tokens(tree.deepest(chain.drafter.name))

    def forget(self) -> None:
        """Costs and rates have changed."""
        self._seconds, self._sizes = {}, {}

    def _choose_size(self, drafter: Drafter, confidence: float) -> DraftSize:
        """The fastest size of a chain whose first token has `confidence`."""
        acceptance = self._stats.drafter(drafter).acceptance
        key = drafter.name, acceptance.simplify(confidence)
        if (found := self._sizes.get(key)) is None:
            expected = list(accumulate(acceptance.survival(key[1], MAX_NODES), initial=1.0))
            found = DraftSize(0, 1.0, self._measure(0))
            if expected[-1] / min(map(self._measure, _CHEAP)) > found.speed:  # else no size can be faster
                sizes = [DraftSize(n, expected[n], self._measure(n)) for n in list_counts(len(expected) - 1)]
                found = max(sizes, key=attrgetter("speed"))
            self._sizes[key] = found
        return found

    def _measure(self, n: int) -> float:
        """Seconds of a round with a chain of `n` tokens."""
        if (found := self._seconds.get(n)) is None:
            own_s = self._stats.own_time.quick_s(n) if n else 0.0
            found = self._seconds[n] = self._cost.seconds(n + 1) + own_s
        return found


# Rounds so short that weighing a draft tree would take a large part of one: chains of lookups, few records.


_PASSING_REASON = "steps are short: drafts are sought rarely"


class ShortRounds:
    """Of one text.

    is_active   whether a decision takes a part of a plain step that matters, as of the last recorded round
    is_passing  whether the present round goes by: plain, recorded with others later
    passing     the decision of such rounds
    """

    def __init__(self, cost: MarginalCost, stats: TextStats, review: Review, drafters: DrafterSet) -> None:
        self._cost = cost
        self._own_time = stats.own_time
        self._review = review
        self._lookups = QuickLookups(cost, stats, drafters)
        self._pace = Pace(stats.own_time)
        self._asking_s = 0.0  # that lookups took in a round that goes by
        self.is_active = False
        self.is_passing = False
        self.passing = Decision("none", _PASSING_REASON)

    @property
    def is_resting(self) -> bool:
        """Whether the next round goes by unless a lookup promises something."""
        return self._pace.is_resting

    @property
    def is_unsure(self) -> bool:
        """Whether a lookup could not say what it promises."""
        return self._lookups.is_unsure

    def begin_text(self) -> None:
        self._own_time.begin_text()
        self.update()
        if self.is_active:
            self.rest()

    def choose(self, tokens: Sequence[int]) -> Chain | None:
        """The chain to draft after `tokens`, if any; sets `is_passing`."""
        started_s = perf_counter()
        chain = None if self._pace.is_blind else self._lookups.choose(tokens)
        self.is_passing = chain is None and self._pace.is_resting
        if self.is_passing:
            self._pace.pass_round()
            self._asking_s = perf_counter() - started_s
        return chain

    def update(self) -> None:
        """A round begins that will be recorded."""
        plain_s = self._cost.seconds(1)
        self.is_active, self.is_passing = not self._own_time.is_negligible(plain_s), False
        self.passing = Decision("none", _PASSING_REASON, 1.0, plain_s)
        self._lookups.forget()

    def draft(self, chain: Chain, tokens: Sequence[int], limit: int) -> list[int]:
        """[n] of the chain's tokens; at most `limit`, and what the regret budget allows. The next rounds go by."""
        drafted = self._lookups.draft(chain, tokens, limit)
        allowed = self._review.find_max_nodes(len(drafted))
        if allowed < len(drafted):
            self._review.remember_blocked(tokens, drafted)
        self.rest()
        return drafted[:allowed]

    def rest(self) -> None:
        """The next rounds go by unless a lookup promises something."""
        self._pace.rest(self._cost.seconds(1))

    def rest_blind(self) -> None:
        """Nothing was drafted though something was promised: nobody is asked in the next rounds."""
        self._pace.rest_blind(self._cost.seconds(1))

    def gain(self) -> None:
        """A draft has gained tokens, or the regret budget lends for one that would have."""
        self._pace.gain()

    def record(self, step: Step) -> None:
        """Record a round that goes by."""
        self._review.pass_round(step, self._asking_s)


_NO_DRAFT_REASON = "no draft is expected to pay"
_LOOKUP_REASON = "a lookup is expected to pay"
_BLOCKED_REASON = "a wrong draft would cost more than may be lost"
_MIN_PLAIN_ROUNDS = 3  # recent measurements of plain decoding without which nothing is drafted


class Adaptive:
    """A Controller over any drafters, for one generation."""

    def __init__(
        self,
        drafters: Sequence[Drafter],
        draft_stats: DraftStats,
        sampling: str,
        vocab_size: int,
        *,
        trees: bool,
        draw: TokenDraw | None = None,
        peers: Callable[[], BatchPeers] = lambda: SOLO,
    ) -> None:
        """`sampling` names a sampling method, whose acceptance is learned separately. `trees`: whether the target takes
        draft trees. `draw` is given to drafters that can draw their tokens at random. `peers` returns the generations
        that share the next forward.
        """
        self._drafters = DrafterSet(drafters, vocab_size, draw)
        self._cost = MarginalCost(draft_stats.costs, peers)
        self._stats = TextStats(draft_stats, sampling)
        self._review = Review(self._cost, self._stats)
        self._gate = DraftGate(self._cost, self._review.regret, self._drafters, self._stats)
        self._builder = TreeBuilder(self._drafters, self._stats, self._cost)
        self._short = ShortRounds(self._cost, self._stats, self._review, self._drafters)
        self._trees = trees
        self._round: RoundPlan | None = None  # of a round that decides
        self.decision = Decision("none", "nothing decided yet")

    @property
    def expects_plain(self) -> bool:
        return self._short.is_resting or self._review.expects_plain

    @property
    def failures(self) -> Mapping[str, str]:
        """The drafters that were dropped, and why."""
        return self._drafters.failures

    def announce(self, prompt: Sequence[int]) -> None:
        self._drafters.announce(prompt)

    def begin(self, prompt: Sequence[int]) -> None:
        self._drafters.begin(prompt, has_cheap_rows=self._cost.has_cheap_rows)
        self._gate.begin(len(prompt))
        self._short.begin_text()

    def propose(self, tokens: Sequence[int], limit: Budget) -> Draft:
        self._round, chain = None, None
        if is_short := self._short.is_active:
            chain = self._short.choose(tokens)
            if self._short.is_passing:
                self.decision = self._short.passing
                return NO_DRAFT
        self._cost.begin_round(len(tokens) - 1)
        self._short.update()
        if self._review.begin_round(tokens):
            self._short.gain()
        if (reason := self._forbid_drafts(limit)) is not None:
            return self._decode_plain(reason)
        return self._propose_quickly(chain, tokens, limit) if is_short else self._plan(tokens, limit)

    def _propose_quickly(self, chain: Chain | None, tokens: Sequence[int], limit: Budget) -> Draft:
        """Where a plain step is so short that a decision takes a part of it that matters."""
        may_ask = self._gate.may_choose(len(tokens)) if chain is None else self._gate.has_gained
        if may_ask or self._short.is_unsure:
            draft = self._plan(tokens, limit)
            if not len(draft):
                self._short.rest_blind()
            return draft
        if chain is None:
            self._short.rest()
            return self._decode_plain(_NO_DRAFT_REASON)
        round_ = RoundPlan(self._cost, tokens, limit, self._review.tokens_per_step, "quick")
        drafted = self._short.draft(chain, tokens, min(round_.node_limit, round_.depth_limit))
        if not drafted:
            self._short.rest_blind()
            return self._decode_plain(_BLOCKED_REASON)
        self._round = round_
        self.decision = Decision(chain.drafter.name, _LOOKUP_REASON, chain.size.tokens, chain.size.seconds)
        return Draft.chain(drafted)

    def _forbid_drafts(self, limit: Budget) -> str | None:
        """The reason why this round cannot have a draft; None if it can."""
        if not limit.nodes or not limit.depth:
            return "the draft limit is zero"
        if self._cost.has_prefill:
            return "prompts of other generations are being read"
        return None if self._review.knows_plain(_MIN_PLAIN_ROUNDS) else "to measure plain decoding"

    def _plan(self, tokens: Sequence[int], limit: Budget) -> Draft:
        round_ = self._round = RoundPlan(self._cost, tokens, limit, self._review.tokens_per_step)
        for drafter in self._drafters:
            self._stats.drafter(drafter)
        tree = ScoredTree(self._stats.rate, is_chain=not self._trees)
        self._review.follow(round_, tree)
        round_.max_nodes = self._review.find_max_nodes(round_.node_limit)
        self._builder.ask_free(tree, tokens, round_)
        size = round_.choose_size(tree)
        self._review.remember_shadow(round_, tree, size)
        if self._drafters.timed:
            return self._ask_others(round_, tokens, limit.depth, tree, size)
        return self._decide(round_, _LOOKUP_REASON, tree, size)

    def observe(self, done: Round) -> None:
        if self._short.is_passing:
            self._drafters.observe_passed(done)
            return
        self._drafters.observe(replace(done, scores=None) if self._short.is_active else done, self._learn)
        self._review.learn(done)

    def record(self, step: Step) -> None:
        if self._short.is_passing:
            self._short.record(step)
        elif self._round is None:
            self._review.record_look(step)
        elif self._review.record(self._round, step) > 0:
            self._short.gain()

    def set_phase(self, phase: str) -> None:
        self._stats.set_phase(phase)

    def warning(self) -> str | None:
        found = (self._stats.drafter(each).warning(each.name) for each in self._drafters if not each.is_free)
        return next((text for text in found if text), None)

    def end(self) -> None:
        self._review.end()
        self._stats.merge()

    def _learn(self, drafter: Drafter, outcomes: Sequence[Outcome]) -> None:
        if drafter.is_free and outcomes:
            acceptance = self._stats.drafter(drafter).acceptance
            for each in outcomes:
                acceptance.observe(each.confidence, each.is_right)

    def _ask_others(
        self, round_: RoundPlan, tokens: Sequence[int], remaining: int, tree: ScoredTree, size: DraftSize
    ) -> Draft:
        """Ask drafters that take time while one is expected to pay; returns the best draft."""
        has_lookup = size.nodes > 0
        reason = _LOOKUP_REASON
        while (request := self._gate.choose(round_, tokens, remaining, has_lookup=has_lookup)) is not None:
            after = tuple(each.drafter.name for each in round_.asked)
            asked = Asked(request.drafter, request.is_trial, after, request.n_read, size, size)
            if request.drafter.is_async:
                if (draft := self._draft_async(round_, request, asked, tokens)) is None:
                    break
                return draft
            is_separate = request.drafter.is_drawn or not self._trees
            grown = ScoredTree(self._stats.rate, is_chain=not self._trees) if is_separate else tree
            round_.asked.append(asked)
            self._builder.ask(request, asked, grown, tokens, round_)
            if not asked.units:  # it knows nothing, lacks one of the tokens, or has failed
                round_.asked.pop()
                round_.silent.add(request.drafter.name)
                continue
            asked.size = round_.measure_chain(grown) if request.drafter.is_drawn else round_.choose_size(grown)
            self._review.follow(round_, grown)
            if request.drafter.is_drawn:
                return self._verify_drawn(grown, asked, request.reason)
            if is_separate and asked.size.speed < size.speed:
                return self._decide(round_, _LOOKUP_REASON, tree, size)
            tree, size, reason = grown, asked.size, request.reason
            if is_separate or request.is_trial:
                break
        return self._decide(round_, reason, tree, size)

    def _draft_async(
        self, round_: RoundPlan, request: DraftRequest, asked: Asked, tokens: Sequence[int]
    ) -> Draft | None:
        """A chain of the drafter that the host does not wait for; None where lookups are expected to be faster."""
        drafter = request.drafter
        probabilities = self._builder.predict_chain(drafter, round_)
        asked.units += [1] * len(probabilities)
        round_.asked.append(asked)
        chain = ScoredTree(self._stats.rate)
        asked.size = round_.measure_chain(chain, probabilities)
        is_faster = request.is_trial or asked.size.speed >= asked.before.speed
        n = len(probabilities)
        limit = Budget(n, n, request.window)
        draft = self._drafters.draft_async(drafter, tokens, limit) if n and is_faster else None
        if draft is None or not len(draft):
            round_.asked.pop()
            return None
        asked.units = [1] * len(draft)
        self._review.follow(round_, chain)
        size, name = asked.size, drafter.name
        self.decision = Decision(name, request.reason, size.tokens, size.seconds, {name: len(draft)})
        return draft

    def _decode_plain(self, reason: str) -> Draft:
        self.decision = Decision("none", reason, 1.0, self._cost.seconds(1))
        return NO_DRAFT

    def _decide(self, round_: RoundPlan, reason: str, tree: ScoredTree, size: DraftSize) -> Draft:
        drafted = {each.drafter.name: sum(each.units) for each in round_.asked}
        if not size.nodes and not drafted:
            return self._decode_plain(_NO_DRAFT_REASON)
        draft = tree.select(size.nodes)
        sources = list(dict.fromkeys(name for source in draft.sources for name in source.split("+"))) or list(drafted)
        if not size.nodes:
            reason = "the draft is not worth verifying"
        self.decision = Decision("+".join(sources), reason, size.tokens, size.seconds, drafted)
        return draft

    def _verify_drawn(self, chain: ScoredTree, asked: Asked, reason: str) -> Draft:
        """The whole drawn chain: dropping a token because of its value would change the output distribution."""
        name, size = asked.drafter.name, asked.size
        self.decision = Decision(name, reason, size.tokens, size.seconds, {name: sum(asked.units)})
        return chain.tree.drawn_chain()

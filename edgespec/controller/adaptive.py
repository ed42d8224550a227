"""The adaptive controller: chooses in each round who drafts and how many tokens, from measured costs and acceptance.

A round is worth its expected tokens less the price of its seconds (`controller/round.py`); plain decoding is one of the
choices. A round takes five steps:

1. Ask the drafters that take no time, such as lookups. They report what they would have said about every emitted token,
   so that their acceptance is known whether or not they drafted.
2. Choose a drafter that takes time (`controller/gate.py`); again after it, given what is in the tree.
3. Have it draft while a further unit is expected to pay (`controller/gate.py`).
4. Verify as many of the most probable nodes as are worth most (`controller/round.py`).
5. Record the cost and the gain of the round (`controller/review.py`).

A regret budget (`controller/gate.py`) limits what drafting may lose against plain decoding. Where nothing was drafted
of late, rounds go by without a decision. docs/autopilot.md gives the reasons and a worked round.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from edgespec.controller.cost_model import MarginalCost
from edgespec.controller.drafter_set import DrafterSet
from edgespec.controller.gate import DraftGate, DraftRequest, TreeBuilder
from edgespec.controller.review import RoundRecorder
from edgespec.controller.round import DrafterCall, DraftSize, RoundPlan, ScoredTree
from edgespec.controller.stats import DecisionTime, DraftStats, TextStats
from edgespec.core.drafter import Drafter, Outcome, TokenDraw
from edgespec.core.protocols import NO_DRAFT, SOLO, BatchPeers, Budget, Decision, Draft, Round, Step

_NO_DRAFT_REASON = "no draft is expected to pay"
_LOOKUP_REASON = "a lookup is expected to pay"
_PAUSE_REASON = "nothing was drafted of late"
_MIN_IDLE = 4  # rounds without a draft before a pause
_MAX_PAUSE = 32  # rounds
_DECIDING_SHARE = 0.01  # of the time of plain decoding, that decisions may take where nothing is drafted
_MIN_PLAIN_ROUNDS = 3  # recent measurements of plain decoding without which nothing is drafted


class DecisionPause:
    """Skips the decisions of one text where nothing was drafted of late.

    As many rounds are skipped as keep decisions within a small share of the time. Nothing is drafted in them.
    """

    def __init__(self, decision_time: DecisionTime) -> None:
        self._decision_time = decision_time
        self._n_idle = 0  # rounds since the last draft, without paused ones
        self._n_left = 0

    @property
    def is_on(self) -> bool:
        """Whether the next round is paused."""
        return self._n_left > 0

    def pass_round(self) -> None:
        """A paused round has ended."""
        self._n_left -= 1

    def record(self, step: Step, plain_s: float, *, is_free: bool) -> None:
        """Record a round with a decision; `is_free`: no drafter that takes time was asked."""
        if step.n_drafted:
            self._n_idle = 0
            return
        self._n_idle += 1
        if is_free:
            self._decision_time.observe(step.draft_s)
        if self._n_idle >= _MIN_IDLE:
            self._n_left = min(int(self._decision_time.seconds / (_DECIDING_SHARE * plain_s)), _MAX_PAUSE)


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
        self._recorder = RoundRecorder(self._cost, self._stats)
        self._gate = DraftGate(self._cost, self._recorder.regret, self._drafters, self._stats)
        self._builder = TreeBuilder(self._drafters, self._stats, self._cost)
        self._pause = DecisionPause(draft_stats.decision_time)
        self._trees = trees
        self._round: RoundPlan | None = None  # of a round that decides
        self.decision = Decision("none", "nothing decided yet")

    @property
    def expects_plain(self) -> bool:
        return self._pause.is_on or self._recorder.expects_plain

    @property
    def failures(self) -> Mapping[str, str]:
        """The drafters that were dropped, and why."""
        return self._drafters.failures

    def prefill_started(self, prompt: Sequence[int]) -> None:
        self._drafters.prefill_started(prompt)

    def begin(self, prompt: Sequence[int]) -> None:
        self._drafters.begin(prompt, has_cheap_rows=self._cost.has_cheap_rows)
        self._gate.begin(len(prompt))

    def propose(self, tokens: Sequence[int], limit: Budget) -> Draft:
        self._round = None
        if self._pause.is_on:
            return self._decode_plain(_PAUSE_REASON)
        self._cost.begin_round(len(tokens) - 1)
        self._recorder.begin_round(tokens)
        if (reason := self._forbid_drafts(limit)) is not None:
            return self._decode_plain(reason)
        return self._plan(tokens, limit)

    def _forbid_drafts(self, limit: Budget) -> str | None:
        """The reason why this round cannot have a draft; None if it can."""
        if not limit.nodes or not limit.depth:
            return "the draft limit is zero"
        if self._cost.has_prefill:
            return "prompts of other generations are being read"
        return None if self._recorder.knows_plain(_MIN_PLAIN_ROUNDS) else "to measure plain decoding"

    def _plan(self, tokens: Sequence[int], limit: Budget) -> Draft:
        round_ = self._round = RoundPlan(self._cost, tokens, limit, self._recorder.tokens_per_step)
        for drafter in self._drafters:
            self._stats.drafter(drafter)
        tree = ScoredTree(self._stats.rate, is_chain=not self._trees)
        self._recorder.follow(round_, tree)
        round_.max_nodes = self._recorder.find_max_nodes(round_.node_limit)
        self._builder.ask_free(tree, tokens, round_)
        size = round_.choose_size(tree)
        self._recorder.remember_shadow(round_, tree, size)
        if self._drafters.timed:
            return self._ask_others(round_, tokens, limit.depth, tree, size)
        return self._decide(round_, _LOOKUP_REASON, tree, size)

    def observe(self, done: Round) -> None:
        if self._pause.is_on:
            self._drafters.observe_passed(done)
            return
        self._drafters.observe(done, self._learn)
        self._recorder.learn(done)

    def record(self, step: Step) -> None:
        if self._pause.is_on:
            self._pause.pass_round()
            self._recorder.pass_round(step)
        elif self._round is None:
            self._recorder.record_plain(step)
        else:
            self._recorder.record(self._round, step)
            self._pause.record(step, self._cost.seconds(1), is_free=not self._round.asked)

    def set_phase(self, phase: str) -> None:
        self._stats.set_phase(phase)

    def warning(self) -> str | None:
        found = (self._stats.drafter(each).warning(each.name) for each in self._drafters if not each.is_free)
        return next((text for text in found if text), None)

    def end(self) -> None:
        self._recorder.end()
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
            asked = DrafterCall(request.drafter, request.is_trial, after, request.n_read, size, size)
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
            self._recorder.follow(round_, grown)
            if request.drafter.is_drawn:
                return self._verify_drawn(grown, asked, request.reason)
            if is_separate and asked.size.speed < size.speed:
                return self._decide(round_, _LOOKUP_REASON, tree, size)
            tree, size, reason = grown, asked.size, request.reason
            if is_separate or request.is_trial:
                break
        return self._decide(round_, reason, tree, size)

    def _draft_async(
        self, round_: RoundPlan, request: DraftRequest, asked: DrafterCall, tokens: Sequence[int]
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
        self._recorder.follow(round_, chain)
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

    def _verify_drawn(self, chain: ScoredTree, asked: DrafterCall, reason: str) -> Draft:
        """The whole drawn chain: dropping a token because of its value would change the output distribution."""
        name, size = asked.drafter.name, asked.size
        self.decision = Decision(name, reason, size.tokens, size.seconds, {name: sum(asked.units)})
        return chain.tree.drawn_chain()

"""The adaptive controller: chooses in each round who drafts and how many tokens, from measured costs and acceptance.

A round is worth its expected tokens less the price of its seconds (`autopilot/round.py`); plain decoding is one of the
choices. A round takes five steps:

1. Ask the drafters that take no time, such as lookups. They report what they would have said about every emitted token,
   so that their acceptance is known whether or not they drafted.
2. Choose a drafter that takes time, if one is expected to pay (`autopilot/gate.py`).
3. Have it draft while a further unit is expected to pay (`autopilot/round.py`).
4. Verify as many of the most probable nodes as are worth most (`autopilot/draft_size.py`).
5. Record the cost and the gain of the round (`autopilot/recorder.py`).

A regret budget (`autopilot/regret.py`) limits what drafting may lose against plain decoding. If drafts gain less than
decisions take, rounds go by without one. docs/autopilot.md gives the reasons and a worked round.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from edgespec.autopilot.decayed_mean import DecayedMean
from edgespec.autopilot.draft_size import DraftSize
from edgespec.autopilot.drafter_set import DrafterSet
from edgespec.autopilot.gate import DraftGate
from edgespec.autopilot.marginal_cost import MarginalCost
from edgespec.autopilot.recorder import RoundRecorder
from edgespec.autopilot.round import DrafterCall, DraftRound
from edgespec.autopilot.scored_tree import ScoredTree
from edgespec.autopilot.stats import DecisionTime, DraftStats, TextStats
from edgespec.core.drafter import Drafter, Outcome, TokenDraw
from edgespec.core.peers import SOLO, BatchPeers
from edgespec.core.protocols import NO_DRAFT, Budget, Decision, Draft, Round, Step

_NO_DRAFT_REASON = "no draft is expected to pay"
_LOOKUP_REASON = "a lookup is expected to pay"
_PAUSE_REASON = "drafts gain less than deciding takes"
_MIN_DECIDED = 4  # rounds of a text before a pause
_MAX_PAUSE = 32  # rounds
_DECIDING_SHARE = 0.005  # of the time of plain decoding, that decisions may take beyond what drafts gain
_MIN_PLAIN_ROUNDS = 3  # recent measurements of plain decoding without which nothing is drafted


class DecisionPause:
    """Lets rounds of one text pass without a decision if recent drafts gained less than deciding took.

    That is so where decisions end without a draft. The more is lost to decisions, the more rounds pass, so that the
    loss stays a small share of the time. Nothing is drafted in them.

    n_left  paused rounds that are to come
    """

    def __init__(self, decision_time: DecisionTime) -> None:
        self._decision_time = decision_time
        self._n_decided = 0
        self._gain = DecayedMean(0.0, 0.8)  # of a round with a decision, in plain steps
        self.n_left = 0

    def record(self, step: Step, plain_s: float, gain: float, *, is_free: bool) -> None:
        """Record a round with a decision, which gained `gain` plain steps of `plain_s` seconds each.

        `is_free`: no drafter that takes time was asked.
        """
        if is_free and not step.n_drafted:
            self._decision_time.observe(step.draft_s)
        self._gain.observe(gain)
        self._n_decided += 1
        mean, _ = self._gain.local
        lost = self._decision_time.seconds / plain_s - max(0.0, mean)
        if self._n_decided >= _MIN_DECIDED and lost > 0:
            self.n_left = min(int(lost / _DECIDING_SHARE), _MAX_PAUSE)


class Adaptive:
    """A Controller over any drafters, for one generation."""

    def __init__(
        self,
        drafters: Sequence[Drafter],
        draft_stats: DraftStats,
        sampling: str,
        vocab_size: int,
        *,
        takes_trees: Callable[[], bool],
        draw: TokenDraw | None = None,
        peers: Callable[[], BatchPeers] = lambda: SOLO,
    ) -> None:
        """`sampling` names a sampling method, whose acceptance is learned separately. `takes_trees` tells whether the
        target takes draft trees in the next round. `draw` is given to drafters that can draw their tokens at random.
        `peers` returns the generations that share the next forward.
        """
        self._drafters = DrafterSet(drafters, vocab_size, draw)
        self._cost = MarginalCost(draft_stats.costs, peers)
        self._stats = TextStats(draft_stats, sampling)
        self._recorder = RoundRecorder(self._cost, self._stats)
        self._gate = DraftGate(self._cost, self._recorder.regret, self._drafters, self._stats)
        self._pause = DecisionPause(draft_stats.decision_time)
        self._takes_trees = takes_trees
        self._round: DraftRound | None = None  # of a round that decides
        self.decision = Decision("none", "nothing decided yet")
        self.failures, self.set_phase = self._drafters.failures, self._stats.set_phase

    @property
    def expects_plain(self) -> bool:
        return self._pause.n_left > 0 or self._recorder.expects_plain

    def begin(self, prompt: Sequence[int]) -> None:
        self._drafters.begin(prompt, has_cheap_rows=self._cost.has_cheap_rows)
        self._gate.prompt_length = len(prompt)

    def propose(self, tokens: Sequence[int], limit: Budget) -> Draft:
        self._round = None
        if self._pause.n_left:
            return NO_DRAFT if self.decision.reason == _PAUSE_REASON else self._decode_plain(_PAUSE_REASON)
        self._cost.begin_round(len(tokens) - 1)
        self._recorder.begin_round(tokens)
        if (reason := self._forbid_drafts(limit)) is not None:
            return self._decode_plain(reason)
        return self._plan(tokens, limit)

    def _forbid_drafts(self, limit: Budget) -> str | None:
        """The reason why this round cannot have a draft; None if it can."""
        if not limit.nodes or not limit.depth:
            return "the draft limit is zero"
        peers = self._cost.peers
        if peers.prefilling:
            return "prompts of other generations are being read"
        n_measured = self._cost.model.count_recent(peers.sessions + 1)
        return None if n_measured >= _MIN_PLAIN_ROUNDS else "to measure plain decoding"

    def _plan(self, tokens: Sequence[int], limit: Budget) -> Draft:
        for drafter in self._drafters:
            self._stats.drafter(drafter)
        round_ = self._round = DraftRound(
            self._cost,
            self._stats,
            self._drafters,
            tokens,
            limit,
            self._recorder.tokens_per_step,
            is_chain=not self._takes_trees(),
        )
        round_.max_nodes = self._recorder.find_max_nodes(round_.limit.nodes)
        round_.ask_free(round_.tree)
        timed = self._drafters.timed
        if not timed and not round_.may_pay(round_.tree):
            return self._decode_plain(_NO_DRAFT_REASON)
        size = round_.choose_size(round_.tree)
        self._recorder.remember_shadow(round_, size)
        return self._ask_others(round_, size) if timed else self._decide_lookups(round_, size)

    def observe(self, done: Round) -> None:
        if self._pause.n_left:
            self._drafters.observe_passed(done)
            return
        self._drafters.observe(done, self._learn)
        if self._round is not None:
            self._recorder.learn(self._round, done)

    def record(self, step: Step) -> None:
        if self._pause.n_left:
            self._pause.n_left -= 1
            self._recorder.pass_round(step)
        elif self._round is None:
            self._recorder.record_plain(step)
        else:
            gain = self._recorder.record(self._round, step)
            self._pause.record(step, self._cost.seconds(1), gain, is_free=self._round.call is None)
        self._round = None

    def end(self) -> None:
        self._recorder.count_passed()  # since the last decision
        self._stats.merge()

    def _learn(self, drafter: Drafter, outcomes: Sequence[Outcome]) -> None:
        if drafter.is_free and outcomes:
            acceptance = self._stats.drafter(drafter).acceptance
            for each in outcomes:
                acceptance.observe(each.confidence, each.is_right)

    def _ask_others(self, round_: DraftRound, lookups: DraftSize) -> Draft:
        """Ask the drafter that takes time and is expected to pay most, if any; returns the best draft.

        `lookups` is the size that was chosen without it. If a drafter has nothing to propose, another one is asked.
        """
        silent: set[str] = set()
        while (call := self._gate.choose(round_, lookups, silent)) is not None:
            drafter, round_.call = call.drafter, call
            if drafter.is_async:
                if (draft := self._draft_async(round_, call)) is not None:
                    return self._decide(round_, call.reason, draft, call.size)
                break
            is_separate = drafter.is_drawn or not self._takes_trees()
            if is_separate:
                call.tree = ScoredTree(self._stats.rate, is_chain=not self._takes_trees())
            round_.ask(call)
            if not call.units:  # it knows nothing, lacks one of the tokens, or has failed
                silent.add(drafter.name)
                continue
            if drafter.is_drawn:
                call.size = round_.measure_chain(call.tree)
                return self._decide(round_, call.reason, call.tree.tree.drawn(), call.size)
            call.size = round_.choose_size(call.tree)
            if is_separate and call.size.speed < lookups.speed:
                return self._decide_lookups(round_, lookups)
            return self._decide(round_, call.reason, call.tree.select(call.size.nodes), call.size)
        round_.call = None
        return self._decide_lookups(round_, lookups)

    def _draft_async(self, round_: DraftRound, call: DrafterCall) -> Draft | None:
        """A chain of the drafter that the host does not wait for; None if lookups are expected to be faster."""
        probabilities = round_.predict_chain(call.drafter)
        n = len(probabilities)
        call.units = [1] * n
        call.tree = ScoredTree(self._stats.rate)
        call.size = round_.measure_chain(call.tree, probabilities)
        if not n or not (call.is_trial or call.size.speed >= call.before.speed):
            return None
        draft = self._drafters.draft_async(call.drafter, round_.tokens, Budget(n, n, call.window))
        if draft is None or not len(draft):
            return None
        call.units = [1] * len(draft)
        return draft

    def _decode_plain(self, reason: str) -> Draft:
        self.decision = Decision("none", reason, 1.0, self._cost.seconds(1))
        return NO_DRAFT

    def _decide_lookups(self, round_: DraftRound, size: DraftSize) -> Draft:
        return self._decide(round_, _LOOKUP_REASON, round_.tree.select(size.nodes), size)

    def _decide(self, round_: DraftRound, reason: str, draft: Draft, size: DraftSize) -> Draft:
        """State why `draft`, which has the size `size`, is the round's; returns it."""
        call = round_.call
        drafted = {call.drafter.name: sum(call.units)} if call is not None else {}
        if not size.nodes and not drafted:
            return self._decode_plain(_NO_DRAFT_REASON)
        names = list(dict.fromkeys(name for drafter in draft.drafters for name in drafter.split("+"))) or list(drafted)
        if not size.nodes:
            reason = "the draft is not worth verifying"
        self.decision = Decision("+".join(names), reason, size.tokens, size.seconds, drafted)
        return draft

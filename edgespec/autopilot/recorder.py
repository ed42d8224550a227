"""What is learned from each round: costs, acceptance, gains, and what drafting may still lose."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from statistics import median

from edgespec.autopilot.decayed_mean import DecayedMean
from edgespec.autopilot.draft_size import DraftSize, list_counts
from edgespec.autopilot.marginal_cost import MarginalCost
from edgespec.autopilot.regret import RegretBudget, choose_allowed_loss
from edgespec.autopilot.round import DrafterCall, DraftRound
from edgespec.autopilot.stats import TextStats
from edgespec.core.protocols import Round, Step

_FEW_NODES = 15  # up to so many draft nodes a larger draft may take less time than a smaller one; beyond, it takes more
_MIN_DRAFTED_SHARE = 0.15  # share of rounds with drafts below which the next round is expected to be plain


class RoundRecorder:
    """Updates costs, acceptance and the regret budget after each round of one generation."""

    def __init__(self, cost: MarginalCost, stats: TextStats) -> None:
        self.regret = RegretBudget(choose_allowed_loss(cost.model.seconds))
        self._cost = cost
        self._stats = stats
        # What recent rounds have emitted and drafted: short discounts, since a text moves from one phase to another.
        self._tokens, self._steps = DecayedMean(1.0, 0.8), DecayedMean(1.0, 0.8)
        self._drafted_share = DecayedMean(0.0, 0.9)
        self._shadow: tuple[int, list[int], int] | None = None  # see `remember_shadow`
        self._n_passed = 0  # rounds that are not recorded yet
        self._passed_s: list[float] = []  # of their forwards that no other generation shared

    @property
    def expects_plain(self) -> bool:
        """Whether the next round will probably have no draft."""
        return self._drafted_share.value < _MIN_DRAFTED_SHARE

    @property
    def tokens_per_step(self) -> float:
        """Recent tokens per plain step; at least 1, the rate of plain decoding."""
        return max(1.0, self._tokens.value / self._steps.value)

    def begin_round(self, tokens: Sequence[int]) -> None:
        """A round begins after `tokens`. If they show how much of the remembered draft is right, the budget is told."""
        if self._shadow is None:
            return
        start, path, nodes = self._shadow
        emitted = tokens[start : start + len(path)]
        n_right = next((i for i, token in enumerate(emitted) if token != path[i]), len(emitted))
        if n_right == len(emitted) < len(path):  # too few tokens to tell
            return
        self._shadow = None
        self.regret.add_shadow(n_right + 1, self._cost.seconds(nodes + 1) / self._cost.seconds(1))

    def find_max_nodes(self, limit: int) -> int:
        """The most draft nodes, up to `limit`, whose rejection costs no more than the regret budget allows."""
        steps, max_steps = self._cost.steps, 1.0 + self.regret.allowance(self._cost.peers.sessions)
        few = min(limit, _FEW_NODES)
        found = next((n for n in range(few, 0, -1) if steps[n] <= max_steps), 0)
        if found == few < limit:
            seconds = self._cost.seconds
            more = takewhile(lambda n: seconds(n + 1) <= max_steps * seconds(1), list_counts(limit)[few + 1 :])
            return max(more, default=few)
        return found

    def remember_shadow(self, round_: DraftRound, size: DraftSize) -> None:
        """Remember the draft that would be chosen without the regret budget, if it is larger than `size`: where it
        begins, its most probable path and its nodes. One draft is remembered at a time.
        """
        if self._shadow is None and round_.max_nodes < min(round_.limit.nodes, len(round_.tree)):
            wanted = round_.choose_unlimited_size()
            if wanted.nodes > size.nodes:
                self._shadow = self._cost.position + 1, round_.tree.path_tokens(wanted.nodes), wanted.nodes

    def learn(self, round_: DraftRound, done: Round) -> None:
        """Compare what the drafters of the round have proposed with the emitted tokens."""
        if (call := round_.call) is None:
            return
        if call.drafter.is_drawn or call.drafter.is_async:
            self._learn_chain(call, done)
        else:
            self._learn_path(call, done.emitted)

    def pass_round(self, step: Step) -> None:
        """A plain round went by, which is recorded together with a later one."""
        self._n_passed += 1
        if step.n_peer_rows == 0:
            self._passed_s.append(step.forward_s(1))

    def record_plain(self, step: Step) -> None:
        if step.n_peer_rows is not None:
            self._cost.model.observe(
                1 + step.n_peer_rows, self._cost.position, step.forward_s(1 + self._cost.peers.sessions)
            )
        self.count_passed()
        self._count_plain(1)

    def count_passed(self) -> None:
        if self._passed_s:
            self._cost.model.observe(1, self._cost.position, median(self._passed_s))
        if self._n_passed:
            self._count_plain(self._n_passed)
        self._n_passed, self._passed_s = 0, []

    def _count_plain(self, n: int) -> None:
        self.regret.add(n, float(n))
        for _ in range(n):
            self._count(1, 1.0, is_drafted=False)
        self._stats.exploration.add(n)

    def _count(self, tokens: int, steps: float, *, is_drafted: bool) -> None:
        """A round emitted `tokens` in a usual time of `steps` plain steps."""
        self._tokens.observe(tokens)
        self._steps.observe(steps)
        self._drafted_share.observe(float(is_drafted))

    def record(self, round_: DraftRound, step: Step) -> float:
        """Record the costs, the gain and the loss of a round; returns the plain steps that it has gained."""
        if round_.call is None and not step.n_drafted:
            self.record_plain(step)  # without the sums below, which would give one step and no gain
            return 0.0
        cost, call, rows = self._cost, round_.call, step.n_drafted + 1
        is_unread = call is not None and call.drafter.is_async  # the forward's time contains the chain's
        drafting_s = round_.drafting_s
        if call is not None:
            if not is_unread and call.n_read <= len(call.units):
                name = call.drafter.name
                expected_s = sum(cost.model.predict_unit_s(name, n) for n in call.units)
                cost.model.observe_drafting(name, step.draft_s, expected_s)
            self.regret.add_reading(call.n_read * cost.model.read_s(call.drafter.name) / cost.seconds(1))
        if step.n_peer_rows is not None:
            forward_s = step.forward_s(1 + cost.peers.sessions)
            if is_unread:
                forward_s = max(forward_s - drafting_s, cost.model.seconds(rows) / 2)
            cost.model.observe(rows + step.n_peer_rows, cost.position, forward_s)
        # The usual time of such a round: in a busy moment plain decoding would have been slow too. Both times are those
        # after the round, so that a plain round is one step even if it has changed what a step is known to take.
        steps = (drafting_s + cost.seconds(rows)) / cost.seconds(1)
        self.count_passed()
        self.regret.add(len(step.tokens), steps)
        self._count(len(step.tokens), steps, is_drafted=step.n_drafted > 0)
        self._stats.exploration.add(steps)
        if call is not None:
            gain = round_.gain(call, step)
            self._stats.drafter(call.drafter).gain(cost.peers.sessions).observe(gain)
            if call.is_trial and gain < 0:
                self._stats.exploration.charge(-gain)
        return len(step.tokens) - steps

    def _learn_path(self, call: DrafterCall, emitted: Sequence[int]) -> None:
        """Learn from the proposals along the emitted tokens.

        Proposals below a token that was not emitted continue another text and are not counted.
        """
        tree, name, stats = call.tree.tree, call.drafter.name, self._stats.drafter(call.drafter)
        nodes = tree.proposals(-1, name)
        for token in emitted:
            for node in nodes:
                stats.acceptance.observe(tree.votes[node][name], tree.tokens[node] == token)
            if nodes:
                stats.observe_choice(tree.tokens[nodes[0]] == token)
            nodes = [below for node in nodes if tree.tokens[node] == token for below in tree.proposals(node, name)]

    def _learn_chain(self, call: DrafterCall, done: Round) -> None:
        """Learn from a whole chain: one of drawn tokens, or one that was verified before the host had read it."""
        stats = self._stats.drafter(call.drafter)
        for depth in range(done.n_tested):
            is_right = depth < len(done.path)
            stats.observe_choice(is_right)
            if call.drafter.is_drawn:
                stats.acceptance.observe(call.tree.tree.votes[depth][call.drafter.name], is_right)

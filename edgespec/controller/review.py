"""What the autopilot learns from its rounds: costs, acceptance, gains, and what drafting may still lose."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from statistics import median

from edgespec.controller.acceptance import RecentRate
from edgespec.controller.cost_model import MarginalCost
from edgespec.controller.gate import RegretBudget, ShadowDraft, choose_allowed_loss
from edgespec.controller.round import DraftSize, RoundPlan, ScoredTree, list_counts
from edgespec.controller.stats import TextStats
from edgespec.core.drafter import Drafter
from edgespec.core.protocols import Round, Step
from edgespec.core.tree import DraftTree

_FEW_NODES = 15  # draft nodes, up to which more of them may take less time; beyond, more take more
_MIN_DRAFTED_SHARE = 0.15  # share of rounds with drafts below which the next round is expected to be plain


class RoundRecorder:
    """Updates costs, acceptance and the regret budget after each round of one generation."""

    def __init__(self, cost: MarginalCost, stats: TextStats) -> None:
        self.regret = RegretBudget(choose_allowed_loss(cost.model.seconds))
        self._cost = cost
        self._stats = stats
        self._rate = RecentRate()
        self._shadow = ShadowDraft()
        self._n_passed = 0  # rounds that are not recorded yet
        self._passed_s: list[float] = []  # of their forwards that no other generation shared
        self._position = 0  # of the round's root
        self._round: RoundPlan | None = None
        self._tree: DraftTree = DraftTree()

    @property
    def expects_plain(self) -> bool:
        """Whether the next round will probably have no draft."""
        return self._rate.drafted_share < _MIN_DRAFTED_SHARE

    @property
    def tokens_per_step(self) -> float:
        """Recent tokens per plain step, at least 1."""
        return self._rate.tokens_per_step

    def begin_round(self, tokens: Sequence[int]) -> None:
        """A round begins after `tokens`. The budget lends for a draft that it did not allow and that they confirm."""
        self._position = len(tokens) - 1
        if (outcome := self._shadow.resolve(tokens)) is not None:
            self.regret.add_shadow(outcome[0], self._cost.seconds(outcome[1]) / self._cost.seconds(1))

    def follow(self, round_: RoundPlan, tree: ScoredTree) -> None:
        """`tree` holds what drafters that take time propose in `round_`."""
        self._round, self._tree = round_, tree.tree

    def find_max_nodes(self, limit: int) -> int:
        """The most draft nodes, up to `limit`, whose rejection costs no more than the regret budget allows."""
        seconds = self._cost.seconds
        max_s = (1.0 + self.regret.allowance(self._cost.n_peers)) * seconds(1)
        few = min(limit, _FEW_NODES)
        found = next((n for n in range(few, 0, -1) if seconds(n + 1) <= max_s), 0)
        if found == few < limit:
            more = takewhile(lambda n: seconds(n + 1) <= max_s, list_counts(limit)[few + 1 :])
            return max(more, default=few)
        return found

    def remember_shadow(self, round_: RoundPlan, tree: ScoredTree, size: DraftSize) -> None:
        """Remember the draft that would be chosen without the regret budget, if it is larger than `size`."""
        if not self._shadow.is_pending and round_.max_nodes < min(round_.node_limit, len(tree)):
            wanted = round_.choose_unlimited_size(tree)
            if wanted.nodes > size.nodes:
                self._shadow.remember(round_.position + 1, tree.path_tokens(wanted.nodes), wanted.nodes)

    def knows_plain(self, n: int) -> bool:
        """Whether plain decoding was measured `n` times of late."""
        return self._cost.plain_measured >= n

    def learn(self, done: Round) -> None:
        """Compare what the drafters of the round have proposed with the emitted tokens."""
        if self._round is None:  # a grammar has drafted
            return
        asked = self._round.asked
        for each in asked:
            if each.drafter.is_drawn:
                self._learn_drawn(each.drafter, done)
            elif each.drafter.is_async:
                self._learn_chain(each.drafter, done)
            else:
                self._learn_path(each.drafter, done.emitted)
        if not any(each.drafter.is_drawn for each in asked):
            self._learn_agreements(done.emitted)

    def pass_round(self, step: Step) -> None:
        """A plain round went by, which is recorded together with a later one."""
        self._n_passed += 1
        if step.n_peer_rows == 0:
            self._passed_s.append(step.forward_s(1))

    def record_plain(self, step: Step) -> None:
        """Record a round that could not have a draft."""
        if step.n_peer_rows is not None:
            self._cost.model.observe(1 + step.n_peer_rows, self._position, step.forward_s(1 + self._cost.n_peers))
        self._count_passed()
        self._count_plain(1)

    def _count_passed(self) -> None:
        if self._passed_s:
            self._cost.model.observe(1, self._position, median(self._passed_s))
        if self._n_passed:
            self._count_plain(self._n_passed)
        self._n_passed, self._passed_s = 0, []

    def _count_plain(self, n: int) -> None:
        self.regret.add(n, float(n))
        self._rate.observe_plain(n)
        self._stats.exploration.add(n)

    def end(self) -> None:
        """The text has ended; count the rounds that went by since the last look."""
        self._count_passed()

    def record(self, round_: RoundPlan, step: Step) -> None:
        """Record the costs, the gain and the loss of a round."""
        cost, rows = self._cost, step.n_drafted + 1
        round_.share_drafting(step.draft_s)
        drafting_s = round_.charged_s
        is_unread = any(each.drafter.is_async for each in round_.asked)  # the forward's time contains the chain's
        if round_.asked:
            if not is_unread:
                self._record_drafting(round_)
            self.regret.add_reading(round_.reading_s / cost.seconds(1))
        if step.n_peer_rows is not None:
            forward_s = step.forward_s(1 + cost.n_peers)
            if is_unread:
                forward_s = max(forward_s - drafting_s, cost.model.seconds(rows) / 2)
            cost.model.observe(rows + step.n_peer_rows, round_.position, forward_s)
        # The usual time of such a round: in a busy moment plain decoding would have been slow too. Both times are those
        # after the round, so that a plain round is one step also where it has changed what a step is known to take.
        # Of a drafter that runs ahead it is the measured time.
        plain_s = cost.seconds(1)
        steps = (drafting_s + cost.seconds(rows)) / plain_s
        self._count_passed()
        self.regret.add(len(step.tokens), steps)
        self._rate.observe(len(step.tokens), steps, drafted=step.n_drafted > 0)
        self._stats.exploration.add(steps)
        self._round = None
        if round_.asked:
            for asked, gain in zip(round_.asked, round_.gains(step), strict=True):
                self._stats.gain(asked.drafter, cost.n_peers, asked.after).observe(gain)
                if asked.is_trial and gain < 0:
                    self._stats.exploration.charge(-gain)

    def _record_drafting(self, round_: RoundPlan) -> None:
        for asked in round_.asked:
            if asked.n_read <= len(asked.units):
                self._cost.model.observe_drafting(asked.drafter.name, asked.seen_s, round_.profile_s(asked))

    def _learn_path(self, drafter: Drafter, emitted: Sequence[int]) -> None:
        """Proposals after the first wrong best one were made for another text and are not counted."""
        tree, stats, parent = self._tree, self._stats.drafter(drafter), -1
        for token in emitted:
            nodes = tree.proposals(parent, drafter.name)
            for node in nodes:
                stats.acceptance.observe(tree.votes[node][drafter.name], tree.tokens[node] == token)
            if not nodes:
                return
            is_right = tree.tokens[nodes[0]] == token
            stats.observe_choice(is_right)
            if not is_right:
                return
            parent = nodes[0]

    def _learn_drawn(self, drafter: Drafter, done: Round) -> None:
        """A drawn token is right if the rule has accepted it."""
        stats = self._stats.drafter(drafter)
        for depth in range(done.n_tested):
            is_right = depth < len(done.path)
            stats.acceptance.observe(self._tree.votes[depth][drafter.name], is_right)
            stats.observe_choice(is_right)

    def _learn_chain(self, drafter: Drafter, done: Round) -> None:
        """Count the tokens of a chain that was verified before the host had read it."""
        stats = self._stats.drafter(drafter)
        for drafted, emitted in zip(done.draft.tokens.tolist(), done.emitted, strict=False):
            stats.observe_choice(drafted == emitted)
            if drafted != emitted:
                return

    def _learn_agreements(self, emitted: Sequence[int]) -> None:
        """Tokens that several drafters have proposed after an emitted one."""
        tree, parent = self._tree, -1
        shared = [node for node, votes in enumerate(tree.votes) if len(votes) > 1]
        for token in emitted if shared else ():
            for node in shared:
                if tree.parents[node] == parent:
                    self._stats.observe_agreement(tree.votes[node], tree.tokens[node] == token)
            child = tree.find_child(parent, token)
            if child is None:
                return
            parent = child

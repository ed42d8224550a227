"""The adaptive controller: chooses in each round who drafts and how many tokens, from measured costs and acceptance.

A round is worth its expected tokens less the price of its seconds (`controller/value.py`); plain decoding is one of the
choices. A round takes five steps:

1. Look up the end of the text in the text itself. The cost is negligible, and every emitted token shows whether a
   lookup was right, drafted or not.
2. Decide whether to ask the draft model (`controller/model_gate.py`).
3. Have it draft while a further token is expected to pay (`controller/tree_builder.py`).
4. Verify as many of the most probable nodes as are worth most (`controller/value.py`).
5. Record the cost and the gain of the round.

A regret budget (`controller/regret.py`) limits what drafting may lose against plain decoding. docs/autopilot.md gives
the reasons and a worked round.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from edgespec.controller.batch_cost import MarginalCost
from edgespec.controller.draft_tree import DraftTree
from edgespec.controller.estimator import RecentRate
from edgespec.controller.model_gate import ModelGate, ModelRequest
from edgespec.controller.regret import RegretBudget
from edgespec.controller.round import Round
from edgespec.controller.shadow import ShadowDraft
from edgespec.controller.stats import DraftStats, TextStats
from edgespec.controller.tree_builder import TreeBuilder
from edgespec.controller.value import DraftSize
from edgespec.core.batching import SOLO, BatchPeers
from edgespec.core.protocols import NO_DRAFT, Budget, Decision, Draft, Step, Verdict
from edgespec.core.scores import Scores
from edgespec.drafters.draft_model import DraftModelStepper
from edgespec.drafters.ngram import SuffixLookup

_LOOKUP_REASON = "a lookup is expected to pay"
_MIN_PLAIN_ROUNDS = 3  # recent measurements of plain decoding without which nothing is drafted
_MIN_DRAFTED_SHARE = 0.15  # share of rounds with drafts below which the next round is expected to be plain


class Autopilot:
    """A Controller over lookups and perhaps a draft model, for one generation."""

    def __init__(
        self,
        draft_stats: DraftStats,
        sampling: str,
        stepper: DraftModelStepper | None,
        *,
        trees: bool,
        peers: Callable[[], BatchPeers] = lambda: SOLO,
    ) -> None:
        """`sampling` names a sampling method, whose acceptance is learned separately. `trees`: whether the target takes
        draft trees. `peers` returns the generations that share the next forward.
        """
        self._cost = MarginalCost(draft_stats.costs, peers)
        self._stats = TextStats(draft_stats, sampling)
        self._stepper = stepper
        self._lookup = SuffixLookup(min_length=1)
        self._builder = TreeBuilder(self._lookup, stepper, trees=trees)
        self._regret = RegretBudget()
        self._gate = ModelGate(self._cost, self._regret, stepper) if stepper is not None else None
        self._rate = RecentRate()
        self._shadow = ShadowDraft()
        self._round: Round
        self.decision = Decision("none", "nothing decided yet")

    @property
    def expects_plain(self) -> bool:
        return self._rate.drafted_share < _MIN_DRAFTED_SHARE

    def begin(self, prompt: Sequence[int], scores: Scores) -> None:
        self._lookup.extend(prompt)
        self._cost.model.begin(len(prompt))
        if self._gate is not None:
            self._gate.begin(len(prompt))

    def propose(self, tokens: Sequence[int], limit: Budget) -> Draft:
        self._cost.refresh()
        self._observe_text(tokens)
        round_ = self._round = Round(self._cost, tokens, limit, self._rate.tokens_per_step)
        if not round_.node_limit or not round_.depth_limit:
            return self._decode_plain("the draft limit is zero")
        if self._cost.has_prefill:
            return self._decode_plain("prompts of other generations are being read")
        if self._cost.plain_measured < _MIN_PLAIN_ROUNDS:
            return self._decode_plain("to measure plain decoding")
        round_.max_nodes = self._find_max_nodes(round_.node_limit)
        tree = self._builder.look_up(round_.depth_limit, self._stats.lookup)
        size = round_.choose_size(tree)
        self._remember_shadow(tree, size)
        request = self._gate.decide(round_, tokens, limit.depth, self._stats.model, size) if self._gate else None
        if request is None:
            return self._decide("ngram", _LOOKUP_REASON, tree, size)
        return self._ask_model(tokens, request, tree, size)

    def set_phase(self, phase: str) -> None:
        self._stats.set_phase(phase)

    def warning(self) -> str | None:
        return self._stats.model.warning()

    def end(self) -> None:
        self._stats.merge()

    def observe(self, verdict: Verdict, scores: Scores) -> None:
        """Unused; `record` receives everything."""

    def record(self, step: Step) -> None:
        cost, costs, round_, rows = self._cost, self._cost.model, self._round, step.n_drafted + 1
        plain_s, drafted_s, n_drafted_by_model = cost.seconds(1), round_.drafted_s, len(round_.path)
        if n_drafted_by_model:
            if round_.n_read <= n_drafted_by_model:
                costs.observe_drafted(step.draft_s / n_drafted_by_model)
            self._regret.add_reading(round_.n_read * costs.read_s / plain_s)
        if step.n_peer_rows is not None:
            costs.observe(rows + step.n_peer_rows, round_.position, step.forward_s(1 + cost.n_peers))
        # The usual time of such a round: in a busy moment plain decoding would have been slow too.
        steps = (drafted_s + cost.seconds(rows)) / plain_s
        self._regret.add(len(step.tokens), steps)
        self._rate.observe(len(step.tokens), steps, drafted=step.n_drafted > 0)
        model = self._stats.model
        model.exploration.elapsed += steps
        if round_.path:
            model.gain(cost.n_peers).observe(round_.gain(step))
            model.observe_path(round_.path, step)

    def _observe_text(self, tokens: Sequence[int]) -> None:
        """Bring drafters and statistics up to date with the emitted tokens."""
        if self._stepper is not None:
            self._stepper.sync(tokens)
        for length, is_right in self._lookup.extend(tokens):
            self._stats.lookup.observe(length, is_right)
        if (outcome := self._shadow.resolve(tokens)) is not None:
            emitted, rows = outcome
            self._regret.add_shadow(emitted, self._cost.seconds(rows) / self._cost.seconds(1))

    def _find_max_nodes(self, limit: int) -> int:
        """The most draft nodes, up to `limit`, whose rejection costs no more than the regret budget allows."""
        max_s = (1.0 + self._regret.allowance(self._cost.n_peers)) * self._cost.seconds(1)
        return next((n for n in range(limit, 0, -1) if self._cost.seconds(n + 1) <= max_s), 0)

    def _remember_shadow(self, tree: DraftTree, size: DraftSize) -> None:
        """Remember the draft that would be chosen without the regret budget, if it is larger than `size`."""
        round_ = self._round
        if not self._shadow.is_pending and round_.max_nodes < min(round_.node_limit, len(tree)):
            wanted = round_.choose_unlimited_size(tree)
            if wanted.nodes > size.nodes:
                self._shadow.remember(round_.position + 1, tree.tokens[: wanted.nodes])

    def _ask_model(
        self, tokens: Sequence[int], request: ModelRequest, lookup_tree: DraftTree, lookup_size: DraftSize
    ) -> Draft:
        """Run the draft model; returns the better draft of those with and without it."""
        assert self._stepper is not None
        round_, is_sampled = self._round, self._stepper.is_sampled
        tree = self._builder.ask_model(round_, tokens, request.window, lookup_tree, self._stats)
        if not round_.path:  # the draft model lacks one of the tokens
            return self._decide("ngram", _LOOKUP_REASON, lookup_tree, lookup_size)
        size = round_.measure_chain(tree) if is_sampled else round_.choose_size(tree)
        round_.n_read = request.n_read
        round_.value_without = lookup_size.value(round_.price)
        round_.expected_tokens = size.tokens
        if is_sampled:
            return self._verify_sampled(tree, size, request.reason)
        if tree is not lookup_tree and size.speed < lookup_size.speed:
            return self._decide("ngram", _LOOKUP_REASON, lookup_tree, lookup_size)
        return self._decide("model+ngram" if self._lookup.length else "model", request.reason, tree, size)

    def _decode_plain(self, reason: str) -> Draft:
        self.decision = Decision("none", reason, 1.0, self._cost.seconds(1))
        return NO_DRAFT

    def _decide(self, source: str, reason: str, tree: DraftTree, size: DraftSize) -> Draft:
        n_drafted_by_model = len(self._round.path)
        if not size.nodes and not n_drafted_by_model:
            return self._decode_plain("no draft is expected to pay")
        if not size.nodes:
            reason = "the draft is not worth verifying"
        self.decision = Decision(source, reason, size.tokens, size.seconds, n_drafted_by_model)
        return tree.select_draft(size.nodes)

    def _verify_sampled(self, chain: DraftTree, size: DraftSize, reason: str) -> Draft:
        """The whole sampled chain: dropping a token because of its value would change the output distribution."""
        path = self._round.path
        self.decision = Decision("model", reason, size.tokens, size.seconds, len(path))
        return Draft.chain(chain.tokens, np.stack([each.q for each in path if each.q is not None]))

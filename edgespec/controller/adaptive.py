"""The controller that decides each round who drafts and how much, from measured cost and calibrated acceptance.

A round is worth the tokens it is expected to emit less its seconds at the present rate of tokens a second (renewal
reward); plain decoding is a round like any other. Lookups cost nothing, so they are drawn up first and scored on every
token, drafted or not. The draft model is asked when its rounds have been worth more than what the lookups offer, and
goes on a token at a time while a further one is expected to pay. All that was drafted forms a trie, whose most probable
nodes fill as many rows as pay. A ledger forbids drafting while too much has been lost against plain decoding; what that
costs is always measured, never inferred. docs/autopilot.md has the reasons.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from edgespec.controller.batch_cost import MarginalCost
from edgespec.controller.draft_tree import DraftSize, DraftTree, best_size, sizes
from edgespec.controller.estimator import DecayedMean
from edgespec.controller.regret import RegretBudget
from edgespec.controller.shadow import ShadowDraft
from edgespec.controller.stats import DraftStats
from edgespec.core.batching import SOLO, BatchPeers
from edgespec.core.protocols import NO_DRAFT, Budget, Decision, Draft, Scores, Step, Verdict
from edgespec.drafters.draft_model import Candidates, DraftModelStepper
from edgespec.drafters.ngram import SuffixLookup

_LOOKUP_PAYS = "a lookup is expected to pay"
_PLAIN_ROUNDS = 3  # measured ones that have to count at any time
_MOST_NODES = 15
_LOOK_AHEAD = 4  # drafted tokens
_AMORTISED = 64  # rounds over which a draft model has to earn what reading the text takes it
_ROUND = 2.0  # tokens that a round emits where drafting pays: so many rounds are left of a text
_INVESTED = 0.03  # plain steps that reading may take beyond the ledger's room, for each token emitted so far
_LEAST_READ = 16  # tokens without which a draft model is not worth asking
_BELIEF = 0.75  # how far what came counts against what was expected, when a round is judged
_TRIALS = 0.003  # share of the time that may be spent on trying a model that does not pay
_RECENT = 0.8  # discount of the speed, at every round: texts go from one phase into another
_RARELY = 0.15  # share of rounds with drafts below which the next one is expected to be plain


class Autopilot:
    """A Controller over lookups and perhaps a draft model."""

    def __init__(
        self,
        draft_stats: DraftStats,
        sampling: str,
        stepper: DraftModelStepper | None,
        *,
        trees: bool,
        peers: Callable[[], BatchPeers] = lambda: SOLO,
    ) -> None:
        """`sampling` names a way of sampling, whose acceptance is remembered apart; `peers` tells whom the next
        forward is shared with.
        """
        self._costs = draft_stats.costs
        self._cost = MarginalCost(draft_stats.costs, peers)
        self._known = {
            phase: (draft_stats.lookup(f"{sampling}, {phase}"), draft_stats.model(f"{sampling}, {phase}"))
            for phase in ("answer", "reasoning")
        }
        self._phases = {phase: (matches.fork(), model.fork()) for phase, (matches, model) in self._known.items()}
        self._matches, self._model = self._phases["answer"]
        self._stepper = stepper
        self._trees = trees
        self._lookup = SuffixLookup(shortest=1)
        self._regret = RegretBudget()
        self._tokens, self._steps = (
            DecayedMean(1.0, _RECENT),
            DecayedMean(1.0, _RECENT),
        )  # of a round: emitted tokens, plain steps
        self._drafted = DecayedMean(0.0, 0.9)  # rounds with a draft
        self._read_debt = 0.0  # plain steps that reading the text has taken, and that rounds have not yet paid for
        self._shadow = ShadowDraft()
        self._main_path: list[Candidates] = []
        self._max_nodes = 0  # draft nodes
        self._value_without = self._expected_tokens = (
            0.0  # value of the round without the draft model, tokens expected with it
        )
        self._token_rate_price = 0.0  # tokens that a second of this round costs
        self._window = 0  # tokens that it may read at once
        self._read = 0  # tokens of the text that the draft model had to read first
        self._text: Sequence[int] = ()
        self._start = self._position = 0
        self.decision = Decision("none", "nothing decided yet")

    @property
    def expects_plain(self) -> bool:
        return self._drafted.value < _RARELY

    def begin(self, prompt: Sequence[int], scores: Scores) -> None:
        self._lookup.extend(prompt)
        self._start = len(prompt)
        self._costs.begin(self._start)

    def propose(self, tokens: Sequence[int], limit: Budget) -> Draft:
        self._cost.look()
        self._text = tokens
        self._position = len(tokens) - 1
        self._main_path = []
        if self._stepper is not None:
            self._stepper.sync(tokens)
        for length, right in self._lookup.extend(tokens):
            self._matches.observe(length, right)
        if (outcome := self._shadow.outcome(tokens)) is not None:
            emitted, rows_untried = outcome
            self._regret.add_untried(emitted, self._cost.seconds(rows_untried) / self._cost.seconds(1))
        most, depth = min(limit.nodes, _MOST_NODES), min(limit.depth, _MOST_NODES)
        if not most or not depth:
            return self._plain("there is no room for a draft")
        if self._cost.reads:
            return self._plain("others' prompts are being read")
        if self._cost.plain_measured < _PLAIN_ROUNDS:
            return self._plain("to measure plain decoding")
        self._max_nodes = self._max_affordable_nodes(most)
        found = self._look_up(depth)
        rows = self._best(found)
        self._remember_shadow(found, most, rows)
        reason = self._why_model(rows, most, limit.depth)
        explored = found if reason is None else self._explore(found, depth, most)
        if reason is None or not self._main_path:  # the draft model is not asked, or cannot read this text
            return self._decide("ngram", _LOOKUP_PAYS, found, rows)
        drawn = self._stepper_is_drawn
        own = self._all_of(explored) if drawn else self._best(explored)
        self._value_without = rows.value(self._token_rate_price)
        self._expected_tokens = own.tokens
        if drawn:
            return self._verify_drawn(explored, own, reason)
        if explored is not found and own.speed < rows.speed:  # one chain or the other
            return self._decide("ngram", _LOOKUP_PAYS, found, rows)
        return self._decide("model+ngram" if self._lookup.length else "model", reason, explored, own)

    def set_phase(self, phase: str) -> None:
        self._matches, self._model = self._phases[phase]

    def warning(self) -> str | None:
        return self._model.warning()

    def end(self) -> None:
        for phase, (matches, model) in self._known.items():
            seen_matches, seen_model = self._phases[phase]
            matches.merge(seen_matches)
            model.merge(seen_model)

    def observe(self, verdict: Verdict, scores: Scores) -> None:
        """The Step says it all."""

    def record(self, step: Step) -> None:
        costs, share, rows = self._costs, self._cost, step.n_drafted + 1
        plain_s = share.seconds(1)
        drafted_s = self._drafted_s
        if self._main_path and self._read <= len(self._main_path):
            costs.observe_drafted(step.draft_s / len(self._main_path))
        if self._main_path:
            self._read_debt += self._read * costs.read_s / plain_s
        if step.n_peer_rows is not None:
            costs.observe(rows + step.n_peer_rows, self._position, step.forward_s(1 + share.n_peers))
        # What such a round usually takes, not what this one took: a busy machine would have slowed plain decoding too.
        steps = (drafted_s + share.seconds(rows)) / plain_s
        paid = self._read_debt / _AMORTISED
        self._read_debt -= paid
        self._regret.add(len(step.tokens), steps + paid)
        self._tokens.observe(len(step.tokens))
        self._steps.observe(steps)
        self._drafted.observe(float(step.n_drafted > 0))
        self._model.trials.elapsed += steps
        if self._main_path:
            self._learn(step)

    def _max_affordable_nodes(self, most: int) -> int:
        """Draft nodes whose rows, if none is right, lose no more than the ledger has room for."""
        limit = (1.0 + self._regret.allowance(self._cost.n_peers)) * self._cost.seconds(1)
        return next((n for n in range(most, 0, -1) if self._cost.seconds(n + 1) <= limit), 0)

    def _remember_shadow(self, found: DraftTree, most: int, rows: DraftSize) -> None:
        """Remember the draft that would be chosen if there were room for it, to see what would have become of it."""
        if not self._shadow.pending and self._max_nodes < min(most, len(found)):
            wanted, _ = best_size(sizes(found.probabilities, self._cost.seconds, 0.0, most), self._recent_rate)
            if wanted.nodes > rows.nodes:
                self._shadow.remember(self._position + 1, found.tokens[: wanted.nodes])

    @property
    def _stepper_is_drawn(self) -> bool:
        return self._stepper is not None and self._stepper.is_drawn

    def _plain(self, reason: str) -> Draft:
        self.decision = Decision("none", reason, 1.0, self._cost.seconds(1))
        return NO_DRAFT

    def _decide(self, source: str, reason: str, found: DraftTree, rows: DraftSize) -> Draft:
        if not rows.nodes and not self._main_path:
            return self._plain("no draft is expected to pay")
        if not rows.nodes:
            reason = "what was drafted is not worth verifying"
        self.decision = Decision(source, reason, rows.tokens, rows.seconds, len(self._main_path))
        return found.draft(rows.nodes)

    def _verify_drawn(self, chain: DraftTree, rows: DraftSize, reason: str) -> Draft:
        """Every token that was drawn, since to drop one by what it is would change the law."""
        self.decision = Decision("model", reason, rows.tokens, rows.seconds, len(self._main_path))
        q = [options.q for options in self._main_path]
        return Draft.chain(chain.tokens, np.stack([each for each in q if each is not None]))

    @property
    def _drafted_s(self) -> float:
        """Usual seconds of what the model has drafted this round."""
        return len(self._main_path) * self._costs.draft_s if self._main_path else 0.0

    def _all_of(self, chain: DraftTree, ahead: Sequence[float] = ()) -> DraftSize:
        """All tokens of a chain that was drawn, and perhaps some more with such probabilities."""
        n, drafted_s = len(chain) + len(ahead), self._drafted_s + len(ahead) * self._costs.draft_s
        return DraftSize(n, 1.0 + sum(chain.probabilities) + sum(ahead), drafted_s + self._cost.seconds(n + 1))

    def _best(self, found: DraftTree) -> DraftSize:
        rows = sizes(found.probabilities, self._cost.seconds, self._drafted_s, self._max_nodes)
        best, self._token_rate_price = best_size(rows, self._recent_rate)
        return best

    @property
    def _recent_rate(self) -> float:
        """Tokens a second of the last rounds, and no less than plain decoding's."""
        return max(1.0, self._tokens.value / self._steps.value) / self._cost.seconds(1)

    def _look_up(self, depth: int) -> DraftTree:
        """What followed the longest match of the text's end."""
        found = DraftTree()
        if length := self._lookup.length:
            found.chain(self._lookup.continuation(self._lookup.end, depth), self._match_rates(length, depth))
        return found

    def _match_rates(self, length: int, n: int) -> list[float]:
        """[n] a token that is right makes the match longer, though one foretold counts half of one seen."""
        return [self._matches.rate(length + i // 2) for i in range(n)]

    def _why_model(self, rows: DraftSize, most: int, allowance: int) -> str | None:
        """Why the draft model is asked; None where it is not. `rows` is what the lookups offer."""
        if self._stepper is None or not self._max_nodes:
            return None
        record, costs = self._model, self._costs
        invested = self._regret.allowance(self._cost.n_peers) + _INVESTED * (len(self._text) - self._start)
        self._window = int(invested * self._cost.seconds(1) / costs.read_s) if costs.read_s else len(self._text)
        if self._window < _LEAST_READ:
            return None
        self._read = min(self._window, self._stepper.lag(self._text)) - 1
        reading = self._read * costs.read_s
        if record.advantage(self._cost.n_peers).value > self._token_rate_price * reading / min(
            _AMORTISED, allowance / _ROUND
        ):
            record.trials.elapsed = record.trials.tried = 0.0
            return "it is expected to win the most tokens a second"
        trial = (costs.draft_s + reading) / self._cost.seconds(1)
        if rows.nodes or record.trials.tried + trial > _TRIALS * record.trials.elapsed:
            return None
        record.trials.tried += trial
        return "tried again after a pause"

    def _explore(self, found: DraftTree, depth: int, most: int) -> DraftTree:
        """Have the model draft while that pays; into `found` where trees are taken, else into a chain of its own."""
        stepper = self._stepper
        assert stepper is not None
        joined = self._trees and not stepper.is_drawn
        own = found if joined else DraftTree()
        parent = -1
        deepest = min(depth, self._max_nodes if stepper.is_drawn else most)
        options = stepper.start(self._text, self._window)
        while options is not None:
            self._main_path.append(options)
            rates = [self._model.calibration.rate(p) for p in options.probabilities]
            following = own.add(parent, options.tokens[0], rates[0])
            if joined:
                for token, rate in zip(options.tokens[1:], rates[1:], strict=True):
                    own.add(parent, token, rate)
            parent = following
            if len(self._main_path) >= deepest or not self._worth_another(own, parent, most):
                break
            options = stepper.step(options.tokens[0])
        if self._main_path and not stepper.is_drawn:
            spine = [options.tokens[0] for options in self._main_path]
            more, length = self._lookup.after(spine, depth - len(spine))
            own.chain(more, self._match_rates(length, len(more)), parent)
        return own

    def _worth_another(self, own: DraftTree, last: int, most: int) -> bool:
        """Whether drafting one to a few tokens more, each as likely right as first choices are, is expected to pay."""
        probability = own.probability(last)
        now = self._reached(own, most, ())
        price = max(self._token_rate_price, now.speed)
        ahead: list[float] = []
        for _ in range(_LOOK_AHEAD):
            probability *= self._model.first_choice.value
            ahead.append(probability)
            if self._reached(own, most, ahead).value(price) > now.value(price):
                return True
        return False

    def _reached(self, own: DraftTree, most: int, ahead: Sequence[float]) -> DraftSize:
        """The fastest rows of what is drafted, and perhaps some more tokens with such probabilities."""
        if self._stepper_is_drawn:
            return self._all_of(own, ahead)
        drafted_s = self._drafted_s + len(ahead) * self._costs.draft_s
        rows = sizes([*own.probabilities, *ahead], self._cost.seconds, drafted_s, most)
        return max(rows, key=lambda each: each.speed)

    def _learn(self, step: Step) -> None:
        """From a round for which the model drafted."""
        record = self._model
        got = self._expected_tokens + _BELIEF * (len(step.tokens) - self._expected_tokens)
        cost = self._drafted_s + self._cost.seconds(step.n_drafted + 1)
        record.advantage(self._cost.n_peers).observe(got - self._token_rate_price * cost - self._value_without)
        for at, options in enumerate(self._main_path[: len(step.tokens)]):
            emitted = step.tokens[at]
            if options.q is None:
                for token, probability in zip(options.tokens, options.probabilities, strict=True):
                    record.calibration.observe(probability, token == emitted)
                right = options.tokens[0] == emitted
            elif at < step.n_tested:
                right = at < step.n_accepted
                record.calibration.observe(options.probabilities[0], right)
            else:
                break
            record.first_choice.observe(float(right))
            if not right:
                break

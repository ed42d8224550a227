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

from edgespec.controller.batch_cost import Share
from edgespec.controller.draft_tree import Candidates, Rows, all_rows, fastest
from edgespec.controller.estimator import Rate
from edgespec.controller.regret import Ledger
from edgespec.controller.shadow import Untried
from edgespec.controller.stats import Experience
from edgespec.core.batching import ALONE, Company
from edgespec.core.protocols import NO_DRAFT, Budget, Decision, Draft, Scores, Step, Verdict
from edgespec.drafters.draft_model import Options, Walk
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
        experience: Experience,
        sampling: str,
        walk: Walk | None,
        *,
        trees: bool,
        company: Callable[[], Company] = lambda: ALONE,
    ) -> None:
        """`sampling` names a way of sampling, whose acceptance is remembered apart; `company` tells whom the next
        forward is shared with.
        """
        self._costs = experience.costs
        self._share = Share(experience.costs, company)
        self._known = {
            passage: (experience.lookup(f"{sampling}, {passage}"), experience.model(f"{sampling}, {passage}"))
            for passage in ("answer", "reasoning")
        }
        self._passages = {
            passage: (matches.begun(), model.begun()) for passage, (matches, model) in self._known.items()
        }
        self._matches, self._model = self._passages["answer"]
        self._walk = walk
        self._trees = trees
        self._lookup = SuffixLookup(shortest=1)
        self._ledger = Ledger()
        self._tokens, self._steps = Rate(1.0, _RECENT), Rate(1.0, _RECENT)  # of a round: emitted tokens, plain steps
        self._drafted = Rate(0.0, 0.9)  # rounds with a draft
        self._owed = 0.0  # plain steps that reading the text has taken, and that rounds have not yet paid for
        self._untried = Untried()
        self._spine: list[Options] = []
        self._affordable = 0  # draft nodes
        self._offered = self._hoped = 0.0  # value of the round without the draft model, tokens expected with it
        self._price = 0.0  # tokens that a second of this round costs
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
        self._share.look()
        self._text = tokens
        self._position = len(tokens) - 1
        self._spine = []
        if self._walk is not None:
            self._walk.settle(tokens)
        for length, right in self._lookup.extend(tokens):
            self._matches.observe(length, right)
        if (outcome := self._untried.outcome(tokens)) is not None:
            emitted, rows_untried = outcome
            self._ledger.add_untried(emitted, self._share.seconds(rows_untried) / self._share.seconds(1))
        most, depth = min(limit.nodes, _MOST_NODES), min(limit.depth, _MOST_NODES)
        if not most or not depth:
            return self._plainly("there is no room for a draft")
        if self._share.reads:
            return self._plainly("others' prompts are being read")
        if self._share.plain_measured < _PLAIN_ROUNDS:
            return self._plainly("to measure plain decoding")
        self._affordable = self._afforded(most)
        found = self._looked_up(depth)
        rows = self._best(found)
        self._imagine(found, most, rows)
        reason = self._why_model(rows, most, limit.depth)
        explored = found if reason is None else self._explore(found, depth, most)
        if reason is None or not self._spine:  # the draft model is not asked, or cannot read this text
            return self._decided("ngram", _LOOKUP_PAYS, found, rows)
        drawn = self._walk_is_drawn
        own = self._all_of(explored) if drawn else self._best(explored)
        self._offered = rows.value(self._price)
        self._hoped = own.tokens
        if drawn:
            return self._drawn(explored, own, reason)
        if explored is not found and own.speed < rows.speed:  # one chain or the other
            return self._decided("ngram", _LOOKUP_PAYS, found, rows)
        return self._decided("model+ngram" if self._lookup.length else "model", reason, explored, own)

    def enter(self, passage: str) -> None:
        self._matches, self._model = self._passages[passage]

    def complaint(self) -> str | None:
        return self._model.complaint()

    def end(self) -> None:
        for passage, (matches, model) in self._known.items():
            seen_matches, seen_model = self._passages[passage]
            matches.learn(seen_matches)
            model.learn(seen_model)

    def observe(self, verdict: Verdict, scores: Scores) -> None:
        """The Step says it all."""

    def record(self, step: Step) -> None:
        costs, share, rows = self._costs, self._share, step.n_drafted + 1
        plain_s = share.seconds(1)
        drafted_s = self._drafted_s
        if self._spine and self._read <= len(self._spine):
            costs.observe_drafted(step.draft_s / len(self._spine))
        if self._spine:
            self._owed += self._read * costs.read_s / plain_s
        if step.n_beside is not None:
            costs.observe(rows + step.n_beside, self._position, step.forward_s(1 + share.beside))
        # What such a round usually takes, not what this one took: a busy machine would have slowed plain decoding too.
        steps = (drafted_s + share.seconds(rows)) / plain_s
        paid = self._owed / _AMORTISED
        self._owed -= paid
        self._ledger.add(len(step.tokens), steps + paid)
        self._tokens.observe(len(step.tokens))
        self._steps.observe(steps)
        self._drafted.observe(float(step.n_drafted > 0))
        self._model.trials.elapsed += steps
        if self._spine:
            self._learn(step)

    def _afforded(self, most: int) -> int:
        """Draft nodes whose rows, if none is right, lose no more than the ledger has room for."""
        limit = (1.0 + self._ledger.room(self._share.beside)) * self._share.seconds(1)
        return next((n for n in range(most, 0, -1) if self._share.seconds(n + 1) <= limit), 0)

    def _imagine(self, found: Candidates, most: int, rows: Rows) -> None:
        """Remember the draft that would be chosen if there were room for it, to see what would have become of it."""
        if not self._untried.pending and self._affordable < min(most, len(found)):
            wanted, _ = fastest(all_rows(found.probabilities, self._share.seconds, 0.0, most), self._lately)
            if wanted.nodes > rows.nodes:
                self._untried.remember(self._position + 1, found.tokens[: wanted.nodes])

    @property
    def _walk_is_drawn(self) -> bool:
        return self._walk is not None and self._walk.is_drawn

    def _plainly(self, reason: str) -> Draft:
        self.decision = Decision("none", reason, 1.0, self._share.seconds(1))
        return NO_DRAFT

    def _decided(self, source: str, reason: str, found: Candidates, rows: Rows) -> Draft:
        if not rows.nodes and not self._spine:
            return self._plainly("no draft is expected to pay")
        if not rows.nodes:
            reason = "what was drafted is not worth verifying"
        self.decision = Decision(source, reason, rows.tokens, rows.seconds, len(self._spine))
        return found.draft(rows.nodes)

    def _drawn(self, chain: Candidates, rows: Rows, reason: str) -> Draft:
        """Every token that was drawn, since to drop one by what it is would change the law."""
        self.decision = Decision("model", reason, rows.tokens, rows.seconds, len(self._spine))
        q = [options.q for options in self._spine]
        return Draft.chain(chain.tokens, np.stack([each for each in q if each is not None]))

    @property
    def _drafted_s(self) -> float:
        """Usual seconds of what the model has drafted this round."""
        return len(self._spine) * self._costs.draft_s if self._spine else 0.0

    def _all_of(self, chain: Candidates, ahead: Sequence[float] = ()) -> Rows:
        """All tokens of a chain that was drawn, and perhaps some more with such probabilities."""
        n, drafted_s = len(chain) + len(ahead), self._drafted_s + len(ahead) * self._costs.draft_s
        return Rows(n, 1.0 + sum(chain.probabilities) + sum(ahead), drafted_s + self._share.seconds(n + 1))

    def _best(self, found: Candidates) -> Rows:
        rows = all_rows(found.probabilities, self._share.seconds, self._drafted_s, self._affordable)
        best, self._price = fastest(rows, self._lately)
        return best

    @property
    def _lately(self) -> float:
        """Tokens a second of the last rounds, and no less than plain decoding's."""
        return max(1.0, self._tokens.value / self._steps.value) / self._share.seconds(1)

    def _looked_up(self, depth: int) -> Candidates:
        """What followed the longest match of the text's end."""
        found = Candidates()
        if length := self._lookup.length:
            found.chain(self._lookup.continuation(self._lookup.end, depth), self._match_rates(length, depth))
        return found

    def _match_rates(self, length: int, n: int) -> list[float]:
        """[n] a token that is right makes the match longer, though one foretold counts half of one seen."""
        return [self._matches.rate(length + i // 2) for i in range(n)]

    def _why_model(self, rows: Rows, most: int, room: int) -> str | None:
        """Why the draft model is asked; None where it is not. `rows` is what the lookups offer."""
        if self._walk is None or not self._affordable:
            return None
        record, costs = self._model, self._costs
        invested = self._ledger.room(self._share.beside) + _INVESTED * (len(self._text) - self._start)
        self._window = int(invested * self._share.seconds(1) / costs.read_s) if costs.read_s else len(self._text)
        if self._window < _LEAST_READ:
            return None
        self._read = min(self._window, self._walk.behind(self._text)) - 1
        reading = self._read * costs.read_s
        if record.advantage(self._share.beside).value > self._price * reading / min(_AMORTISED, room / _ROUND):
            record.trials.elapsed = record.trials.tried = 0.0
            return "it is expected to win the most tokens a second"
        trial = (costs.draft_s + reading) / self._share.seconds(1)
        if rows.nodes or record.trials.tried + trial > _TRIALS * record.trials.elapsed:
            return None
        record.trials.tried += trial
        return "tried again after a pause"

    def _explore(self, found: Candidates, depth: int, most: int) -> Candidates:
        """Have the model draft while that pays; into `found` where trees are taken, else into a chain of its own."""
        walk = self._walk
        assert walk is not None
        joined = self._trees and not walk.is_drawn
        own = found if joined else Candidates()
        parent = -1
        deepest = min(depth, self._affordable if walk.is_drawn else most)
        options = walk.start(self._text, self._window)
        while options is not None:
            self._spine.append(options)
            rates = [self._model.calibration.rate(p) for p in options.probabilities]
            following = own.add(parent, options.tokens[0], rates[0])
            if joined:
                for token, rate in zip(options.tokens[1:], rates[1:], strict=True):
                    own.add(parent, token, rate)
            parent = following
            if len(self._spine) >= deepest or not self._worth_another(own, parent, most):
                break
            options = walk.go_on(options.tokens[0])
        if self._spine and not walk.is_drawn:
            spine = [options.tokens[0] for options in self._spine]
            more, length = self._lookup.after(spine, depth - len(spine))
            own.chain(more, self._match_rates(length, len(more)), parent)
        return own

    def _worth_another(self, own: Candidates, last: int, most: int) -> bool:
        """Whether drafting one to a few tokens more, each as likely right as first choices are, is expected to pay."""
        probability = own.probability(last)
        now = self._reached(own, most, ())
        price = max(self._price, now.speed)
        ahead: list[float] = []
        for _ in range(_LOOK_AHEAD):
            probability *= self._model.first_choice.value
            ahead.append(probability)
            if self._reached(own, most, ahead).value(price) > now.value(price):
                return True
        return False

    def _reached(self, own: Candidates, most: int, ahead: Sequence[float]) -> Rows:
        """The fastest rows of what is drafted, and perhaps some more tokens with such probabilities."""
        if self._walk_is_drawn:
            return self._all_of(own, ahead)
        drafted_s = self._drafted_s + len(ahead) * self._costs.draft_s
        rows = all_rows([*own.probabilities, *ahead], self._share.seconds, drafted_s, most)
        return max(rows, key=lambda each: each.speed)

    def _learn(self, step: Step) -> None:
        """From a round for which the model drafted."""
        record = self._model
        got = self._hoped + _BELIEF * (len(step.tokens) - self._hoped)
        cost = self._drafted_s + self._share.seconds(step.n_drafted + 1)
        record.advantage(self._share.beside).observe(got - self._price * cost - self._offered)
        for at, options in enumerate(self._spine[: len(step.tokens)]):
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

"""Fills a round's draft tree: from lookups in the text, and token by token from the draft model."""

from __future__ import annotations

from collections.abc import Sequence

from edgespec.controller.acceptance import AcceptanceModel
from edgespec.controller.draft_tree import DraftTree
from edgespec.controller.round import Round
from edgespec.controller.stats import TextStats
from edgespec.controller.value import DraftSize
from edgespec.drafters.draft_model import DraftModelStepper
from edgespec.drafters.ngram import SuffixLookup

_LOOK_AHEAD = 4  # further tokens that have to be worth less before the draft model stops


class TreeBuilder:
    """Combines an n-gram index and perhaps a draft model."""

    def __init__(self, lookup: SuffixLookup, stepper: DraftModelStepper | None, *, trees: bool) -> None:
        """`trees`: whether the target takes trees; if not, lookups and the draft model make separate chains."""
        self._lookup = lookup
        self._stepper = stepper
        self._trees = trees

    def look_up(self, depth: int, acceptance: AcceptanceModel) -> DraftTree:
        """The continuation of the longest match of the text's end: a chain of `depth` tokens, or an empty tree."""
        tree = DraftTree()
        if length := self._lookup.length:
            continuation = self._lookup.read_continuation(self._lookup.end, depth)
            tree.add_chain(continuation, _list_rates(acceptance, length, depth))
        return tree

    def ask_model(
        self, round_: Round, tokens: Sequence[int], window: int, lookup_tree: DraftTree, stats: TextStats
    ) -> DraftTree:
        """Have the model draft while that is expected to pay; its candidates go to `round_.path`.

        Returns `lookup_tree` with the candidates added where the draft may be a tree, else the model's own chain. A
        lookup continues the path, unless its tokens are sampled.
        """
        stepper = self._stepper
        assert stepper is not None
        is_tree = self._trees and not stepper.is_sampled
        tree = lookup_tree if is_tree else DraftTree()
        max_depth = min(round_.depth_limit, round_.max_nodes if stepper.is_sampled else round_.node_limit)
        node = -1
        candidates = stepper.start(tokens, window)
        while candidates is not None:
            round_.path.append(candidates)
            rates = [stats.model.acceptance.rate(p) for p in candidates.probabilities]
            parent, node = node, tree.add(node, candidates.tokens[0], rates[0])
            if is_tree:
                for token, rate in zip(candidates.tokens[1:], rates[1:], strict=True):
                    tree.add(parent, token, rate)
            if len(round_.path) >= max_depth or not self._pays_to_continue(round_, tree, node, stats):
                break
            candidates = stepper.step(candidates.tokens[0])
        if round_.path and not stepper.is_sampled:
            path = [candidates.tokens[0] for candidates in round_.path]
            continuation, length = self._lookup.continue_after(path, round_.depth_limit - len(path))
            tree.add_chain(continuation, _list_rates(stats.lookup, length, len(continuation)), node)
        return tree

    def _pays_to_continue(self, round_: Round, tree: DraftTree, last: int, stats: TextStats) -> bool:
        """Whether one to `_LOOK_AHEAD` more tokens are worth their seconds, if accepted like first candidates are."""
        probability = tree.probability(last)
        now = self._measure(round_, tree, ())
        price = max(round_.price, now.speed)
        ahead: list[float] = []
        for _ in range(_LOOK_AHEAD):
            probability *= stats.model.first_choice.value
            ahead.append(probability)
            if self._measure(round_, tree, ahead).value(price) > now.value(price):
                return True
        return False

    def _measure(self, round_: Round, tree: DraftTree, ahead: Sequence[float]) -> DraftSize:
        """The size to verify after drafting more tokens with probabilities `ahead`; a sampled chain is never cut."""
        if self._stepper is not None and self._stepper.is_sampled:
            return round_.measure_chain(tree, ahead)
        return round_.find_fastest_size(tree, ahead)


def _list_rates(acceptance: AcceptanceModel, length: int, n: int) -> list[float]:
    """[n] acceptance rates after a match of `length` tokens, which each looked-up token extends by a half."""
    return [acceptance.rate(length + i // 2) for i in range(n)]

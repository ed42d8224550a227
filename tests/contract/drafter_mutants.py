"""Plausible bugs of drafters, so that the contract can be seen to fail."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from edgespec.core.arrays import Logits
from edgespec.core.decoding import resize_logits
from edgespec.core.draft_tree import DraftTree
from edgespec.core.drafter import Drafter, Outcome, TokenDraw
from edgespec.core.protocols import Budget, Draft, Round
from edgespec.drafters.block import BlockDrafter
from edgespec.drafters.ngram import NgramDrafter
from edgespec.drafters.pard import PardSession
from edgespec.drafters.registry import SlotResources
from edgespec.drafters.sequential import ModelDraftSession, SequentialDrafter
from tests.contract import drafter_answers, drafters
from tests.contract.drafter_subjects import Subject


class KeepsRejectedTokens(ModelDraftSession):
    """`settle` counts on nothing having been drafted."""

    def settle(self, text: Sequence[int]) -> None:
        self.text += self._chain.tokens.tolist()


class ForgetsTheLastToken(ModelDraftSession):
    """One token too many counts as read."""

    def pending_tokens(self, text: Sequence[int]) -> int:
        return max(1, super().pending_tokens(text) - 1)


class IgnoresTheWindow(ModelDraftSession):
    def prepare(self, text: Sequence[int], window: int, rows: int = 0) -> list[int] | None:
        return super().prepare(text, len(text), rows)


class KeepsAnotherTextsCache(ModelDraftSession):
    """`begin` takes a text of the same beginning for the same text."""

    def begin(self, text: Sequence[int]) -> None:
        if not self.text or self.text[0] != text[0] or len(text) < len(self.text):
            super().begin(text)


class MixesUpNodes(ModelDraftSession):
    """The rows of a tree's level belong to other nodes."""

    def branch(self, tokens: Sequence[int], parents: Sequence[int]) -> list[Logits] | None:
        rows = super().branch(tokens, parents)
        return None if rows is None else rows[::-1]


class CommitsTheMasks(PardSession):
    """As if they were the tokens that were drafted in their places."""

    def block(self, text: Sequence[int], window: int, n: int) -> list[Logits] | None:
        unread = self.prepare(text, window, n - 1)
        if unread is None:
            return None
        n = min(n, self.session.draft_limit + 2 - len(unread))
        scores = self.session.forward(unread[0], Draft.chain([*unread[1:], *[self._mask_token] * (n - 1)]))
        first = len(unread) - 1
        rows = [resize_logits(scores.logits(first + i), self._vocab_size).copy() for i in range(n)]
        self.session.commit(range(first + n - 1))
        for row in rows[:-1]:
            self.text.append(int(row.argmax()))
        return rows


class IgnoresTheDepth(SequentialDrafter):
    def expand(self, tree: DraftTree, text: Sequence[int], limit: Budget) -> Iterator[None]:
        return super().expand(tree, text, Budget(limit.depth + 2, limit.nodes, limit.read))


class NeedsAllUnits(SequentialDrafter):
    """Cleans up at the end of `expand`, which is not reached where it is stopped."""

    def __init__(self, name: str, session: ModelDraftSession) -> None:
        super().__init__(name, session)
        self._is_clean = True

    def expand(self, tree: DraftTree, text: Sequence[int], limit: Budget) -> Iterator[None]:
        if not self._is_clean:
            return
        self._is_clean = False
        yield from super().expand(tree, text, limit)
        self._is_clean = True

    def begin(self, text: Sequence[int], draw: TokenDraw | None) -> None:
        self._is_clean = True
        super().begin(text, draw)


class ForgetsToDraw(SequentialDrafter):
    def begin(self, text: Sequence[int], draw: TokenDraw | None) -> None:
        super().begin(text, draw)
        self._draw = None


class ClaimsAnothersTokens(NgramDrafter):
    """Notes what was drafted where it should note what was emitted."""

    def observe(self, done: Round) -> Sequence[Outcome]:
        self._read([*done.text[: -len(done.emitted)], *done.draft.tokens.tolist(), done.text[-1]])
        return ()


class HearsOfItsOwnRoundsAlone(NgramDrafter):
    """Looks at the last tokens alone, as if no other round had been between."""

    def expand(self, tree: DraftTree, text: Sequence[int], limit: Budget) -> Iterator[None]:
        known = len(self._lookup.tokens)
        self._lookup.extend([*text[:known], text[-1]] if len(text) > known else text)
        return super().expand(tree, text[: len(self._lookup.tokens)], limit)

    def observe(self, done: Round) -> Sequence[Outcome]:
        return ()


class DamagesTheTarget(NgramDrafter):
    """Cuts the cache of the target whenever it is asked."""

    def __init__(self, resources: SlotResources) -> None:
        super().__init__()
        self._target = resources.target

    def expand(self, tree: DraftTree, text: Sequence[int], limit: Budget) -> Iterator[None]:
        self._target.rewind(0)
        return super().expand(tree, text, limit)


def over(session: type[ModelDraftSession]) -> Callable[[SlotResources], Drafter]:
    """The draft model's drafter over another session."""
    return lambda slot: SequentialDrafter("model", session(slot.require_session(), slot.vocab_size))


def sequential(drafter: Callable[[str, ModelDraftSession], Drafter]) -> Callable[[SlotResources], Drafter]:
    return lambda slot: drafter("model", ModelDraftSession(slot.require_session(), slot.vocab_size))


def pard(session: type[PardSession]) -> Callable[[SlotResources], Drafter]:
    return lambda slot: BlockDrafter("pard", session(slot.require_session(), slot.vocab_size, slot.mask_token or 0))


@dataclass(frozen=True)
class Mutation:
    """A broken way to open `drafter`, and the function of the contract that notices."""

    drafter: str
    open: Callable[[SlotResources], Drafter]
    check: Callable[[Subject], None]


SOUND = {
    "reader": ("model", over(ModelDraftSession)),
    "sequential": ("model", sequential(SequentialDrafter)),
    "pard": ("pard", pard(PardSession)),
    "ngram": ("ngram", lambda slot: NgramDrafter()),
}
MUTATIONS = {
    "rejected tokens stay in the cache": Mutation("model", over(KeepsRejectedTokens), drafters.keeps_in_step),
    "one token is left out": Mutation("model", over(ForgetsTheLastToken), drafters.knows_what_is_unread),
    "the window is ignored": Mutation("model", over(IgnoresTheWindow), drafters.stays_within_limits),
    "another text's cache is kept": Mutation("model", over(KeepsAnotherTextsCache), drafters.reuses_prefixes),
    "nodes are mixed up": Mutation("model", over(MixesUpNodes), drafters.continues_every_path),
    "mask rows are committed": Mutation("pard", pard(CommitsTheMasks), drafters.keeps_in_step),
    "the depth is ignored": Mutation("model", sequential(IgnoresTheDepth), drafters.stays_within_limits),
    "every unit is needed": Mutation("model", sequential(NeedsAllUnits), drafters.may_stop_anywhere),
    "best tokens are called drawn": Mutation("model", sequential(ForgetsToDraw), drafters.draws_its_chains),
    "drafted tokens count as text": Mutation("ngram", lambda slot: ClaimsAnothersTokens(), drafters.keeps_in_step),
    "others' rounds are missed": Mutation(
        "ngram", lambda slot: HearsOfItsOwnRoundsAlone(), drafters.hears_of_every_round
    ),
    "the target is changed": Mutation("ngram", DamagesTheTarget, drafter_answers.says_what_plain_decoding_says),
}

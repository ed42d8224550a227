"""The Drafter contract, round by round: functions that any drafter can be run through.

tests/contract/drafter_answers.py has those for whole answers, test_drafter_rules.py the distribution of drawn drafts.
"""

from __future__ import annotations

import numpy as np
import pytest

from edgespec.core.draft_tree import DraftTree
from edgespec.core.protocols import Budget
from edgespec.core.tree import check_draft, depths
from tests.contract.drafter_pair import (
    MAX_ROUNDS,
    MAX_TOKENS,
    PROMPT,
    Pair,
    Reference,
    make_draw,
    make_policies,
    play_round,
    play_without,
    random_token,
)
from tests.contract.drafter_subjects import Subject


def keeps_in_step(subject: Subject, seed: int = 0) -> None:
    """After any verdict the next proposals are those of a drafter that was opened for the text."""
    pair, rng = Pair(subject), np.random.default_rng(seed)
    reference = Reference(pair)
    pair.begin(PROMPT, 97)
    n_proposed = 0
    for _ in range(MAX_ROUNDS):
        limit = Budget(int(rng.integers(1, MAX_TOKENS)), 4)
        tree = pair.expand(limit)
        reference.check(tree, pair.text, limit)
        n_proposed += len(tree)
        play_round(pair, rng, tree)
    assert n_proposed, "it drafts"
    pair.close()
    reference.close()


def continues_every_path(subject: Subject, seed: int = 0) -> None:
    """What a draft model proposes below a node is what it proposes after the text with the node's path.

    Drafts that read the target's states or cache have none of it for drafted tokens; tests/backends has their trees.
    """
    pair = Pair(subject)
    reference = Reference(pair)
    pair.begin(PROMPT, 97)
    tree, name = pair.expand(Budget(3, 12)), pair.drafter.name
    if pair.drafter.grows_trees and name == "model":
        continued = [node for node in range(len(tree)) if tree.proposals(node, name)]
        assert len(continued) > 2, "a chain of three tokens continues two"
        for node in continued:
            below = DraftTree()
            for child in tree.proposals(node, name):
                below.add(-1, tree.tokens[child], name, tree.votes[child][name])
            reference.check(below, [*pair.text, *tree.path_tokens(node)], Budget(1, 1))
    pair.close()
    reference.close()


def hears_of_every_round(subject: Subject, seed: int = 0) -> None:
    """Rounds of others, of a grammar or of nobody leave it in step."""
    pair, rng = Pair(subject), np.random.default_rng(seed)
    reference = Reference(pair)
    pair.begin(PROMPT, 97)
    for _ in range(MAX_ROUNDS):
        for _ in range(int(rng.integers(1, 4))):
            play_without(pair, rng)
        tree = pair.expand()
        reference.check(tree, pair.text)
        play_round(pair, rng, tree)
    pair.close()
    reference.close()


def may_stop_anywhere(subject: Subject, seed: int = 0) -> None:
    """Whichever unit was the last, the next proposals are the same; so too if nothing was verified."""
    pair, rng = Pair(subject), np.random.default_rng(seed)
    reference = Reference(pair)
    pair.begin(PROMPT, 97)
    for units in (0, 1, 2, 3, 1):
        tree = pair.expand(units=units)
        if rng.random() < 0.5:
            play_round(pair, rng, tree)
        else:
            play_without(pair, rng)
        tree = pair.expand()
        reference.check(tree, pair.text)
        play_round(pair, rng, tree)
    pair.close()
    reference.close()


def knows_what_is_unread(subject: Subject, seed: int = 0) -> None:
    """`pending_tokens` is what the next expand computes; nothing for lookups, the root for attached drafts."""
    pair, rng = Pair(subject), np.random.default_rng(seed)
    pair.begin(PROMPT, 97)
    n_before = 0
    for at in range(MAX_ROUNDS):
        unread = pair.drafter.pending_tokens(pair.text)
        if pair.computed is None:
            assert unread == 0
        else:
            assert unread <= 1 if pair.is_attached else unread <= (n_before if at else len(pair.text))
            done = pair.computed.tokens
            pair.expand(Budget(1, 1))
            assert pair.computed.tokens - done == unread
            assert pair.is_recurrent or pair.drafter.pending_tokens(pair.text) == 1, "all but the root is held"
            play_round(pair, rng, pair.expand())
        length = len(pair.text)
        for _ in range(at % 3):
            play_without(pair, rng)
        play_without(pair, rng)
        n_before = len(pair.text) - length + MAX_TOKENS + 1
    pair.close()


def reuses_prefixes(subject: Subject, seed: int = 0) -> None:
    """The next generation continues the text, goes back in it, or is about something else."""
    pair, rng = Pair(subject), np.random.default_rng(seed)
    reference = Reference(pair)
    pair.begin(PROMPT, 97)
    play_round(pair, rng, pair.expand())
    said = list(pair.text)
    other = [103, 104, 103, 105, 103, 104, 106, 103]
    for prompt in ([*said, 98, 99], said, PROMPT, PROMPT[:7], other, [*other, 103, 104], said, [97], said):
        pair.begin(prompt, 97)
        unread = pair.drafter.pending_tokens(pair.text)
        assert unread <= (0 if pair.computed is None else 1 if pair.is_attached else len(pair.text))
        tree = pair.expand()
        reference.check(tree, pair.text)
        play_round(pair, rng, tree)
    pair.begin([*pair.text, 97, 98], 99)
    if not pair.is_recurrent:
        assert pair.drafter.pending_tokens(pair.text) <= 3 + 1 + MAX_TOKENS, "what it has read is not read again"
    pair.close()
    reference.close()


def stays_within_limits(subject: Subject, seed: int = 0) -> None:
    """Depth, vocabulary and reading; and through both policies also the number of nodes."""
    pair, rng = Pair(subject), np.random.default_rng(seed)
    for limit in (Budget(1, 1), Budget(3, 3), Budget(2, 6), Budget(6, 2), Budget(5, 5, 16), Budget(2, 2, 4)):
        pair.begin([98 + limit.depth, *PROMPT * 2], 97)  # another text each time
        done = pair.computed.tokens if pair.computed is not None else 0
        tree = pair.expand(limit)
        assert max(tree.depths, default=0) <= limit.depth, (tree.depths, limit)
        check_draft(tree.select(range(len(tree))), subject.vocab_size)
        if pair.computed is not None and limit.read is not None:
            assert pair.computed.tokens - done <= limit.read + limit.depth - 1
        play_round(pair, rng, tree)
    for draw in (None, make_draw(subject, 1)) if subject.loaded.spec.draws else (None,):
        for budget, limit in ((Budget(4, 4), Budget(2, 9)), (Budget(4, 4), Budget(9, 2)), (Budget(3, 6), Budget(9, 4))):
            for policy in make_policies(subject, pair.drafter, budget, draw):
                policy.begin(pair.text[:-1])
                draft = policy.propose(pair.text, limit)
                assert len(draft) <= limit.nodes, (policy, limit)
                assert max(depths(draft), default=0) <= limit.depth
                assert not policy.failures
    pair.close()


def draws_its_chains(subject: Subject, seed: int = 0) -> None:
    """Where it can draw, it draws a chain with its distributions, like a drafter that was opened for the text."""
    pair, fresh, rng = Pair(subject), Pair(subject), np.random.default_rng(seed)
    pair.begin(PROMPT, 97, make_draw(subject, 0))
    assert pair.drafter.is_drawn == subject.loaded.spec.draws
    for at in range(MAX_ROUNDS if pair.drafter.is_drawn else 0):
        pair.drafter.begin(pair.text[:-1], make_draw(subject, at))
        tree = pair.expand()
        draft = tree.drawn()
        check_draft(draft, subject.vocab_size)
        assert draft.q is not None
        np.testing.assert_allclose(draft.q.sum(1), 1, rtol=1e-5)
        assert [votes[pair.drafter.name] for votes in tree.votes] == pytest.approx(
            draft.q[np.arange(len(draft)), draft.tokens].tolist()
        )
        fresh.begin(pair.text[:-1], pair.text[-1], make_draw(subject, at))
        other = fresh.expand().drawn()
        assert other.q is not None
        np.testing.assert_allclose(draft.q[0], other.q[0], atol=subject.tolerance + 1e-6)
        assert subject.tolerance or draft.tokens.tolist() == other.tokens.tolist()
        pair.finish(draft, int(rng.integers(-1, len(draft))), random_token(rng))
    pair.begin(pair.text, 97)
    assert not pair.drafter.is_drawn, "without a draw it proposes its best tokens"
    pair.close()
    fresh.close()

"""The Session contract: forward scores what a fresh session would, commit keeps one path, rewind forgets."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from edgespec.core.peers import YIELD
from edgespec.core.protocols import NO_DRAFT, Draft, PrefillProgress, Session, Storable
from edgespec.core.tree import path_to
from edgespec.errors import ContextOverflow, EdgespecError
from tests.contract.toys import CONTEXT, Runtime, prefill

PROMPT = [5, 9, 14, 33, 7, 21, 40, 12, 5, 9, 14, 2, 60, 11, 8, 17, 29, 3, 44, 50, 6, 13, 31, 22, 19, 28, 41, 10, 4, 37]


# In files: sessions of a fixed width, on the target's cache, and of several ranks.
KEEP_NOTHING = ("fixed", "draft", "ranks", "documented")


def random_draft(rng: np.random.Generator, session: Session, n: int) -> Draft:
    """A chain, or where the session takes trees any tree, of `n` nodes over tokens 1..63, siblings distinct."""
    parents = [int(rng.integers(-1, i)) if session.capabilities.tree else i - 1 for i in range(n)]
    used: set[tuple[int, int]] = set()
    tokens = []
    for parent in parents:
        token = int(rng.integers(1, 64))
        while (parent, token) in used:
            token = int(rng.integers(1, 64))
        used.add((parent, token))
        tokens.append(token)
    return Draft(np.array(tokens, np.int32), np.array(parents, np.int32))


def test_a_chain_scores_what_a_fresh_session_scores(runtime: Runtime) -> None:
    session = runtime.prefilled(PROMPT)
    chain = [20, 30, 40, 50, 20]
    scores = session.forward(15, Draft.chain(chain))
    for row in range(6):
        assert runtime.same(scores.logits(row), runtime.logits_after([*PROMPT, 15, *chain[:row]])), row
    assert scores.argmax().tolist() == [int(scores.logits(row).argmax()) for row in range(6)]
    assert not runtime.same(scores.logits(0), scores.logits(1))  # the tolerance tells different prefixes apart
    session.close()


def test_every_tree_node_scores_its_own_path(runtime: Runtime) -> None:
    session = runtime.prefilled(PROMPT)
    rng = np.random.default_rng(1)
    draft = random_draft(rng, session, 7)
    scores = session.forward(15, draft)
    for node in range(-1, 7):
        path = draft.tokens[list(path_to(draft, node))].tolist()
        assert runtime.same(scores.logits(node + 1), runtime.logits_after([*PROMPT, 15, *path])), (node, draft)
    session.close()


def test_commit_keeps_exactly_the_path(runtime: Runtime) -> None:
    """Many rounds of random drafts, each cut at a random node: the cache must always hold just what was kept."""
    rng = np.random.default_rng(2)
    session = runtime.prefilled(PROMPT)
    held = list(PROMPT)
    for round_ in range(14):
        root = int(rng.integers(1, 64))
        draft = random_draft(rng, session, int(rng.integers(0, 8)))
        scores = session.forward(root, draft)
        assert runtime.same(scores.logits(0), runtime.logits_after([*held, root])), round_
        path = path_to(draft, int(rng.integers(-1, len(draft))))
        session.commit(path)
        held += [root, *draft.tokens[list(path)].tolist()]
        assert session.position == len(held)
    assert runtime.same(prefill(session, [*held, 5]), runtime.logits_after([*held, 5]))
    session.close()


def test_rewind_then_other_tokens(runtime: Runtime) -> None:
    session = runtime.prefilled(PROMPT)
    session.checkpoint()
    for token in (3, 4, 5):
        session.forward(token, NO_DRAFT)
        session.commit(())
    left = session.rewind(len(PROMPT) + 1)
    assert left == session.position <= len(PROMPT) + 1
    if left < len(PROMPT) + 1:
        assert left == len(PROMPT)  # a recurrent session comes back to its checkpoint, not to nothing
    tokens = [*PROMPT, 3, 9, 9]
    assert runtime.same(prefill(session, tokens), runtime.logits_after(tokens))
    assert session.rewind(4) <= 4
    assert runtime.same(prefill(session, PROMPT[:6]), runtime.logits_after(PROMPT[:6]))
    session.close()


def test_a_checkpoint_after_a_partial_commit(runtime: Runtime) -> None:
    """A state saved while a rollback is still pending inside the runtime is the rolled-back one."""
    session = runtime.prefilled(PROMPT)
    session.forward(7, Draft.chain([8, 9, 10]))
    session.commit((0,))
    session.checkpoint()
    session.forward(11, NO_DRAFT)
    session.commit(())
    session.rewind(len(PROMPT) + 2)
    scores = session.forward(12, NO_DRAFT)
    held = [*PROMPT, 7, 8] if session.position == len(PROMPT) + 2 else PROMPT
    assert held != PROMPT
    assert runtime.same(scores.logits(0), runtime.logits_after([*held, 12]))
    session.close()


def test_prefill_reuses_the_longest_prefix(runtime: Runtime) -> None:
    session = runtime.prefilled(PROMPT)
    for tokens in ([*PROMPT, 1, 2], [*PROMPT[:10], 63, 62], [9, 8, 7], PROMPT, PROMPT):
        assert runtime.same(prefill(session, tokens), runtime.logits_after(tokens)), tokens
        assert session.position == len(tokens)
    session.close()


def test_what_is_held_is_held_after_a_rejection_too(runtime: Runtime) -> None:
    """A prompt that goes on with all that a session holds reads only what is new.

    With a fixed width it reads what was decoded again, in whole chunks; see tests/backends/test_fixed_width.py.
    """
    session = runtime.prefilled(PROMPT)
    session.checkpoint()
    session.forward(7, Draft.chain([8, 9, 10])).argmax()
    session.commit((0,))
    tokens = [*PROMPT, 7, 8, 20, 21]
    first = next(event for event in session.prefill(tokens) if event is not YIELD)
    assert isinstance(first, PrefillProgress)
    assert first.reused == len(PROMPT) + 2 or (not first.reused and runtime.name.startswith(("draft", "fixed")))
    session.close()


def test_a_cache_that_was_saved_goes_on_in_another_session(runtime: Runtime) -> None:
    session = runtime.prefilled(PROMPT)
    session.checkpoint()
    session.forward(7, Draft.chain([8, 9, 10])).argmax()
    session.commit((0,))
    held = [*PROMPT, 7, 8]
    state = session.save_state(2**30) if isinstance(session, Storable) and not session.capabilities.shares_kv else None
    session.close()
    if state is None:
        assert runtime.name.startswith(KEEP_NOTHING), runtime.name
        return
    other = runtime.session()
    assert isinstance(other, Storable) and other.restore_state(held, state) and other.position == len(held)
    tokens = [*held, 20, 21]
    first = next(event for event in other.prefill(tokens) if event is not YIELD)
    assert isinstance(first, PrefillProgress) and first.reused == len(held)
    assert runtime.same(prefill(other, tokens), runtime.logits_after(tokens))
    if other.rewind(len(held)) == len(held):
        assert runtime.same(other.forward(3, NO_DRAFT).logits(0), runtime.logits_after([*held, 3]))
    assert not other.restore_state(held, state[: len(state) // 2]) and other.position == 0
    assert runtime.same(prefill(other, PROMPT), runtime.logits_after(PROMPT)), "it reads texts as before"
    other.close()


def test_prefill_reports_progress_to_the_end(runtime: Runtime) -> None:
    session = runtime.session()
    tokens = (PROMPT * 9)[:CONTEXT]
    progress = [event for event in session.prefill(tokens) if event is not YIELD]
    assert [p.done for p in progress] == sorted({p.done for p in progress})
    assert progress[-1].done == progress[-1].total == len(tokens)
    session.close()


def test_drafts_up_to_the_limit_and_the_end_of_the_context(runtime: Runtime) -> None:
    tokens = (PROMPT * 9)[: CONTEXT - 4]
    session = runtime.prefilled(tokens)
    assert session.draft_limit == 3
    chain = [1, 2, 3]
    scores = session.forward(6, Draft.chain(chain))
    assert runtime.same(scores.logits(3), runtime.logits_after([*tokens, 6, *chain]))
    session.commit((0, 1, 2))
    assert (session.position, session.draft_limit) == (CONTEXT, 0)
    with pytest.raises(ContextOverflow):
        session.forward(1, NO_DRAFT)
    assert session.position == CONTEXT
    session.close()


def test_what_does_not_fit_is_refused_and_the_session_goes_on(runtime: Runtime) -> None:
    session = runtime.prefilled(PROMPT)
    with pytest.raises(ContextOverflow):
        prefill(session, [1] * (CONTEXT + 1))
    with pytest.raises(ContextOverflow):
        session.forward(1, Draft.chain([2] * CONTEXT))
    for bad in (
        Draft.chain([99_999]),
        Draft.chain([-1]),
        Draft(np.array([1, 1], np.int32), np.array([-1, -1], np.int32)),
    ):
        with pytest.raises(ValueError, match=r"token|siblings|chains"):
            session.forward(1, bad)
    assert session.position == len(PROMPT)
    scores = session.forward(7, NO_DRAFT)
    assert runtime.same(scores.logits(0), runtime.logits_after([*PROMPT, 7]))
    session.close()


def test_forward_and_commit_come_in_pairs(runtime: Runtime) -> None:
    session = runtime.prefilled(PROMPT)
    with pytest.raises(EdgespecError):
        session.commit(())
    session.forward(1, Draft.chain([2, 3]))
    with pytest.raises(EdgespecError):
        session.forward(1, NO_DRAFT)
    with pytest.raises((EdgespecError, ValueError)):
        session.commit((1,))
    session.commit((0, 1))
    assert session.position == len(PROMPT) + 3
    session.close()


def test_two_sessions_do_not_touch_each_other(runtime: Runtime) -> None:
    one, two = runtime.prefilled(PROMPT), runtime.prefilled(PROMPT[:5])
    one.forward(3, Draft.chain([4, 5]))
    scores = two.forward(8, NO_DRAFT)
    assert runtime.same(scores.logits(0), runtime.logits_after([*PROMPT[:5], 8]))
    one.commit((0,))
    two.commit(())
    assert (one.position, two.position) == (len(PROMPT) + 2, 6)
    one.close()
    two.close()


def test_a_checkpoint_does_not_outlive_what_it_was_of(runtime: Runtime) -> None:
    """A mark at position 30 of one text must not come back for another text that is as long."""
    session = runtime.prefilled(PROMPT)
    session.checkpoint()
    session.rewind(0)
    other = [t + 1 for t in reversed(PROMPT)] + [7, 8, 9, 10, 11, 12, 13, 14, 15, 16]
    prefill(session, other)
    left = session.rewind(35)
    tokens = [*other[:left], *other[left:35], 3]
    assert runtime.same(prefill(session, tokens), runtime.logits_after(tokens))
    session.close()


def test_the_latest_of_several_checkpoints_is_where_a_text_goes_on(runtime: Runtime) -> None:
    """Each prompt of a conversation leaves one; where the last message differs, the text goes on behind the others."""
    session = runtime.prefilled(PROMPT[:10])
    session.checkpoint()
    for end in (20, len(PROMPT)):
        prefill(session, PROMPT[:end])
        session.checkpoint()
    left = session.rewind(15)
    assert 10 <= left <= 15 or (not left and runtime.name.startswith(("draft", "fixed")))
    tokens = [*PROMPT[:15], 3]
    assert runtime.same(prefill(session, tokens), runtime.logits_after(tokens))
    assert 10 <= session.rewind(12) <= 12 or runtime.name.startswith(("draft", "fixed"))
    assert runtime.same(prefill(session, PROMPT), runtime.logits_after(PROMPT))
    session.close()


def test_a_long_prompt_has_checkpoints_within(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    """A text that shares its beginning alone does not start again there. Ranks are processes of their own."""
    if not runtime.name.startswith("ranks"):
        monkeypatch.setattr("edgespec.backends.checkpoints._SPACING", 4)
        for module, name in (("llamacpp.context", "MAX_TOKENS"), ("mlx.session", "PREFILL_CHUNK")):
            if f"edgespec.backends.{module}" in sys.modules:  # the runtime is in use
                monkeypatch.setattr(f"edgespec.backends.{module}.{name}", 8)
    session = runtime.prefilled(PROMPT)
    session.checkpoint()
    left = session.rewind(20)
    assert left > 0 or runtime.name.startswith(("draft", "fixed", "ranks", "toy"))
    tokens = [*PROMPT[:left], 3, 2, 1]
    assert runtime.same(prefill(session, tokens), runtime.logits_after(tokens))
    session.close()


def test_ids_outside_the_vocabulary_are_refused_everywhere(runtime: Runtime) -> None:
    session = runtime.prefilled(PROMPT)
    size = session.capabilities.vocab_size
    for root in (size, -1):
        with pytest.raises(ValueError, match="token ids"):
            session.forward(root, NO_DRAFT)
        with pytest.raises(ValueError, match="token ids"):
            prefill(session, [*PROMPT, root])
    session.close()


def test_rejection_after_rejection(runtime: Runtime) -> None:
    """Recurrent sessions run again what was accepted; however often that happens in a row, the scores are right."""
    session = runtime.prefilled(PROMPT)
    tokens = list(PROMPT)
    rng = np.random.default_rng(0)
    for _ in range(14):
        if not session.draft_limit:
            break
        root, *drafted = (int(t) for t in rng.integers(0, 60, min(4, session.draft_limit + 1)))
        kept = int(rng.integers(0, len(drafted)))
        scores = session.forward(root, Draft.chain(drafted))
        tokens += [root, *drafted[:kept]]
        assert runtime.same(scores.logits(kept), runtime.logits_after(tokens))
        session.commit(range(kept))
        assert session.position == len(tokens)
    session.close()

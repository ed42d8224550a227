"""Sessions of trained heads on both runtimes: in step with their target after rounds, reuse, windows and cancels."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgespec.backends.llamacpp.heads import open_head
from edgespec.backends.llamacpp.model import load
from edgespec.backends.mlx.heads import runner as head_runner
from edgespec.backends.options import LoadOptions
from edgespec.cancel import cancellable
from edgespec.core.drafter import BlockSession
from edgespec.core.protocols import NO_DRAFT, Draft
from edgespec.core.tree import path_to
from edgespec.errors import Cancelled
from tests.backends.assistant_heads import make_assistant, make_target
from tests.backends.dflash_heads import DIALECTS, make_dflash
from tests.backends.eagle3_heads import HIDDEN, make_head
from tests.backends.head_kinds import KINDS, TargetShape, kinds_on
from tests.backends.head_sessions import TEXT, WHOLE, Cancellation, Pair, check_fresh, is_close
from tests.backends.llamacpp_pairs import open_mtp_subject
from tests.backends.medusa_heads import make_hydra
from tests.backends.mlx_pairs import attach, read_spec
from tests.backends.pair_heads import QWEN, make_pair_folder
from tests.contract.runtimes import prefill
from tests.gguf_models import REPOSITORY, TARGET
from tests.mlx_models import load_target

CONTEXT = 256
LLAMA = ("eagle3", "dflash", "window", "dspark", "dflash2", "mixture", "chain", "hybrid", "assistant")
MLX = (*kinds_on("mlx"), "trained eagle3", "hybrid mtp", "hydra++")
SHAPE = TargetShape(256, 4096, (1, 3, 6))


@dataclass
class Subject:
    """A head and its target. `tolerance` is of logits with a standard deviation of about 3."""

    target: Any
    head: Any
    tolerance: float
    takes_trees: bool = False

    def open_pair(self, text: list[int]) -> Pair:
        return Pair(self.target, self.head, text, tolerance=self.tolerance)


def open_llama(name: str, folder: Path) -> Subject:
    if name in ("mixture", "chain", "hybrid"):
        found = open_mtp_subject(name, folder, CONTEXT)
        return Subject(found.target, found.head, 0.15)
    options = LoadOptions(context_size=CONTEXT, threads=1)
    if name == "assistant":
        path = make_assistant(folder / "head.gguf")
        target = load(make_target(folder / "target.gguf"), options)
        return Subject(target, open_head(target, path, read_spec(path)), 0.5)  # a chained state carries noise
    target = load(TARGET, options)
    if name == "eagle3":
        made = make_head(folder / "head.gguf", size=HIDDEN)
        return Subject(target, open_head(target, made.path, made.spec), 0.15, takes_trees=True)
    dialect = DIALECTS[name]
    return Subject(target, open_head(target, make_dflash(folder / "head.gguf", dialect), dialect.spec), 0.1)


def make_folder(folder: Path, kind: str) -> Path:
    match kind:
        case "trained eagle3":
            return REPOSITORY / "tests" / "fixtures" / "heads" / "eagle3-python-6m"
        case "hybrid mtp":
            return make_pair_folder(folder, "mtp", look=QWEN, size=SHAPE.size, vocab_size=SHAPE.vocab_size)
        case "hydra++":
            return make_hydra(folder, has_prefix=True, size=SHAPE.size, vocab_size=SHAPE.vocab_size)
    return KINDS[kind]["mlx"](folder, SHAPE)


@pytest.fixture(scope="module", params=[*(f"llamacpp {kind}" for kind in LLAMA), *(f"mlx {kind}" for kind in MLX)])
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Subject]:
    runtime, kind = request.param.split(maxsplit=1)
    folder = tmp_path_factory.mktemp("head")
    if runtime == "llamacpp":
        found = open_llama(kind, folder)
    else:
        target = load_target()
        head = attach(target, make_folder(folder / "head", kind))
        found = Subject(target, head, 5e-3, takes_trees=kind.split()[-1] in ("eagle3", "eagle", "mtp"))
    yield found
    found.head.close()
    found.target.close()


def count_pending(pair: Pair, missing: int) -> int:
    """Tokens that the head has to read where `missing` rows of the text are not held."""
    runner = pair.draft._runner
    if not runner.has_cache:  # which reads the last state alone
        return 1
    return max(1, missing) if runner.reads_pairs else missing + 1


def ask(pair: Pair, text: list[int], window: int = WHOLE) -> Any:
    """What the head says after a text; None where it says nothing."""
    return pair.draft.block(text, window, 3) if isinstance(pair.draft, BlockSession) else pair.draft.read(text, window)


def test_after_rounds_it_drafts_as_a_fresh_session(subject: Subject) -> None:
    pair = subject.open_pair(TEXT[:50])
    for n_accepted in (2, 0, 3, 1, 3):
        drafted = pair.say()[:3].argmax(axis=1).tolist()
        n_accepted = min(n_accepted, len(drafted))
        pair.verify_chain(drafted, n_accepted, 11 + n_accepted)
        assert pair.draft.pending_tokens(pair.text) == count_pending(pair, n_accepted + 1)
        check_fresh(pair)
    tree = Draft(np.array([5, 9, 7, 3], np.int32), np.array([-1, -1, 0, 1], np.int32))
    for path in ((1, 3), (0,), ()):  # rounds of another drafter, read together
        is_tree = pair.session.capabilities.tree
        pair.verify(tree if is_tree else Draft.chain([5, 9, 7]), path if is_tree else range(len(path)), 20)
    assert pair.draft.pending_tokens(pair.text) == count_pending(pair, 6)
    check_fresh(pair)
    assert pair.draft.pending_tokens(pair.text) == 1, "the last one, which may be read again"
    check_fresh(pair)
    pair.close()


@pytest.mark.parametrize("kept", [0, 1, 25, 49])
def test_a_new_text_keeps_the_prefix_that_it_shares(subject: Subject, kept: int) -> None:
    pair = subject.open_pair(TEXT[:50])
    pair.say()
    pair.restart([*TEXT[:kept], *TEXT[100:130]])
    missing = kept + 29 - max(0, kept - pair.draft._runner.reads_pairs)
    assert pair.draft.pending_tokens(pair.text) == count_pending(pair, missing)
    check_fresh(pair)
    for text in ([*TEXT[:20], 78], [*TEXT[:20], 79], TEXT[:21]):  # another root after the same text
        pair.restart(text)
        check_fresh(pair)
    pair.close()


def test_a_target_that_goes_back(subject: Subject) -> None:
    """To its checkpoint; and, where it can, without a prompt after that."""
    pair = subject.open_pair(TEXT[:40])
    pair.session.checkpoint()
    pair.say()
    pair.verify_chain([5, 6, 7], 2, 8)
    pair.say()
    pair.restart([*TEXT[:39], 9, 10, 11])
    check_fresh(pair)
    if pair.session.rewind(25) == 25:
        pair.text = [*pair.text[:25], 8]
        pair.draft.begin(pair.text)
        check_fresh(pair)
    pair.restart([*TEXT[:20], 78])  # a prompt that it has not read is no loss
    pair.restart(TEXT[60:80])
    check_fresh(pair)
    pair.close()


def test_a_window_reads_the_end_alone(subject: Subject) -> None:
    text = TEXT[:100]
    pair, short, other = (subject.open_pair(text) for _ in range(3))
    if pair.draft._runner.has_cache:
        whole, end = ask(pair, text), ask(short, text, 10)
        assert not is_close(end, whole, subject.tolerance)
        assert short.draft.pending_tokens(text) == 1
        assert is_close(ask(other, text, 10), end, subject.tolerance)
        short.restart([*text[:20], *TEXT[150:159]])  # behind what was read: only what the target ran anew is read
        assert not np.isnan(np.asarray(ask(short, short.text))).any()
        pair.verify_chain([4], 1, 9)
        check_fresh(pair)
    for each in (pair, short, other):
        each.close()


def test_the_ends_of_texts_and_contexts(subject: Subject) -> None:
    pair = subject.open_pair(TEXT[:2])
    assert ask(pair, TEXT[:1]) is None
    check_fresh(pair)
    if not isinstance(pair.draft, BlockSession):
        is_async = pair.draft.is_async
        assert not is_async or pair.draft.rollout(TEXT[:1], WHOLE, 3) is None
        pair.restart(TEXT[: CONTEXT - 2])
        assert not is_async or pair.draft.rollout(pair.text, WHOLE, 8) is not None
        pair.read()
        assert [pair.draft.step(7) is None for _ in range(3)] == [False, False, True]
    pair.restart(TEXT[:CONTEXT])
    assert ask(pair, pair.text) is not None
    assert ask(pair, [*pair.text, 4]) is None
    pair.close()


def test_rows_of_a_tree_are_those_of_its_paths(subject: Subject) -> None:
    """Calls add nodes anywhere, in the second round below a chain too; rows are as if no others were there."""
    pair = subject.open_pair(TEXT[:40])
    assert subject.takes_trees == (not isinstance(pair.draft, BlockSession) and pair.draft.takes_trees)
    if not subject.takes_trees:
        return
    levels = [([50, 7, 90], [-1, -1, -1]), ([8, 9, 7, 50], [1, 1, 0, 2]), ([11, 12], [4, 6])]
    below_chain = [([7, 8], [-1, 0]), ([9, 7, 50], [0, 1, 2]), ([11, 12], [3, 5])]
    for round_ in range(2):
        pair.read()
        nodes = NO_DRAFT.extend([50], [-1]) if round_ else NO_DRAFT
        found: list[Any] = [pair.step(50)] if round_ else []
        for tokens, parents in below_chain if round_ else levels:
            nodes = nodes.extend(tokens, parents)
            found += pair.draft.branch(tokens, parents)
        assert list(pair.draft.text) == pair.text
        for node, row in enumerate(found):
            pair.read()
            for each in path_to(nodes, node):
                expected = pair.step(int(nodes.tokens[each]))
            assert is_close(row, expected, subject.tolerance), (round_, node)
        pair.verify(nodes, path_to(nodes, len(nodes) - 1)[:2], 33)
    pair.close()


def test_trees_end_with_the_context(subject: Subject) -> None:
    pair = subject.open_pair(TEXT[: CONTEXT - 4])
    assert subject.takes_trees == (not isinstance(pair.draft, BlockSession) and pair.draft.takes_trees)
    if not subject.takes_trees:
        return
    pair.read()
    assert len(pair.draft.branch([50, 7, 90], [-1, -1, -1])) == 3
    assert pair.draft.branch([50, 7, 90], [0, 1, 2]) is None
    assert is_close(pair.say(), pair.fresh().say(), subject.tolerance)
    pair.close()


def test_a_rollout_is_the_chain_of_best_tokens(subject: Subject) -> None:
    pair = subject.open_pair(TEXT[:40])
    if not isinstance(pair.draft, BlockSession) and pair.draft.is_async:
        most = pair.draft._runner.max_drafts or 8  # as many as a ring of recurrent states takes back
        for n, accepted in ((4, 2), (2, 1), (most, 0)):
            length = min(n, most)
            rows = pair.follow(length)
            chain, scores = pair.rollout(n)
            assert chain.tokens.tolist() == rows.argmax(axis=1).tolist()
            assert is_close([scores.logits(i) for i in range(length)], rows, subject.tolerance)
            pair.verify(chain, range(accepted), 8)
            check_fresh(pair)
    pair.close()


def test_a_cancelled_read_is_done_again(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head_runner, "_CHUNK", 32)
    check = Cancellation()
    pair = subject.open_pair(TEXT[:150])
    for cancelled in (1, 3):
        if cancelled == 1 or pair.draft._runner.has_cache:
            check.left = cancelled
            with pytest.raises(Cancelled), cancellable(check):
                pair.say()
            assert pair.draft.pending_tokens(pair.text) >= count_pending(pair, 2)
    check_fresh(pair)
    pair.close()


def test_a_closed_head_leaves_its_target_without_states(subject: Subject) -> None:
    pair = subject.open_pair(TEXT[:30])
    features, end = pair.draft._features, pair.draft._features.end
    pair.say()
    pair.draft.close()
    pair.verify_chain([5, 6], 1, 7)
    assert features.end == end and pair.session.position == 31
    pair.session.rewind(0)
    expected = prefill(subject.target.open_session(), TEXT[:30])
    assert is_close(prefill(pair.session, TEXT[:30]), expected, subject.tolerance)
    pair.session.close()

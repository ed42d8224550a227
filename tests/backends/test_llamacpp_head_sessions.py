"""Sessions of trained heads on llama.cpp: in step with their target after rounds, reuse, and cancels."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from edgespec.backends.llamacpp.heads import LlamaHead, open_head
from edgespec.backends.llamacpp.model import LlamaModel, load
from edgespec.backends.options import LoadOptions
from edgespec.core.drafter import BlockSession
from edgespec.core.protocols import Draft
from tests.backends import head_sessions
from tests.backends.dflash_heads import DIALECTS, HIDDEN, make_dflash
from tests.backends.eagle3_heads import make_head
from tests.backends.llamacpp_pairs import (
    CONTEXT,
    TEXT,
    BlockPair,
    Pair,
    cancel_a_read,
    check_fresh_block,
    open_mtp_subject,
    run_rounds,
    skip_rounds,
)
from tests.contract.runtimes import prefill
from tests.models import TARGET

EAGLE3 = {"eagle3": {"size": HIDDEN}, "eagle3 own": {"size": 64}, "eagle3 normed": {"size": HIDDEN, "is_normed": True}}
MTP = ("mixture", "alone", "dense", "chain", "hybrid")


@dataclass
class Subject:
    """A head and its target. `behind` tokens are pending where the target accepts no drafted one."""

    target: LlamaModel
    head: LlamaHead
    behind: int = 1

    def open_pair(self, n: int) -> head_sessions.Pair:
        return (Pair if self.behind == 1 else BlockPair)(self.target, self.head, TEXT[:n])


def open_subject(name: str, folder: Path) -> Subject:
    if name in MTP:
        found = open_mtp_subject(name, folder)
        return Subject(found.target, found.head)
    target = load(TARGET, LoadOptions(context_size=CONTEXT, threads=1))
    if name in EAGLE3:
        made = make_head(folder / "head.gguf", **EAGLE3[name])
        return Subject(target, open_head(target, made.path, made.spec))
    dialect = DIALECTS[name]
    return Subject(target, open_head(target, make_dflash(folder / "head.gguf", dialect), dialect.spec), behind=2)


@pytest.fixture(scope="module", params=[*EAGLE3, *DIALECTS, *MTP])
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Subject]:
    found = open_subject(request.param, tmp_path_factory.mktemp("head"))
    yield found
    found.head.close()
    found.target.close()


def check_fresh(pair: head_sessions.Pair) -> None:
    if isinstance(pair.draft, BlockSession):
        check_fresh_block(pair)
    else:
        head_sessions.check_fresh(pair)


def test_after_rounds_it_drafts_as_a_fresh_session(subject: Subject) -> None:
    pair = subject.open_pair(50)
    run_rounds(pair, subject.behind)
    check_fresh(pair)
    skip_rounds(pair, subject.behind)
    check_fresh(pair)
    assert pair.draft.pending_tokens(pair.text) == 1, "the last one, which may be read again"
    check_fresh(pair)
    pair.close()


@pytest.mark.parametrize("kept", [0, 1, 2, 25, 48, 49])
def test_a_new_text_keeps_the_prefix_that_it_shares(subject: Subject, kept: int) -> None:
    pair = subject.open_pair(50)
    pair.say()
    pair.restart([*TEXT[:kept], *TEXT[100:130]])
    if subject.head.name != "mtp":  # whose target may go back further
        assert pair.draft.pending_tokens(pair.text) == (30 if subject.behind == 2 else kept + 29 - max(kept - 1, 0))
    check_fresh(pair)
    pair.restart(TEXT[:50])
    check_fresh(pair)
    pair.close()


def test_another_root_after_the_same_text(subject: Subject) -> None:
    pair = subject.open_pair(50)
    pair.say()
    for text in ([*TEXT[:49], 77], [*TEXT[:20], 78], [*TEXT[:20], 79], TEXT[:21]):
        pair.restart(text)
        if subject.head.name != "mtp":
            assert pair.draft.pending_tokens(pair.text) == 1
        check_fresh(pair)
    pair.close()


def test_a_target_that_goes_back_to_its_checkpoint(subject: Subject) -> None:
    pair = subject.open_pair(40)
    pair.session.checkpoint()
    pair.say()
    pair.verify_chain([5, 6, 7], 2, 8)
    pair.say()
    pair.restart([*TEXT[:39], 9, 10, 11])
    check_fresh(pair)
    pair.close()


def test_a_prompt_that_it_has_not_read_is_no_loss(subject: Subject) -> None:
    """A generation without its drafts, after which the text goes back behind what it has read."""
    pair = subject.open_pair(50)
    pair.say()
    pair.restart([*TEXT[:20], 78])
    pair.restart(TEXT[60:80])
    check_fresh(pair)
    pair.close()


def test_a_cancelled_read_is_done_again(subject: Subject) -> None:
    if subject.behind == 1:
        pair = cancel_a_read(subject.target, subject.head)
        check_fresh(pair)
        pair.close()


def test_a_closed_head_leaves_the_target_without_states(subject: Subject) -> None:
    session = subject.target.open_session()
    draft = subject.head.open_session(session, lambda: None)
    prefill(session, TEXT[:30])
    draft.close()
    for _ in range(3):
        session.forward(5, Draft.chain([6]))
        session.commit((0,))
    session.rewind(0)
    if subject.head.name != "mtp":
        features = session.tap((1,))  # as another head does
        prefill(session, TEXT[:20])
        assert features.take(0, 20).shape == (20, HIDDEN)
    session.close()

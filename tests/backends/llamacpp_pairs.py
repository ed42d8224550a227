"""A target and a head that drafts from its states on llama.cpp, in rounds, beside a pair that is opened anew."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgespec.backends.llamacpp.heads import LlamaHead, open_head
from edgespec.backends.llamacpp.model import LlamaModel, load
from edgespec.backends.llamacpp.session import LlamaSession
from edgespec.backends.options import LoadOptions
from edgespec.controller.fixed import FixedLength
from edgespec.core.loop import speculate
from edgespec.core.protocols import Budget, Step
from edgespec.core.sampling import CounterRng, Logits, Sampler, SamplingParams
from edgespec.core.verify import SampleMatching
from edgespec.drafters.sequential import SequentialDrafter
from edgespec.errors import Cancelled
from tests.backends import head_sessions
from tests.backends.head_sessions import Cancellation
from tests.backends.mtp_heads import make_chain, make_dense, make_hybrid, make_mixture, spec_of

CONTEXT = 512  # of the target
TEXT: list[int] = np.random.default_rng(8).integers(1, 4000, 300).tolist()


class Pair(head_sessions.Pair):
    tolerance = 0.15  # of logits with a standard deviation of 3; the target's states have the noise of other widths


def is_close(a: Any, b: Any) -> bool:
    return head_sessions.is_close(a, b, Pair.tolerance)


class BlockPair(head_sessions.Pair):
    tolerance = 0.1  # of logits with a standard deviation of 0.8 to 4


def check_fresh_block(pair: head_sessions.Pair) -> None:
    """It drafts the block that a new pair does, as far as both take the same best tokens."""
    fresh = pair.fresh()
    ours, theirs = pair.block(), fresh.block()
    fresh.close()
    same = ours.argmax(1) == theirs.argmax(1)
    n = len(same) if pair.head.name == "dflash" or same.all() else int(same.argmin()) + 1
    assert head_sessions.is_close(ours[:n], theirs[:n], pair.tolerance)


MTP_OPTIONS = LoadOptions(context_size=CONTEXT, threads=1, mtp=True)


@dataclass
class MtpSubject:
    """A model and the file that has its MTP layer."""

    target: LlamaModel
    head: LlamaHead
    file: Path


def open_mtp_subject(kind: str, folder: Path) -> MtpSubject:
    makers = {"hybrid": make_hybrid, "dense": make_dense, "chain": make_chain}
    file = makers.get(kind, make_mixture)(folder / "model.gguf")
    target = load(file, MTP_OPTIONS)
    if kind == "alone":
        file = make_mixture(folder / "mtp-model.gguf", is_alone=True)
    return MtpSubject(target, open_head(target, file, spec_of(file)), file)


def run_rounds(pair: head_sessions.Pair, behind: int) -> None:
    """Rounds after drafts, in which the target accepts some tokens. `behind` are unread where it accepts none."""
    rng = np.random.default_rng(3)
    for n_accepted in (2, 0, 3, 1, 3, 0, 2):
        drafted = rng.integers(1, 4000, 3).tolist()
        assert pair.draft.pending_tokens(pair.text) > 0
        pair.say(drafted[:-1])
        pair.verify_chain(drafted, n_accepted, int(rng.integers(1, 4000)))
        assert pair.draft.pending_tokens(pair.text) == n_accepted + behind


def skip_rounds(pair: head_sessions.Pair, behind: int) -> None:
    """Rounds without a draft of the head, which it reads later."""
    pair.say()
    for i in range(5):
        pair.verify_chain([5, 6], i % 3, 9 + i)
    assert pair.draft.pending_tokens(pair.text) == 5 + 0 + 1 + 2 + 0 + 1 + behind - 1


def cancel_a_read(target: LlamaModel, head: LlamaHead) -> Pair:
    """A pair whose read was cancelled after a round."""
    check = Cancellation()
    pair = Pair(target, head, TEXT[:50], check)
    pair.read()
    pair.verify_chain([5, 6, 7], 2, 8)
    check.left = 1
    with pytest.raises(Cancelled):
        pair.read()
    assert pair.draft.pending_tokens(pair.text) == 3
    return pair


def check_steps(pair: head_sessions.Pair, reference: Callable[[list[int]], Logits]) -> Logits:
    """[V] after the text. The head says what `reference` does, after the text and after three drafted tokens."""
    logits = pair.read()
    assert logits.shape == (4096,) and logits.dtype == np.float32 and logits[np.isfinite(logits)].std() > 1
    assert is_close(logits, reference([]))
    drafted: list[int] = []
    for token in (40, 41, 42):
        drafted.append(token)
        assert is_close(pair.step(token), reference(drafted))
    return logits


def check_answers(
    target: LlamaModel, head: LlamaHead, kind: str, prompts: Sequence[list[int]], nodes: int, temperature: float = 0.0
) -> None:
    """With drafts of the head they are those of plain decoding."""
    session, plain = target.open_session(), target.open_session()
    drafter = SequentialDrafter(kind, head.open_session(session, lambda: None))
    for prompt in prompts:
        tokens, n_tested = generate(session, FixedLength([drafter], Budget(3, nodes), 4096), prompt, temperature)
        expected, _ = generate(plain, FixedLength([], Budget(0, 0), 4096), prompt, temperature)
        assert tokens == expected
        assert n_tested >= 20
    drafter.close()
    session.close()
    plain.close()


def generate(
    session: LlamaSession, controller: FixedLength, prompt: list[int], temperature: float = 0.0
) -> tuple[list[int], int]:
    """The answer with one seed, and how many drafted tokens were tested."""
    sampler = Sampler(SamplingParams(temperature=temperature), session.capabilities.vocab_size)
    tokens: list[int] = []
    n_tested = 0
    verifier = SampleMatching(sampler, CounterRng(3))
    for event in speculate(session, controller, verifier, prompt, max_tokens=60, stop=frozenset()):
        if isinstance(event, Step):
            tokens += event.tokens
            n_tested += event.n_tested
    assert not controller.failures
    return tokens, n_tested

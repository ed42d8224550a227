"""A target and a head that drafts from its states on llama.cpp, in rounds, beside a pair that is opened anew."""

from __future__ import annotations

import numpy as np

from edgespec.backends.llamacpp.model import LlamaModel
from edgespec.backends.llamacpp.pair_session import PairHead
from edgespec.backends.llamacpp.session import LlamaSession
from edgespec.controller.fixed import FixedLength
from edgespec.core.arrays import Logits
from edgespec.core.loop import speculate
from edgespec.core.protocols import Draft, Step
from edgespec.core.rng import CounterRng
from edgespec.core.sampling import Sampler, SamplingParams
from edgespec.core.verify import SampleMatching
from tests.contract.runtimes import prefill

TOLERANCE = 0.15  # of logits with a standard deviation of 3, where the target's states have the noise of other widths
ALL = 2**20  # tokens of a window that holds every text


class Pair:
    """A session of the target and the head's for it; `text` ends with the root."""

    def __init__(self, target: LlamaModel, head: PairHead, text: list[int]) -> None:
        self.target = target.open_session()
        self.draft = head.open_session(self.target, lambda: None)
        self.restart(text)

    def restart(self, text: list[int]) -> None:
        """A generation starts: the target reads the prompt and emits the last token of `text`."""
        self.text = list(text)
        prefill(self.target, text[:-1])
        self.draft.begin(text)

    def read(self) -> Logits:
        logits = self.draft.read(self.text, ALL)
        assert logits is not None
        return logits

    def verify(self, drafted: list[int], n_accepted: int, root: int) -> None:
        """A round in which the target accepts some drafted tokens and emits `root` after them."""
        self.target.forward(self.text[-1], Draft.chain(drafted))
        self.target.commit(range(n_accepted))
        self.text += [*drafted[:n_accepted], root]

    def close(self) -> None:
        self.draft.close()
        self.target.close()


def is_close(a: Logits, b: Logits) -> bool:
    np.testing.assert_array_equal(np.isinf(a), np.isinf(b))
    finite = np.isfinite(a)
    return bool(np.abs(a[finite] - b[finite]).max() < TOLERANCE)


def is_fresh(target: LlamaModel, head: PairHead, pair: Pair) -> bool:
    """Whether the pair drafts two tokens as a new one does."""
    fresh = Pair(target, head, pair.text)
    found = [is_close(pair.read(), fresh.read())]
    for token in (17, 23):
        ours, theirs = pair.draft.step(token), fresh.draft.step(token)
        assert ours is not None and theirs is not None
        found.append(is_close(ours, theirs))
    fresh.close()
    return all(found)


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

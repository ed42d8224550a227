"""Models with MTP layers on llama.cpp, and answers with the drafts of heads beside those of plain decoding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from edgespec.autopilot.fixed import FixedLength
from edgespec.backends.llamacpp.heads import LlamaHead, open_head
from edgespec.backends.llamacpp.model import LlamaModel, load
from edgespec.backends.llamacpp.session import LlamaSession
from edgespec.backends.options import LoadOptions
from edgespec.core.drafter import BlockSession, Drafter
from edgespec.core.loop import speculate
from edgespec.core.protocols import Budget, Step, Verifier
from edgespec.core.rng import CounterRng
from edgespec.core.sampling import Sampler, SamplingParams
from edgespec.core.verify import SampleMatching
from edgespec.drafters.block import BlockDrafter
from edgespec.drafters.sequential import SequentialDrafter
from tests.backends.mtp_heads import make_chain, make_dense, make_hybrid, make_mixture, spec_of

CONTEXT = 512


@dataclass
class MtpSubject:
    """A model and the file that has its MTP layer."""

    target: LlamaModel
    head: LlamaHead
    file: Path


def open_mtp_subject(kind: str, folder: Path, context_size: int = CONTEXT) -> MtpSubject:
    makers = {"hybrid": make_hybrid, "dense": make_dense, "chain": make_chain}
    file = makers.get(kind, make_mixture)(folder / "model.gguf")
    target = load(file, LoadOptions(context_size=context_size, threads=1, mtp=True))
    if kind == "alone":
        file = make_mixture(folder / "mtp-model.gguf", is_alone=True)
    return MtpSubject(target, open_head(target, file, spec_of(file)), file)


def open_drafter(head: LlamaHead, session: LlamaSession) -> Drafter:
    opened = head.open_session(session)
    if isinstance(opened, BlockSession):
        return BlockDrafter(head.name, opened)
    return SequentialDrafter(head.name, opened)


def check_answers(
    target: LlamaModel, head: LlamaHead, prompts: Sequence[list[int]], nodes: int, temperature: float = 0.0
) -> None:
    """With drafts of the head they are those of plain decoding."""
    session, plain = target.open_session(), target.open_session()
    drafter = open_drafter(head, session)
    verifier = SampleMatching(Sampler(SamplingParams(temperature=temperature), 4096), CounterRng(3))
    for prompt in prompts:
        tokens, n_tested = generate(session, FixedLength([drafter], Budget(3, nodes), 4096), prompt, verifier)
        expected, _ = generate(plain, FixedLength([], Budget(0, 0), 4096), prompt, verifier)
        assert tokens == expected
        assert n_tested >= 15
    drafter.close()
    session.close()
    plain.close()


def generate(
    session: LlamaSession, controller: FixedLength, prompt: list[int], verifier: Verifier
) -> tuple[list[int], int]:
    """The answer with one seed, and how many drafted tokens were tested."""
    tokens: list[int] = []
    n_tested = 0
    for event in speculate(session, controller, verifier, prompt, max_tokens=40, stop=frozenset()):
        if isinstance(event, Step):
            tokens += event.tokens
            n_tested += event.n_tested
    assert not controller.failures
    return tokens, n_tested

"""A trained DFlash head on llama.cpp: what it gains, and that every mistake in reading it costs acceptance."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgespec.autopilot.fixed import FixedLength
from edgespec.backends.llamacpp import heads
from edgespec.backends.llamacpp.heads import LlamaHead, open_head
from edgespec.backends.llamacpp.heads.contexts import BlockContext
from edgespec.backends.llamacpp.hidden_states import Floats
from edgespec.backends.llamacpp.model import LlamaModel, load
from edgespec.backends.options import LoadOptions
from edgespec.core.loop import speculate
from edgespec.core.protocols import Budget, Step, Verifier
from edgespec.core.rng import CounterRng
from edgespec.core.sampling import Sampler, SamplingParams
from edgespec.core.verify import BlockVerification, SampleMatching, TokenRejection
from edgespec.drafters.block import BlockDrafter
from edgespec.drafters.candidates import RequestDraw
from edgespec.formats.head_file import read_head
from edgespec.formats.heads import HeadSpec
from laboratory.dflash_gguf import convert
from tests.gguf_models import REPOSITORY, TARGET

TRAINED = REPOSITORY / "tests" / "fixtures" / "heads" / "dflash-python-6m"
PROMPTS = (
    "def read_lines(path):",
    "class Config:\n    def __init__(self",
    "import os\n\n\ndef list_files(folder",
    "def parse_arguments():\n    parser = argparse.",
    "for name in sorted(names):\n    if name not in",
    "    def test_empty(self):\n        self.assertEqual(",
)
DEPTH, N = 4, 64


@pytest.fixture(scope="module")
def target() -> Iterator[LlamaModel]:
    model = load(TARGET, LoadOptions(context_size=512, threads=1, exact=True))
    yield model
    model.close()


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("heads") / "trained.gguf"
    convert(TRAINED, TARGET, path)
    return path


@pytest.fixture(scope="module")
def spec(file: Path) -> HeadSpec:
    found = read_head(file)
    assert found is not None
    return found


def answer(
    target: LlamaModel,
    head: LlamaHead | None,
    budget: Budget,
    make: Callable[[Sampler], Verifier],
    temperature: float = 0.0,
    *,
    is_drawn: bool = False,
) -> tuple[list[list[int]], float]:
    """The answer to each prompt, and the tokens that a forward of the target emits, without the first ones."""
    session = target.open_session()
    drafter = BlockDrafter("dflash", head.open_session(session)) if head is not None else None
    sampler = Sampler(SamplingParams(temperature=temperature), 4096)
    draw = RequestDraw(sampler, np.random.default_rng(1)) if is_drawn else None
    texts, n_tokens, n_rounds = [], 0, 0
    for prompt in PROMPTS:
        controller = FixedLength([drafter] if drafter else [], budget, 4096, draw)
        tokens: list[int] = []
        ids = target.tokenizer.encode(prompt, parse_special=False)
        for event in speculate(session, controller, make(sampler), ids, max_tokens=N, stop=frozenset()):
            if isinstance(event, Step):
                tokens += event.tokens
                n_tokens, n_rounds = n_tokens + len(event.tokens) * bool(event.index), n_rounds + bool(event.index)
        assert not controller.failures
        texts.append(tokens)
    if drafter is not None:
        drafter.close()
    session.close()
    return texts, n_tokens / n_rounds


def match(sampler: Sampler) -> Verifier:
    return SampleMatching(sampler, CounterRng(5))


@pytest.fixture(scope="module")
def plain(target: LlamaModel) -> dict[float, list[list[int]]]:
    """The answers of plain decoding by temperature."""
    return {t: answer(target, None, Budget(0, 0), match, t)[0] for t in (0.0, 0.8)}


@pytest.fixture(scope="module")
def tau(target: LlamaModel, file: Path, spec: HeadSpec) -> float:
    head = open_head(target, file, spec)
    _, found = answer(target, head, Budget(DEPTH, DEPTH), match)
    head.close()
    return found


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("nodes", [DEPTH, 12], ids=["chain", "tree"])
def test_texts_are_those_of_plain_decoding(
    target: LlamaModel, file: Path, spec: HeadSpec, plain: dict[float, list[list[int]]], nodes: int, temperature: float
) -> None:
    head = open_head(target, file, spec)
    texts, found = answer(target, head, Budget(DEPTH, nodes), match, temperature)
    assert texts == plain[temperature]
    assert found > (1.4 if temperature == 0 else 1.2), "trained for this target"
    head.close()


@pytest.mark.parametrize("rule", [TokenRejection, BlockVerification])
def test_drawn_chains_are_accepted(
    target: LlamaModel, file: Path, spec: HeadSpec, rule: type[TokenRejection | BlockVerification]
) -> None:
    head = open_head(target, file, spec)
    _, found = answer(
        target, head, Budget(DEPTH, DEPTH), lambda sampler: rule(sampler, CounterRng(5)), 0.8, is_drawn=True
    )
    assert found > 1.2
    head.close()


def shift_layers(spec: HeadSpec) -> HeadSpec:
    return replace(spec, layers=tuple(layer - 1 for layer in spec.layers or ()))


def reverse_layers(spec: HeadSpec) -> HeadSpec:
    return replace(spec, layers=(spec.layers or ())[::-1])


def mask_otherwise(spec: HeadSpec) -> HeadSpec:
    return replace(spec, mask_token=4)


def predict_at_root(spec: HeadSpec) -> HeadSpec:
    return replace(spec, predicts_at_root=True)


@pytest.mark.parametrize(
    ("mutate", "loss"),
    [(shift_layers, 0.02), (reverse_layers, 0.3), (mask_otherwise, 0.3), (predict_at_root, 0.3)],
)
def test_a_head_that_is_read_wrongly_drafts_worse(
    target: LlamaModel,
    file: Path,
    spec: HeadSpec,
    plain: dict[float, list[list[int]]],
    tau: float,
    mutate: Callable[[HeadSpec], HeadSpec],
    loss: float,
) -> None:
    """This head reads little of its first layers, so that their neighbours serve it nearly as well."""
    head = open_head(target, file, mutate(spec))
    texts, found = answer(target, head, Budget(DEPTH, DEPTH), match)
    assert texts == plain[0.0]
    assert found < tau - loss
    head.close()


class Changed:
    """Features of which the last row of each read is zero."""

    def __init__(self, take: Callable[[int, int], Floats]) -> None:
        self._take = take

    def take(self, first: int, last: int) -> Floats:
        rows = self._take(first, last).copy()
        rows[-1] = 0
        return rows


class Later(BlockContext):
    """A block one position further than its text."""

    def start(self, text: Sequence[int]) -> None:
        later: Any = Changed(lambda first, last: np.zeros((last - first, self._features.shape[1]), np.float32))
        super().read([*text, text[-1]], len(text) - 1, later)
        super().start([*text, text[-1]])


class Forgetful(BlockContext):
    """The last state of the text is another one."""

    def read(self, text: Sequence[int], first: int, features: Any) -> int:
        changed: Any = Changed(features.take)
        return super().read(text, first, changed)


@pytest.mark.parametrize("context", [Later, Forgetful])
def test_a_block_that_is_run_wrongly_drafts_worse(
    target: LlamaModel,
    file: Path,
    spec: HeadSpec,
    plain: dict[float, list[list[int]]],
    tau: float,
    monkeypatch: pytest.MonkeyPatch,
    context: type[BlockContext],
) -> None:
    monkeypatch.setattr(heads, "BlockContext", context)
    head = open_head(target, file, spec)
    texts, found = answer(target, head, Budget(DEPTH, DEPTH), match)
    assert texts == plain[0.0]
    assert found < tau - 0.05
    head.close()

"""DFlash and DSpark heads on llama.cpp: answers with them are those of plain decoding, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from edgespec.backends.attached_draft import Unsupported
from edgespec.backends.llamacpp.heads import open_head
from edgespec.backends.llamacpp.model import LlamaModel, load
from edgespec.backends.llamacpp.session import LlamaSession
from edgespec.backends.options import LoadOptions
from edgespec.controller.fixed import FixedLength
from edgespec.core.loop import speculate
from edgespec.core.protocols import Budget, Step, Verifier
from edgespec.core.sampling import CounterRng, Sampler, SamplingParams
from edgespec.core.verify import BlockVerification, SampleMatching, TokenRejection
from edgespec.drafters.block import BlockDrafter
from edgespec.drafters.sequential import RequestDraw
from edgespec.errors import InvalidModelFile
from edgespec.formats.gguf_validate import read_file
from edgespec.formats.head_file import read_head
from tests.backends.dflash_heads import BLOCK, Dialect, make_dflash
from tests.models import DRAFT, TARGET, sliding_window

CONTEXT = 512
TEXT: list[int] = np.random.default_rng(8).integers(1, 4000, 300).tolist()
PROMPTS = (TEXT[:30], [*TEXT[:20], *TEXT[50:60]], TEXT[100:103])


@pytest.fixture(scope="module")
def target() -> Iterator[LlamaModel]:
    model = load(TARGET, LoadOptions(context_size=CONTEXT, threads=1, exact=True))
    yield model
    model.close()


def generate(
    session: LlamaSession, drafter: BlockDrafter | None, verifier: Verifier, budget: Budget, draw: RequestDraw | None
) -> list[tuple[list[int], int]]:
    """The answer to each prompt, and how many drafted tokens were tested."""
    answers = []
    for prompt in PROMPTS:
        controller = FixedLength([drafter] if drafter else [], budget, 4096, draw)
        tokens: list[int] = []
        n_tested = 0
        for event in speculate(session, controller, verifier, prompt, max_tokens=60, stop=frozenset()):
            if isinstance(event, Step):
                tokens += event.tokens
                n_tested += event.n_tested
        assert not controller.failures
        answers.append((tokens, n_tested))
    return answers


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("nodes", [4, 12], ids=["chain", "tree"])
@pytest.mark.parametrize("dialect", [Dialect(), Dialect(markov=True, is_reduced=True)], ids=["dflash", "dspark"])
def test_answers_are_those_of_plain_decoding(
    target: LlamaModel, tmp_path: Path, dialect: Dialect, nodes: int, temperature: float
) -> None:
    head = open_head(target, make_dflash(tmp_path / "head.gguf", dialect), dialect.spec)
    session, plain = target.open_session(), target.open_session()
    drafter = BlockDrafter(head.name, head.open_session(session, lambda: None))
    assert drafter.block_size == BLOCK - dialect.first
    verifier = SampleMatching(Sampler(SamplingParams(temperature=temperature), 4096), CounterRng(5))
    found = generate(session, drafter, verifier, Budget(4, nodes), None)
    wanted = generate(plain, None, verifier, Budget(0, 0), None)
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in wanted]
    assert min(n_tested for _, n_tested in found) >= 20
    drafter.close()
    for each in (session, plain, head):
        each.close()


@pytest.mark.parametrize("rule", [TokenRejection, BlockVerification])
@pytest.mark.parametrize("dialect", [Dialect(is_reduced=True), Dialect(markov=True)], ids=["dflash", "dspark"])
def test_drawn_chains_serve_the_rejection_rules(
    target: LlamaModel, tmp_path: Path, dialect: Dialect, rule: type[TokenRejection | BlockVerification]
) -> None:
    head = open_head(target, make_dflash(tmp_path / "head.gguf", dialect), dialect.spec)
    session = target.open_session()
    drafter = BlockDrafter(head.name, head.open_session(session, lambda: None))
    sampler = Sampler(SamplingParams(temperature=0.8), 4096)
    draw = RequestDraw(sampler, np.random.default_rng(2))
    for tokens, n_tested in generate(session, drafter, rule(sampler, CounterRng(5)), Budget(4, 4), draw):
        assert len(tokens) == 60 and n_tested >= 20
    drafter.close()
    session.close()
    head.close()


def refuse(target: LlamaModel, path: Path, match: str, kind: type[Exception] = InvalidModelFile) -> None:
    """The file's own description is refused in one sentence."""
    spec = read_head(path)
    assert spec is not None
    with pytest.raises(kind, match=match) as refused:
        open_head(target, path, spec)
    assert "\n" not in str(refused.value) and refused.value.hint  # type: ignore[attr-defined]


def test_a_head_for_another_model_is_refused(target: LlamaModel, tmp_path: Path) -> None:
    small = load(DRAFT, LoadOptions(context_size=CONTEXT, threads=1))
    path = make_dflash(tmp_path / "head.gguf")
    refuse(small, path, r"is a head for a hidden size of 256; the model has 128\.$", Unsupported)
    small.close()
    for layer in (6, 7):
        spec = replace(Dialect().spec, layers=(1, 2, 3, layer))
        head = open_head(target, path, spec)
        session = target.open_session()
        with pytest.raises(Unsupported):
            head.open_session(session, lambda: None)
        session.close()
        head.close()


def test_an_architecture_without_hidden_states_is_refused(tmp_path: Path) -> None:
    sliding_window(tmp_path / "target.gguf")
    target = load(tmp_path / "target.gguf", LoadOptions(context_size=CONTEXT, threads=1))
    head = open_head(target, make_dflash(tmp_path / "head.gguf", size=64), replace(Dialect().spec, hidden_size=64))
    session = target.open_session()
    with pytest.raises(Unsupported, match=r"llama\.cpp does not give the hidden states of 'gemma3' models"):
        head.open_session(session, lambda: None)
    for each in (session, head, target):
        each.close()


@pytest.mark.parametrize(
    ("keys", "match"),
    [
        ({"attention__value_length": 16}, "its keys and values differ in size"),
        ({"attention__head_count_kv": 3}, "heads do not share keys evenly"),
        ({"attention__head_count": 0}, "heads do not share keys evenly"),
        ({"rope__dimension_count": 64}, "64 numbers of a head are rotated, and it has 32"),
        ({"rope__dimension_count": 15}, "15 numbers of a head are rotated"),
        ({"rope__dimension_sections": 20}, r"has the sections \[20, 20, 20, 20\] of 32 numbers"),
        ({"embedding_length": 128}, "fc.weight has the shape"),
    ],
)
def test_numbers_on_which_llama_cpp_aborts(
    target: LlamaModel, tmp_path: Path, keys: dict[str, int], match: str
) -> None:
    path = make_dflash(tmp_path / "head.gguf", **keys)
    with pytest.raises(InvalidModelFile, match=match):
        open_head(target, path, read_head(path) or Dialect().spec)


@pytest.mark.parametrize("size", [1, 65, 1000])
def test_blocks_of_other_sizes_are_refused(target: LlamaModel, tmp_path: Path, size: int) -> None:
    path = make_dflash(tmp_path / "head.gguf", block_size=size)
    refuse(target, path, f"has blocks of {size:,} positions; those of 2 to 64 are run", Unsupported)


def test_other_kinds_in_such_files_are_refused(target: LlamaModel, tmp_path: Path) -> None:
    path = make_dflash(tmp_path / "v4.gguf", hyper_connection_count=2)
    refuse(target, path, "is a head of the kind DeepSeek V4's DSpark, which is not run", Unsupported)


@pytest.mark.parametrize("token", [None, 4096, 2**20])
def test_a_mask_token_that_the_model_lacks(target: LlamaModel, tmp_path: Path, token: int | None) -> None:
    path = make_dflash(tmp_path / "head.gguf")
    named = "none" if token is None else f"{token:,} of 4,096"
    with pytest.raises(Unsupported, match=f"a token of the model, and its file names {named}"):
        open_head(target, path, replace(Dialect().spec, mask_token=token))


@pytest.mark.parametrize("max_id", [4096, -1])
def test_ids_beyond_the_vocabulary_are_refused(target: LlamaModel, max_id: int, tmp_path: Path) -> None:
    path = make_dflash(tmp_path / "head.gguf", Dialect(is_reduced=True), max_id=max_id)
    refuse(target, path, "d2t names tokens that the model does not have")


def test_a_head_cut_short_is_refused(target: LlamaModel, tmp_path: Path) -> None:
    path = make_dflash(tmp_path / "head.gguf")
    data = path.read_bytes()
    for size in (100, read_file(path).data_offset + 1000, len(data) - 5000):
        path.write_bytes(data[:size])
        with pytest.raises(InvalidModelFile):
            open_head(target, path, Dialect().spec)


def test_weights_that_are_not_numbers_are_an_error(target: LlamaModel, tmp_path: Path) -> None:
    path = make_dflash(tmp_path / "head.gguf")
    header = read_file(path)
    offset = next(each.offset for each in header.tensors if each.name == "enc.output_norm.weight")
    data = bytearray(path.read_bytes())
    data[header.data_offset + offset : header.data_offset + offset + 4] = np.float32("nan").tobytes()
    path.write_bytes(data)
    head = open_head(target, path, Dialect().spec)
    session = target.open_session()
    drafter = BlockDrafter("dflash", head.open_session(session, lambda: None))
    controller = FixedLength([drafter], Budget(3, 3), 4096)
    verifier = SampleMatching(Sampler(SamplingParams(temperature=0), 4096), CounterRng(0))
    for _ in speculate(session, controller, verifier, TEXT[:30], max_tokens=8, stop=frozenset()):
        pass
    assert "NaN" in controller.failures["dflash"], "it is dropped, and the text goes on"
    drafter.close()
    session.close()
    head.close()

"""Trained heads on llama.cpp: random weights against numpy, and answers that are those of plain decoding."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgespec.autopilot.fixed import FixedLength
from edgespec.backends.llamacpp.heads import LlamaHead, open_head
from edgespec.backends.llamacpp.model import LlamaModel, load
from edgespec.backends.options import LoadOptions
from edgespec.core.arrays import Logits
from edgespec.core.protocols import Budget, Draft
from edgespec.core.rng import CounterRng
from edgespec.core.sampling import Sampler, SamplingParams
from edgespec.core.verify import BlockVerification, SampleMatching, TokenRejection
from edgespec.drafters.candidates import RequestDraw
from edgespec.formats.gguf_validate import read_file
from tests.backends.assistant_heads import Reference, make_assistant, make_target
from tests.backends.dflash_heads import BLOCK, DIALECTS, LAYERS, Dialect, NumpyDflash, make_dflash
from tests.backends.eagle3_heads import HIDDEN, NumpyHead, make_head
from tests.backends.head_sessions import TEXT, Pair, is_close
from tests.backends.llamacpp_pairs import CONTEXT, check_answers, generate, open_drafter, open_mtp_subject
from tests.backends.mlx_pairs import read_spec
from tests.backends.mtp_heads import LAYERS as MTP_LAYERS
from tests.backends.mtp_heads import WIDTH, NumpyLayer, make_mixture, spec_of
from tests.contract.runtimes import prefill
from tests.gguf_models import TARGET

PAIRS = 0.15  # of logits with a standard deviation of 3; the target's states have the noise of other widths
BLOCKS = 0.1  # of logits with a standard deviation of 0.8 to 4
OPTIONS = LoadOptions(context_size=CONTEXT, threads=1)
EAGLE3 = {"shared": {"size": HIDDEN}, "own": {"size": 64}, "normed": {"size": HIDDEN, "is_normed": True}}


@pytest.fixture(scope="module")
def target() -> Iterator[LlamaModel]:
    model = load(TARGET, OPTIONS)
    yield model
    model.close()


@dataclass
class Case:
    """A head, its target, and [V] of a numpy reference for the target's states, a text and drafted tokens."""

    target: LlamaModel
    head: LlamaHead
    reference: Callable[[np.ndarray, list[int], list[int]], Logits]


def open_case(kind: str, target: LlamaModel, folder: Path) -> Case:
    if kind in EAGLE3:
        made = make_head(folder / "head.gguf", **EAGLE3[kind])  # type: ignore[arg-type]
        numpy_head = NumpyHead(made)
        return Case(target, open_head(target, made.path, made.spec), lambda s, t, d: numpy_head.logits(s, t[1:], d))
    if kind == "assistant":
        path, own = make_assistant(folder / "head.gguf"), load(make_target(folder / "target.gguf"), OPTIONS)
        reference = Reference(folder / "target.gguf", path)
        return Case(own, open_head(own, path, read_spec(path)), lambda s, t, d: reference.logits(t, d))
    found = open_mtp_subject(kind, folder)
    layer = NumpyLayer(found.file)
    return Case(found.target, found.head, lambda s, t, d: layer.logits(s, t[1:], d))


def states_of(target: LlamaModel, layers: Any, text: list[int]) -> np.ndarray:
    """[n, width] the hidden states of a fresh session that reads `text`."""
    session = target.open_session()
    features = session.tap(layers)
    prefill(session, text)
    rows = features.take(0, len(text)).copy()
    session.close()
    return rows


@pytest.mark.parametrize("kind", [*EAGLE3, "mixture", "alone", "dense", "assistant"])
def test_pairs_are_those_of_numpy(target: LlamaModel, kind: str, tmp_path: Path) -> None:
    """After the text, after three drafted tokens, and behind a window; several decodes of the head."""
    case = open_case(kind, target, tmp_path)
    text = TEXT[:140]
    rows = states_of(case.target, case.head._spec.layers or (), text[:-1])
    pair = Pair(case.target, case.head, text)
    logits = pair.read()
    assert logits.shape == (4096,) and logits.dtype == np.float32 and logits[np.isfinite(logits)].std() > 1
    assert is_close(logits, case.reference(rows, text, []), PAIRS)
    for n in (1, 2, 3):
        assert is_close(pair.step(39 + n), case.reference(rows, text, [40, 41, 42][:n]), PAIRS)
    assert not is_close(logits, case.reference(rows, [700, *text[2:], 9], []), PAIRS)
    if not case.head.shares_kv:
        assert not is_close(logits, case.reference(np.roll(rows, 1, axis=0), text, []), PAIRS)
        pair.restart(TEXT[200:230])
        pair.restart(text)
        ends = case.reference(rows[49:], text[49:], [])  # positions are relative
        assert is_close(pair.read(90), ends, PAIRS)
    pair.close()
    case.head.close()
    if case.target is not target:
        case.target.close()


@pytest.mark.parametrize("name", DIALECTS)
def test_blocks_are_those_of_numpy(target: LlamaModel, name: str, tmp_path: Path) -> None:
    dialect = DIALECTS[name]
    path = make_dflash(tmp_path / "head.gguf", dialect)
    head = open_head(target, path, dialect.spec)
    text = TEXT[:140]  # three decodes of states
    states, reference = states_of(target, LAYERS, text[:-1]), NumpyDflash(path, dialect)
    pair = Pair(target, head, text)
    rows = pair.block()
    assert rows.shape == (BLOCK - dialect.first, 4096) and rows.dtype == np.float32
    best = rows.argmax(1).tolist()
    assert is_close(rows, reference.logits(states, text[-1], best), BLOCKS)
    assert not is_close(rows, reference.logits(states[:-1], text[-1], best), BLOCKS), "it reads every state"
    assert not is_close(rows, reference.logits(states, text[-2], best), BLOCKS), "it reads the root"
    for n in (1, 2):
        assert is_close(pair.block(n=n), rows[:n], BLOCKS), "fewer rows are the first of all"
    short = Pair(target, head, text)
    found = short.block(90)
    assert is_close(found, reference.logits(states[50:], text[-1], found.argmax(1).tolist()), BLOCKS)
    for each in (pair, short, head):
        each.close()


def test_each_layer_of_a_chain_drafts_one_token(tmp_path: Path) -> None:
    subject = open_mtp_subject("chain", tmp_path)
    layers = [NumpyLayer(subject.file, number) for number in range(3)]
    text = TEXT[:90]
    h, tokens = states_of(subject.target, (), text[:-1]).astype(np.float64), text[1:]
    pair = Pair(subject.target, subject.head, text)
    logits: Logits | None = pair.read()
    for layer, drafted in zip(layers, (40, 41, 42), strict=True):
        assert logits is not None
        states = layer.run(h, tokens)
        assert is_close(logits, layer.output(states[-1]), PAIRS)
        h, tokens = np.concatenate([h, states[-1:]]), [*tokens, drafted]
        logits = pair.draft.step(drafted)
    assert logits is None and list(pair.draft.text) == [*text, 40, 41]
    for each in (pair, subject.head, subject.target):
        each.close()


def test_the_last_hidden_states_are_those_of_the_text(tmp_path: Path) -> None:
    """They give the target's logits; also after chains and trees, and beside another session of the context."""
    mixture = make_mixture(tmp_path / "model.gguf")
    target = load(mixture, replace(OPTIONS, mtp=True, caches=2))
    target.lends_cells = True  # so that drafts may be trees
    session, beside = target.open_session(shared=True), target.open_session(shared=True)
    features, text = session.tap((MTP_LAYERS,)), TEXT[:30]
    prefill(beside, TEXT[60:90])
    logits, rows = prefill(session, text), features.take(0, 30)
    assert rows.shape == (30, WIDTH)
    assert is_close(logits, NumpyLayer(mixture).output(rows[-1]), PAIRS)
    assert not is_close(logits, NumpyLayer(mixture).output(rows[-2]), PAIRS)
    tree = Draft(np.array([7, 8, 9, 10, 11], np.int32), np.array([-1, -1, 1, 0, 2], np.int32))
    for draft, path in ((tree, (1, 2, 4)), (Draft.chain([1, 2, 3]), (0, 1)), (tree, ())):
        beside.forward(6, Draft.chain([4, 5]))
        session.forward(5, draft)
        for each, kept in ((beside, ()), (session, path)):
            each.commit(kept)
        text = [*text, 5, *draft.tokens[list(path)].tolist()]
        np.testing.assert_allclose(features.take(0, len(text)), states_of(target, (), text), atol=0.05)
    assert not session.adopt(beside, 10), "hidden states are not copied"
    for each in (session, beside, target):
        each.close()


@pytest.mark.parametrize(
    ("kind", "nodes", "temperature"),
    [
        *(("eagle3", nodes, 0.0) for nodes in (3, 9)),
        *(("mixture", nodes, temperature) for nodes, temperature in ((3, 0.8), (9, 0.0))),
        ("hybrid", 3, 0.0),
        ("chain", 3, 0.0),
        ("assistant", 9, 0.0),
        ("dflash", 4, 0.8),
        ("dflash", 12, 0.0),
        ("dflash2", 4, 0.0),
        ("dflash2", 12, 0.8),
        ("dspark reduced", 4, 0.0),
        ("dspark reduced", 12, 0.8),
    ],
)
def test_answers_are_those_of_plain_decoding(kind: str, nodes: int, temperature: float, tmp_path: Path) -> None:
    """With kernels whose results do not depend on the number of rows where trees and draws are compared."""
    if kind in ("hybrid", "chain"):
        subject = open_mtp_subject(kind, tmp_path)
        target, head = subject.target, subject.head
    elif kind == "mixture":
        file = make_mixture(tmp_path / "model.gguf", is_quantized=True)
        target = load(file, replace(OPTIONS, mtp=True, exact=True))
        assert target.is_row_invariant, "the router of the MTP layer, in F32, only drafts"
        head = open_head(target, file, spec_of(file))
        assert head.extra_bytes == 0
    elif kind == "assistant":
        case = open_case(kind, load(TARGET, OPTIONS), tmp_path)
        target, head = case.target, case.head
    else:
        target = load(TARGET, replace(OPTIONS, exact=True))
        if kind == "eagle3":
            made = make_head(tmp_path / "head.gguf")
            head = open_head(target, made.path, made.spec)
        else:
            head = open_head(target, make_dflash(tmp_path / "head.gguf", DIALECTS[kind]), DIALECTS[kind].spec)
    check_answers(target, head, (TEXT[:30], [*TEXT[:20], *TEXT[50:60]]), nodes, temperature)
    head.close()
    target.close()


@pytest.mark.parametrize("rule", [TokenRejection, BlockVerification])
def test_drawn_chains_serve_the_rejection_rules(
    target: LlamaModel, tmp_path: Path, rule: type[TokenRejection | BlockVerification]
) -> None:
    dialect = Dialect(markov=True)
    head = open_head(target, make_dflash(tmp_path / "head.gguf", dialect), dialect.spec)
    session = target.open_session()
    drafter = open_drafter(head, session)
    sampler = Sampler(SamplingParams(temperature=0.8), 4096)
    draw = RequestDraw(sampler, np.random.default_rng(2))
    controller = FixedLength([drafter], Budget(4, 4), 4096, draw)
    tokens, n_tested = generate(session, controller, TEXT[:30], rule(sampler, CounterRng(5)))
    assert len(tokens) == 40 and n_tested >= 15
    for each in (drafter, session, head):
        each.close()


def test_weights_that_are_not_numbers_are_an_error(target: LlamaModel, tmp_path: Path) -> None:
    path = make_dflash(tmp_path / "head.gguf")
    header = read_file(path)
    offset = next(each.offset for each in header.tensors if each.name == "enc.output_norm.weight")
    data = bytearray(path.read_bytes())
    data[header.data_offset + offset : header.data_offset + offset + 4] = np.float32("nan").tobytes()
    path.write_bytes(data)
    head = open_head(target, path, Dialect().spec)
    session = target.open_session()
    drafter = open_drafter(head, session)
    controller = FixedLength([drafter], Budget(3, 3), 4096)
    verifier = SampleMatching(Sampler(SamplingParams(temperature=0), 4096), CounterRng(0))
    with pytest.raises(AssertionError):  # of failures
        generate(session, controller, TEXT[:30], verifier)
    assert "NaN" in controller.failures["dflash"], "it is dropped, and the text goes on"
    for each in (drafter, session, head):
        each.close()

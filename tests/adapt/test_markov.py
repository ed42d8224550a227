"""Terms for pairs of tokens, learned from the rows of a block drafter."""

from __future__ import annotations

import numpy as np
import pytest

from edgespec.adapt.markov import CandidateRows, read_rows, train_bigram
from edgespec.adapt.texts import TrainingText
from edgespec.backends.llamacpp.model import load
from edgespec.backends.options import LoadOptions
from edgespec.core.sampling import top_k
from edgespec.drafters.recycling import CANDIDATES
from edgespec.drafters.sequential import PardSession
from edgespec.errors import Cancelled
from tests.models import REPOSITORY

PARD = REPOSITORY / "tests" / "fixtures" / "pard" / "model.gguf"
MASK, V = 3, 4096


def make_rows(n: int, seed: int, vocab_size: int = 64) -> CandidateRows:
    """Rows that tell nothing, and texts in which token t is followed by t + 1."""
    rng = np.random.default_rng(seed)
    previous = rng.integers(0, vocab_size - 1, n).astype(np.int32)
    others = np.array([rng.permutation(np.delete(np.arange(vocab_size), p + 1))[: CANDIDATES - 1] for p in previous])
    ids = np.sort(np.concatenate([others, previous[:, None] + 1], axis=1), axis=1).astype(np.int32)
    chosen = (ids == previous[:, None] + 1).argmax(axis=1).astype(np.int32)
    return CandidateRows(ids, rng.standard_normal(ids.shape).astype(np.float32), previous, chosen)


def test_what_follows_is_learned() -> None:
    """From texts, for rows that were not seen."""
    bigram = train_bigram(make_rows(40_000, 0), 64, lambda: None)
    held_out, right = make_rows(500, 1), 0
    for ids, scores, previous in zip(held_out.ids, held_out.scores, held_out.previous, strict=True):
        row = np.full(64, -50, np.float32)
        row[ids] = scores
        right += int(bigram.adjust(row, int(previous)).argmax()) == previous + 1
    assert right > 400
    assert (held_out.scores.argmax(axis=1) == held_out.chosen).mean() < 0.1


def test_tokens_without_rows_change_nothing() -> None:
    bigram = train_bigram(make_rows(2000, 0), 80, lambda: None)
    row = np.arange(80, dtype=np.float32)
    assert bigram.adjust(row, 70).tolist() == row.tolist()
    assert bigram.adjust(row, 5)[64:].tolist() == row[64:].tolist()


def test_the_rows_of_a_drafter() -> None:
    """Of a PARD model: the text's token and the one before it, of all depths but the first."""
    model = load(PARD, LoadOptions(context_size=256, threads=1))
    prompt = model.tokenizer.encode("def read_lines(path):\n    with open(path) as file:\n", parse_special=False)
    chain, _ = model.open_session().rollout(prompt, 24, V)
    tokens = np.array([*prompt, *chain.tokens], np.int32)
    text = TrainingText(tokens, 0, len(prompt), "a", 0.0)
    session = PardSession(model.open_session(), V, MASK)
    rows = read_rows(session, [text], 3, lambda: None)
    at = 0
    session.begin(tokens.tolist())
    for position in range(len(prompt) + 1, len(tokens)):
        block = session.block(tokens[:position].tolist(), 256, min(3, len(tokens) - position)) or []
        for d, row in list(enumerate(block))[1:]:
            best, true = top_k(row, CANDIDATES).tolist(), int(tokens[position + d])
            if true in best:
                assert rows.ids[at].tolist() == best and rows.ids[at, rows.chosen[at]] == true
                assert rows.previous[at] == tokens[position + d - 1]
                assert np.allclose(rows.scores[at], row[best], atol=0.2), "rounding of other numbers of rows"
                at += 1
    assert at == len(rows.previous) > 20
    assert len(read_rows(session, [text, text], 3, lambda: None, most=5).previous) <= 6


def test_cancelled() -> None:
    def check() -> None:
        raise Cancelled

    with pytest.raises(Cancelled):
        train_bigram(make_rows(100, 0), 64, check)

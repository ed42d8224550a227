"""Contexts of llama.cpp that are filled by copies of their own cells."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from edgespec.backends.llamacpp.model import LlamaModel, load
from edgespec.backends.options import LoadOptions
from edgespec.core.protocols import NO_DRAFT, Draft
from tests.contract.runtimes import llama_model, prefill
from tests.gguf_models import TARGET

TOKEN = 65
LENGTH = 700  # more than one copy of 512 cells


@pytest.mark.parametrize("flash_attention", [True, False])
@pytest.mark.parametrize("held", [1, 3, 600])
def test_copies_lie_one_behind_the_other(flash_attention: bool, held: int) -> None:
    model = load(TARGET, LoadOptions(threads=1, context_size=1024, flash_attention=flash_attention))
    session = model.open_session()
    prefill(session, [TOKEN] * held)
    assert session.extend(LENGTH) == session.position == LENGTH
    memory = session.context.native.memory
    assert session.api.llama_memory_seq_pos_max(memory, session.sequence) == LENGTH - 1
    for _ in range(2):  # llama.cpp refuses rows whose positions do not follow
        scores = session.forward(TOKEN, Draft.chain([66, 67, 68]))
        assert all(np.isfinite(scores.logits(row)).all() for row in range(4))
        session.commit((0,))
    assert session.extend(1024) == 1024  # every cell is free or held
    model.close()


def test_no_answer_reuses_the_copies() -> None:
    model = load(TARGET, LoadOptions(threads=1, context_size=256, caches=2))
    model.lends_cells = True
    session, other = model.open_session(shared=True), model.open_session(shared=True)
    expected = prefill(other, [TOKEN, 70, 71])
    prefill(session, [TOKEN])
    session.extend(100)
    assert np.abs(prefill(session, [TOKEN, 70, 71]) - expected).max() < 1e-3
    assert session.position == 3
    spare = session.context.acquire_spare(100)
    assert len(spare) == 62  # none is missing
    model.close()


def test_the_context_limits_the_copies() -> None:
    model = load(TARGET, LoadOptions(threads=1, context_size=300))
    session = model.open_session()
    assert session.extend(100) == 0  # there is nothing to copy
    prefill(session, [TOKEN])
    assert session.extend(1) == 1
    assert session.extend(5000) == 300
    assert session.rewind(299) == 299
    assert np.isfinite(session.forward(TOKEN, NO_DRAFT).logits(0)).all()
    model.close()


@pytest.mark.parametrize("kind", ["mamba", "hybrid"])
def test_recurrent_states_and_windows_are_left_as_they_are(kind: str, tmp_path: Path) -> None:
    model: LlamaModel = llama_model(kind, tmp_path)
    session = model.open_session()
    prefill(session, [1, 2, 3])
    assert session.extend(30) == 3
    model.close()

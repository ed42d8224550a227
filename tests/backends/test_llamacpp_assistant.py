"""Gemma 4 assistants on llama.cpp: numpy's scores, always those of a fresh session, and what does not fit."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from edgespec.backends.attached_draft import Unsupported
from edgespec.backends.llamacpp.heads import LlamaHead, open_head
from edgespec.backends.llamacpp.model import LlamaModel, load
from edgespec.backends.options import LoadOptions
from edgespec.core.protocols import Draft
from edgespec.errors import InvalidModelFile
from edgespec.formats.head_file import read_head
from edgespec.formats.heads import HeadSpec
from edgespec.planner.head_probe import HeadProbe
from tests.backends.assistant_heads import TARGET_WINDOWS, Reference, make_assistant, make_target
from tests.backends.head_sessions import check_fresh
from tests.backends.llamacpp_pairs import TEXT, Pair, check_answers, check_steps, is_close, run_rounds
from tests.models import TARGET

OPTIONS = LoadOptions(context_size=256, threads=1)


class LoosePair(Pair):
    tolerance = 0.5  # a chained state carries the noise of the last one


def spec_of(path: Path) -> HeadSpec:
    spec = read_head(path)
    assert spec is not None and spec.kind == "gemma4-assistant"
    return spec


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With target.gguf and head.gguf."""
    path = tmp_path_factory.mktemp("gemma4")
    make_target(path / "target.gguf")
    make_assistant(path / "head.gguf")
    return path


@pytest.fixture(scope="module")
def target(folder: Path) -> Iterator[LlamaModel]:
    model = load(folder / "target.gguf", OPTIONS)
    yield model
    model.close()


@pytest.fixture(scope="module")
def head(target: LlamaModel, folder: Path) -> Iterator[LlamaHead]:
    opened = open_head(target, folder / "head.gguf", spec_of(folder / "head.gguf"))
    yield opened
    opened.close()


def test_the_forward_pass_is_that_of_numpy(target: LlamaModel, head: LlamaHead, folder: Path) -> None:
    """Behind a window of 12 tokens, and where the text is shorter than that."""
    reference = Reference(folder / "target.gguf", folder / "head.gguf")
    for text in (TEXT[:40], TEXT[:5]):
        pair = Pair(target, head, text)
        logits = check_steps(pair, partial(reference.logits, text))
        assert not is_close(logits, reference.logits([TEXT[50], *text[1:]], [])), "the first token is seen"
        pair.close()


def test_after_rounds_it_drafts_as_a_fresh_session(target: LlamaModel, head: LlamaHead) -> None:
    """Trees and rejected tokens leave nothing in the cells that it reads."""
    pair = LoosePair(target, head, TEXT[:50])
    run_rounds(pair, behind=1)
    check_fresh(pair)
    pair.verify(Draft(np.array([5, 9, 7, 3], np.int32), np.array([-1, -1, 0, 1], np.int32)), (1, 3), 20)
    check_fresh(pair)
    pair.restart([*TEXT[:20], *TEXT[100:130]])
    check_fresh(pair)
    pair.restart([*TEXT[:20], *TEXT[100:129], 77])
    check_fresh(pair)
    pair.close()


def test_a_probe_goes_along_with_the_target(target: LlamaModel, folder: Path) -> None:
    """It cannot draft behind what the target holds, as other heads do."""
    path = folder / "head.gguf"
    result = HeadProbe(target, path, "llamacpp", lambda: None, n_tokens=40).run(spec_of(path))
    assert result.chosen == result.stated and result.chosen.positions == 38 and len(result.trials) == 1


def test_the_end_of_the_context(target: LlamaModel, head: LlamaHead) -> None:
    pair = LoosePair(target, head, TEXT[:256])
    assert np.isfinite(pair.say()).all() and pair.session.draft_limit == 0
    check_fresh(pair)
    pair.close()


@pytest.mark.parametrize("nodes", [3, 9], ids=["chain", "tree"])
def test_answers_are_those_of_plain_decoding(target: LlamaModel, head: LlamaHead, nodes: int) -> None:
    check_answers(target, head, "mtp", (TEXT[:30], TEXT[200:210]), nodes)


def test_what_does_not_fit_is_refused(target: LlamaModel, folder: Path, tmp_path: Path) -> None:
    def refuse(path: Path, error: type[Exception], match: str, model: LlamaModel = target) -> None:
        with pytest.raises(error, match=match):
            open_head(model, path, spec_of(path))

    llama = load(TARGET, OPTIONS)
    wide = make_assistant(tmp_path / "wide.gguf", hidden=256)
    refuse(folder / "head.gguf", Unsupported, "for a hidden size of 64; the model has 256", llama)
    refuse(wide, Unsupported, "is the assistant of another model", llama)
    llama.close()
    refuse(wide, Unsupported, "for a hidden size of 256; the model has 64")
    other = load(make_target(tmp_path / "other.gguf", kv_heads=4), OPTIONS)
    refuse(folder / "head.gguf", Unsupported, "is the assistant of another model", other)
    other.close()
    turned = load(make_target(tmp_path / "turned.gguf", windows=TARGET_WINDOWS[::-1]), OPTIONS)
    refuse(folder / "head.gguf", Unsupported, "is the assistant of another model", turned)
    turned.close()
    data = (folder / "head.gguf").read_bytes()
    at = data.index(b"gemma4-assistant.nextn_predict_layers") + len(b"gemma4-assistant.nextn_predict_layers") + 4
    (tmp_path / "two.gguf").write_bytes(data[:at] + b"\x02" + data[at + 1 :])
    refuse(tmp_path / "two.gguf", InvalidModelFile, "not all of its layers are the assistant's")

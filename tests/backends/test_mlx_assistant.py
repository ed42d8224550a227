"""Gemma 4 assistants on MLX: numpy's scores, always those of a fresh session, and what does not fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from edgespec.backends.attached_draft import Unsupported
from edgespec.backends.mlx.heads import MlxHead
from edgespec.backends.mlx.model import MlxModel, load
from edgespec.backends.options import LoadOptions
from edgespec.core.protocols import Budget
from edgespec.errors import InvalidModelFile
from edgespec.planner.head_probe import HeadProbe
from tests.backends.assistant_heads import (
    SIZE,
    TARGET_WINDOWS,
    WIDTH,
    WINDOWS,
    Reference,
    describe_layers,
    make_assistant,
    make_target,
    name_tensors,
)
from tests.backends.head_sessions import Pair, check_fresh
from tests.backends.mlx_pairs import (
    answer,
    attach,
    check_rollout,
    follow_another_text,
    is_close,
    make_tokens,
    read_spec,
    refuse,
)
from tests.mlx_models import make_folder
from tests.models import TARGET


def write_head(path: Path, tensors: dict[str, np.ndarray], **config: Any) -> Path:
    path.mkdir()
    mx.save_safetensors(str(path / "model.safetensors"), {name: mx.array(each) for name, each in tensors.items()})
    layers = {**describe_layers(WINDOWS, SIZE), **config}
    whole = {"model_type": "gemma4_assistant", "backbone_hidden_size": WIDTH, "text_config": layers}
    (path / "config.json").write_text(json.dumps(whole))
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With folders target and head, and GGUF files of the same weights."""
    path = tmp_path_factory.mktemp("gemma4")
    make_folder(path / "target", describe_layers(TARGET_WINDOWS, WIDTH))
    tensors = name_tensors(make_target(path / "target.gguf"))
    weights = {name: mx.array(each) for name, each in tensors.items()}
    mx.save_safetensors(str(path / "target" / "model.safetensors"), weights)
    write_head(path / "head", name_tensors(make_assistant(path / "head.gguf")))
    return path


@pytest.fixture(scope="module")
def target(folder: Path) -> MlxModel:
    return load(folder / "target", LoadOptions(context_size=256))


@pytest.fixture(scope="module")
def head(target: MlxModel, folder: Path) -> MlxHead:
    return attach(target, folder / "head")


def test_the_forward_pass_is_that_of_numpy(target: MlxModel, head: MlxHead, folder: Path) -> None:
    """Behind a window of 12 tokens, and where the text is shorter than that."""
    reference = Reference(folder / "target.gguf", folder / "head.gguf")
    for n in (40, 5):
        text = make_tokens(n)
        pair = Pair(target, head, text)
        first = pair.read()
        assert is_close(first, reference.logits(text, []))
        assert is_close(pair.step(9), reference.logits(text, [9]))
        assert is_close(pair.step(30), reference.logits(text, [9, 30]))
        assert not is_close(first, reference.logits([700, *text[1:]], [])), "the first token is seen"


def test_after_rounds_it_drafts_as_a_fresh_session(target: MlxModel, head: MlxHead) -> None:
    """Rejected tokens and branches of trees leave nothing that it reads."""
    pair = Pair(target, head, make_tokens(30))
    for accepted in (0, 3, 1):
        pair.verify_chain(pair.propose(3), accepted, 11 + accepted)
        check_fresh(pair)
    pair.verify(check_rollout(pair, 4, length=4), range(2), 8)
    check_fresh(pair)
    check_fresh(follow_another_text(target, head, 12))


def test_the_end_of_the_context(target: MlxModel, head: MlxHead) -> None:
    pair = Pair(target, head, make_tokens(255))
    check_rollout(pair, 4, length=2)
    pair.read()
    pair.step(5)
    assert pair.draft.step(6) is None
    assert pair.draft.read([5], 9) is None, "a text of one token"


def test_answers_are_those_of_plain_decoding(target: MlxModel, head: MlxHead) -> None:
    prompts = ["def f(x):\n", "import os\n"]
    for temperature, budget in ((0.0, Budget(3, 3)), (0.8, Budget(3, 8))):
        found = answer(target, head, budget=budget, temperature=temperature, prompts=prompts)
        assert found.texts == answer(target, None, temperature=temperature, prompts=prompts).texts
        assert found.tested.total() > 20


def test_a_cache_of_eight_bits(folder: Path, target: MlxModel, head: MlxHead) -> None:
    low = load(folder / "target", LoadOptions(context_size=256, kv_type="q8_0"))
    text = make_tokens(40)
    found, exact = (Pair(each, attach(each, folder / "head"), text).read() for each in (low, target))
    assert 0 < np.abs(found - exact).max() < 0.5


def test_a_probe_goes_along_with_the_target(target: MlxModel, folder: Path) -> None:
    result = HeadProbe(target, folder / "head", "mlx", lambda: None, n_tokens=40).run(read_spec(folder / "head"))
    assert result.chosen == result.stated and result.chosen.positions == 38 and len(result.trials) == 1


def test_what_does_not_fit_is_refused(target: MlxModel, folder: Path, tmp_path: Path) -> None:
    tensors = name_tensors(folder / "head.gguf")
    llama = load(TARGET, LoadOptions(context_size=256))
    refuse(llama, folder / "head", Unsupported, "for a hidden size of 64; the model has 256")
    less = {name: each for name, each in tensors.items() if name != "post_projection.weight"}
    refuse(target, write_head(tmp_path / "less", less), InvalidModelFile, "less is no assistant: .*post_projection")
    wide = write_head(tmp_path / "wide", tensors, hidden_size=48)
    refuse(target, wide, InvalidModelFile, "wide is no assistant: ")
    rows = tensors | {"model.embed_tokens.weight": tensors["model.embed_tokens.weight"][:500]}
    refuse(target, write_head(tmp_path / "few", rows, vocab_size=500), Unsupported, "for a vocabulary of 500 tokens")
    swapped = make_folder(tmp_path / "target", describe_layers(TARGET_WINDOWS, WIDTH) | {"head_dim": 16})
    refuse(load(swapped, LoadOptions(context_size=256)), folder / "head", Unsupported, "that of another model")


def test_a_quantized_assistant(target: MlxModel, folder: Path, tmp_path: Path) -> None:
    """As mlx-lm quantizes, norms and scalars left as they are."""
    tensors, values = name_tensors(folder / "head.gguf"), {}
    for name, each in tensors.items():
        if each.ndim == 2 and "embed" not in name:
            parts = mx.quantize(mx.array(each), 32, 8)
            values |= {
                name.removesuffix("weight") + part: np.array(x)
                for part, x in zip(("weight", "scales", "biases"), parts, strict=True)
            }
        else:
            values[name] = each
    low = write_head(tmp_path / "low", values)
    config = json.loads((low / "config.json").read_text())
    (low / "config.json").write_text(json.dumps(config | {"quantization": {"group_size": 32, "bits": 8}}))
    text = make_tokens(40)
    found, exact = (Pair(target, attach(target, each), text).read() for each in (low, folder / "head"))
    assert 0 < np.abs(found - exact).max() < 0.3

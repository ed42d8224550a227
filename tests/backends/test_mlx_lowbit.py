"""Self-drafts on MLX: weights of fewer bits, what they take of memory, and models that are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

from edgespec.backends.attached_draft import Unsupported
from edgespec.backends.mlx.model import load
from edgespec.backends.options import LoadOptions
from edgespec.core.protocols import NO_DRAFT, Draft
from edgespec.errors import BackendError
from tests.backends.test_mlx_selfdraft import fresh_logits, make_draft, make_tokens, wrap
from tests.backends.zoo import VOCABULARY, tiny
from tests.mlx_models import CONFIGS, DENSE, make_folder, make_model


@pytest.mark.parametrize("bits", [4, 8])
def test_copies_leave_the_model_as_it_is(bits: int) -> None:
    network = make_model({**CONFIGS["moe"], "vocab_size": 4096})
    nn.quantize(network, group_size=32, bits=bits)
    model = wrap(network)
    before = {name: np.array(array) for name, array in tree_flatten(network.parameters())}
    description, tokens = model.description, make_tokens(9)
    expected = fresh_logits(model, tokens, 3, Draft.chain([4]))
    draft = make_draft(model, "qspec")
    assert np.array_equal(fresh_logits(model, tokens, 3, Draft.chain([4])), expected)
    weights = sum(array.nbytes for name, array in before.items() if name.endswith(".weight") and "embed" not in name)
    assert 0 < draft.extra_bytes < weights, "half the bits, and scales"
    with pytest.raises(BackendError, match="low-bit draft already"):
        make_draft(model, "qspec:2")
    assert model.description == description
    draft.close()
    after = {name: np.array(array) for name, array in tree_flatten(network.parameters())}
    assert before.keys() == after.keys()
    assert all(np.array_equal(before[name], after[name]) for name in before)
    assert np.array_equal(fresh_logits(model, tokens, 3, Draft.chain([4])), expected)


def test_low_bits_are_those_of_a_model_quantized_to_them() -> None:
    network = make_model({**CONFIGS["moe"], "vocab_size": 4096})
    nn.quantize(network, group_size=32, bits=8)
    model = wrap(network)
    draft = make_draft(model, "qspec:3")
    session = draft.open_session(model.open_session(), lambda: None)
    found, scores = session.rollout(make_tokens(9), 3, 4096)
    z = scores.logits(2)
    draft.close()
    for _, module in network.named_modules():  # what is left of an 8-bit weight after a copy of 3 bits
        if hasattr(module, "bits") and not isinstance(module, nn.QuantizedEmbedding):
            whole = mx.dequantize(module.weight, module.scales, module.biases, group_size=32, bits=8)
            module.weight, module.scales, module.biases = mx.quantize(whole, group_size=32, bits=3)
            module.bits = 3
    wanted, coarse = wrap(network).open_session().rollout(make_tokens(9), 3, 4096)
    assert found.tokens.tolist() == wanted.tokens.tolist()
    assert np.abs(z - coarse.logits(2)).max() < 1e-4


@pytest.mark.parametrize(
    ("config", "bits", "method", "message"),
    [
        (CONFIGS["hybrid"], None, "layerskip:2", "recurrent states"),
        (CONFIGS["recurrent"], None, "sparse", "recurrent states"),
        ({**DENSE, "vocab_size": 64}, 3, "qspec", "no more bits"),
        ({**DENSE, "vocab_size": 64}, 4, "qspec:4", "no more bits"),
    ],
)
def test_refusals(config: dict[str, Any], bits: int | None, method: str, message: str) -> None:
    network = make_model({"vocab_size": 64, **config})
    if bits is not None:
        nn.quantize(network, group_size=32, bits=bits)
    model = wrap(network, 64)
    expected = fresh_logits(model, [1, 2, 3], 4, NO_DRAFT)
    with pytest.raises(Unsupported, match=message) as caught:
        make_draft(model, method)
    assert caught.value.hint and "\n" not in caught.value.message
    assert np.array_equal(fresh_logits(model, [1, 2, 3], 4, NO_DRAFT), expected)


@pytest.mark.parametrize(("name", "message"), [("llama4", "cannot share"), ("gemma4_text", "one cache for each layer")])
def test_caches_that_cannot_be_shared(name: str, message: str) -> None:
    with pytest.raises(Unsupported, match=message):
        make_draft(wrap(tiny(name), VOCABULARY), "layerskip:2")


def test_closing_gives_the_memory_back(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "m", {**DENSE, "hidden_size": 256}, bits=8)
    mx.clear_cache()
    before = mx.get_active_memory()
    model = load(folder, LoadOptions(context_size=64))
    loaded = mx.get_active_memory()
    draft = make_draft(model, "qspec")
    assert loaded < mx.get_active_memory() <= loaded + draft.extra_bytes + 100_000
    draft.close()
    del draft
    assert mx.get_active_memory() <= loaded + 10_000
    model.close()
    assert mx.get_active_memory() <= before + 10_000

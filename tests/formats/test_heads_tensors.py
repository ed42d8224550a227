"""Names of EAGLE-3's dialects, and tables of draft tokens."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec.errors import InvalidModelFile
from edgespec.formats.head_tensors import eagle3_names, read_draft_ids
from tests.formats.head_files import eagle3_shapes


def test_names_of_every_dialect() -> None:
    safeai, speculators = (eagle3_names(eagle3_shapes(prefix)) for prefix in ("midlayer.", "layers.0."))
    assert safeai.keys() == speculators.keys()
    assert safeai["q"] == "midlayer.self_attn.q_proj.weight"
    assert speculators["feature_norm"] == "layers.0.hidden_norm.weight"
    assert eagle3_names(f"model.{name}" for name in eagle3_shapes())["fc"] == "model.fc.weight"
    assert eagle3_names([*eagle3_shapes(), "input_norm.weight"])["input_norm"] == "input_norm.weight"
    reduced = [name for name in eagle3_shapes() if name not in ("d2t", "lm_head.weight")]
    assert not {"d2t", "output", "embedding"} & eagle3_names(reduced).keys()


@pytest.mark.parametrize("missing", sorted(set(eagle3_shapes()) - {"d2t", "lm_head.weight"}))
def test_a_missing_tensor_is_named(missing: str) -> None:
    with pytest.raises(InvalidModelFile) as caught:
        eagle3_names(set(eagle3_shapes()) - {missing})
    assert missing in caught.value.message


def test_several_layers() -> None:
    with pytest.raises(InvalidModelFile, match="more than one layer"):
        eagle3_names([*eagle3_shapes("layers.0."), "layers.1.hidden_norm.weight"])


@settings(max_examples=100)
@given(st.sets(st.integers(0, 999), min_size=1, max_size=60).map(sorted))
def test_draft_ids_of_either_kind(ids: list[int]) -> None:
    wanted = np.array(ids)
    absolute = read_draft_ids(wanted, 1000)
    assert absolute.dtype == np.int32 and absolute.tolist() == ids
    offsets = wanted - np.arange(len(ids))
    if not (np.diff(offsets) > 0).all():  # else the offsets themselves ascend, and are taken for ids
        assert read_draft_ids(offsets, 1000).tolist() == ids


def test_the_kind_of_draft_ids() -> None:
    assert read_draft_ids(np.zeros(8, np.int64), 8).tolist() == list(range(8)), "offsets"
    assert read_draft_ids(np.arange(8), 8).tolist() == list(range(8)), "ids"
    assert read_draft_ids(np.array([0, 0, 5]), 8).tolist() == [0, 1, 7]


@pytest.mark.parametrize(
    "table",
    [
        np.array([0, 0, 6]), np.array([3, 1]), np.array([-1, 0]), np.array([2**62, 2**63 - 1]),
        np.array([2**64 - 1], np.uint64), np.array([0.0, 1.0]), np.zeros((2, 2), np.int64), np.zeros(0, np.int64),
        np.zeros(9, np.int64), np.array(3),
    ],
)  # fmt: skip
def test_tables_that_name_no_tokens(table: np.ndarray) -> None:
    with pytest.raises(InvalidModelFile, match="vocabulary of 8"):
        read_draft_ids(table, 8)

"""Medusa heads on MLX: the forward pass, sessions in step with their target, files that do not fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from edgespec.backends.attached_draft import Unsupported
from edgespec.backends.mlx.head_session import BlockHeadSession
from edgespec.backends.mlx.heads import MlxHead
from edgespec.backends.mlx.model import MlxModel
from edgespec.errors import Cancelled, EdgespecError, InvalidModelFile
from edgespec.formats.head_file import read_head
from tests.backends.medusa_heads import make_medusa, pickle_head, read_arrays, rewrite, run_medusa
from tests.backends.mlx_pairs import (
    Cancellation,
    Pair,
    attach,
    check_fresh,
    is_close,
    make_tokens,
    read_spec,
    refuse,
    tapped_features,
)
from tests.formats.head_files import call, make_pickle, write_torch
from tests.mlx_models import load_target

SIZE, VOCABULARY = 256, 4096
WHOLE = 10**6  # a window that no text fills


@pytest.fixture(scope="module")
def target() -> MlxModel:
    return load_target()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_medusa(tmp_path_factory.mktemp("medusa") / "head", size=SIZE, vocab_size=VOCABULARY)


@pytest.fixture(scope="module")
def head(target: MlxModel, folder: Path) -> MlxHead:
    found = attach(target, folder)
    assert found.name == "medusa"
    return found


@pytest.mark.parametrize(("blocks", "own"), [(1, (0, 1, 2)), (2, (0, 1, 2)), (1, ()), (2, (1,))], ids=str)
def test_the_forward_pass_is_that_of_numpy(target: MlxModel, blocks: int, own: tuple[int, ...], tmp_path: Path) -> None:
    """Of heads with their own output matrix and the target's, from the state of the token before the root."""
    folder = make_medusa(tmp_path / "head", size=SIZE, vocab_size=VOCABULARY, blocks=blocks, own=own)
    pair = Pair(target, attach(target, folder), make_tokens(20))
    assert isinstance(pair.draft, BlockHeadSession)
    states = tapped_features(target, read_spec(folder), pair.text)
    output = np.array(target.network.model.embed_tokens(mx.arange(VOCABULARY))).astype(np.float64)  # tied
    rows = pair.block()
    assert is_close(rows, run_medusa(read_arrays(folder), output, states[18]))
    assert not is_close(rows, run_medusa(read_arrays(folder), output, states[17])), "nothing was tested"
    assert is_close(pair.block(n=1), rows[:1])
    assert all(row.dtype == np.float32 for row in rows)


def test_a_block_has_as_many_positions_as_there_are_heads_in_the_file(target: MlxModel, tmp_path: Path) -> None:
    """The config of published heads says 2 where the file has 5."""
    folder = make_medusa(tmp_path / "head", size=SIZE, vocab_size=VOCABULARY, heads=5, own=())
    pair = Pair(target, attach(target, folder), make_tokens(9))
    assert pair.draft.block_size == 5
    assert len(pair.block(n=9)) == 5


def test_a_state_that_the_target_has_dropped(target: MlxModel, head: MlxHead) -> None:
    """It drafts again once the target has run the token before the root again."""
    pair = Pair(target, head, make_tokens(30))
    pair.block()
    pair.session.rewind(25)
    pair.text = [*pair.text[:25], 8]
    assert pair.draft.block(pair.text, WHOLE, 3) is None
    pair.verify_chain([4], 1, 9)
    check_fresh(pair)


def test_only_one_state_is_kept(target: MlxModel, head: MlxHead) -> None:
    pair = Pair(target, head, make_tokens(90))
    pair.block()
    assert (pair.draft._features.start, pair.draft._features.end) == (88, 89)


def test_a_cancelled_block_is_done_again(target: MlxModel, head: MlxHead) -> None:
    check = Cancellation()
    pair = Pair(target, head, make_tokens(20), check)
    check.left = 1
    with pytest.raises(Cancelled):
        pair.block()
    check_fresh(pair)


def test_pickled_heads_are_the_same(target: MlxModel, head: MlxHead, folder: Path, tmp_path: Path) -> None:
    pickled = attach(target, pickle_head(folder, tmp_path / "pickled", "medusa_lm_head.pt"))
    text = make_tokens(12)
    assert is_close(Pair(target, pickled, text).block(), Pair(target, head, text).block())
    assert pickled.extra_bytes == head.extra_bytes


@pytest.mark.parametrize("prefix", ["medusa_head.", "medusa_heads."])
def test_prefixes_of_names(target: MlxModel, head: MlxHead, folder: Path, prefix: str, tmp_path: Path) -> None:
    arrays = {name: array.astype(np.float32) for name, array in read_arrays(folder).items()}
    change: dict[str, Any] = {**dict.fromkeys(arrays), **{prefix + name: array for name, array in arrays.items()}}
    renamed = attach(target, rewrite(folder, tmp_path / "head", change))
    text = make_tokens(12)
    assert is_close(Pair(target, renamed, text).block(), Pair(target, head, text).block())


WRONG: list[tuple[str, type[EdgespecError], str, dict[str, Any]]] = [
    ("a shape", InvalidModelFile, "has the shape", {"1.0.linear.weight": np.zeros((SIZE, 128), np.float32)}),
    ("a bias", InvalidModelFile, "has the shape", {"1.0.linear.bias": np.zeros(8, np.float32)}),
    ("a vocabulary", Unsupported, "4,000 tokens; the model has 4,096", {"0.1.weight": np.zeros((4000, SIZE), "f4")}),
    ("an absent head", InvalidModelFile, "lacks residual blocks", {"1.0.linear.weight": None}),
    (
        "an absent block",
        InvalidModelFile,
        "lacks residual blocks",
        {"1.2.linear.weight": np.zeros((SIZE, SIZE), np.float32)},
    ),
]


@pytest.mark.parametrize(("error", "message", "change"), [each[1:] for each in WRONG], ids=[each[0] for each in WRONG])
def test_files_that_do_not_fit(
    target: MlxModel, folder: Path, tmp_path: Path, error: type[EdgespecError], message: str, change: dict[str, Any]
) -> None:
    refuse(target, rewrite(folder, tmp_path / "head", change), error, message)


def test_heads_of_another_size(target: MlxModel, tmp_path: Path) -> None:
    folder = make_medusa(tmp_path / "head", size=128, vocab_size=VOCABULARY)
    refuse(target, folder, Unsupported, "hidden size of 128; the model has 256")


def test_pickles_that_are_no_heads(target: MlxModel, folder: Path, tmp_path: Path) -> None:
    """Also where the file changes between the check of its shapes and the reading of its weights."""
    pickled = pickle_head(folder, tmp_path / "pickled", "medusa_lm_head.pt")
    spec = read_head(pickled)
    assert spec is not None
    place, file = tmp_path / "executed", pickled / "medusa_lm_head.pt"
    whole = file.read_bytes()
    for content in (whole[: len(whole) // 2], b"", whole[:-60], b"PK\x05\x06" + bytes(18)):
        file.write_bytes(content)
        with pytest.raises(InvalidModelFile, match="is not read: "):
            target.load_head(spec, pickled)
    write_torch(file, make_pickle({"0.0.linear.weight": call("os", "system", f"touch {place}")}), {})
    with pytest.raises(InvalidModelFile, match="nothing is run from a file"):
        target.load_head(spec, pickled)
    assert not place.exists()

"""Trained Medusa and Hydra++ heads on MLX: what is accepted, and that wrong readings of them cost acceptance alone."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from edgespec.backends.mlx.heads import MlxHead
from edgespec.backends.mlx.model import MlxModel
from edgespec.core.protocols import Budget
from tests.backends.medusa_heads import rewrite
from tests.backends.mlx_pairs import PROMPTS, Answers, LateFeatures, answer, attach
from tests.mlx_models import load_target
from tests.models import REPOSITORY

SIZE = 256  # of the target
Sound = Callable[[str], Answers]
HEADS = REPOSITORY / "tests" / "fixtures" / "heads"
ASKED = {"medusa": PROMPTS, "hydra": PROMPTS[:2]}  # enough to tell a wrong reading from a right one


@pytest.fixture(scope="module")
def target() -> MlxModel:
    return load_target()


@pytest.fixture(scope="module")
def plain(target: MlxModel) -> Answers:
    return answer(target, None)


@pytest.fixture(scope="module", params=["medusa", "hydra"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def folder(kind: str) -> Path:
    return HEADS / f"{kind}-python-6m"


@pytest.fixture(scope="module")
def sound(target: MlxModel) -> Sound:
    """What is accepted of the heads of a kind as they are."""
    return cache(lambda kind: answer(target, attach(target, HEADS / f"{kind}-python-6m"), prompts=ASKED[kind]))


@pytest.fixture(scope="module")
def chain(kind: str, sound: Sound) -> Answers:
    return sound(kind)


def test_it_is_accepted(target: MlxModel, folder: Path, plain: Answers, chain: Answers, tmp_path: Path) -> None:
    """Heads of random weights are not."""
    check_texts(chain, plain)
    assert chain.rate > 0.15
    rng = np.random.default_rng(0)
    random = {
        name: rng.standard_normal(array.shape).astype(np.float32)
        for name, array in load_file(folder / "model.safetensors").items()
        if array.ndim == 2
    }
    nothing = answer(target, attach(target, rewrite(folder, tmp_path / "random", random)), prompts=PROMPTS[:1])
    check_texts(nothing, plain)
    assert nothing.rate < 0.05


def test_trees_accept_more(target: MlxModel, kind: str, folder: Path, plain: Answers, chain: Answers) -> None:
    """The second best tokens of an early head are often right."""
    tree = answer(target, attach(target, folder), budget=Budget(3, 12), prompts=ASKED[kind])
    check_texts(tree, plain)
    assert tree.tokens_per_round > chain.tokens_per_round + 0.1


def test_drawn_texts_are_plain_ones(target: MlxModel, folder: Path) -> None:
    drawn = answer(target, attach(target, folder), temperature=0.8, prompts=PROMPTS[:1])
    assert drawn.texts == answer(target, None, temperature=0.8, prompts=PROMPTS[:1]).texts
    assert drawn.accepted.total()


def read_late(head: MlxHead) -> None:
    """The state of the position before."""
    opener = head.opener

    def open_late(network: Any, session: Any, features: Any, check: Any) -> Any:
        late: Any = LateFeatures(features)
        return opener(network, session, late, check)

    head.opener = open_late


def read_before_the_norm(head: MlxHead) -> None:
    network: Any = head.network
    network.layers = (6,)


def skip_the_prefix(head: MlxHead) -> None:
    network: Any = head.network
    network._prefix = None


def check_texts(found: Answers, plain: Answers) -> None:
    """Answers to the first prompts are those of plain decoding."""
    assert found.texts == plain.texts[: len(found.texts)] != []


def test_the_state_of_another_position(target: MlxModel, folder: Path, plain: Answers, chain: Answers) -> None:
    check_worse(target, folder, plain, chain, read_late)


def test_medusa_heads_before_the_norm(target: MlxModel, plain: Answers, sound: Sound) -> None:
    """Hydra++ norms its input itself."""
    folder = HEADS / "medusa-python-6m"
    check_worse(target, folder, plain, sound("medusa"), read_before_the_norm)


def test_medusa_heads_in_another_order(target: MlxModel, plain: Answers, sound: Sound, tmp_path: Path) -> None:
    folder = HEADS / "medusa-python-6m"
    arrays = load_file(folder / "model.safetensors")
    names = {f"{i}.0.linear.{part}": f"{2 - i}.0.linear.{part}" for i in range(3) for part in ("weight", "bias")}
    turned = rewrite(folder, tmp_path / "head", {name: arrays[other] for name, other in names.items()})
    check_worse(target, turned, plain, sound("medusa"))


def test_hydra_heads_without_their_prefix_layer(target: MlxModel, plain: Answers, sound: Sound) -> None:
    folder = HEADS / "hydra-python-6m"
    check_worse(target, folder, plain, sound("hydra"), skip_the_prefix)


def test_hydra_heads_that_read_the_embedding_first(
    target: MlxModel, plain: Answers, sound: Sound, tmp_path: Path
) -> None:
    folder = HEADS / "hydra-python-6m"
    arrays = load_file(folder / "model.safetensors")
    matrices = {name: array for name, array in arrays.items() if name.startswith("hydra_mlp") and array.ndim == 2}
    rolled = {name: np.roll(array, SIZE, axis=1) for name, array in matrices.items()}
    check_worse(target, rewrite(folder, tmp_path / "head", rolled), plain, sound("hydra"))


def check_worse(
    target: MlxModel,
    folder: Path,
    plain: Answers,
    chain: Answers,
    misread: Callable[[MlxHead], None] = lambda head: None,
) -> None:
    """The text is the same and less of the drafts is accepted than of `chain`."""
    head = attach(target, folder)
    misread(head)
    found = answer(target, head, prompts=PROMPTS[: len(chain.texts)])
    check_texts(found, plain)
    assert found.rate < 0.9 * chain.rate, (found.by_depth, chain.by_depth)

"""Losses against NumPy in double precision, and their gradients against finite differences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from edgespec.adapt.options import LOSS_NAMES
from edgespec.adapt.trainer import LOSSES

B, T, V, K = 2, 3, 40, 6
Reference = Callable[[np.ndarray, np.ndarray], np.ndarray]
REFERENCES: dict[str, Reference] = {
    "forward-kl": lambda p, q: (p * np.log(p / q)).sum(-1),
    "reverse-kl": lambda p, q: (q * np.log(q / p)).sum(-1),
    "jsd": lambda p, q: ((p * np.log(2 * p / (p + q))) + (q * np.log(2 * q / (p + q)))).sum(-1) / 2,
    "tv": lambda p, q: 1 - np.minimum(p, q).sum(-1),
}


def softmax(z: np.ndarray) -> np.ndarray:
    e = np.exp(z - z.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def events(p: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """[B, T, K + 1] the probabilities of `ids` and of all others, which is 1e-6 at least."""
    top = np.take_along_axis(p, ids, -1)
    return np.concatenate([top, np.maximum(1 - top.sum(-1, keepdims=True), 1e-6)], -1)


class Case:
    """Random scores of a draft and a target."""

    def __init__(self, seed: int = 0, k: int = K) -> None:
        rng = np.random.default_rng(seed)
        self.draft, self.target = rng.standard_normal((2, B, T, V)) * 2
        self.ids = np.argsort(-self.target, axis=-1)[..., :k].astype(np.int32)
        self.log_probs = np.log(np.take_along_axis(softmax(self.target), self.ids, -1))
        self.mask = rng.integers(0, 2, (B, T)).astype(np.float32)
        self.mask[0, 0] = 1

    def arguments(self) -> tuple[Any, ...]:
        return tuple(mx.array(each) for each in (self.ids, self.log_probs.astype(np.float32), self.mask))

    def loss(self, name: str, draft: np.ndarray) -> float:
        """The mean over the mask, by NumPy."""
        found = REFERENCES[name](events(softmax(self.target), self.ids), events(softmax(draft), self.ids))
        return float((found * self.mask).sum() / self.mask.sum())


def test_all_losses_have_a_name() -> None:
    assert tuple(LOSSES) == LOSS_NAMES and REFERENCES.keys() == LOSSES.keys()


@pytest.mark.parametrize("name", LOSS_NAMES)
@pytest.mark.parametrize("seed", range(3))
def test_values_and_gradients(name: str, seed: int) -> None:
    case = Case(seed)
    loss, gradient = mx.value_and_grad(LOSSES[name])(mx.array(case.draft.astype(np.float32)), *case.arguments())
    assert loss.item() == pytest.approx(case.loss(name, case.draft), abs=2e-6)
    differences = np.zeros_like(case.draft)
    for place in np.ndindex(case.draft.shape):
        up, down = case.draft.copy(), case.draft.copy()
        up[place] += 1e-5
        down[place] -= 1e-5
        differences[place] = (case.loss(name, up) - case.loss(name, down)) / 2e-5
    assert np.abs(np.array(gradient) - differences).max() < 2e-6
    assert np.abs(differences).max() > 1e-3
    assert not np.array(gradient)[case.mask == 0].any()


@pytest.mark.parametrize("name", LOSS_NAMES)
def test_equal_distributions_lose_nothing(name: str) -> None:
    case = Case()
    loss, gradient = mx.value_and_grad(LOSSES[name])(mx.array(case.target.astype(np.float32)), *case.arguments())
    assert abs(loss.item()) < 1e-6 and (name == "tv" or np.abs(np.array(gradient)).max() < 1e-6)
    assert LOSSES[name](mx.array(case.draft.astype(np.float32)), *case.arguments()).item() > 0.1


@pytest.mark.parametrize("name", LOSS_NAMES)
def test_rows_outside_of_the_mask_change_nothing(name: str) -> None:
    case, other = Case(), Case(9)
    before = LOSSES[name](mx.array(case.draft.astype(np.float32)), *case.arguments()).item()
    for ours, theirs in ((case.draft, other.draft), (case.ids, other.ids), (case.log_probs, other.log_probs)):
        ours[case.mask == 0] = theirs[case.mask == 0]
    assert LOSSES[name](mx.array(case.draft.astype(np.float32)), *case.arguments()).item() == before
    case.mask[:] = 0
    assert LOSSES[name](mx.array(case.draft.astype(np.float32)), *case.arguments()).item() == 0


def test_tv_is_the_share_that_rejection_sampling_rejects() -> None:
    """With all tokens known, sum of min(p, q) is the probability that a token drawn from q is accepted."""
    case = Case(k=V)
    case.mask[:] = 1
    loss = LOSSES["tv"](mx.array(case.draft.astype(np.float32)), *case.arguments()).item()
    accepted = np.minimum(softmax(case.target), softmax(case.draft)).sum(-1).mean()
    assert loss == pytest.approx(1 - accepted, abs=2e-6)


@pytest.mark.parametrize("name", LOSS_NAMES)
def test_half_precision_rows_and_scores(name: str) -> None:
    """Rows are kept in half precision, where the known probabilities may exceed 1 together.

    What is left for the others is then known to about 2e-4 only, of which reverse KL takes the logarithm.
    """
    case = Case()
    case.target *= 8  # nearly all mass is on few tokens
    case.log_probs = np.log(np.take_along_axis(softmax(case.target), case.ids, -1)).astype(np.float16)
    arguments = case.arguments()
    loss, gradient = mx.value_and_grad(LOSSES[name])(mx.array(case.draft).astype(mx.float16), *arguments)
    expected = case.loss(name, case.draft.astype(np.float16).astype(float))
    assert loss.item() == pytest.approx(expected, rel=0.1 if name == "reverse-kl" else 2e-3)
    assert np.isfinite(np.array(gradient)).all()

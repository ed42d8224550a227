"""Trained heads on MLX: what is accepted of each kind, and that wrong readings of it cost acceptance alone."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from edgespec.autopilot.fixed import FixedLength
from edgespec.backends.head_session import BlockHeadSession, HeadSession
from edgespec.backends.mlx.heads import MlxHead
from edgespec.backends.mlx.heads import networks as head_networks
from edgespec.backends.mlx.model import MlxModel
from edgespec.core.loop import speculate
from edgespec.core.protocols import Budget, Step
from edgespec.core.rng import CounterRng
from edgespec.core.sampling import Sampler, SamplingParams
from edgespec.core.verify import TokenRejection
from edgespec.drafters.candidates import RequestDraw
from tests.backends.mlx_pairs import CHAIN, PROMPTS, Answers, LateFeatures, answer, attach, open_drafter
from tests.backends.pair_heads import quantize
from tests.gguf_models import REPOSITORY
from tests.mlx_models import load_target

HEADS = REPOSITORY / "tests" / "fixtures" / "heads"
SIZE = 256  # of the target
RATES = {"eagle3": 0.5, "eagle": 0.6, "mtp": 0.6, "dflash": 0.4, "dspark": 0.3, "medusa": 0.15, "hydra": 0.15}
BUDGETS = {"dflash": Budget(7, 7), "dspark": Budget(8, 8)}
Change = Callable[[dict[str, Any]], dict[str, Any]]


@pytest.fixture(scope="module")
def target() -> MlxModel:
    return load_target()


@pytest.fixture(scope="module")
def plain(target: MlxModel) -> Answers:
    return answer(target, None)


@pytest.fixture(scope="module")
def sound(target: MlxModel, plain: Answers) -> Callable[[str], float]:
    """The share that is accepted of a kind's head as it is."""
    return cache(lambda kind: measure(target, attach(target, find(kind)), plain, kind))


def find(kind: str) -> Path:
    return HEADS / f"{kind}-python-6m"


def measure(target: MlxModel, head: MlxHead, plain: Answers, kind: str) -> float:
    """The share of compared tokens that was accepted. Answers must be those of plain decoding."""
    prompts = PROMPTS if kind == "medusa" else PROMPTS[:2]  # enough to tell a wrong reading from a right one
    found = answer(target, head, budget=BUDGETS.get(kind, CHAIN), prompts=prompts)
    assert found.texts == plain.texts[: len(prompts)]
    return found.rate


def rewrite(kind: str, path: Path, change: Change) -> Path:
    """A copy of the trained head with other tensors."""
    shutil.copytree(find(kind), path)
    arrays = mx.load(str(find(kind) / "model.safetensors"))
    mx.save_safetensors(str(path / "model.safetensors"), {**arrays, **change(arrays)})
    return path


@pytest.mark.parametrize("kind", RATES)
def test_it_is_accepted(
    target: MlxModel, plain: Answers, sound: Callable[[str], float], kind: str, tmp_path: Path
) -> None:
    """More in trees than in chains; heads of random weights are not. A seed gives the text of plain decoding."""
    assert sound(kind) > RATES[kind]
    head = attach(target, find(kind))
    tree = answer(target, head, budget=Budget(3, 12), prompts=PROMPTS[:1])
    chain = answer(target, head, prompts=PROMPTS[:1])
    assert tree.texts == chain.texts == plain.texts[:1]
    assert tree.tokens_per_round > chain.tokens_per_round - 0.1
    drawn = [answer(target, each, temperature=0.8, prompts=PROMPTS[:1]) for each in (head, None)]
    assert drawn[0].texts == drawn[1].texts and drawn[0].accepted
    rng = np.random.default_rng(0)

    def randomize(arrays: dict[str, Any]) -> dict[str, Any]:
        return {
            name: mx.array(rng.standard_normal(each.shape).astype(np.float32) / 16)
            for name, each in arrays.items()
            if each.ndim == 2
        }

    assert measure(target, attach(target, rewrite(kind, tmp_path / "random", randomize)), plain, kind) < 0.1


@pytest.mark.parametrize("kind", ["eagle3", "eagle", "mtp", "dflash", "medusa", "hydra"])
def test_the_states_of_other_positions(
    target: MlxModel, plain: Answers, sound: Callable[[str], float], kind: str
) -> None:
    head = attach(target, find(kind))
    opener: type[HeadSession] | type[BlockHeadSession] = head.opener

    def open_late(runner: Any, session: Any, features: Any) -> Any:
        late: Any = LateFeatures(features)
        return opener(runner, session, late)

    late: Any = open_late
    head.opener = late
    assert measure(target, head, plain, kind) < 0.9 * sound(kind)


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("eagle3", {"layers": (2, 4, 6)}),
        ("eagle3", {"layers": (5, 3, 1)}),
        ("eagle3", {"norm_before_residual": True}),
        ("eagle3", {"feeds_normed": True}),
        ("eagle", {"layers": (6,)}),
        ("medusa", {"layers": (6,)}),
        ("dflash", {"layers": (2, 4, 6)}),
        ("dflash", {"mask_token": 700}),
        ("dspark", {"predicts_at_root": False}),
    ],
    ids=str,
)
def test_a_wrong_reading_is_accepted_less(
    target: MlxModel, plain: Answers, sound: Callable[[str], float], kind: str, changes: dict[str, Any]
) -> None:
    head = attach(target, find(kind), **changes)
    if kind == "medusa":  # whose network has no description to read
        head.network.layers = changes["layers"]
    assert measure(target, head, plain, kind) < 0.97 * sound(kind)


def roll(name: str) -> Change:
    """The two halves of what a matrix reads change places."""
    return lambda arrays: {
        key: mx.roll(each, SIZE, axis=1) for key, each in arrays.items() if name in key and each.ndim == 2
    }


def turn_medusa(arrays: dict[str, Any]) -> dict[str, Any]:
    """The heads in another order."""
    names = {f"{i}.0.linear.{part}": f"{2 - i}.0.linear.{part}" for i in range(3) for part in ("weight", "bias")}
    return {name: arrays[other] for name, other in names.items()}


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("eagle", roll("fc.weight")),
        ("mtp", roll("mtp.fc.weight")),
        ("hydra", roll("hydra_mlp")),
        ("medusa", turn_medusa),
        ("eagle3", lambda arrays: {"d2t": mx.zeros(2048, mx.int64)}),
    ],
    ids=["eagle", "mtp", "hydra", "medusa", "eagle3"],
)
def test_tensors_read_in_another_order(
    target: MlxModel, plain: Answers, sound: Callable[[str], float], kind: str, change: Change, tmp_path: Path
) -> None:
    folder = rewrite(kind, tmp_path / "head", change)
    assert measure(target, attach(target, folder), plain, kind) < 0.9 * sound(kind)


def test_norms_that_a_file_holds_less_1(
    target: MlxModel,
    plain: Answers,
    sound: Callable[[str], float],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = rewrite(
        "mtp", tmp_path / "less", lambda arrays: {name: each - 1 for name, each in arrays.items() if "norm" in name}
    )
    assert measure(target, attach(target, folder), plain, "mtp") > sound("mtp") - 0.05
    monkeypatch.setattr(head_networks, "_PLAIN_MEAN", -10.0)
    assert measure(target, attach(target, folder), plain, "mtp") < sound("mtp") - 0.3


def test_a_quantized_head_is_accepted_nearly_as_often(
    target: MlxModel, plain: Answers, sound: Callable[[str], float], tmp_path: Path
) -> None:
    quantize(tmp_path / "low", find("eagle3"), 4)
    low = attach(target, tmp_path / "low")
    assert low.extra_bytes < attach(target, find("eagle3")).extra_bytes / 4
    assert measure(target, low, plain, "eagle3") > sound("eagle3") - 0.1


def test_drawn_chains_are_accepted(target: MlxModel) -> None:
    """By the rejection rule."""
    found, head = Answers(), attach(target, find("dflash"))
    sampler = Sampler(SamplingParams(temperature=0.8), target.tokenizer.vocab_size)
    for prompt in PROMPTS[:2]:
        session = target.open_session()
        draw = RequestDraw(sampler, np.random.default_rng(3))
        controller = FixedLength([open_drafter(head, session)], Budget(4, 4), target.tokenizer.vocab_size, draw)
        rng = CounterRng(7)
        verifier = TokenRejection(sampler, rng)
        tokens = target.tokenizer.encode(prompt, parse_special=False)
        events = list(speculate(session, controller, verifier, tokens, max_tokens=40, stop=frozenset()))
        found.add(events)
        assert not controller.failures
        assert any(isinstance(event, Step) and event.n_drafted == 4 for event in events)
    assert found.rate > 0.2

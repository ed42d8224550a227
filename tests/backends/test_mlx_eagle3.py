"""EAGLE-3 heads on MLX: the forward pass, and a trained head's acceptance. Sessions: test_mlx_pairs.py."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from edgespec.backends.attached_draft import Unsupported
from edgespec.backends.mlx.heads import MlxHead
from edgespec.backends.mlx.model import MlxModel
from edgespec.core.protocols import Budget
from edgespec.core.sampling import Logits
from edgespec.errors import InvalidModelFile
from edgespec.formats.heads import HeadSpec
from tests.backends.mlx_pairs import Answers, answer, check_forward, measure, open_late, read_spec
from tests.backends.numpy_layers import attend, feed_forward, normed, rotated
from tests.backends.pair_heads import quantize
from tests.mlx_models import load_target
from tests.models import REPOSITORY

FOLDER = REPOSITORY / "tests" / "fixtures" / "heads" / "eagle3-python-6m"


@pytest.fixture(scope="module")
def target() -> MlxModel:
    return load_target()


def make_spec(**changes: Any) -> HeadSpec:
    return read_spec(FOLDER, **changes)


@pytest.fixture(scope="module")
def head(target: MlxModel) -> MlxHead:
    return target.load_head(make_spec(), FOLDER)


def rewrite(path: Path, change: dict[str, Any], config: dict[str, Any] | None = None) -> Path:
    """A copy of the trained head with other tensors, or without those that are None."""
    shutil.copytree(FOLDER, path)
    arrays = {**mx.load(str(FOLDER / "model.safetensors")), **change}
    mx.save_safetensors(str(path / "model.safetensors"), {k: v for k, v in arrays.items() if v is not None})
    settings = {**json.loads((FOLDER / "config.json").read_text()), **(config or {})}
    (path / "config.json").write_text(json.dumps(settings))
    return path


class NumpyHead:
    """The forward pass over all pairs of a text at once, in double precision."""

    def __init__(self, folder: Path, spec: HeadSpec, target: MlxModel) -> None:
        self.w = {k: np.array(v).astype(np.float64) for k, v in mx.load(str(folder / "model.safetensors")).items()}
        self.spec, self.vocab_size = spec, target.tokenizer.vocab_size
        self.embeddings = np.array(target.network.model.embed_tokens(mx.arange(self.vocab_size))).astype(np.float64)

    def fuse(self, features: Any) -> Any:
        if self.spec.norm_before_fc == "all":
            features = normed(features, self.w["input_norm.weight"])
        elif self.spec.norm_before_fc == "each":
            parts = np.split(features, 3, axis=1)
            features = np.concatenate([normed(x, self.w[f"fc_norm.{i}.weight"]) for i, x in enumerate(parts)], axis=1)
        return features @ self.w["fc.weight"].T

    def run(self, states: Any, tokens: list[int]) -> Any:
        w, n = {k.removeprefix("midlayer."): v for k, v in self.w.items()}, len(tokens)
        g = normed(states, w["hidden_norm.weight"])
        x = np.concatenate([normed(self.embeddings[tokens], w["input_layernorm.weight"]), g], axis=1)
        q, k, v = (
            (x @ w[f"self_attn.{c}_proj.weight"].T + w.get(f"self_attn.{c}_proj.bias", 0.0)).reshape(n, -1, 64)
            for c in "qkv"
        )
        if "self_attn.q_norm.weight" in w:
            q, k = normed(q, w["self_attn.q_norm.weight"]), normed(k, w["self_attn.k_norm.weight"])
        attended = attend(rotated(q), rotated(k), v, np.tri(n, dtype=bool)).reshape(n, -1)
        attended = attended @ w["self_attn.o_proj.weight"].T
        hidden = attended + (g if self.spec.norm_before_residual else states)
        y = normed(hidden, w["post_attention_layernorm.weight"])
        return hidden + feed_forward(y, *(w[f"mlp.{part}_proj.weight"] for part in ("gate", "up", "down")))

    def logits(self, features: Any, tokens: list[int], drafted: list[int]) -> Logits:
        """[V] after pairs of `features` and `tokens`, and of drafted tokens with the head's own states."""
        states = self.fuse(features)
        output = self.run(states, tokens)
        for token in drafted:
            last = output[-1:]
            fed = normed(last, self.w["norm.weight"]) if self.spec.feeds_normed else last
            states, tokens = np.concatenate([states, fed]), [*tokens, token]
            output = self.run(states, tokens)
        whole = np.full(self.vocab_size, -np.inf, np.float32)
        ids = self.w["d2t"].astype(int) + np.arange(len(self.w["d2t"]))
        whole[ids] = normed(output[-1], self.w["norm.weight"]) @ self.w["lm_head.weight"].T
        return whole


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"norm_before_residual": True, "norm_before_fc": "all"},
        {"feeds_normed": True, "norm_before_fc": "each"},
        {"layers": (4, 0, 6)},
    ],
    ids=str,
)
def test_the_forward_pass_is_that_of_numpy(target: MlxModel, changes: dict[str, Any], tmp_path: Path) -> None:
    norms = {f"fc_norm.{i}.weight": mx.linspace(0.5, 1.5 + i, 256) for i in range(3)}
    folder = rewrite(tmp_path / "head", {**norms, "input_norm.weight": mx.linspace(0.5, 1.5, 768)})
    spec = make_spec(**changes)
    check_forward(target, target.load_head(spec, folder), NumpyHead(folder, spec, target), spec)


def test_norms_and_biases_of_queries_and_keys(target: MlxModel, tmp_path: Path) -> None:
    more = {"q_norm.weight": mx.linspace(0.5, 2.0, 64), "k_norm.weight": mx.linspace(2.0, 0.5, 64)}
    more |= {f"{c}_proj.bias": mx.linspace(-1.0, 1.0, n) for c, n in (("q", 256), ("k", 128), ("v", 128))}
    folder = rewrite(tmp_path / "head", {f"midlayer.self_attn.{name}": each for name, each in more.items()})
    spec = make_spec()
    check_forward(target, target.load_head(spec, folder), NumpyHead(folder, spec, target), spec)


@pytest.fixture(scope="module")
def plain(target: MlxModel) -> Answers:
    return answer(target, None)


@pytest.fixture(scope="module")
def rate(target: MlxModel, head: MlxHead, plain: Answers) -> float:
    return measure(target, head, plain)


def test_a_trained_head_is_accepted(
    target: MlxModel, head: MlxHead, plain: Answers, rate: float, tmp_path: Path
) -> None:
    rng = np.random.default_rng(0)
    random = {
        name: mx.array(rng.standard_normal(each.shape).astype(np.float32) / 16)
        for name, each in mx.load(str(FOLDER / "model.safetensors")).items()
        if each.ndim == 2
    }
    assert rate > 0.5
    assert measure(target, head, plain, Budget(3, 8), 2) >= rate - 0.1  # trees
    assert (
        measure(target, target.load_head(make_spec(), rewrite(tmp_path / "random", random)), plain, n_prompts=1) < 0.05
    )


def test_a_quantized_head_is_accepted_nearly_as_often(
    target: MlxModel, head: MlxHead, plain: Answers, rate: float, tmp_path: Path
) -> None:
    quantize(tmp_path / "low", FOLDER, 4)
    low = target.load_head(read_spec(tmp_path / "low"), tmp_path / "low")
    assert low.extra_bytes < head.extra_bytes / 4
    assert measure(target, low, plain) > rate - 0.1


@pytest.mark.parametrize(
    "changes",
    [
        {"layers": (2, 4, 6)},
        {"layers": (0, 2, 4)},
        {"layers": (5, 3, 1)},
        {"norm_before_residual": True},
        {"feeds_normed": True},
    ],
    ids=str,
)
def test_a_wrong_reading_of_the_head_is_accepted_less(
    target: MlxModel, plain: Answers, rate: float, changes: dict[str, Any]
) -> None:
    """And the text does not change, which `measure` checks."""
    assert measure(target, target.load_head(make_spec(**changes), FOLDER), plain) < rate - 0.04


def test_shifted_features_and_ids_are_accepted_less(
    target: MlxModel, head: MlxHead, plain: Answers, rate: float, tmp_path: Path
) -> None:
    assert measure(target, MlxHead("eagle3", head.network, open_late, head.tokenizer), plain) < rate - 0.2
    folder = rewrite(tmp_path / "head", {"d2t": mx.zeros(2048, mx.int64)})
    assert measure(target, target.load_head(make_spec(), folder), plain, n_prompts=1) < 0.05


def test_heads_that_do_not_fit(target: MlxModel, tmp_path: Path) -> None:
    def check(error: type[Exception], message: str, changes: dict[str, Any], **spec: Any) -> None:
        folder = rewrite(tmp_path / str(len(list(tmp_path.iterdir()))), changes)
        with pytest.raises(error, match=message):
            target.load_head(make_spec(**spec), folder)

    check(Unsupported, "hidden size of 512; the model has 256", {}, hidden_size=512)
    check(InvalidModelFile, "is no assistant", {}, kind="gemma4-assistant")
    check(Unsupported, "scores 2,048 tokens and does not name them", {"d2t": None})
    check(InvalidModelFile, "lacks the tensor", {"fc.weight": None})
    check(InvalidModelFile, "has the shape", {"midlayer.self_attn.o_proj.weight": mx.zeros((256, 128))})
    check(InvalidModelFile, "does not name tokens", {"d2t": mx.full(2048, 5000, mx.int64)})
    check(Unsupported, "not its own embeddings", {}, size=128)
    head = target.load_head(make_spec(layers=(1, 3, 9)), FOLDER)
    with pytest.raises(Unsupported, match="reads layers 1, 3, 9, and the model has 6"):
        head.open_session(target.open_session(), lambda: None)

"""EAGLE, EAGLE-3 and MTP heads and Gemma 4 assistants on MLX: random weights against numpy."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from edgespec.backends.llamacpp.hidden_states import Floats
from edgespec.backends.mlx.model import MlxModel, load
from edgespec.backends.options import LoadOptions
from edgespec.core.arrays import Logits
from edgespec.core.protocols import Budget
from edgespec.engine.head_probe import HeadProbe
from edgespec.formats.heads import HeadSpec
from tests.backends.assistant_heads import Reference, make_assistant, name_tensors
from tests.backends.head_sessions import Pair, check_fresh
from tests.backends.mlx_pairs import answer, attach, check_forward, is_close, make_tokens, read_spec
from tests.backends.mlx_pairs import make_assistant_target as make_target
from tests.backends.mlx_pairs import write_assistant as write_head
from tests.backends.numpy_layers import attend, feed_forward, normed, rotated
from tests.backends.pair_heads import (
    FFN,
    LLAMA,
    MIXTURE,
    QWEN,
    Look,
    NumpyHead,
    make_config,
    make_tensors,
    quantize,
    stack_experts,
    write_folder,
)
from tests.formats.head_files import make_pickle, stored, write_torch
from tests.gguf_models import REPOSITORY
from tests.mlx_models import CONFIGS, load_target, make_folder

EAGLE3 = REPOSITORY / "tests" / "fixtures" / "heads" / "eagle3-python-6m"
SIZE, VOCABULARY = 256, 4096
LAYER = ("input_layernorm", "post_attention_layernorm", "q_norm", "k_norm")
OUTER = ("pre_fc_norm_hidden", "pre_fc_norm_embedding")


@pytest.fixture(scope="module")
def target() -> MlxModel:
    return load_target()


@pytest.fixture(scope="module")
def embeddings(target: MlxModel) -> Floats:
    """[V, H], which serve as the output matrix too."""
    found: Floats = np.array(target.network.model.embed_tokens(mx.arange(VOCABULARY)))
    return found


def write(path: Path, kind: str, tensors: dict[str, Any], look: Look = LLAMA) -> Path:
    return write_folder(path, tensors, make_config(kind, SIZE, VOCABULARY, look))


LOOKS = [
    *(("eagle", look) for look in (LLAMA, Look(is_biased=True), Look(n_layers=2), Look(is_normed=True))),
    *(("mtp", look) for look in (LLAMA, Look(is_biased=True), QWEN)),
    *(("mtp", look) for look in (Look(is_deepseek=True), Look(is_deepseek=True, is_normed=True))),
]


@pytest.mark.parametrize(("kind", "look"), LOOKS, ids=str)
def test_pairs_are_those_of_numpy(target: MlxModel, embeddings: Floats, kind: str, look: Look, tmp_path: Path) -> None:
    tensors = make_tensors(kind, SIZE, look)
    folder = write(tmp_path / "head", kind, tensors, look)
    spec = read_spec(folder)
    assert (spec.kind, spec.layers, spec.in_target, spec.feeds_normed) == (kind, (), False, kind == "mtp")
    head = target.load_head(spec, folder)
    assert head.extra_bytes == sum(each.nbytes for each in tensors.values())
    check_forward(target, head, NumpyHead(tensors, look, embeddings, embeddings), spec)


def test_embeddings_and_output_of_its_own(target: MlxModel, tmp_path: Path) -> None:
    rng, tensors = np.random.default_rng(5), make_tensors("eagle", SIZE, LLAMA)
    own = rng.standard_normal((2, VOCABULARY, SIZE), np.float32) / 16
    folder = write(tmp_path / "head", "eagle", {**tensors, "embed_tokens.weight": own[0], "lm_head.weight": own[1]})
    spec = read_spec(folder)
    check_forward(target, target.load_head(spec, folder), NumpyHead(tensors, LLAMA, own[0], own[1]), spec)


@pytest.mark.parametrize(
    ("kind", "look", "bits"),
    [("eagle", LLAMA, 4), ("eagle", LLAMA, 8), ("mtp", QWEN, 4), ("mtp", Look(is_deepseek=True), 4)],
    ids=str,
)
def test_quantized_heads(
    target: MlxModel, embeddings: Floats, kind: str, look: Look, bits: int, tmp_path: Path
) -> None:
    """Also with names without the prefix `mtp.`."""
    tensors = make_tensors(kind, SIZE, look)
    plain = {name.removeprefix("mtp."): each for name, each in tensors.items()}
    whole = write(tmp_path / "whole", kind, plain, look)
    values = quantize(tmp_path / "low", whole, bits)
    spec = read_spec(tmp_path / "low")
    assert spec == read_spec(whole)
    head = target.load_head(spec, tmp_path / "low")
    assert head.extra_bytes < target.load_head(spec, whole).extra_bytes / 2
    if kind == "mtp" and not look.is_deepseek:
        values = {f"mtp.{name}": each for name, each in values.items()}
    check_forward(target, head, NumpyHead(values, look, embeddings, embeddings), spec)


def test_pickled_heads(target: MlxModel, embeddings: Floats, tmp_path: Path) -> None:
    tensors = make_tensors("eagle", SIZE, LLAMA)
    tmp_path.joinpath("config.json").write_text(json.dumps(make_config("eagle", SIZE, VOCABULARY)))
    state, data = {}, {}
    for name, each in tensors.items():
        strides = (each.shape[1], 1) if each.ndim == 2 else (1,)
        state[name] = stored("FloatStorage", str(len(state)), each.size, each.shape, strides)
        data[str(len(data))] = each.tobytes()
    write_torch(tmp_path / "pytorch_model.bin", make_pickle(state), data)
    spec = read_spec(tmp_path)
    check_forward(target, target.load_head(spec, tmp_path), NumpyHead(tensors, LLAMA, embeddings, embeddings), spec)


@pytest.mark.parametrize("layout", ["experts", "fused", "stacked", "quantized"])
def test_a_mixture_of_experts(target: MlxModel, embeddings: Floats, layout: str, tmp_path: Path) -> None:
    tensors = values = make_tensors("mtp", SIZE, MIXTURE)
    if layout != "experts":
        tensors = stack_experts(tensors, is_fused=layout == "fused")
    folder = write(tmp_path / "head", "mtp", tensors, MIXTURE)
    if layout == "quantized":
        low = quantize(tmp_path / "low", folder, 8)
        folder, prefix = tmp_path / "low", "mtp.layers.0.mlp."
        values = {name: each for name, each in low.items() if "switch_mlp" not in name}
        for part in ("gate", "up", "down"):
            for i, each in enumerate(low[f"{prefix}switch_mlp.{part}_proj.weight"]):
                values[f"{prefix}experts.{i}.{part}_proj.weight"] = each
    spec = read_spec(folder)
    check_forward(target, target.load_head(spec, folder), NumpyHead(values, MIXTURE, embeddings, embeddings), spec)


@pytest.mark.parametrize(
    "kept", [(), LAYER, (*LAYER, "mtp.norm"), ("mtp.norm",), (*LAYER, "mtp.norm", *OUTER)], ids=len
)
def test_norms_that_converters_have_changed(
    target: MlxModel, embeddings: Floats, kept: tuple[str, ...], tmp_path: Path
) -> None:
    """`kept` are in the file as they are, the others less 1."""
    tensors = make_tensors("mtp", SIZE, QWEN)
    changed = {name: each + (1 if any(f"{part}." in name for part in kept) else 0) for name, each in tensors.items()}
    folder = write(tmp_path / "head", "mtp", changed, QWEN)
    spec = read_spec(folder)
    check_forward(target, target.load_head(spec, folder), NumpyHead(tensors, QWEN, embeddings, embeddings), spec)


def test_a_layer_in_the_folder_of_a_hybrid_target(tmp_path: Path) -> None:
    """mlx-lm does not load it. Rejected drafts are replayed there, and so are their features."""
    config = CONFIGS["hybrid"] | {"model_type": "qwen3_5", "num_experts": 0, "intermediate_size": FFN}
    rope = {"rope_parameters": {"rope_theta": 10_000.0, "partial_rotary_factor": QWEN.rotated, "type": "default"}}
    folder = make_folder(tmp_path / "target", config | rope)
    tensors = make_tensors("mtp", 64, QWEN)
    mx.save_safetensors(str(folder / "model-mtp.safetensors"), {name: mx.array(each) for name, each in tensors.items()})
    spec = read_spec(folder)
    assert (spec.kind, spec.in_target, spec.hidden_size) == ("mtp", True, 64)
    target = load(folder, LoadOptions(context_size=256))
    head = target.load_head(spec, folder)
    model = target.network.language_model
    embeddings, output = (np.array(each.weight) for each in (model.model.embed_tokens, model.lm_head))
    check_forward(target, head, NumpyHead(tensors, QWEN, embeddings, output), spec)
    pair = Pair(target, head, make_tokens(30))
    for accepted in (0, 2, 3, 1):
        pair.verify_chain([5, 9, 7], accepted, 11 + accepted)
        check_fresh(pair)
    pair.session.checkpoint()
    pair.verify_chain([5, 9, 7], 2, 8)
    pair.restart([*pair.text[:-3], 9, 10])
    check_fresh(pair)
    found = answer(target, head)
    assert found.texts == answer(target, None).texts and found.tested.total() > 20


class NumpyEagle3:
    """The forward pass over all pairs of a text at once, in double precision."""

    def __init__(self, folder: Path, spec: HeadSpec, embeddings: Floats) -> None:
        self.w = {k: np.array(v).astype(np.float64) for k, v in mx.load(str(folder / "model.safetensors")).items()}
        self.spec, self.embeddings = spec, embeddings.astype(np.float64)

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
        hidden = attended @ w["self_attn.o_proj.weight"].T + (g if self.spec.norm_before_residual else states)
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
        whole = np.full(len(self.embeddings), -np.inf, np.float32)
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
@pytest.mark.parametrize("is_normed", [False, True])
def test_eagle3_is_that_of_numpy(
    target: MlxModel, embeddings: Floats, changes: dict[str, Any], is_normed: bool, tmp_path: Path
) -> None:
    more = {f"fc_norm.{i}.weight": mx.linspace(0.5, 1.5 + i, 256) for i in range(3)}
    more["input_norm.weight"] = mx.linspace(0.5, 1.5, 768)
    if is_normed:  # norms and biases of queries and keys
        attention = "midlayer.self_attn"
        more |= {f"{attention}.{c}_norm.weight": mx.linspace(low, 2.5 - low, 64) for c, low in (("q", 0.5), ("k", 2.0))}
        more |= {
            f"{attention}.{c}_proj.bias": mx.linspace(-1.0, 1.0, n) for c, n in (("q", 256), ("k", 128), ("v", 128))
        }
    folder = tmp_path / "head"
    shutil.copytree(EAGLE3, folder)
    mx.save_safetensors(str(folder / "model.safetensors"), {**mx.load(str(EAGLE3 / "model.safetensors")), **more})
    spec = read_spec(EAGLE3, **changes)
    check_forward(target, target.load_head(spec, folder), NumpyEagle3(folder, spec, embeddings), spec)


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With folders target and head, and GGUF files of the same weights."""
    path = tmp_path_factory.mktemp("gemma4")
    make_target(path)
    write_head(path / "head", name_tensors(make_assistant(path / "head.gguf")))
    return path


def test_assistants_are_those_of_numpy(gemma: Path) -> None:
    """Behind a window of 12 tokens, and where the text is shorter than that; in a cache of eight bits."""
    target = load(gemma / "target", LoadOptions(context_size=256))
    head = attach(target, gemma / "head")
    reference = Reference(gemma / "target.gguf", gemma / "head.gguf")
    for n in (40, 5):
        text = make_tokens(n)
        pair = Pair(target, head, text)
        first = pair.read()
        assert is_close(first, reference.logits(text, []))
        assert is_close(pair.step(9), reference.logits(text, [9]))
        assert is_close(pair.step(30), reference.logits(text, [9, 30]))
        assert not is_close(first, reference.logits([700, *text[1:]], [])), "the first token is seen"
        pair.verify_chain(pair.propose(3), 2, 12)
        check_fresh(pair)
    low = load(gemma / "target", LoadOptions(context_size=256, kv_type="q8_0"))
    found, exact = (Pair(each, attach(each, gemma / "head"), make_tokens(40)).read() for each in (low, target))
    assert 0 < np.abs(found - exact).max() < 0.5
    result = HeadProbe(target, gemma / "head", "mlx", n_tokens=40).run(read_spec(gemma / "head"))
    assert result.chosen == result.stated
    prompts = ["def f(x):\n"]
    for temperature, budget in ((0.0, Budget(3, 3)), (0.8, Budget(3, 8))):
        answered = answer(target, head, budget=budget, temperature=temperature, prompts=prompts)
        assert answered.texts == answer(target, None, temperature=temperature, prompts=prompts).texts
        assert answered.tested.total() > 10


def test_a_quantized_assistant(gemma: Path, tmp_path: Path) -> None:
    """As mlx-lm quantizes, norms and scalars left as they are."""
    values = {}
    for name, each in name_tensors(gemma / "head.gguf").items():
        if each.ndim == 2 and "embed" not in name:
            parts = mx.quantize(mx.array(each), 32, 8)
            stem = name.removesuffix("weight")
            values |= {stem + part: np.array(x) for part, x in zip(("weight", "scales", "biases"), parts, strict=True)}
        else:
            values[name] = each
    low = write_head(tmp_path / "low", values)
    config = json.loads((low / "config.json").read_text())
    (low / "config.json").write_text(json.dumps(config | {"quantization": {"group_size": 32, "bits": 8}}))
    target = load(gemma / "target", LoadOptions(context_size=256))
    found, exact = (Pair(target, attach(target, each), make_tokens(40)).read() for each in (low, gemma / "head"))
    assert 0 < np.abs(found - exact).max() < 0.3

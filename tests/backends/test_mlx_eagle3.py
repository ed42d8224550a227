"""EAGLE-3 heads on MLX: the forward pass, sessions in step with their target, and a trained head's acceptance."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from edgespec.backends.attached_draft import Unsupported
from edgespec.backends.mlx import pair_session
from edgespec.backends.mlx.heads import MlxHead
from edgespec.backends.mlx.model import MlxModel, load
from edgespec.backends.mlx.pair_session import PairSession
from edgespec.backends.mlx.session import MlxSession
from edgespec.backends.options import LoadOptions
from edgespec.controller.fixed import FixedLength
from edgespec.core.arrays import Logits
from edgespec.core.loop import speculate
from edgespec.core.protocols import Budget, CheckCancelled, Draft, Step
from edgespec.core.rng import CounterRng
from edgespec.core.sampling import Sampler, SamplingParams
from edgespec.core.verify import SampleMatching
from edgespec.drafters.sequential import SequentialDrafter
from edgespec.errors import BackendError, Cancelled, InvalidModelFile
from edgespec.formats.head_file import read_head
from edgespec.formats.heads import HeadSpec
from tests.contract.runtimes import prefill
from tests.models import REPOSITORY, TARGET

FOLDER = REPOSITORY / "tests" / "fixtures" / "heads" / "eagle3-python-6m"
WHOLE = 10**6  # a window that no text fills
EPS = 1e-5
PROMPTS = (
    "def read_lines(path):\n",
    "class Queue:\n    def __init__(self, maxsize=0):\n",
    "import os\nimport sys\n\n\ndef main():\n    parser = ",
    "    def close(self):\n        if self._closed:\n",
)


@pytest.fixture(scope="module")
def target() -> MlxModel:
    return load(TARGET, LoadOptions(context_size=256))


def make_spec(**changes: Any) -> HeadSpec:
    spec = read_head(FOLDER)
    assert spec is not None
    return replace(spec, **changes)


@pytest.fixture(scope="module")
def head(target: MlxModel) -> MlxHead:
    return target.attach_head(make_spec(), FOLDER)


def make_tokens(n: int, seed: int = 0) -> list[int]:
    found: list[int] = np.random.default_rng(seed).integers(4, 600, n).tolist()
    return found


def rewrite(path: Path, change: dict[str, Any], config: dict[str, Any] | None = None) -> Path:
    """A copy of the trained head with other tensors, or without those that are None."""
    shutil.copytree(FOLDER, path)
    arrays = {**mx.load(str(FOLDER / "model.safetensors")), **change}
    mx.save_safetensors(str(path / "model.safetensors"), {k: v for k, v in arrays.items() if v is not None})
    settings = {**json.loads((FOLDER / "config.json").read_text()), **(config or {})}
    (path / "config.json").write_text(json.dumps(settings))
    return path


class Pair:
    """A target's session and a head's, which follow a text whose last token the target does not hold."""

    def __init__(self, target: MlxModel, head: MlxHead, text: list[int]) -> None:
        self.session: MlxSession = target.open_session()
        self.draft: PairSession = head.open_session(self.session, lambda: None)
        self.restart(text)

    def restart(self, text: list[int]) -> None:
        self.text = list(text)
        prefill(self.session, self.text[:-1])
        self.draft.begin(self.text)

    def verify(self, draft: Draft, path: Sequence[int], root: int) -> None:
        """The target accepts `path`, and emits `root` after it."""
        self.session.forward(self.text[-1], draft)
        self.session.commit(path)
        self.text += [*draft.tokens[list(path)].tolist(), root]

    def read(self, window: int = WHOLE) -> Logits:
        logits = self.draft.read(self.text, window)
        assert logits is not None
        return logits


def is_close(a: Logits, b: Logits) -> bool:
    known = np.isfinite(b)
    return bool((np.isfinite(a) == known).all() and np.abs(a[known] - b[known]).max() < 5e-3)


def check_fresh(target: MlxModel, head: MlxHead, pair: Pair) -> None:
    """The head says what it would beside a fresh session, and so does its next step."""
    other = Pair(target, head, pair.text)
    assert is_close(pair.read(), other.read())
    for token in (50, 7):
        a, b = pair.draft.step(token), other.draft.step(token)
        assert a is not None
        assert b is not None
        assert is_close(a, b)


def normed(x: Any, weight: Any) -> Any:
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + EPS) * weight


def rotated(x: Any) -> Any:
    """Rotary embedding of the two halves of a head; position is the row."""
    half = x.shape[-1] // 2
    angles = np.arange(len(x))[:, None] * 10_000.0 ** (-np.arange(half) / half)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


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
        q, k, v = ((x @ w[f"self_attn.{c}_proj.weight"].T).reshape(n, -1, 64) for c in "qkv")
        q, k, v = rotated(q), rotated(k).repeat(2, axis=1), v.repeat(2, axis=1)
        scores = np.where(np.tri(n, dtype=bool), np.einsum("ihd,jhd->hij", q, k) / 8, -np.inf)
        weights = np.exp(scores - scores.max(axis=2, keepdims=True))
        weights /= weights.sum(axis=2, keepdims=True)
        attended = np.einsum("hij,jhd->ihd", weights, v).reshape(n, -1) @ w["self_attn.o_proj.weight"].T
        hidden = attended + (g if self.spec.norm_before_residual else states)
        y = normed(hidden, w["post_attention_layernorm.weight"])
        gate = y @ w["mlp.gate_proj.weight"].T
        return hidden + (gate / (1 + np.exp(-gate)) * (y @ w["mlp.up_proj.weight"].T)) @ w["mlp.down_proj.weight"].T

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
    pair = Pair(target, target.attach_head(spec, folder), make_tokens(20))
    tapped = target.open_session()
    kept = tapped.tap(spec.layers or ())
    prefill(tapped, pair.text[:-1])
    features = np.array(kept.take(0, 19)).astype(np.float64)
    reference = NumpyHead(folder, spec, target)
    assert is_close(pair.read(), reference.logits(features, pair.text[1:], []))
    pair.draft.step(9)
    found = pair.draft.step(30)
    assert found is not None
    assert is_close(found, reference.logits(features, pair.text[1:], [9, 30]))
    assert not is_close(pair.read(), found), "nothing was tested"


def test_after_rounds_it_drafts_as_a_fresh_session(target: MlxModel, head: MlxHead) -> None:
    pair = Pair(target, head, make_tokens(30))
    for accepted in (0, 1, 2, 3, 3, 0):
        drafted = [int(pair.read().argmax())]
        while len(drafted) < 3:
            logits = pair.draft.step(drafted[-1])
            assert logits is not None
            drafted.append(int(logits.argmax()))
        pair.verify(Draft.chain(drafted), range(accepted), 11 + accepted)
        assert pair.draft.unread(pair.text) == accepted + 1
        check_fresh(target, head, pair)
    tree = Draft(np.array([5, 9, 7, 3], np.int32), np.array([-1, -1, 0, 1], np.int32))
    for path in ((1, 3), (0,), ()):  # rounds of another drafter, read together
        pair.verify(tree, path, 20)
    assert pair.draft.unread(pair.text) == 6
    check_fresh(target, head, pair)
    assert pair.draft.unread(pair.text) == 1, "the last pair runs again"
    check_fresh(target, head, pair)  # the same text again


def test_rollouts(target: MlxModel, head: MlxHead) -> None:
    pair = Pair(target, head, make_tokens(30))
    for accepted in (3, 1):
        steps = [pair.read()]
        while len(steps) < 4:
            logits = pair.draft.step(int(steps[-1].argmax()))
            assert logits is not None
            steps.append(logits)
        found = pair.draft.rollout(pair.text, WHOLE, 4)
        assert found is not None
        chain, scores = found
        assert chain.tokens.tolist() == [int(row.argmax()) for row in steps]
        assert all(is_close(scores.logits(i), row) for i, row in enumerate(steps))
        pair.verify(chain, range(accepted), 8)
        check_fresh(target, head, pair)


@pytest.mark.parametrize("shared", [0, 1, 12, 29])
def test_a_new_text_keeps_the_prefix_that_it_shares(target: MlxModel, head: MlxHead, shared: int) -> None:
    text = make_tokens(30)
    pair = Pair(target, head, text)
    pair.read()
    pair.draft.step(5)
    pair.restart([*text[:shared], *make_tokens(25, seed=shared + 1)])
    assert pair.draft.unread(pair.text) == len(pair.text) - 1 - max(0, shared - 1)
    check_fresh(target, head, pair)


def test_a_window_reads_the_end_alone(target: MlxModel, head: MlxHead) -> None:
    text = make_tokens(60)
    pair = Pair(target, head, text)
    whole, short = pair.read(), Pair(target, head, text)
    assert not is_close(short.read(window=10), whole)
    assert short.draft.unread(text) == 1
    assert is_close(short.read(), Pair(target, head, text).read(window=10))
    short.restart([*text[:20], *make_tokens(9, seed=5)])  # behind what was read: only what the target ran anew is read
    assert np.isfinite(short.read()).any()
    pair.verify(Draft.chain([4]), (0,), 9)
    check_fresh(target, head, pair)


def test_ends_of_texts_and_contexts(target: MlxModel, head: MlxHead) -> None:
    pair = Pair(target, head, [5, 6])
    assert pair.draft.read([5], WHOLE) is None
    assert pair.draft.rollout([5], WHOLE, 3) is None
    check_fresh(target, head, pair)
    pair.restart(make_tokens(254))
    assert pair.draft.rollout(pair.text, WHOLE, 8) is not None
    pair.read()
    assert [pair.draft.step(7) is None for _ in range(3)] == [False, False, True]
    with pytest.raises(BackendError, match="no hidden states"):
        pair.draft.read([*pair.text, 4], WHOLE)


def test_a_cancelled_read_is_done_again(target: MlxModel, head: MlxHead, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pair_session, "_CHUNK", 8)
    left = [3]

    def check() -> None:
        left[0] -= 1
        if left[0] == 0:
            raise Cancelled

    pair = Pair(target, head, make_tokens(40))
    pair.draft._check = check
    with pytest.raises(Cancelled):
        pair.read()
    assert 0 < pair.draft.unread(pair.text) < 39
    check_fresh(target, head, pair)


def generate(session: MlxSession, controller: FixedLength, prompt: list[int]) -> tuple[list[int], int, int]:
    """(tokens, how many drafted ones were compared, how many of them were accepted)."""
    verifier = SampleMatching(Sampler(SamplingParams(temperature=0.0), []), CounterRng(0))
    tokens, tested, accepted = [], 0, 0
    for event in speculate(session, controller, verifier, prompt, max_tokens=40, stop=frozenset()):
        if isinstance(event, Step):
            tokens += event.tokens
            tested, accepted = tested + event.n_tested, accepted + event.n_accepted
    assert not controller.failures
    return tokens, tested, accepted


@pytest.fixture(scope="module")
def plain(target: MlxModel) -> dict[str, list[int]]:
    return {
        prompt: generate(target.open_session(), FixedLength([], Budget(0, 0), 4096), encode(target, prompt))[0]
        for prompt in PROMPTS
    }


def encode(target: MlxModel, prompt: str) -> list[int]:
    return target.tokenizer.encode(prompt, parse_special=False)


def measure(target: MlxModel, head: MlxHead, plain: dict[str, list[int]], nodes: int = 3) -> float:
    """The share of compared tokens that was accepted. Answers must be those of plain decoding."""
    all_tested = all_accepted = 0
    for prompt, expected in plain.items():
        session = target.open_session()
        drafter = SequentialDrafter("eagle3", head.open_session(session, lambda: None))
        controller = FixedLength([drafter], Budget(3, nodes), 4096)
        tokens, tested, accepted = generate(session, controller, encode(target, prompt))
        assert tokens == expected
        all_tested, all_accepted = all_tested + tested, all_accepted + accepted
    return all_accepted / all_tested


@pytest.fixture(scope="module")
def rate(target: MlxModel, head: MlxHead, plain: dict[str, list[int]]) -> float:
    return measure(target, head, plain)


def test_a_trained_head_is_accepted(
    target: MlxModel, head: MlxHead, plain: dict[str, list[int]], rate: float, tmp_path: Path
) -> None:
    rng = np.random.default_rng(0)
    random = {
        name: mx.array(rng.standard_normal(each.shape).astype(np.float32) / 16)
        for name, each in mx.load(str(FOLDER / "model.safetensors")).items()
        if each.ndim == 2
    }
    assert rate > 0.5
    assert measure(target, head, plain, nodes=8) >= rate - 0.1  # trees
    assert measure(target, target.attach_head(make_spec(), rewrite(tmp_path / "random", random)), plain) < 0.05


class LateFeatures:
    """Features of which each row but the first is that of the position before."""

    def __init__(self, features: Any) -> None:
        self._features = features

    def __getattr__(self, name: str) -> Any:
        return getattr(self._features, name)

    def take(self, first: int, last: int) -> Any:
        rows = self._features.take(max(first - 1, 0), last)
        return rows[:-1] if first else mx.concatenate([rows[:1], rows[:-1]])

    def release(self, position: int) -> None:
        """Keep all."""


def open_late(network: Any, target: MlxSession, features: Any, check: CheckCancelled) -> PairSession:
    """A session whose features are shifted by one position."""
    late: Any = LateFeatures(features)
    return PairSession(network, target, late, check)


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
    target: MlxModel, plain: dict[str, list[int]], rate: float, changes: dict[str, Any]
) -> None:
    """And the text does not change, which `measure` checks."""
    assert measure(target, target.attach_head(make_spec(**changes), FOLDER), plain) < rate - 0.04


def test_shifted_features_and_ids_are_accepted_less(
    target: MlxModel, head: MlxHead, plain: dict[str, list[int]], rate: float, tmp_path: Path
) -> None:
    assert measure(target, MlxHead("eagle3", head._network, open_late, head.tokenizer), plain) < rate - 0.2
    folder = rewrite(tmp_path / "head", {"d2t": mx.zeros(2048, mx.int64)})
    assert measure(target, target.attach_head(make_spec(), folder), plain) < 0.05


def test_heads_that_do_not_fit(target: MlxModel, tmp_path: Path) -> None:
    def check(error: type[Exception], message: str, changes: dict[str, Any], **spec: Any) -> None:
        folder = rewrite(tmp_path / str(len(list(tmp_path.iterdir()))), changes)
        with pytest.raises(error, match=message):
            target.attach_head(make_spec(**spec), folder)

    check(Unsupported, "hidden size of 512; the model has 256", {}, hidden_size=512)
    check(Unsupported, "MLX runs heads in folders", {}, kind="gemma4-assistant")
    check(Unsupported, "scores 2,048 tokens and does not name them", {"d2t": None})
    check(InvalidModelFile, "lacks the tensor", {"fc.weight": None})
    check(InvalidModelFile, "has the shape", {"midlayer.self_attn.o_proj.weight": mx.zeros((256, 128))})
    check(InvalidModelFile, "does not name tokens", {"d2t": mx.full(2048, 5000, mx.int64)})
    check(Unsupported, "not its own embeddings", {}, size=128)
    head = target.attach_head(make_spec(layers=(1, 3, 9)), FOLDER)
    with pytest.raises(Unsupported, match="reads layers 1, 3, 9, and the model has 6"):
        head.open_session(target.open_session(), lambda: None)

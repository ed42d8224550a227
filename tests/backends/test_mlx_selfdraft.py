"""Self-drafts on MLX: what is left out is left out, the target stays what it was, followers keep to their target."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

from edgespec.backends.attached_draft import Unsupported, parse
from edgespec.backends.mlx.caches import SLACK
from edgespec.backends.mlx.model import MlxModel, load
from edgespec.backends.mlx.selfdraft import MlxSelfDraft
from edgespec.backends.mlx.session import MlxSession
from edgespec.backends.mlx.shared_kv import SharedKVSession
from edgespec.backends.options import LoadOptions
from edgespec.cancel import cancellable
from edgespec.core.arrays import Logits
from edgespec.core.protocols import NO_DRAFT, Draft
from edgespec.errors import BackendError, Cancelled, ContextOverflow, InvalidRequest, RollbackError
from tests.backends.zoo import VOCABULARY, tiny
from tests.contract.runtimes import prefill
from tests.gguf_models import TARGET
from tests.mlx_models import CONFIGS, DENSE, make_folder, make_model

METHODS = ("layerskip:2", "layerskip:0,1,5", "qspec", "sparse:4,8", "layerskip:3+qspec:3", "skip:2+sparse")
SIX = {**DENSE, "num_hidden_layers": 6, "vocab_size": 4096}


@pytest.fixture(scope="module")
def small() -> MlxModel:
    """Random weights of 8 bits."""
    network = make_model(SIX)
    nn.quantize(network, group_size=32, bits=8)
    return wrap(network)


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> MlxModel:
    folder = make_folder(tmp_path_factory.mktemp("mlx") / "w", CONFIGS["sliding-window"])
    return load(folder, LoadOptions(context_size=1024))


def make_tokens(n: int, seed: int = 0, limit: int = 500) -> list[int]:
    found: list[int] = np.random.default_rng(seed).integers(0, limit, n).tolist()
    return found


def wrap(network: Any, vocab_size: int = 4096) -> MlxModel:
    return MlxModel(network, SimpleNamespace(vocab_size=vocab_size), None, 512, None)  # type: ignore[arg-type]


def make_draft(model: MlxModel, method: str) -> MlxSelfDraft:
    found = parse(method)
    assert found is not None
    return model.make_self_draft(found)


def pair(draft: MlxSelfDraft, model: MlxModel, tokens: list[int]) -> tuple[MlxSession, SharedKVSession]:
    """A target's session that holds `tokens`, and a draft's beside it."""
    target = model.open_session()
    prefill(target, tokens)
    return target, draft.open_session(target)


def chain_logits(session: MlxSession, root: int, draft: Draft) -> Logits:
    scores = session.forward(root, draft)
    return np.stack([scores.logits(i) for i in range(len(draft) + 1)])


def fresh_logits(model: MlxModel, tokens: list[int], root: int, draft: Draft) -> Logits:
    session = model.open_session()
    prefill(session, tokens)
    return chain_logits(session, root, draft)


@pytest.mark.parametrize("kept", [(0, 1), (0, 2, 5), (3, 4)])
def test_a_draft_is_a_model_of_the_kept_layers(kept: tuple[int, ...]) -> None:
    network = make_model(SIX)
    tokens = make_tokens(12)
    model = wrap(network)
    assert model.layer_count == 6
    draft = make_draft(model, "layerskip:" + (str(len(kept)) if kept == (0, 1) else ",".join(map(str, kept))))
    session = draft.open_session(model.open_session())
    found, scores = session.rollout(tokens, 5, 4096)  # beside a target that holds nothing, so all of it is drafted
    z = scores.logits(4)
    whole, network.model.layers = network.model.layers, [network.model.layers[i] for i in kept]
    wanted, truncated = wrap(network).open_session().rollout(tokens, 5, 4096)
    assert found.tokens.tolist() == wanted.tokens.tolist()
    assert np.abs(z - truncated.logits(4)).max() < 1e-4
    network.model.layers = whole


def test_an_exit_is_resumed(small: MlxModel) -> None:
    draft = make_draft(small, "layerskip:2")
    assert draft.continues_from_layer
    hooks, tokens = small._hooks, make_tokens(20)
    assert hooks is not None
    target, session = pair(draft, small, tokens)
    chain, _ = session.rollout([7], 3, 4096)
    drafted = chain.tokens.tolist()
    layers = small.layer_count
    # What the draft ran: the root and all of the chain but its last token, in two layers.
    for following, reused in [
        (chain, 3),
        (Draft.chain(drafted), 3),
        (Draft.chain([*drafted[:1], drafted[1] + 1, 9]), 2),
        (NO_DRAFT, 1),
        (Draft.chain([drafted[0] + 1]), 1),
    ]:
        expected = fresh_logits(small, tokens, 7, following)
        before = hooks.layer_rows
        found = chain_logits(target, 7, following)
        assert np.abs(found - expected).max() < 1e-4
        assert hooks.layer_rows - before == layers * (len(following) + 1) - 2 * reused
        target.rewind(20)
        session.rollout([7], 3, 4096)
    tree = Draft(np.array([drafted[0], 5], np.int32), np.array([-1, -1], np.int32))
    for root, other in ((8, Draft.chain(drafted)), (7, tree)):
        expected = fresh_logits(small, tokens, root, other)
        before = hooks.layer_rows
        assert np.array_equal(chain_logits(target, root, other), expected)
        assert hooks.layer_rows - before == layers * (len(other) + 1)
        target.rewind(20)
        session.rollout([7], 3, 4096)
    # Step by step, and some of it taken back: a walk that ran every token of the chain, the last one included.
    session.rewind(0)
    for token in (7, 30, 31, 32):
        session.forward(token, NO_DRAFT)
        session.commit(())
    assert session.rewind(22) == 22
    session.forward(33, Draft.chain([34]))
    session.commit((0,))
    expected = fresh_logits(small, tokens, 7, Draft.chain([30, 33, 34]))
    before = hooks.layer_rows
    assert np.abs(chain_logits(target, 7, Draft.chain([30, 33, 34])) - expected).max() < 1e-4
    assert hooks.layer_rows - before == (layers - 2) * 4
    draft.close()


@pytest.mark.parametrize("method", METHODS)
def test_the_target_computes_what_it_did(small: MlxModel, method: str) -> None:
    """After drafts of all kinds: the same rows in the same forward, bit for bit."""
    draft = make_draft(small, method)
    tokens = make_tokens(16)
    other, tree = Draft.chain([3, 4]), Draft(np.array([3, 4], np.int32), np.array([-1, -1], np.int32))
    for following in (other, tree, NO_DRAFT):
        expected = fresh_logits(small, tokens, 6, following)
        target, session = pair(draft, small, tokens)
        assert session.position == 16
        session.rollout([7, 8], 4, 4096)
        assert (session.position, target.position) == (21, 16)
        session.rewind(17)
        session.forward(9, Draft.chain([10, 11]))
        session.commit((0,))
        assert session.position == 19
        assert np.array_equal(chain_logits(target, 6, following), expected)
        assert session.position == target.position == 16
        target.commit(())
        assert session.position == target.position == 17
    draft.close()


def test_a_sparse_draft_sees_both_ends(small: MlxModel) -> None:
    draft = make_draft(small, "sparse:4,16")
    tokens = make_tokens(60)
    target, session = pair(draft, small, tokens)
    short = chain_logits(session, 5, Draft.chain([6]))  # type: ignore[arg-type]
    session.commit((0,))
    assert {cache.keys.shape[2] for cache in session._caches} == {20 + 256}, "rows copied, and a step of new ones"
    assert np.abs(short - fresh_logits(small, tokens, 5, Draft.chain([6]))).max() > 1e-2
    # What the model makes of rows that it sees alone, at the positions they have in the text.
    runner = target.bind(session)
    for cache in runner.caches.entries:
        rows = [*range(4), *range(44, 60)]
        cache.keys, cache.values = (mx.take(x, mx.array(rows), axis=2) for x in (cache.keys, cache.values))
        cache._start = 40
    assert np.abs(np.array(runner.run(mx.array([[5, 6]]))) - short).max() < 1e-4
    for n in (3, 12, 20):  # all of a context that is no longer than both ends
        _, session = pair(draft, small, tokens[:n])
        found = chain_logits(session, 5, Draft.chain([6]))  # type: ignore[arg-type]
        assert np.abs(found - fresh_logits(small, tokens[:n], 5, Draft.chain([6]))).max() < 1e-4


@pytest.mark.parametrize("method", ["layerskip:3", "layerskip:0,2,5", "sparse:4,8", "qspec:4"])
def test_beside_a_sliding_window(windowed: MlxModel, method: str) -> None:
    """Rounds that keep a part of each draft, while the target's buffers drop their front."""
    draft = make_draft(windowed, method)
    tokens = make_tokens(24 + 2 * SLACK - 6)
    target, session = pair(draft, windowed, tokens)
    for root, kept in ((5, 3), (6, 0), (7, 9), (8, 10)):
        chain, _ = session.rollout([root], 10, 4096)
        target.forward(root, chain)
        target.commit(range(kept))
        tokens += [root, *chain.tokens.tolist()[:kept]]
    session.rollout([3], 4, 4096)
    found = target.forward(3, NO_DRAFT).logits(0)
    assert target._runner.caches.entries[0]._start > 0
    assert np.abs(found - prefill(windowed.open_session(), [*tokens, 3])).max() < 2e-3
    target.commit(())
    with pytest.raises(ContextOverflow):
        session.rollout([3], SLACK + 1, 4096)


def test_over_a_quantized_cache() -> None:
    model = load(TARGET, LoadOptions(context_size=256, kv_type="q8_0"))
    for method in ("layerskip:2", "sparse:4,8"):
        target, session = pair(make_draft(model, method), model, make_tokens(30))
        chain, _ = session.rollout([7], 3, 4096)
        expected = fresh_logits(model, make_tokens(30), 7, Draft.chain(chain.tokens.tolist()))
        assert np.abs(chain_logits(target, 7, chain) - expected).max() < 0.02


@pytest.mark.parametrize("name", ["gptj", "talkie", "gemma2", "gpt_oss", "qwen3_moe", "deepseek_v2"])
def test_classes_of_models(name: str) -> None:
    """Layers with other signatures. What a class does not take up again runs in full."""
    model = wrap(tiny(name), VOCABULARY)
    tokens = make_tokens(12, limit=VOCABULARY)
    expected = fresh_logits(model, tokens, 3, Draft.chain([4, 5]))
    for method in ("layerskip:2", "layerskip:0,3", "sparse:2,3"):
        draft = make_draft(model, method)
        assert draft.continues_from_layer == (method == "layerskip:2" and name != "talkie")
        target, session = pair(draft, model, tokens)
        session.forward(3, Draft.chain([4]))
        session.commit((0,))
        assert np.abs(chain_logits(target, 3, Draft.chain([4, 5])) - expected).max() < 1e-3 * expected.std()


def test_other_mistakes(small: MlxModel, windowed: MlxModel) -> None:
    with pytest.raises(InvalidRequest, match="6 layers"):
        make_draft(small, "layerskip:6")
    mxfp4 = make_model({**DENSE, "vocab_size": 64})
    nn.quantize(mxfp4, group_size=32, bits=4, mode="mxfp4")
    make_draft(wrap(mxfp4, 64), "qspec").close()
    draft = make_draft(small, "layerskip:2")
    with pytest.raises(ValueError, match="a session of another model"):
        draft.open_session(windowed.open_session())
    target, session = pair(draft, small, make_tokens(10))
    target.forward(3, NO_DRAFT)
    with pytest.raises(RollbackError, match="not committed"):
        session.rollout([3], 2, 4096)
    target.commit(())
    session.close()
    with pytest.raises(BackendError, match="closed"):
        session.rollout([3], 2, 4096)


@pytest.mark.parametrize("method", ["layerskip:2", "qspec", "layerskip:2+sparse:4,8"])
def test_cancelled_anywhere(small: MlxModel, method: str) -> None:
    """At every check of a draft and of the target's forward on it, from the loading on; both go on afterwards."""
    left = 10**9

    def check() -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise Cancelled

    def until_done(run: Callable[[], Any], limit: int) -> Any:
        """`run`, after having been cancelled at its first check, its second ... and at the last."""
        nonlocal left
        for allowed in range(limit):
            left = allowed
            try:
                with cancellable(check):
                    return run()
            except Cancelled:
                continue
            finally:
                left = 10**9
        raise AssertionError("there is no end of checks")

    found = parse(method)
    assert found is not None
    expected = fresh_logits(small, make_tokens(30), 6, Draft.chain([3]))
    if method == "qspec":  # once is enough: there are checks for every layer
        left = 20
        with pytest.raises(Cancelled), cancellable(check):
            small.make_self_draft(found)
        left = 10**9
        assert np.array_equal(fresh_logits(small, make_tokens(30), 6, Draft.chain([3])), expected)
    draft = small.make_self_draft(found)
    target = small.open_session()
    prefill(target, make_tokens(30))
    session = draft.open_session(target)

    def drafted() -> Draft:
        session.rewind(0)
        return session.rollout([6], 4, 4096)[0]

    wanted = drafted().tokens.tolist()
    target.rewind(29)
    prefill(target, make_tokens(30))
    chain = until_done(drafted, 20)
    assert chain.tokens.tolist() == wanted
    following = Draft.chain(wanted)
    rows = until_done(lambda: chain_logits(target, 6, following), 20)
    assert np.abs(rows - fresh_logits(small, make_tokens(30), 6, following)).max() < 1e-4
    target.rewind(30)
    drafted()
    assert np.array_equal(chain_logits(target, 6, Draft.chain([3])), expected) or draft.continues_from_layer
    draft.close()


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
    session = draft.open_session(model.open_session())
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

"""Every class of mlx-lm in a tiny configuration: whether it takes trees, and that its caches roll back."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import pytest

from edgespec.backends.attached_draft import Unsupported
from edgespec.backends.mlx.hooks import LayerHooks
from edgespec.backends.mlx.probe import probe
from edgespec.backends.mlx.runner import ModelRunner
from edgespec.backends.mlx.session import MlxSession
from edgespec.core.protocols import Capabilities, Draft
from edgespec.errors import BackendError
from tests.backends.zoo import VOCABULARY, class_names, tiny
from tests.contract.runtimes import prefill
from tests.gguf_models import REPOSITORY

# What takes chains only.
CHAINS = {
    *("baichuan_m1", "bailing_hybrid", "bailing_moe_linear", "bailing_moe_v3", "falcon_h1", "gpt_bigcode"),
    *("granitemoehybrid", "jamba", "kimi_linear", "lfm2", "lfm2-vl", "lfm2_moe", "longcat_flash_ngram", "mamba"),
    *("mamba2", "nemotron_h", "olmo_hybrid", "plamo2", "qwen3_5", "qwen3_next", "recurrent_gemma", "rwkv7"),
    *("gpt2", "llama4"),
}
REFUSED = {"bitnet": "No Metal back-end", "deepseek_v41": "LayerCache cannot be rolled back"}
# No tiny configuration, or (phi3small) token ids fixed in the code.
UNMADE = {"phi3small", "kimi_k3", "minimax_m3_vl", "muse_spark", "prism_hadamard_qwen35", "qwen3_5_moe", "spark2_5"}
NO_STATES = {"gemma3n", "iquestloopcoder"}  # several rows for each token; layers that run twice
NO_FINAL_STATE = {"plamo"}
NAMES = class_names()


def test_the_lists_name_classes_that_exist() -> None:
    assert {*CHAINS, *REFUSED, *UNMADE} <= set(NAMES)


def test_the_document_names_them_all() -> None:
    text = (REPOSITORY / "docs" / "models.md").read_text(encoding="utf-8")
    assert {*CHAINS, *REFUSED, *UNMADE} <= set(re.findall(r"[\w-]+", text))
    assert f"the {len(NAMES)} classes" in text.replace("\n", " ")


@pytest.mark.parametrize("name", [name for name in NAMES if name not in UNMADE])
def test_class(name: str) -> None:
    model = tiny(name)

    def open_runner() -> ModelRunner:
        return ModelRunner(model)

    if name in REFUSED:
        with pytest.raises(BackendError, match=REFUSED[name]):
            probe(open_runner, VOCABULARY)
        return
    found = probe(open_runner, VOCABULARY)
    assert (found is not None) == (name in CHAINS), found
    early, late = ([first, *range(20, 24)] for first in (3, 4))
    a, b = (np.array(open_runner().run_chain(tokens)[-1]) for tokens in (early, late))
    assert np.abs(a - b).max() > 1e-4 * a.std() > 0, "a model that looks at the last token alone proves nothing"
    check_rollback(open_runner, takes_trees=found is None)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in UNMADE | set(REFUSED)])
def test_hidden_states(name: str) -> None:
    """Those of a draft that was accepted in part are those of a prompt."""
    model, tokens = tiny(name), (np.arange(30) * 37 % VOCABULARY).tolist()
    hooks = LayerHooks(model)
    for layers in ((), (1, 2, len(hooks.layers))):
        sessions = [
            MlxSession(lambda: ModelRunner(model), lambda: hooks, Capabilities(VOCABULARY, 256, False))
            for _ in range(2)
        ]
        if name in (NO_STATES if layers else NO_FINAL_STATE):
            with pytest.raises(Unsupported, match="cannot be read"):
                sessions[0].tap(layers)
            continue
        drafted, prefilled = (session.tap(layers) for session in sessions)
        prefill(sessions[0], tokens)
        sessions[0].forward(3, Draft.chain([4, 5]))
        sessions[0].commit((0,))
        prefill(sessions[1], [*tokens, 3, 4])
        a, b = (np.array(kept.take(0, 32)) for kept in (drafted, prefilled))
        assert np.abs(a - b).max() < 2e-3 * b.std()


def check_rollback(open_runner: Callable[[], ModelRunner], *, takes_trees: bool) -> None:
    """Drafts accepted in part, as chains and trees, each followed by the scores of a fresh session."""
    capabilities = Capabilities(VOCABULARY, 256, takes_trees)

    def fresh() -> MlxSession:
        return MlxSession(open_runner, lambda: LayerHooks(open_runner().model), capabilities)

    session = fresh()
    tokens = (np.arange(30) * 37 % VOCABULARY).tolist()  # more than the window of 24 that some have
    prefill(session, tokens)
    tree = Draft(np.array([5, 9, 7, 3, 4], np.int32), np.array([-1, -1, 0, 1, 3], np.int32))
    rounds = [(Draft.chain([1, 2, 3]), (0,)), (Draft.chain([4, 5]), (0, 1)), (tree, (1, 3)), (tree, (0,))]
    for draft, path in rounds:
        if not draft.is_chain and not takes_trees:
            continue
        session.forward(6, draft)
        session.commit(path)
        tokens += [6, *draft.tokens[list(path)].tolist()]
        scores = session.forward(8, Draft.chain([2]))
        z = prefill(fresh(), [*tokens, 8, 2])
        assert np.abs(scores.logits(1) - z).max() < 1e-3 * z.std()
        session.commit(())
        tokens.append(8)

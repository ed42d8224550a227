"""The MLX backend beside the contract suite: windows, vocabularies, agreement with llama.cpp, the process itself."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from edgespec.backends import prefers_mlx
from edgespec.backends.llamacpp.model import load as load_llama
from edgespec.backends.mlx import library, runner
from edgespec.backends.mlx.caches import SLACK
from edgespec.backends.mlx.forward import ForwardContext
from edgespec.backends.mlx.model import MlxModel, load
from edgespec.backends.mlx.probe import probe
from edgespec.backends.mlx.runner import ModelRunner
from edgespec.backends.options import LoadOptions
from edgespec.core.protocols import NO_DRAFT, Draft
from edgespec.core.rng import CounterRng
from edgespec.core.sampling import SamplingParams
from edgespec.errors import BackendError, BackendUnavailable
from edgespec.installation import install_command
from tests.contract.runtimes import prefill
from tests.gguf_models import TARGET, find_trained
from tests.mlx_models import CONFIGS, DENSE, make_folder, make_model

TEXTS = (
    "def f(x):\n    return x + 1\n",
    "naïve café — 日本語 🙂 \x00\t\r\n",
    "<|endoftext|> spelled, and half a <|end",
    "  leading and trailing  ",
    "a",
)


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> MlxModel:
    folder = make_folder(tmp_path_factory.mktemp("mlx") / "w", CONFIGS["sliding-window"])
    return load(folder, LoadOptions(context_size=1024))


def test_far_beyond_a_window(windowed: MlxModel) -> None:
    """Drafts accepted in part, until the buffer has dropped its front several times."""
    session = windowed.open_session()
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 500, 40).tolist()
    prefill(session, tokens)
    checked = 0
    while len(tokens) < 24 + 5 * SLACK:
        drafted = rng.integers(0, 500, 20).tolist()
        scores = session.forward(drafted[0], Draft.chain(drafted[1:]))
        kept = int(rng.integers(0, 20))
        tokens += drafted[: kept + 1]
        if len(tokens) // 60 > checked:
            checked = len(tokens) // 60
            assert np.abs(scores.logits(kept) - prefill(windowed.open_session(), tokens)).max() < 2e-3
        session.commit(range(kept))
    assert checked >= 5


def test_going_back_further_than_a_window_remembers(windowed: MlxModel) -> None:
    """To the end of the last prompt, which is a checkpoint; further back only from the start."""
    session = windowed.open_session()
    rng = np.random.default_rng(1)
    prompt = rng.integers(0, 500, 70).tolist()
    prefill(session, prompt)
    session.checkpoint()
    for _ in range(3 * SLACK // 20 + 2):
        drafted = rng.integers(0, 500, 20).tolist()
        session.forward(drafted[0], Draft.chain(drafted[1:]))
        session.commit(range(19))
    assert session.rewind(80) == 70
    after = [*prompt, 3, 4, 5]
    assert np.abs(prefill(session, after) - prefill(windowed.open_session(), after)).max() < 2e-3
    assert session.rewind(len(after) - 2) == len(after) - 2
    prefill(session, rng.integers(0, 500, 500).tolist())
    assert session.rewind(100) == 0


def test_prefill_of_many_chunks(windowed: MlxModel) -> None:
    tokens = np.random.default_rng(2).integers(0, 500, 700).tolist()
    in_chunks = prefill(windowed.open_session(), tokens)
    session = windowed.open_session()
    for end in range(50, 700, 50):  # as many turns, each of which continues the last
        prefill(session, tokens[:end])
    session.forward(tokens[650], Draft.chain(tokens[651:-1]))
    session.commit(range(48))
    assert np.abs(session.forward(tokens[-1], NO_DRAFT).logits(0) - in_chunks).max() < 2e-3


def test_the_embedded_pair_says_the_same_on_both_runtimes() -> None:
    ours, theirs = load(TARGET, LoadOptions(context_size=256)), load_llama(TARGET, LoadOptions(256, threads=1))
    for text in TEXTS[:2]:
        tokens = theirs.tokenizer.encode(text, parse_special=True)
        a, b = (prefill(model.open_session(), tokens) for model in (ours, theirs))
        assert np.abs(a - b).max() < 0.2, "Q8_0 weights, which llama.cpp multiplies by 8-bit activations"
        assert a.argmax() == b.argmax()


@pytest.mark.parametrize("parse_special", [True, False])
def test_a_folders_vocabulary_is_the_gguf_files(tmp_path: Path, parse_special: bool) -> None:
    folder = find_trained("target").parent
    if not (folder / "config.json").is_file():  # without the trained pair: the packaged vocabulary written as a folder
        folder = make_folder(tmp_path / "m", DENSE)
    ours = load(folder, LoadOptions(context_size=64)).tokenizer
    theirs = load_llama(TARGET, LoadOptions(64), vocabulary_only=True).tokenizer
    assert ours.vocab_size == theirs.vocab_size
    assert (ours.bos, ours.eos) == (theirs.bos, theirs.eos)
    for token in range(ours.vocab_size):
        assert ours.piece(token) == theirs.piece(token), token
        assert ours.special_text(token) == theirs.special_text(token), token
    for text in TEXTS:
        assert ours.encode(text, parse_special=parse_special) == theirs.encode(text, parse_special=parse_special)


@pytest.mark.parametrize("bits", [3, 8])
def test_quantized_folders(tmp_path: Path, bits: int) -> None:
    model = load(make_folder(tmp_path / "q", DENSE, bits=bits), LoadOptions(context_size=64))
    assert model.no_tree_reason is None
    assert np.isfinite(prefill(model.open_session(), [1, 2, 3])).all()


def test_mxfp4(tmp_path: Path) -> None:
    import mlx.nn as nn

    from tests.mlx_models import save

    config = {**DENSE, "vocab_size": 4096}
    made = make_model(config)
    nn.quantize(made, group_size=32, bits=4, mode="mxfp4")
    tmp_path.joinpath("x").mkdir()
    save(tmp_path / "x", made, {**config, "quantization": {"group_size": 32, "bits": 4, "mode": "mxfp4"}})
    model = load(tmp_path / "x", LoadOptions(context_size=64))
    wanted = np.array(made(mx.array([[1, 2, 3]]))[0, -1].astype(mx.float32))
    assert np.abs(prefill(model.open_session(), [1, 2, 3]) - wanted).max() < 1e-2


def test_tokens_that_the_model_knows_nothing_of_are_text(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "m", DENSE)
    content = json.loads((folder / "tokenizer.json").read_text())
    content["added_tokens"].append({**content["added_tokens"][0], "id": 4096, "content": "<|extra|>"})
    (folder / "tokenizer.json").write_text(json.dumps(content))
    tokenizer = load(folder, LoadOptions(context_size=64)).tokenizer
    found = tokenizer.encode("x <|extra|> y", parse_special=True)
    assert max(found) < tokenizer.vocab_size
    assert b"".join(map(tokenizer.piece, found)) == b"x <|extra|> y"


def test_reading_scores_twice_while_running_ahead(windowed: MlxModel) -> None:
    """The token that was run ahead is the first read's; what a second read finds must not pass for it."""
    for seed in range(6):
        session = windowed.open_session()
        tokens = [5, 6, 7, 8]
        prefill(session, tokens)
        scores = session.forward(9, NO_DRAFT, run_ahead=True)
        drawn = scores.draw(SamplingParams(temperature=2.0), [CounterRng(seed).uniform(0)])
        best = int(scores.argmax()[0])
        session.commit(())
        z = session.forward(best, NO_DRAFT).logits(0)
        assert np.abs(z - prefill(windowed.open_session(), [*tokens, 9, best])).max() < 2e-3, drawn


@pytest.mark.parametrize("broken", ["positions", "mask"])
def test_the_probe_finds_models_that_take_no_trees(monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    """Rows that are placed one after another, or that attend to all before them."""
    model = make_model({**DENSE, "vocab_size": 64})
    assert probe(lambda: ModelRunner(model), 64) is None
    if broken == "positions":
        monkeypatch.setattr(runner, "tree_positions", lambda depth: contextlib.nullcontext())
    else:
        monkeypatch.setattr(ForwardContext, "mask", lambda self, cached, window: "causal")
    assert probe(lambda: ModelRunner(model), 64) == "its scores of trees are not those of chains"


def test_the_probe_finds_models_that_cannot_take_several_tokens() -> None:
    model = make_model({**DENSE, "vocab_size": 64})

    class Backward:
        layers = model.layers
        make_cache = model.make_cache

        def __call__(self, tokens: mx.array, cache: list) -> mx.array:
            return model(tokens[:, ::-1], cache=cache)

    with pytest.raises(BackendError, match="one at a time"):
        probe(lambda: ModelRunner(Backward()), 64)


def test_importing_mlx_leaves_the_limits_of_the_process() -> None:
    code = (
        "import resource\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (1000, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))\n"
        "before = resource.getrlimit(resource.RLIMIT_NOFILE), resource.setrlimit\n"
        "from edgespec.backends.mlx.library import load_mlx\n"
        "load_mlx()\n"
        "import mlx_lm\n"
        "assert before == (resource.getrlimit(resource.RLIMIT_NOFILE), resource.setrlimit)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == done.stderr == ""


def test_where_mlx_does_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setitem(sys.modules, "mlx_lm", None)
    with pytest.raises(BackendUnavailable, match="cannot be imported") as caught:
        library.load_mlx.__wrapped__()
    assert install_command("mlx-lm") in str(caught.value.hint)


@pytest.mark.parametrize(
    ("system", "machine", "preferred"),
    [("darwin", "arm64", True), ("darwin", "x86_64", False), ("linux", "aarch64", False), ("win32", "AMD64", False)],
)
def test_mlx_is_preferred_on_apple_silicon(
    monkeypatch: pytest.MonkeyPatch, system: str, machine: str, preferred: bool
) -> None:
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr("platform.machine", lambda: machine)
    assert prefers_mlx() is preferred

"""Heads that --draft auto finds, and those that cannot be used: the answer comes without them, in one sentence."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from edgespec.formats.gguf_validate import read_file
from tests.backends import eagle3_heads
from tests.backends.eagle3_heads import make_head
from tests.backends.mtp_heads import make_mixture
from tests.cli.conftest import Cli
from tests.gguf_models import REPOSITORY, TARGET, sliding_window

TRAINED = REPOSITORY / "tests" / "fixtures" / "heads" / "eagle3-python-6m"
RUN = ("run", "def f(x):", "--max-tokens", "12", "--temperature", "0", "--threads", "1", "--ctx", "128")


def write_alias(tmp_path: Path) -> None:
    """An alias `here` with a draft model, so that no self-draft is searched."""
    (tmp_path / "config").mkdir(exist_ok=True)
    given = [f'target = "{tmp_path}/target.gguf"', 'draft = "package:python-6m/draft.gguf"']
    (tmp_path / "config" / "models.toml").write_text("\n".join(["[here.gguf]", *given, ""]))


def write_cut(path: Path) -> None:
    data = make_head(path).path.read_bytes()
    path.write_bytes(data[:-4000])


def write_flipped_header(path: Path) -> None:
    data = bytearray(make_head(path).path.read_bytes())
    data[data.find(b"eagle3.block_count") + 3] ^= 1
    path.write_bytes(data)


def write_flipped_weights(path: Path) -> None:
    data = bytearray(make_head(path).path.read_bytes())
    for at in range(len(data) // 2, len(data), 1001):
        data[at] ^= 0x7F
    path.write_bytes(data)


def write_nan(path: Path) -> None:
    """The first weight of the last norm is NaN."""
    header = read_file(make_head(path).path)
    offset = next(tensor.offset for tensor in header.tensors if tensor.name == "output_norm.weight")
    data = bytearray(path.read_bytes())
    data[header.data_offset + offset : header.data_offset + offset + 4] = np.float32("nan").tobytes()
    path.write_bytes(data)


def write_layers(path: Path) -> None:
    """The head reads a layer that the target does not have."""
    data = make_head(path).path.read_bytes()
    path.write_bytes(data.replace(np.array([2, 3, 5], "<i4").tobytes(), np.array([2, 3, 9], "<i4").tobytes(), 1))


def write_other_words(path: Path) -> None:
    data = make_head(path).path.read_bytes()
    entry = (6).to_bytes(8, "little") + b"return"
    assert entry in data
    path.write_bytes(data.replace(entry, entry.replace(b"return", b"retorn"), 1))


def write_other_size(path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(eagle3_heads, "HIDDEN", 128)
        make_head(path, size=128)


UNUSABLE: list[tuple[Callable[[Path], None], int, str]] = [
    (write_cut, 5, "'head.gguf' is cut short"),
    (write_flipped_header, 5, "'head.gguf' is not a usable model: eagle3.block_count is missing"),
    (write_flipped_weights, 5, "d2t names tokens that the model does not have"),
    (write_nan, 5, "gives scores that are not numbers (NaN)"),
    (write_layers, 2, "he head reads layer 9, and the model has layers 0 to 5"),
    (write_other_words, 5, "token"),
    (write_other_size, 5, "is an EAGLE-3 head for a hidden size of 128; the target has 256."),
]


def test_heads_that_cannot_be_used(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One after the other beside one target, whose settings are measured and whose plain text is written once."""
    shutil.copy(TARGET, tmp_path / "target.gguf")
    write_alias(tmp_path)
    head = str(tmp_path / "head.gguf")
    plain = cli(*RUN, "--model", "here", "--draft", "none")
    for write, code, told in UNUSABLE:
        write(tmp_path / "head.gguf")
        found = cli(*RUN, "--model", "here")
        assert (found.returncode, found.stdout) == (0, plain.stdout), (told, found.stderr)
        (left,) = [line for line in found.stderr.splitlines() if line.startswith("note: Drafting with")]
        assert left.startswith("note: Drafting without ") and told in left, (told, left)
        named = cli(*RUN, "--model", "here", "--draft", head)
        assert (named.returncode, named.stdout) == (code, ""), (told, named.stderr)
        message, hint = named.stderr.rstrip().rsplit("error: ", 1)[1].split("\nhint: ")
        assert told in message and "\n" not in message + hint, (told, message)
    # A sidecar newer than the runtime: auto does not know that it is a head; named, it is a model of an unknown kind.
    data = make_head(tmp_path / "head.gguf").path.read_bytes()
    for name in ("eagle4", "llamb3"):
        (tmp_path / "head.gguf").write_bytes(data.replace(b"eagle3", name.encode()))
        assert "head" not in cli(*RUN, "--model", "here").stderr
        named = cli(*RUN, "--model", "here", "--draft", head)
        assert named.returncode == 5 and f"unknown model architecture: '{name}'" in named.stderr
        assert "upgrade llama-cpp-python" in named.stderr
    for draft, told in (
        (f"eagle3:{TARGET}", "is no trained head."),
        ("mtp", "There is no mtp head in the target's file, beside it or in the registry."),
    ):
        named = cli(*RUN, "--draft", draft)
        assert (named.returncode, named.stdout) == (5, "") and told in named.stderr
    monkeypatch.setattr(eagle3_heads, "HIDDEN", 64)
    sliding_window(tmp_path / "window.gguf")
    make_head(tmp_path / "head.gguf", size=64)
    named = cli(*RUN, "--model", f"{tmp_path}/window.gguf", "--draft", head)
    assert named.returncode == 2 and named.stdout == ""
    assert "error: llama.cpp does not give the hidden states of 'gemma3' models" in named.stderr


def test_the_registrys_head_drafts(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "config").mkdir()
    lines = f'[python-6m.mlx]\nhead = "{TRAINED}"\nhead_kind = "eagle3"\n'
    (tmp_path / "config" / "models.toml").write_text(lines)
    found = cli(*RUN, "--backend", "mlx", "--json", "--no-memory")
    assert found.returncode == 0, found.stderr
    assert json.loads(found.stdout)["draft"] == f"ngram+package:python-6m/draft.gguf+{TRAINED}"
    told = f"note: Drafting with {TRAINED}, an EAGLE-3 head that the registry pairs with the target."
    assert found.stderr.count("note: Drafting with") == 1 and told in found.stderr
    plan = json.loads(cli("plan", "--backend", "mlx", "--no-speed", "--json").stdout)
    (head,) = plan["heads"]
    assert (head["head"], head["kind"], head["in_target"]) == (str(TRAINED), "eagle3", False)
    weights = (TRAINED / "model.safetensors").stat().st_size
    assert head["weights_bytes"] == weights and plan["draft_bytes"] > weights + head["kv_bytes"]
    shown = cli("plan", "--backend", "mlx", "--no-speed").stdout
    assert "\n  draft model: " in shown and "\n  eagle3 head: weights " in shown and "KV cache and states" in shown


def flip_first_tensor(data: bytes) -> bytes:
    """The first tensor of the safetensors file is d2t."""
    start = 8 + int.from_bytes(data[:8], "little")
    return data[:start] + bytes(byte ^ 0x7F for byte in data[start : start + 64]) + data[start + 64 :]


def cut(data: bytes) -> bytes:
    return data[:-4000]


def test_a_heads_folder_that_cannot_be_used(cli: Cli, tmp_path: Path) -> None:
    head = Path(shutil.copytree(TRAINED, tmp_path / "head"))
    weights, config = head / "model.safetensors", head / "config.json"
    whole = weights.read_bytes()
    changes: tuple[tuple[Callable[[bytes], bytes], str], ...] = (
        (cut, "model.safetensors is cut short"),
        (lambda data: data[:2] + b"\x41" + data[3:], "model.safetensors is damaged: it has no header of safetensors"),
        (lambda data: data.replace(b"fc.weight", b"fd.weight"), "The EAGLE-3 head lacks the tensor fc.weight"),
        (flip_first_tensor, "table of draft tokens (d2t, 2,048 entries) does not name tokens"),
    )
    named = (*RUN, "--backend", "mlx", "--draft", f"ngram+eagle3:{head}")
    for change, told in changes:
        weights.write_bytes(change(whole))
        done = cli(*named)
        assert (done.returncode, done.stdout) == (5, "") and told in done.stderr, done.stderr
    weights.write_bytes(whole)
    config.write_text(json.dumps(json.loads(config.read_text()) | {"vocab_size": 5000}))
    assert "an EAGLE-3 head for a vocabulary of 5,000; the target has 4,096" in cli(*named).stderr


def test_auto_answers_without_the_registrys_head_if_that_is_damaged(cli: Cli, tmp_path: Path) -> None:
    head = Path(shutil.copytree(TRAINED, tmp_path / "head"))
    (head / "model.safetensors").write_bytes(cut((head / "model.safetensors").read_bytes()))
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "models.toml").write_text(f'[python-6m.mlx]\nhead = "{head}"\nhead_kind = "eagle3"\n')
    found = cli(*RUN, "--backend", "mlx", "--json", "--no-memory")
    assert found.returncode == 0 and json.loads(found.stdout)["text"], found.stderr
    (left,) = [line for line in found.stderr.splitlines() if line.startswith("note: Drafting without ")]
    assert "model.safetensors is cut short" in left


def test_the_targets_own_layer_drafts(cli: Cli, tmp_path: Path) -> None:
    make_mixture(tmp_path / "target.gguf")
    told = "note: Drafting with an MTP head in the target's own file."
    found = cli(*RUN, "--model", f"{tmp_path}/target.gguf", "--json")
    assert found.returncode == 0 and told in found.stderr, found.stderr
    own = cli(*RUN, "--model", f"{tmp_path}/target.gguf", "--json", "--draft", "mtp", "--draft-max", "2")
    answer = json.loads(own.stdout)
    assert answer["draft"] == "mtp" and answer["metrics"]["drafted_tokens"] > 0, own.stderr

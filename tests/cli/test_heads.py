"""Trained heads given as the model or as its draft: one sentence that says what they are, and what to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.conftest import Cli
from tests.formats.head_files import (
    H,
    call,
    eagle3_shapes,
    make_pickle,
    write,
    write_assistant,
    write_dflash,
    write_eagle3,
    write_folder,
    write_mtp,
    write_state,
    write_torch,
)


@pytest.fixture
def heads(tmp_path: Path) -> Path:
    """A folder with heads of several kinds."""
    folder = tmp_path / "heads"
    folder.mkdir()
    write_eagle3(folder / "eagle3.gguf")
    write_dflash(folder / "dflash.gguf")
    write_dflash(folder / "dspark.gguf", markov=True)
    write_mtp(folder / "mtp.gguf", trunk=False)
    write_assistant(folder / "assistant.gguf")
    write(folder / "bare.gguf", "dflash", {"embedding_length": H, "target_layers": [1, 2], "context_length": 0},
          {"fc.weight": (H, 2 * H)})  # fmt: skip
    write_folder(folder / "eagle3", {"model_type": "llama", "hidden_size": H, "draft_vocab_size": 32}, eagle3_shapes())
    write_state(
        write_folder(folder / "medusa", {"medusa_num_heads": 2}, {}) / "medusa_lm_head.pt",
        {"0.0.linear.weight": (H, H)},
    )
    return folder


def refused(cli: Cli, *arguments: str) -> tuple[str, str]:
    """The message and the hint of a command that must end with the exit code of an unusable model."""
    done = cli("run", "def f", *arguments)
    assert done.returncode == 5 and done.stdout == "", done.stderr
    message, hint = done.stderr.removeprefix("error: ").split("\nhint: ")
    assert "\n" not in message
    return message, hint.strip()


NAMES = {
    "eagle3.gguf": "an EAGLE-3 head",
    "dflash.gguf": "a DFlash head",
    "dspark.gguf": "a DSpark head",
    "mtp.gguf": "an MTP head",
    "assistant.gguf": "a Gemma 4 assistant",
    "bare.gguf": "a DFlash head",
    "eagle3": "an EAGLE-3 head",
    "medusa": "a set of Medusa heads",
}


def test_a_head_as_the_model(cli: Cli, heads: Path) -> None:
    for name, kind in NAMES.items():
        message, hint = refused(cli, "--model", str(heads / name))
        if name == "bare.gguf":
            assert "is not a usable model" in message
        elif name.endswith(".gguf"):
            told = f"{heads / name} is {kind}; it drafts for a model and writes no text by itself."
            assert (message, hint) == (told, "Name the model that it was trained for.")
        else:
            assert message.startswith(f"{heads / name} is a trained head, and no model; llama.cpp")


def test_a_head_of_another_model_as_the_draft(cli: Cli, heads: Path) -> None:
    for name, kind in NAMES.items():
        message, hint = refused(cli, "--draft", str(heads / name))
        is_kind = f"{heads / name} is {kind}"
        if not name.endswith(".gguf"):
            assert message.startswith(f"{heads / name} is a trained head, and no model")
            assert "convert_hf_to_gguf.py" in hint
        elif name != "bare.gguf":
            assert message == f"{is_kind} for a hidden size of 8; the target has 256."


def test_a_head_cut_short(cli: Cli, heads: Path) -> None:
    cut = heads / "eagle3.gguf"
    cut.write_bytes(cut.read_bytes()[:-40])
    for option in ("--model", "--draft"):
        assert "'eagle3.gguf' is cut short" in refused(cli, option, str(cut))[0]


def test_weights_that_want_to_run_something(cli: Cli, heads: Path, tmp_path: Path) -> None:
    place = tmp_path / "executed"
    write_torch(heads / "medusa" / "medusa_lm_head.pt", make_pickle({"a": call("os", "system", f"touch {place}")}), {})
    for option in ("--model", "--draft"):
        done = cli("run", "def f", option, str(heads / "medusa"))
        assert done.returncode == 3 and "holds no GGUF model" in done.stderr
    assert not place.exists()

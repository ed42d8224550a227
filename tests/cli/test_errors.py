"""Bad input: one clear sentence, a hint, an exit code of its kind; no crash and no traceback."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from edgespec.errors import InvalidModelFile
from tests.cli.conftest import Cli
from tests.gguf_models import TARGET, llama

_TELL_ALL = ("models.toml", "temperature", "top")  # errors that say what to correct


def refused(cli: Cli, code: int, told: str, *arguments: str, stdin: str = "") -> str:
    done = cli(*arguments, stdin=stdin)
    assert done.returncode == code, done.stderr
    assert told in done.stderr, done.stderr
    assert done.stdout == ""
    if code != 2 or "Usage" not in done.stderr:
        assert "error: " in done.stderr and ("\nhint: " in done.stderr or told in _TELL_ALL), done.stderr
    return done.stderr


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--temperature", "-1"], "temperature"),
        (["--temperature", "nan"], "temperature"),
        (["--temperature", "warm"], "temperature"),
        (["--top-p", "1.5"], "top-p"),
        (["--top-k", "-3"], "top-k"),
        (["--draft-max", "64"], "draft-max"),
        (["--max-tokens", "0"], "max-tokens"),
        (["--ctx", "3"], "ctx"),
        (["--threads", "0"], "threads"),
        (["--gpu-layers", "-1"], "gpu-layers"),
        (["--backend", "cuda"], "backend"),
        (["--seed", "x"], "seed"),
        (["--logit-bias", "5"], "ID=BIAS"),
        (["--logit-bias", "5000=1"], "vocabulary ends at 4095"),
        (["--acceptance", "block", "--draft-max", "2", "--draft-tree", "5"], "takes chains only"),
        (["--acceptance", "rejection", "--draft", "ngram"], "by a draft model"),
        (["--no-flash-attention", "--kv-type", "q8_0"], "flash attention"),
        (["--stop", ""], "stop string"),
        (["--frobnicate"], "frobnicate"),
    ],
)
def test_wrong_flag_values(cli: Cli, options: list[str], told: str) -> None:
    refused(cli, 2, told, "run", "x", *options)


def test_prompts_that_cannot_be_served(cli: Cli, tmp_path: Path) -> None:
    refused(cli, 2, "prompt is empty", "run", "")
    refused(cli, 2, "prompt is empty", "run", stdin="")
    refused(cli, 2, "far more than a context of 2,048 tokens", "run", stdin="x = 1\n" * 100_000)
    refused(cli, 2, "tokens, the context holds 2,048", "run", stdin="x = 1\n" * 5_000)
    refused(cli, 2, "the context holds 16", "run", "def fibonacci(n):\n" * 9, "--ctx", "16")
    refused(cli, 2, "No such file", "run", "--file", str(tmp_path / "none"))


def test_unknown_models(cli: Cli, tmp_path: Path) -> None:
    assert "llama-70b-q4" in refused(cli, 3, "llama-70b-q5", "run", "x", "--model", "llama-70b-q5")
    refused(cli, 3, "no file", "run", "x", "--model", str(tmp_path / "none.gguf"))
    refused(cli, 4, "offline", "run", "x", "--model", "llama-70b-q4")
    refused(cli, 3, "MLX opens a folder", "run", "x", "--backend", "mlx", "--model", str(TARGET))
    refused(cli, 3, "toy model", "run", "x", "--backend", "toy", "--model", "nonsense")


def test_files_that_are_no_models(cli: Cli, tmp_path: Path) -> None:
    whole = TARGET.read_bytes()
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(whole[: len(whole) // 2])
    refused(cli, 5, "cut short", "run", "x", "--model", str(cut))
    for name in ("text.gguf", "text"):
        (tmp_path / name).write_text("This is no model.\n" * 50)
        refused(cli, 5, f"error: '{name}' is not a GGUF file", "run", "x", "--model", f"./{name}")
    flipped = bytearray(whole)
    flipped[whole.index(b"llama.block_count") + len(b"llama.block_count") + 4] = 0  # six layers become none
    zero = tmp_path / "zero.gguf"
    zero.write_bytes(flipped)
    refused(cli, 5, "block_count is 0", "run", "x", "--model", str(zero))


def test_a_draft_that_cannot_serve(cli: Cli, tmp_path: Path) -> None:
    other = tmp_path / "other.gguf"
    llama(other)
    data = other.read_bytes()
    entry = (6).to_bytes(8, "little") + b"return"
    other.write_bytes(data.replace(entry, entry.replace(b"return", b"retorn"), 1))
    error = refused(cli, 5, "cannot draft for this target", "run", "x", "--draft", str(other))
    assert "'retorn'" in error and "'return'" in error
    refused(cli, 5, "No draft model is paired", "run", "x", "--model", str(TARGET), "--draft", "model")
    refused(cli, 2, "N of lookahead must be at least 2, not 1.", "run", "x", "--draft", "lookahead:7,1,7")


@pytest.mark.parametrize("name", ["jacobi", "jacobi:3", "ngram+jacobi"])
def test_a_draft_that_names_nothing_is_told_with_the_drafters(cli: Cli, name: str) -> None:
    part = name.removeprefix("ngram+")
    error = refused(cli, 3, f"No drafter is called '{part}', and ", "run", "x", "--draft", name)
    assert "hint: Drafters: ngram, suffix, recycling, lookahead, model, " in error
    assert "drafter" not in refused(cli, 3, "There is no file jacobi.gguf", "run", "x", "--draft", "jacobi.gguf")


def test_memory_that_does_not_suffice_is_told_in_numbers(cli: Cli) -> None:
    error = refused(cli, 6, "GiB", "run", "x", "--ctx", "16000000")
    assert "--ctx" in error
    assert "--force" in error


def test_a_broken_registry_file_is_told_by_name(cli: Cli, environment: dict[str, str]) -> None:
    folder = Path(environment["EDGESPEC_CONFIG_DIR"])
    folder.mkdir()
    (folder / "models.toml").write_text('[mine]\ndescripton = "x"\n')
    assert "descripton: this key is not known" in refused(cli, 3, "models.toml", "list")
    (folder / "models.toml").write_text("[mine")
    refused(cli, 3, "models.toml", "run", "x")


def test_a_list_without_keys_is_no_error(cli: Cli, tmp_path: Path) -> None:
    default = tmp_path / "config" / "keys.toml"
    done = cli("key", "list")
    assert (done.returncode, done.stdout) == (
        0,
        f"There are no keys in {default}; `edgespec key add NAME` makes one.\n",
    )
    (tmp_path / "none.toml").touch()
    assert "`edgespec key add NAME --file none.toml` makes one" in cli("key", "list", "--file", "none.toml").stdout
    assert cli("key", "add", "laptop").returncode == 0
    assert "laptop" in cli("key", "list").stdout
    assert json.loads(cli("key", "list", "--json").stdout) == [{"name": "laptop", "manages": False, "remembers": False}]


def test_a_tokenizer_of_another_kind_is_told(cli: Cli, tmp_path: Path) -> None:
    """llama.cpp's tokenizer of RWKV finds no token of such a vocabulary."""
    data = TARGET.read_bytes()
    kind = data.index(b"gpt2", data.index(b"tokenizer.ggml.model"))
    (tmp_path / "other.gguf").write_bytes(data[:kind] + b"rwkv" + data[kind + 4 :])
    done = cli("run", "def f(x):", "--model", "other.gguf", "--threads", "1", "--draft", "none")
    assert done.returncode == InvalidModelFile.exit_code
    assert "The tokenizer of this model gives tokens that the model does not have." in done.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        (("run", ""), 2, "The prompt is empty"),
        (("run", "-"), 2, "The prompt is empty"),
        (("run", "--file", "binary", "hi"), 2, "The input is not text"),
        (("run", "--raw", "--system", "Be brief.", "hi"), 2, "A system message needs the chat template."),
        (("serve", "x="), 2, "'x=' lacks a name or a model"),
        (("service", "systemd", "nosuch"), 3, "There is no model called 'nosuch'"),
        (("draft", "compare", "python-6m", "nosuch"), 3, "No drafter is called 'nosuch', and there is no model called"),
    ],
)
def test_what_is_missing_is_told_at_once(
    arguments: tuple[str, ...], code: int, told: str, cli: Cli, tmp_path: Path
) -> None:
    (tmp_path / "binary").write_bytes(b"text\0and more")
    refused(cli, code, told, *arguments)


def test_doctor_names_folders_that_cannot_be_written(cli: Cli) -> None:
    done = cli("doctor", EDGESPEC_DATA_DIR="/proc/nosuch")
    assert "problem: /proc/nosuch cannot be written" in done.stdout and "No problems found" not in done.stdout

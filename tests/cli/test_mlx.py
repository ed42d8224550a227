"""The command on MLX: the embedded pair, folders, the hub, and what cannot be opened."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.conftest import Cli
from tests.cli.test_errors import refused
from tests.mlx_models import DENSE, make_folder
from tests.models.hubserver import HubServer

PROMPT = "def fibonacci(n):\n"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """served/me/{target,draft,other}: two models of one vocabulary, and one that calls a token something else."""
    root = tmp_path_factory.mktemp("served") / "me"
    for name, layers in (("target", 2), ("draft", 1), ("other", 1)):
        make_folder(root / name, {**DENSE, "num_hidden_layers": layers})
    file = root / "other" / "tokenizer.json"
    content = json.loads(file.read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary["zzzz"] = vocabulary.pop(next(token for token, i in vocabulary.items() if i == 4000))
    content["model"]["merges"] = [m for m in content["model"]["merges"] if "".join(m) in vocabulary]
    file.write_text(json.dumps(content))
    return root


@pytest.mark.parametrize("temperature", ["0", "0.8"])
def test_run_on_the_embedded_pair(cli: Cli, temperature: str) -> None:
    """Drafting does not change the text: greedy, or for a seed."""
    answers = {}
    for draft in ("model", "none"):
        done = cli("run", PROMPT, "--backend", "mlx", "--temperature", temperature, "--seed", "3", "--draft", draft,
                   "--max-tokens", "24", "--draft-max", "3", "--json")  # fmt: skip
        assert done.returncode == 0, done.stderr
        answers[draft] = json.loads(done.stdout.splitlines()[-1])
    assert {answer["backend"] for answer in answers.values()} == {"mlx"}
    assert answers["model"]["text"] == answers["none"]["text"] != ""
    assert answers["model"]["metrics"]["accepted_tokens"] > 0


def test_a_folder_opens_on_mlx_by_itself(cli: Cli, folders: Path) -> None:
    pair = ("--model", str(folders / "target"), "--draft", str(folders / "draft"))
    done = cli("run", PROMPT, *pair, "--max-tokens", "8", "--threads", "2", "--json")
    assert done.returncode == 0, done.stderr
    assert "--threads has no effect on MLX" in done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["backend"] == "mlx"
    shown = cli("show", str(folders / "target"), "--json")
    facts = json.loads(shown.stdout)
    assert (facts["backend"], facts["architecture"], facts["layers"]) == ("mlx", "llama", 2)


def test_the_process_ends_in_order(cli: Cli, folders: Path) -> None:
    """MLX aborts the process, mostly, if the thread that used it ends without saying so."""
    done = cli("run", PROMPT, "--model", str(folders / "draft"), "--max-tokens", "4", is_new=True)
    assert done.returncode == 0, done.stderr


def test_bad_folders(cli: Cli, folders: Path, tmp_path: Path) -> None:
    broken = Path(shutil.copytree(folders / "target", tmp_path / "broken"))
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    refused(cli, 5, "model.safetensors is cut short", "run", "x", "--model", str(broken))
    weights.unlink()
    refused(cli, 5, "holds no model*.safetensors", "run", "x", "--model", str(broken), "--backend", "mlx")
    other, target = str(folders / "other"), str(folders / "target")
    refused(cli, 5, "token 4000 is", "run", "x", "--model", target, "--draft", other)
    refused(cli, 2, "the context holds 16", "run", PROMPT * 9, "--model", target, "--ctx", "16")
    refused(cli, 2, "with --exact", "run", "x", "--model", target, "--exact-width", "4")


def test_every_draft_gives_the_same_exact_text(cli: Cli, folders: Path) -> None:
    base = ("run", PROMPT, "--model", str(folders / "target"), "--json", "--max-tokens", "24", "--temperature", "0",
            "--exact", "--exact-width", "4")  # fmt: skip
    plain, lookup, model = (
        json.loads(cli(*base, "--draft", draft, "--draft-max", "3").stdout)
        for draft in ("none", "ngram", str(folders / "draft"))
    )
    assert plain["exact_width"] == 4 and plain["metrics"]["drafted_tokens"] == 0 < model["metrics"]["drafted_tokens"]
    assert plain["tokens"] == lookup["tokens"] == model["tokens"]


def test_the_measured_width_is_kept(cli: Cli, folders: Path, tmp_path: Path) -> None:
    model = ("--model", str(folders / "target"), "--draft", "none")
    base = ("run", PROMPT, *model, "--json", "--max-tokens", "4", "--exact")
    first = cli(*base)
    width = json.loads(first.stdout)["exact_width"]
    assert width in (1, 2, 4, 8) and "for --exact" in first.stderr
    (stored,) = (tmp_path / "cache" / "calibration").glob("*-exact.json")
    entry = json.loads(stored.read_text())["entries"][0]
    assert entry["exact"] == {"width": width}
    entry["exact"]["width"] = other = 2 if width == 4 else 4
    stored.write_text(json.dumps({"entries": [entry]}))
    assert json.loads(cli(*base).stdout)["exact_width"] == other


@pytest.fixture
def server(folders: Path) -> Iterator[HubServer]:
    with HubServer(folders.parent) as running:
        yield running


def test_pull_and_run_from_the_hub(cli: Cli, environment: dict[str, str], server: HubServer) -> None:
    environment.update(HF_ENDPOINT=server.url, HF_HUB_OFFLINE="0", HF_TOKEN="")
    refused(cli, 5, "token 4000 is", "pull", "me/target", "--draft", "me/other")
    asked = [request.path for request in server.log if request.method == "GET"]
    assert not any(path.endswith(".safetensors") for path in asked), "refused before any weights were fetched"
    done = cli("pull", "me/target", "--draft", "me/draft")
    assert done.returncode == 0, done.stderr
    environment.update(HF_HUB_OFFLINE="1")
    done = cli("run", PROMPT, "--model", "me/target", "--draft", "me/draft", "--max-tokens", "8", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["draft"] == "me/draft"

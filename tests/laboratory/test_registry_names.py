"""The program that asks the hub for the models of models.toml prints what is missing, and downloads nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from edgespec.models.registry import load_registry
from laboratory.registry_names import SHIPPED, list_names, main
from tests.models.fixtures import hub, root, server
from tests.models.hubserver import HubServer

__all__ = ["hub", "root", "server"]

NAMES = """
[here.gguf]
target = "hf:me/a-GGUF/a-Q4_0.gguf"
draft = "me/a-GGUF:Q4_0"
[here.mlx]
target = "me/a-mlx"
draft = "ngram"
[packaged.gguf]
target = "package:python-6m/target.gguf"
"""
GONE = """
[gone.gguf]
target = "hf:me/a-GGUF/a-Q8_0.gguf"
draft = "me/a-GGUF:Q8_0"
with_head = "me/none"
[gone.mlx]
target = "me/a-GGUF"
"""


@pytest.fixture
def served(root: Path, server: HubServer, monkeypatch: pytest.MonkeyPatch) -> HubServer:
    for repo, files in (("a-GGUF", ["a-Q4_0.gguf"]), ("a-mlx", ["config.json", "model.safetensors"])):
        folder = root / "me" / repo
        folder.mkdir(parents=True)
        for name in files:
            (folder / name).write_bytes(b"{}")
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")  # a cache cannot answer
    return server


def ask(folder: Path, text: str) -> Result:
    file = folder / "models.toml"
    file.write_text(text)
    return CliRunner().invoke(main, [str(file)])


@pytest.mark.usefixtures("hub")
def test_what_the_hub_has_is_fine(served: HubServer, tmp_path: Path) -> None:
    result = ask(tmp_path, NAMES)
    assert (result.exit_code, result.stdout) == (0, "")
    assert result.stderr == "3 models asked for, 0 names without one\n"
    assert not served.downloads("")


@pytest.mark.usefixtures("hub")
def test_what_the_hub_lost_is_printed(served: HubServer, tmp_path: Path) -> None:
    result = ask(tmp_path, NAMES + GONE)
    lines = result.stdout.splitlines()
    assert result.exit_code == 1 and len(lines) == 4
    assert lines[0].startswith("[gone.gguf] target = hf:me/a-GGUF/a-Q8_0.gguf: ")
    assert lines[1] == "[gone.gguf] draft = me/a-GGUF:Q8_0: me/a-GGUF has no Q8_0."
    assert "no repository me/none" in lines[2]
    assert lines[3] == "[gone.mlx] target = me/a-GGUF: me/a-GGUF has no files for mlx."


def test_a_hub_that_is_away_is_no_missing_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    result = ask(tmp_path, NAMES)
    assert (result.exit_code, result.stdout) == (2, "") and "127.0.0.1:9" in result.stderr


def test_every_alias_of_the_shipped_file_is_asked_for(tmp_path: Path) -> None:
    tables = {table.split("]")[0].rpartition(".")[0].removeprefix("[") for table, _, _ in list_names(SHIPPED)}
    assert tables == load_registry(tmp_path / "none").entries.keys() - {"python-6m"}

"""`edgespec export`: a script on stdout or in a folder, wrong input, and mlx-lm started by the script."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cli.conftest import Cli
from tests.gguf_models import DRAFT, TARGET
from tests.mlx_models import DENSE, make_folder

START_S = 60


def test_the_script_is_on_stdout(cli: Cli) -> None:
    done = cli("export", "--to", "vllm", "llama-70b-q4")
    assert done.returncode == 0 and done.stderr == "" and done.stdout.startswith("#!/bin/sh\n# llama-70b-q4 for vLLM")
    command = [line for line in done.stdout.splitlines() if not line.startswith("#")]
    assert command[0] == "vllm serve meta-llama/Llama-3.3-70B-Instruct \\"
    assert '"model": "meta-llama/Llama-3.2-1B-Instruct"' in command[1] and command[1].endswith('"$@"')
    assert max(len(line) for line in done.stdout.splitlines() if line.startswith("#")) <= 100
    assert f"--model {TARGET}" in cli("export", "--to", "llama-server").stdout


def test_the_files_of_a_folder(cli: Cli, tmp_path: Path) -> None:
    done = cli("export", "--to", "tensorrt-llm", "llama-70b-q4", "--output", "a folder")
    folder = tmp_path / "a folder"
    assert done.stdout.splitlines() == [f"a folder/{n}" for n in ("serve.sh", "tensorrt-llm.yml")]
    assert yaml.safe_load((folder / "tensorrt-llm.yml").read_text())["speculative_config"]["max_draft_len"] == 4
    assert os.access(folder / "serve.sh", os.X_OK) and not os.access(folder / "tensorrt-llm.yml", os.X_OK)
    again = cli("export", "--to", "tensorrt-llm", "llama-70b-q4", "-o", "a folder")
    assert again.returncode == 2 and "error: 'a folder/serve.sh' exists." in again.stderr
    assert cli("export", "--to", "tensorrt-llm", "llama-8b-q4", "-o", "a folder", "--force").returncode == 0
    assert "Llama-3.1-8B" in (folder / "serve.sh").read_text()
    (tmp_path / "file").write_text("")
    assert cli("export", "--to", "ollama", "-o", "file").returncode == 2
    assert cli("export", "--to", "ollama", "-o", "file/below").returncode == 4


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        (
            ["--to", "vllm"],
            2,
            "error: It is not known which weights python-6m was made from, and vLLM 0.33 loads those.",
        ),
        (["--to", "lmdeploy"], 2, "'lmdeploy' is not one of 'vllm', 'sglang'"),
        ([], 2, "Missing option '--to'"),
        (["--to", "vllm", "nonsense"], 3, "There is no model called 'nonsense'."),
        (["--to", "vllm", "./none.gguf"], 3, "There is no file none.gguf."),
        (["--to", "vllm", "user/unknown:Q4_0"], 4, "offline mode is on"),
        (["--to", "vllm", "--target-id", "one"], 2, "'one' is neither a repository nor a folder with config.json."),
        (["--to", "llama-server", "--backend", "mlx"], 2, "llama-server loads GGUF files."),
        (["--to", "mlx-lm"], 2, "mlx-lm loads folders, and package:python-6m/target.gguf is a GGUF file."),
        (["--to", "sglang", "qwen3-32b-q4", "--backend", "mlx", "--draft", "pard"], 2, "no drafter of the kind pard"),
        (["--to", "vllm", "--draft", "layerskip:2", "--target-id", "a/b"], 2, "the drafter self cannot be exported"),
    ],
)
def test_wrong_input_is_one_sentence(cli: Cli, arguments: list[str], code: int, told: str) -> None:
    done = cli("export", *arguments)
    assert done.returncode == code and done.stdout == "" and told.lower() in done.stderr.lower(), done.stderr
    assert done.stderr.count("error: ") == 1 and "hint: " in done.stderr


@contextmanager
def serving(script: Path, *options: str, path: str) -> Iterator[Callable[[dict[str, Any]], dict[str, Any]]]:
    """A function that asks the server that `script` starts."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = subprocess.Popen(
        ["sh", script, "--port", str(port), *options], env={**os.environ, "PATH": path}, cwd=script.parents[1],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    until = time.monotonic() + START_S

    def ask(body: dict[str, Any]) -> dict[str, Any]:
        url = f"http://127.0.0.1:{port}/v1/completions"
        request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
        while True:
            try:
                with urllib.request.urlopen(request, timeout=START_S) as reply:
                    return json.load(reply)  # type: ignore[no-any-return]
            except urllib.error.URLError:
                assert server.poll() is None and time.monotonic() < until
                time.sleep(0.1)

    try:
        yield ask
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def test_mlx_lm_starts_from_the_script_and_answers(cli: Cli, tmp_path: Path) -> None:
    """The folder of the pair has a space in its name."""
    for seed, name in enumerate(("a target", "a draft")):
        make_folder(tmp_path / name, DENSE, seed=seed)
    done = cli("export", "--to", "mlx-lm", "./a target", "--draft", "./a draft", "--backend", "mlx", "-o", "out")
    assert done.returncode == 0, done.stderr
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    with serving(tmp_path / "out" / "serve.sh", path=path) as ask:
        assert ask({"prompt": "def f(", "max_tokens": 12, "temperature": 0})["usage"]["completion_tokens"] == 12


@pytest.mark.skipif(shutil.which("llama-server") is None, reason="llama-server is not on the PATH")
def test_llama_server_starts_from_the_script(cli: Cli, tmp_path: Path) -> None:
    folder = tmp_path / "pair of models"
    folder.mkdir()
    for file in (TARGET, DRAFT):
        shutil.copy(file, folder)
    pair = (f"{folder}/target.gguf", "--draft", f"ngram+{folder}/draft.gguf")
    done = cli("export", "--to", "llama-server", *pair, "-o", "o")
    assert done.returncode == 0, done.stderr
    with serving(tmp_path / "o" / "serve.sh", "--threads", "1", path=os.environ["PATH"]) as ask:
        answer = ask({"prompt": "def fibonacci(n):", "max_tokens": 40, "temperature": 0})
    assert answer["timings"]["draft_n"] > 0

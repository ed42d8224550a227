"""The real server as a child process, called over real sockets."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic, sleep
from typing import IO, Any

import anthropic
import httpx
import openai
import psutil

from tests.zygote import ForkedProcess, open_zygote

COMMAND = [sys.executable, "-m", "edgespec"]
EMBEDDED = ("--no-memory", "--draft-max", "3", "--draft", "model", "--threads", "1", "--ctx", "512")
SMALL = ("tree", "--backend", "toy", "--no-memory", "--draft-max", "3", "--ctx", "256")
TOY = (*SMALL[:-1], "200000")
ENDLESS = {"max_tokens": 150_000, "temperature": 0, "logit_bias": {"256": -100}}  # 256 ends the toy's texts
KEY = "key of the tests"
PROMPT = "def read_lines(path):"


@dataclass
class Server:
    """A running server. `log` grows with its output. `urls`: all that it has printed; `url`: the first, without /v1."""

    urls: list[str]
    process: subprocess.Popen[str] | ForkedProcess
    log: list[str] = field(default_factory=list)
    _http: httpx.Client = field(
        default_factory=lambda: httpx.Client(timeout=60, limits=httpx.Limits(max_connections=None))
    )

    @property
    def url(self) -> str:
        return self.urls[0].removesuffix("/v1")

    def openai(self, **options: Any) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", max_retries=0, timeout=60, **{"api_key": KEY, **options})

    def anthropic(self, **options: Any) -> anthropic.Anthropic:
        return anthropic.Anthropic(base_url=self.url, max_retries=0, timeout=60, **{"api_key": KEY, **options})

    def get(self, path: str, **options: Any) -> httpx.Response:
        return self._http.get(f"{self.url}{path}", **options)

    def post(self, path: str, **options: Any) -> httpx.Response:
        return self._http.post(f"{self.url}{path}", **options)

    def ask(self, model: str, text: str = PROMPT, **more: Any) -> httpx.Response:
        body = {"model": model, "messages": [{"role": "user", "content": text}], "temperature": 0, **more}
        return self.post("/v1/chat/completions", json=body)

    def model(self, name: str) -> dict[str, Any]:
        """The state of a model, from /props."""
        (state,) = [each for each in self.get("/props").json()["models"] if each["name"] == name]
        return dict(state)

    def close(self) -> None:
        self._http.close()

    def until(self, name: str, seconds: float = 20, **wanted: object) -> None:
        """Wait until /props has `wanted` for a model."""
        end = monotonic() + seconds
        while not wanted.items() <= (state := self.model(name)).items():
            assert monotonic() < end, state
            sleep(0.02)

    def engines(self) -> list[psutil.Process]:
        """The engine processes, one for each loaded model."""
        found = []
        for each in psutil.Process(self.process.pid).children():
            with suppress(psutil.Error):  # it may just have ended
                if "serve_engine" in " ".join(each.cmdline()):
                    found.append(each)
        return found


@contextmanager
def serving(folder: Path, *arguments: str, port: int | None = 0, **variables: str) -> Iterator[Server]:
    """`edgespec serve ARGUMENTS` at a free port. It must shut down cleanly and log no internal error.

    `port`: None for none. `variables` are added to its environment.
    """
    others = ("HF_", "EDGESPEC_", "XDG_", "OLLAMA_", "LLAMA_")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(others)}
    for name in ("CONFIG", "CACHE", "DATA"):
        environment[f"EDGESPEC_{name}_DIR"] = str(folder / name.lower())
    environment |= {"HF_HOME": str(folder / "hf"), "HF_HUB_OFFLINE": "1", "HOME": str(folder), "PYTHONUNBUFFERED": "1"}
    environment |= {"EDGESPEC_MODEL": "python-6m"} | variables
    ports = [] if port is None else ["--port", str(port)]
    child, output = start_command(("serve", *ports, *arguments), environment, folder)
    first = output.readline()
    found = re.search(r" at (.+); press Ctrl-C to stop\.$", first)
    assert found, first + output.read()
    server = Server(found[1].split(", "), child)
    reader = threading.Thread(target=lambda: server.log.extend(output))
    reader.start()
    try:
        yield server
    finally:
        child.send_signal(signal.SIGTERM)
        try:
            child.wait(30)
        finally:
            child.kill()
            reader.join()
            output.close()
            server.close()
    assert not any("Traceback" in line or "nternal error" in line for line in server.log), "".join(server.log[-80:])


def start_command(
    arguments: Sequence[str], environment: dict[str, str], folder: Path
) -> tuple[subprocess.Popen[str] | ForkedProcess, IO[str]]:
    """`edgespec ARGUMENTS`, and what it writes. It is forked where libraries of the system expect forks."""
    if sys.platform != "linux":
        child = subprocess.Popen([*COMMAND, *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                                 env=environment, cwd=folder)  # fmt: skip
        assert child.stdout is not None
        return child, child.stdout
    reader, writer = os.pipe()
    forked = open_zygote().start(arguments, environment, folder, writer)
    os.close(writer)
    return forked, open(reader, encoding="utf-8")

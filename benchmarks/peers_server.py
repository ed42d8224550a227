"""llama.cpp's server as arms of `benchmarks.peers`: draft modes from its --help, tokens from its stream."""

from __future__ import annotations

import http.client
import json
import re
import socket
import subprocess
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import psutil

from benchmarks.peers_arms import Generation, PeerFailed, Prompt, processor_s
from edgespec.backends.options import LoadOptions

WITH_DRAFT = ("ngram-simple", "ngram-mod")  # n-gram modes that are also run together with the draft model
MAX_WAIT_S = 300.0  # for a server to load its models, or to answer
IDLE_S = 0.5  # over which an idle server's processor time is measured
MAX_IDLE_PERCENT = 5.0  # of a core; a server that uses more is suspended between requests


def read_help(binary: str) -> str:
    return subprocess.run([binary, "--help"], capture_output=True, text=True, check=False).stdout


def read_version(binary: str) -> str:
    done = subprocess.run([binary, "--version"], capture_output=True, text=True, check=False)
    return "; ".join(line for line in (done.stdout + done.stderr).splitlines() if re.match("version|built", line))


def list_draft_modes(help_text: str, kind: str | None) -> dict[str, list[str]]:
    """Mode -> command-line options, of every mode in this build; `kind` of draft: 'simple' for a model, or a head's.

    Without a draft, and with one of a kind that this build does not have, only the modes that need none. In a build
    that drafts by default, --no-spec-type switches off what a mode has not asked for.
    """
    listed = re.search(r"^ *--spec-type +\[?([\w,|-]+)", help_text, re.MULTILINE)
    types = re.split("[,|]", listed[1]) if listed else []
    ngrams = [name for name in types if name.startswith("ngram")]
    drafts = ["--spec-type", f"draft-{kind}"] if f"draft-{kind}" in types else []
    modes: dict[str, list[str]] = {"plain": []}
    if kind and "--model-draft" in help_text and (drafts or kind == "simple"):
        modes["draft"] = [*drafts]
    modes |= {name: ["--spec-type", name] for name in ngrams}
    if "draft" in modes and drafts:
        modes |= {f"draft + {name}": [drafts[0], f"{drafts[1]},{name}"] for name in ngrams if name in WITH_DRAFT}
    default = re.search(r"^ *--spec-type .*?\(default:\s+([\w,\s-]+)\)", help_text, re.MULTILINE | re.DOTALL)
    drafting = {*re.split(r"[,\s]+", default[1])} if default and "--no-spec-type" in help_text else set()
    for options in modes.values():
        unwanted = drafting - {"none", *",".join(options).split(",")}
        options[:0] = ["--no-spec-type", ",".join(sorted(unwanted))] if unwanted else []
    return modes


def read_stream(
    lines: Iterable[bytes],
    clock: Callable[[], float] = time.perf_counter,
    processor: Callable[[], float] = lambda: 0.0,
) -> Generation:
    """Read the server's events. Raises PeerFailed when it reports an error or ends early.

    A chunk may hold several tokens, or none within a character of several; `tokens_predicted` counts them all. The
    server sends comments while it reads a long prompt, so its `processor` time counts from the first token.
    """
    sent: list[tuple[int, int]] = []  # token, tokens predicted when it was sent
    arrivals: list[tuple[float, int]] = []
    chunk: dict[str, Any] = {}
    start_s = 0.0
    for line in lines:
        at = clock()
        kind, _, data = line.partition(b":")
        if kind not in (b"data", b"error") or data.strip() == b"[DONE]":
            continue
        chunk = json.loads(data)
        if kind == b"error" or "error" in chunk:
            raise PeerFailed(f"the server reported: {data.decode().strip()}")
        new = chunk.get("tokens") or []
        count = chunk.get("tokens_predicted", len(sent) + len(new))
        sent += [(token, count) for token in new]
        if count > (arrivals[-1][1] if arrivals else 0):
            start_s = start_s if arrivals else processor()
            arrivals.append((at, count))
    if not chunk.get("stop") or not arrivals:
        raise PeerFailed("the stream ended before the text did.")
    timings = chunk.get("timings", {})
    drafted, accepted = timings.get("draft_n", 0), timings.get("draft_n_accepted", 0)
    emitted = arrivals[-1][1]
    tokens: list[int | None] = [token for token, _ in sent]
    if len(tokens) != emitted:
        places = {count - 1: token for token, count in sent}
        tokens = [places.get(i) for i in range(emitted)]
    rounds = max(emitted - arrivals[0][1] - accepted, 1) if emitted > 1 else 0
    return Generation(tuple(tokens), tuple(arrivals), rounds, drafted, accepted, processor() - start_s)


class LlamaServer:
    """One server process with one draft mode; suspended between requests if it is busy while idle."""

    def __init__(
        self,
        binary: str,
        help_text: str,
        mode: str,
        options: list[str],
        target: Path,
        draft: Path | None,
        load: LoadOptions,
        logs: Path,
    ) -> None:
        """Start it and wait until it is ready; its log goes to the folder `logs`. Raises PeerFailed."""
        self.name = f"llama-server {mode}"
        self.idle_percent = 0.0
        self.port = _free_port()
        self._log = logs / f"{mode}.log"
        command = [
            binary,
            "--model",
            target,
            "--ctx-size",
            (load.context_size or 0) * load.caches,
        ]  # 0: the model's own
        command += ["--threads", load.threads, "--parallel", load.caches]
        command += ["--host", "127.0.0.1", "--port", self.port, *options]
        if draft is not None and mode.startswith("draft"):
            command += ["--model-draft", draft]
        if "--cache-ram" in help_text:
            command += ["--cache-ram", 0]  # no copies of earlier prompts: edgespec keeps none either
        self.command = [str(part) for part in command]
        with self._log.open("wb") as log:
            self._process = psutil.Popen(self.command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            self._wait_until_ready()
        except BaseException:
            self.close()
            raise

    def generate(self, prompt: Prompt, tokens: int, temperature: float) -> Generation:
        body = {
            "prompt": prompt.ids,
            "n_predict": tokens,
            "temperature": temperature,
            "samplers": ["temperature"],  # the model's own distribution, edgespec's default
            "cache_prompt": False,
            "stream": True,
            "return_tokens": True,
        }
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=MAX_WAIT_S)
        try:
            if self._is_busy_idle:
                self._process.resume()
            connection.request("POST", "/completion", json.dumps(body), {"Content-Type": "application/json"})
            response = connection.getresponse()
            if response.status != 200:
                raise PeerFailed(f"the server answered {response.status}: {response.read().decode()[:300]}")
            return read_stream(iter(response.readline, b""), processor=lambda: processor_s(self._process.pid))
        except (OSError, http.client.HTTPException, psutil.Error) as error:
            raise PeerFailed(f"{error!r}; its log ends: {self._tail()}") from error
        finally:
            connection.close()
            if self._is_busy_idle and self._process.poll() is None:
                self._process.suspend()

    def rest(self) -> None:
        """After the warm-up: measure its processor time without a request, and suspend it if that is much."""
        self.idle_percent = self._process.cpu_percent(interval=IDLE_S)
        if self._is_busy_idle:
            self._process.suspend()

    def close(self) -> None:
        if self._process.poll() is None:
            self._process.terminate()
            self._process.resume()
            try:
                self._process.wait(10)
            except psutil.TimeoutExpired:
                self._process.kill()
                self._process.wait()

    @property
    def _is_busy_idle(self) -> bool:
        return self.idle_percent > MAX_IDLE_PERCENT

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + MAX_WAIT_S
        while self._process.poll() is None and time.monotonic() < deadline:
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
            try:
                connection.request("GET", "/health")
                if connection.getresponse().status == 200:
                    return
            except (OSError, http.client.HTTPException):
                pass
            finally:
                connection.close()
            time.sleep(0.1)
        raise PeerFailed(f"it did not start; its log ends: {self._tail()}")

    def _tail(self) -> str:
        return " / ".join(self._log.read_text(encoding="utf-8", errors="replace").splitlines()[-4:])


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])

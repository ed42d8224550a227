"""A draft server of this process: the real application at a real port of the loopback."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable

import uvicorn

from edgespec.backends import Model
from edgespec.backends.options import LoadOptions
from edgespec.backends.toy import LetterModel, ToyRuntimeModel
from edgespec.drafters import drafter_specs
from edgespec.drafters.remote import RemoteDraft, RemoteDrafter, parse_address
from edgespec.engine.drafting import LoadedDrafter, Speculation
from edgespec.engine.engine import Engine
from edgespec.server.auth import Rules
from edgespec.server.connections import Connection, HttpServer, listen_tcp
from edgespec.server.draft import DraftModel, ServedDraft, draft_application

PATIENT = (20.0, 20.0)
"""Waits for every draft, so that answers do not depend on the clock."""
V = 257
PROMPT = [*b"the rain in"]
QUICK = (0.05, 0.05)
REMOTE = Speculation(("remote",), 3)


class DraftServer:
    """Serves what `load` loads, until `close`. `port` may be one that another server had."""

    def __init__(
        self,
        load: Callable[[], Model],
        *,
        parallel: int = 16,
        rules: Rules | None = None,
        mask_token: int | None = None,
        port: int = 0,
    ) -> None:
        self.model = DraftModel(lambda: _load(load, mask_token), parallel)
        self._socket = listen_tcp("127.0.0.1", port)
        self.port: int = self._socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        app = draft_application(self.model, rules or Rules())
        config = uvicorn.Config(app, http=Connection, log_config=None, log_level="error", timeout_graceful_shutdown=3)
        self._server = HttpServer(config, None)
        self._thread = threading.Thread(target=lambda: asyncio.run(self._server.serve([self._socket])))
        self._thread.start()

    def connect(self, waits_s: tuple[float, float] = PATIENT, key: str = "") -> RemoteDraft:
        return RemoteDraft(parse_address(self.url), key, waits_s)

    def open_drafter(self, waits_s: tuple[float, float] = PATIENT) -> RemoteDrafter:
        """A drafter of a generation after PROMPT."""
        drafter = RemoteDrafter(self.connect(waits_s).open_link(V, lambda: None), V)
        drafter.begin(PROMPT, None)
        return drafter

    def close(self) -> None:
        self._server.should_exit = True
        self._thread.join(30)
        assert not self._thread.is_alive()
        self._socket.close()


def _load(load: Callable[[], Model], mask_token: int | None) -> ServedDraft:
    model = load()
    return ServedDraft("a draft", model, model.close, mask_token)


def load_letters(noise: float = 1.0) -> ToyRuntimeModel:
    return ToyRuntimeModel("tree", LetterModel(noise=noise), LoadOptions(context_size=256))


def open_engine(remote: RemoteDraft) -> Engine:
    target = ToyRuntimeModel("tree", LetterModel(), LoadOptions(context_size=256))
    return Engine(target, [LoadedDrafter(drafter_specs()["remote"], "remote", remote)], REMOTE)


def until(condition: Callable[[], bool]) -> None:
    for _ in range(1000):
        if condition():
            return
        time.sleep(0.02)
    raise AssertionError("it did not happen within 20 seconds")


def hear(remote: RemoteDraft, n: int) -> list[str]:
    """The next `n` notices."""
    heard: list[str] = []

    def listen() -> bool:
        heard.extend(remote.take_notices())
        return len(heard) >= n

    until(listen)
    return heard

"""Downloads of models while the server runs, each on a thread and shared by those who ask for it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from time import monotonic

from edgespec.errors import Cancelled, InvalidRequest
from edgespec.hub.hub import Hub
from edgespec.planner.plan import LoadConfig, fetch_all
from edgespec.registry.schema import load_registry
from edgespec.server.redaction import hide_folders

_EVERY_S = 0.1  # at most so often does a download tell how far a file is
_MAX_DOWNLOADS = 8


@dataclass(frozen=True, slots=True)
class Progress:
    """`done` of `total` bytes of a file are here."""

    file: str
    done: int
    total: int


class Downloads:
    """The downloads that are under way, by what was asked for. Used on the event loop."""

    def __init__(self) -> None:
        self._running: dict[LoadConfig, _Download] = {}

    async def pull(self, config: LoadConfig) -> AsyncGenerator[Progress, None]:
        """Download a model with what drafts for it; what is here already is not downloaded again.

        A download that is under way is joined. It is stopped once all who asked for it have left, and what has arrived
        is kept. Raises any EdgespecError.
        """
        download = self._running.get(config)
        if download is None:
            if len(self._running) >= _MAX_DOWNLOADS:
                raise InvalidRequest(f"{_MAX_DOWNLOADS} models are being downloaded.", hint="Try again later.")
            download = self._running[config] = _Download(config, self._forget)
        download.n_callers += 1
        try:
            async for each in download.follow():
                yield each
        finally:
            download.n_callers -= 1
            if not download.n_callers:
                download.stop()
                self._forget(config, download)

    def _forget(self, config: LoadConfig, download: _Download) -> None:
        """Another download of the same model may have taken its place."""
        if self._running.get(config) is download:
            del self._running[config]


class _Download:
    """One download. As a Reporter it is called on its thread."""

    def __init__(self, config: LoadConfig, forget: Callable[[LoadConfig, _Download], None]) -> None:
        """`forget` is called on the event loop at the end."""
        self.n_callers = 0
        self._forget = partial(forget, config, self)
        self._files: dict[str, Progress] = {}
        self._told_s = 0.0
        self._error: Exception | None = None
        self._is_over = False
        self._is_stopped = False
        self._changed = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        threading.Thread(target=self._run, args=(config,), name="edgespec-download", daemon=True).start()

    async def follow(self) -> AsyncGenerator[Progress, None]:
        """What is new of each file, until all are here. Raises what the download raised."""
        shown: dict[str, Progress] = {}
        while True:
            changed = self._changed
            for name, each in self._files.items():
                if shown.get(name) != each:
                    shown[name] = each
                    yield each
            if self._is_over and self._changed is changed:
                break
            await changed.wait()
        if self._error is not None:
            raise self._error

    def stop(self) -> None:
        self._is_stopped = True

    def notice(self, text: str) -> None:
        """What is said of a plan concerns its load."""

    def loading(self, name: str, fraction: float) -> None:
        """A download loads nothing."""

    def download(self, name: str, done: int, total: int) -> None:
        now_s = monotonic()
        if done == total or now_s - self._told_s >= _EVERY_S:
            self._told_s = now_s
            self._on_loop(Progress(name, done, total))

    def _check(self) -> None:
        if self._is_stopped:
            raise Cancelled

    def _run(self, config: LoadConfig) -> None:
        error: Exception | None = None
        try:
            fetch_all(config, load_registry(), Hub.from_environment(), self, self._check)
        except Exception as failure:  # noqa: BLE001 - the callers are told
            hide_folders(failure)
            error = failure
        self._on_loop(error)

    def _on_loop(self, news: Progress | Exception | None) -> None:
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._take, news)

    def _take(self, news: Progress | Exception | None) -> None:
        """`news`: of a file; or the end, with what failed."""
        if isinstance(news, Progress):
            self._files[news.file] = news
        else:
            self._error, self._is_over = news, True
            self._forget()
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

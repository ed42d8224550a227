"""The models of a server. One of this machine is loaded on demand in a process of its own, and unloaded when idle."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from time import monotonic, time
from typing import Any

from edgespec.errors import Cancelled, EdgespecError, HubError, InvalidRequest, UnknownModel, reason_of
from edgespec.hub.hub import Hub
from edgespec.planner.plan import LoadConfig, fetch_all, list_cached_files, list_used_files, resolve_download
from edgespec.registry.schema import load_registry
from edgespec.server.http import HttpError, Policy, TimedOut
from edgespec.server.metrics import ServerMetrics
from edgespec.server.record import hide_folders
from edgespec.server.remote_client import RemoteModel
from edgespec.server.remote_slot import RemoteSlot
from edgespec.server.slots import ModelSlot, Turn
from edgespec.service.client import ModelInfo

_IDLE_CHECK_S = 1.0
_POLL_S = 0.1
TAG = ":latest"
"""What Ollama's clients append to names."""


AnySlot = ModelSlot | RemoteSlot


class Models:
    """The slots by the names that clients use, and the limit of loaded models."""

    def __init__(
        self,
        requests: Mapping[str, LoadConfig],
        policy: Policy,
        server_metrics: ServerMetrics,
        aliases: Mapping[str, str] | None = None,
        keep_alive_s: Mapping[str, float] | None = None,
        remotes: Mapping[str, RemoteModel] | None = None,
    ) -> None:
        """`aliases`: other names that clients may use, with the name in `requests` that each stands for.

        `keep_alive_s`: of the models that have one of their own. `remotes`: the models of other servers.
        """
        self.slots: dict[str, ModelSlot] = {}
        self.is_preloading = False
        self._aliases = aliases or {}
        self._policy = policy
        self._server_metrics = server_metrics
        for name, request in requests.items():
            own = replace(policy, keep_alive_s=(keep_alive_s or {}).get(name, policy.keep_alive_s))
            self.slots[name] = ModelSlot(name, request, own, server_metrics)
        self.remotes = {name: RemoteSlot(name, each, policy, server_metrics) for name, each in (remotes or {}).items()}
        self._only = self.all[0] if len(self.all) == 1 and not policy.strict_names else None
        self._opening = asyncio.Lock()
        self.created_s = int(time())

    @property
    def all(self) -> list[AnySlot]:
        """Those of this machine, then those of other servers."""
        return [*self.slots.values(), *self.remotes.values()]

    def choose(self, name: str) -> AnySlot:
        """The model of a call. Where the server was started with one, that answers to unknown names too, unless names
        are strict. Raises UnknownModel.
        """
        return self.look_up(name) or self._only or self.find(name)

    def describe(self, slot: AnySlot) -> dict[str, Any]:
        """A model as OpenAI lists it, with its context in tokens and, as llama.cpp's server has it, its status.

        `owned_by` is that of the server that has the model, because it tells another edgespec what may be sent.
        """
        if isinstance(slot, RemoteSlot):
            owner, state = slot.owner or "unknown", "remote"
        else:
            owner, state = "edgespec", slot.state
        kind = {"object": "model", "created": self.created_s, "owned_by": owner}
        return {"id": slot.name, **kind, "context_length": slot.context_size, "status": {"value": state}}

    def find(self, name: str) -> AnySlot:
        if (slot := self.look_up(name)) is None:
            names = ", ".join(sorted(each.name for each in self.all))
            fault = f"there is no model '{name}' here." if name else "the request names no model."
            raise UnknownModel(fault, hint=f"There are: {names}.")
        return slot

    def look_up(self, name: str) -> AnySlot | None:
        """The model that has this name; None if there is none."""
        for each in (name, name.removesuffix(TAG)):
            for own in (each, self._aliases.get(each, each)):
                if slot := self.slots.get(own) or self.remotes.get(own):
                    return slot
        return None

    async def enter(self, slot: AnySlot, *, is_new: bool = True) -> Turn:
        """Wait for a turn in `slot` and load its model. Raises Busy (see ModelSlot.enter), TimedOut where the model
        takes longer to load than a call may, or any EdgespecError.
        """
        await slot.enter(is_new=is_new)
        if isinstance(slot, RemoteSlot):
            return Turn(monotonic() + self._policy.timeout_s)
        try:
            return await self._require(slot)
        except BaseException:
            slot.leave()
            raise

    @asynccontextmanager
    async def visit(self, slot: ModelSlot) -> AsyncIterator[Turn]:
        """Load the model and keep it loaded, for what neither takes a turn nor waits for one; see ModelSlot.read.

        Raises what `enter` raises, except Busy.
        """
        async with slot.visit():
            yield await self._require(slot)

    async def _require(self, slot: ModelSlot) -> Turn:
        """Load the model if it is not loaded; the time of the call begins."""
        ends_s = monotonic() + self._policy.timeout_s
        if (model_info := slot.model_info) is None:
            opening = self._start_opening(slot)
            await asyncio.wait({opening}, timeout=self._policy.timeout_s)
            if not opening.done():
                message = f"the model was not loaded within {self._policy.timeout_s:g} seconds."
                raise TimedOut(message, hint="Loading goes on; try again.")
            model_info = opening.result()
        return Turn(ends_s, model_info)

    def _start_opening(self, slot: ModelSlot) -> asyncio.Task[ModelInfo]:
        """The task that loads a model, of its own: a caller that leaves must not cancel it for the others."""
        if slot.opening is None:
            slot.opening = asyncio.create_task(self._open(slot))
            slot.opening.add_done_callback(_consume_error)
        return slot.opening

    async def _open(self, slot: ModelSlot) -> ModelInfo:
        try:
            async with self._opening:  # one load at a time, since it may unload another model
                await self._evict_for(slot)
                return await slot.open()
        except Exception as error:
            reason = error.message if isinstance(error, EdgespecError) else reason_of(error)
            self._server_metrics.note_failed_open(slot.name, reason)
            hide_folders(error)
            raise
        finally:
            slot.opening = None

    @asynccontextmanager
    async def turn(self, slot: AnySlot) -> AsyncIterator[Turn]:
        """`enter`, and `leave` at the end."""
        turn = await self.enter(slot)
        try:
            yield turn
        finally:
            slot.leave()

    async def preload(self, names: Sequence[str]) -> None:
        """Load models, one after the other; the log tells of failures. Raises UnknownModel."""
        self.is_preloading = True
        try:
            for slot in [self.find(name) for name in names]:
                if isinstance(slot, ModelSlot) and slot.model_info is None:
                    with suppress(Exception):  # which `_open` has noted
                        await self._start_opening(slot)
        finally:
            self.is_preloading = False

    async def watch(self) -> None:
        """Unload models that are idle for too long. Never returns."""
        while True:
            await asyncio.sleep(_IDLE_CHECK_S)
            for slot in tuple(self.slots.values()):
                if slot.has_process and not slot.is_busy and not slot.unloads_in_s:
                    await slot.unload()

    async def close(self) -> None:
        for slot in self.slots.values():
            if slot.opening is not None:
                slot.opening.cancel()
        await asyncio.gather(*(slot.close() for slot in self.all))

    async def _evict_for(self, slot: ModelSlot) -> None:
        """Unload models, idle and least recently used first, until `slot` may be loaded."""
        others = [each for each in self.slots.values() if each is not slot and each.holds_memory]
        others.sort(key=lambda each: (each.is_busy, each.used_s))
        for each in others[: max(0, len(others) + 1 - self._policy.max_open)]:
            unloading = asyncio.create_task(each.unload())
            # Polls: after a crash it holds no memory, but its callers may wait for this lock and block `unload`.
            while each.holds_memory and not (await asyncio.wait({unloading}, timeout=_POLL_S))[0]:
                pass
            unloading.cancel()


def require_local(slot: AnySlot) -> ModelSlot:
    """`slot`, where its model is one of this machine. Raises InvalidRequest."""
    if isinstance(slot, RemoteSlot):
        raise InvalidRequest(f"'{slot.name}' is a model of another server, which manages it.", hint="Ask that server.")
    return slot


def _consume_error(opening: asyncio.Task[ModelInfo]) -> None:
    """Mark the error of a load as seen: all callers may have left."""
    if not opening.cancelled():
        opening.exception()


# /api/delete: a model leaves the cache.


async def remove_model(models: Models, config: LoadConfig) -> None:
    """Remove the files of `config.model` from the cache, as `edgespec rm` does.

    Raises HttpError (409) while a loaded model uses one of them, UnknownModel for what is not there.
    """
    loaded = {slot.name: slot.config for slot in models.slots.values() if slot.state != "unloaded"}
    await asyncio.to_thread(_remove, config, loaded)


def _remove(config: LoadConfig, loaded: dict[str, LoadConfig]) -> None:
    hub, registry = Hub.from_environment(), load_registry()
    reference = resolve_download(config, registry, hub)
    files = list_cached_files(reference, hub)
    for name, each in loaded.items():
        with suppress(UnknownModel):  # a file outside of the cache that has been moved since
            if files & list_used_files(each, registry, hub):
                raise HttpError(409, f"the loaded model '{name}' uses {reference}.", hint="Unload it first.")
    try:
        hub.remove(reference)
    except HubError as error:
        raise UnknownModel(f"{reference} is not downloaded.", hint="`edgespec list` shows what is.") from error


# Downloads of models while the server runs, each on a thread and shared by those who ask for it.


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

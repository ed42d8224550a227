"""The models of a server. One of this machine is loaded on demand in a process of its own, and unloaded when idle."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from time import monotonic, time
from typing import Any

from edgespec.errors import EdgespecError, InvalidRequest, UnknownModel, reason_of
from edgespec.planner.plan import LoadConfig
from edgespec.server.metrics import ServerMetrics
from edgespec.server.model_slot import ModelSlot
from edgespec.server.policy import Policy, TimedOut
from edgespec.server.redaction import hide_folders
from edgespec.server.remote_model import RemoteModel
from edgespec.server.remote_slot import RemoteSlot
from edgespec.server.slot import Turn
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
            owner, state = slot.state.owner or "unknown", "remote"
        else:
            owner, state = "edgespec", slot.state
        kind = {"object": "model", "created": self.created_s, "owned_by": owner}
        return {"id": slot.name, **kind, "context_length": slot.context_size, "status": {"value": state}}

    def find(self, name: str) -> AnySlot:
        """Raises UnknownModel."""
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

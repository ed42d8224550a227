"""The models of a server: opened on demand in a process each, answering several calls at once, closed when idle."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from time import monotonic
from typing import Any, Generic, TypeVar

from edgespec.core.protocols import PrefillProgress
from edgespec.engine.embeddings import Embedding
from edgespec.engine.events import Event, Finished, Notice, Request
from edgespec.errors import Cancelled, EdgespecError, InvalidRequest, UnknownModel
from edgespec.planner.plan import OpenRequest
from edgespec.server.tally import Tally
from edgespec.server.turns import Turns
from edgespec.service.client import Standing
from edgespec.service.process import Apart
from edgespec.service.worker import Job

T = TypeVar("T")

_FRAME_S = 0.005  # what comes within it is sent together
_IDLE_CHECK_S = 1.0
_POLL_S = 0.1


class Busy(EdgespecError):
    """Too many calls are waiting; `retry_after_s` is about when there will be room."""

    def __init__(self, message: str, *, hint: str, retry_after_s: int) -> None:
        super().__init__(message, hint=hint)
        self.retry_after_s = retry_after_s


@dataclass(frozen=True, slots=True)
class Policy:
    """Models open at once and calls waiting for one, at most; seconds that an idle model stays and a call may take."""

    open_at_most: int = 1
    waiting_at_most: int = 64
    keep_alive_s: float = 300.0
    call_at_most_s: float = 600.0


class Room:
    """One model and the queue before it."""

    def __init__(self, name: str, request: OpenRequest, policy: Policy, tally: Tally) -> None:
        self.name = name
        self.turns = Turns(request.load.caches)
        self.opening: asyncio.Task[Standing] | None = None
        self.used_s = monotonic()
        self._request = request
        self._policy = policy
        self._tally = tally
        self._stage: Apart | None = None
        self._is_closing = False

    @property
    def standing(self) -> Standing | None:
        return self._stage.standing if self._stage is not None else None

    @property
    def has_process(self) -> bool:
        """Whether there is something to close."""
        return self._stage is not None

    @property
    def holds_memory(self) -> bool:
        """Whether a model is open; its process may have died."""
        return self.standing is not None or self._is_closing

    @property
    def is_busy(self) -> bool:
        return self.turns.inside > 0 or self.turns.waiting > 0 or self.opening is not None

    @property
    def resident(self) -> int:
        """Bytes of memory, this process included."""
        return self._stage.resident if self._stage is not None else 0

    async def enter(self, *, is_new: bool = True) -> None:
        """Wait for one's turn; `leave` ends it. Raises Busy for a call that `is_new`, where too many wait already."""
        turns = self.turns
        if is_new and turns.is_full and turns.waiting >= self._policy.waiting_at_most:
            self._tally.refused.labels(self.name).inc()
            after_s = max(1, round(self._tally.seconds_a_call(self.name) * turns.waiting / turns.at_once))
            told = f"{turns.waiting} calls are waiting for this model already."
            raise Busy(told, hint=f"Try again in {after_s} seconds.", retry_after_s=after_s)
        await turns.enter()
        self.used_s = monotonic()

    def leave(self) -> None:
        self.used_s = monotonic()
        self.turns.leave()

    async def open(self) -> Standing:
        """Open the model. Raises any EdgespecError."""
        if self._stage is None:
            self._stage = Apart("The next call opens it again.")
        async with Reading(self._stage.open(self._request, self._tally)) as opening:
            ((standing,),) = [batch async for batch in opening]
        self.turns.at_once = standing.at_once
        self.used_s = monotonic()
        return standing

    def stream(self, request: Request) -> Reading[Event]:
        """Events within one's turn, which ends with them, however slowly they are read."""
        assert self._stage is not None
        job = self._stage.stream(request)
        began_s = monotonic()
        loop = asyncio.get_running_loop()
        late: list[asyncio.TimerHandle] = []  # from the first event on: the engine may be busy with others before

        def started() -> None:
            if not late:
                late.append(self._limited(job))

        def note(event: Event) -> None:
            if isinstance(event, PrefillProgress):
                loop.call_soon_threadsafe(started)
            elif isinstance(event, Finished):
                self._tally.add(self.name, event, monotonic() - began_s)
            elif isinstance(event, Notice):
                self._tally.notice(event.text)

        def ended() -> None:
            for timer in late:
                timer.cancel()
            if (standing := self.standing) is not None:
                self.turns.at_once = standing.at_once
            self.leave()

        return Reading(job, note, ended)

    async def count(self, request: Request) -> int:
        """Tokens of the prompt, within one's turn."""
        assert self._stage is not None
        async with Reading(self._stage.count(request.prompt, request.variables)) as counting:
            (counted,) = await anext(counting)
            return counted

    async def embed(self, texts: Sequence[str | list[int]]) -> list[Embedding]:
        """A vector for each text, within one's turn."""
        assert self._stage is not None
        job = self._stage.embed(texts)
        late = self._limited(job)
        try:
            async with Reading(job) as embedding:
                return [each async for batch in embedding for each in batch]
        except Cancelled as error:
            told = f"the embeddings took longer than {self._policy.call_at_most_s:.0f} seconds."
            raise InvalidRequest(told, hint="Send fewer or shorter inputs.") from error
        finally:
            late.cancel()

    async def rest(self) -> None:
        """Free the model once the present call is over."""
        async with self.turns.alone():
            await self.close()

    async def close(self) -> None:
        """Free the model, whatever it is doing."""
        if (stage := self._stage) is not None:
            self._is_closing = True
            try:
                await asyncio.to_thread(stage.close)
            finally:
                self._stage, self._is_closing = None, False

    def _limited(self, job: Job[Any]) -> asyncio.TimerHandle:
        """What stops `job` when it takes too long; to be cancelled when it is over."""
        return asyncio.get_running_loop().call_later(self._policy.call_at_most_s, job.cancel)


class Models:
    """Rooms by the names that clients use."""

    def __init__(self, requests: Mapping[str, OpenRequest], policy: Policy, tally: Tally) -> None:
        self.rooms = {name: Room(name, request, policy, tally) for name, request in requests.items()}
        self._policy = policy
        self._opening = asyncio.Lock()

    def find(self, name: str) -> Room:
        """Raises UnknownModel."""
        if (room := self.rooms.get(name)) is None:
            names = ", ".join(sorted(self.rooms))
            raise UnknownModel(f"there is no model '{name}' here.", hint=f"There are: {names}.")
        return room

    async def enter(self, room: Room, *, is_new: bool = True) -> Standing:
        """Wait for one's turn in `room` and have its model open. Raises Busy (see Room.enter), any EdgespecError."""
        await room.enter(is_new=is_new)
        try:
            if (standing := room.standing) is not None:
                return standing
            if room.opening is None:
                room.opening = asyncio.create_task(self._open(room))
                room.opening.add_done_callback(_looked_at)
            return await asyncio.shield(room.opening)  # who leaves does not spoil it for those who wait
        except BaseException:
            room.leave()
            raise

    async def _open(self, room: Room) -> Standing:
        try:
            async with self._opening:  # others may have to make way, and only one can for one
                await self._make_way(room)
                return await room.open()
        finally:
            room.opening = None

    @asynccontextmanager
    async def turn(self, room: Room) -> AsyncIterator[Standing]:
        """`enter`, and `leave` at the end."""
        standing = await self.enter(room)
        try:
            yield standing
        finally:
            room.leave()

    async def watch(self) -> None:
        """Close models that have been idle for long, for ever."""
        while True:
            await asyncio.sleep(_IDLE_CHECK_S)
            for room in self.rooms.values():
                idle_s = monotonic() - room.used_s
                if room.has_process and not room.is_busy and idle_s > self._policy.keep_alive_s:
                    await room.rest()

    async def close(self) -> None:
        for room in self.rooms.values():
            if room.opening is not None:
                room.opening.cancel()
        await asyncio.gather(*(room.close() for room in self.rooms.values()))

    async def _make_way(self, room: Room) -> None:
        others = [each for each in self.rooms.values() if each is not room and each.holds_memory]
        others.sort(key=lambda each: (each.is_busy, each.used_s))
        for each in others[: max(0, len(others) + 1 - self._policy.open_at_most)]:
            resting = asyncio.create_task(each.rest())
            # Its engine may have died, and its callers wait for us to have done with opening.
            while each.holds_memory and not (await asyncio.wait({resting}, timeout=_POLL_S))[0]:
                pass
            resting.cancel()


def _looked_at(opening: asyncio.Task[Standing]) -> None:
    """Its callers may have left: nobody is to be told of its error."""
    if not opening.cancelled():
        opening.exception()


class Reading(Generic[T]):
    """The events of a job in lists, from now on; use it as a context, on leaving which the job is stopped.

    `note` hears of each event on another thread; `ended` is called on the loop when the job is over, read or not.
    """

    def __init__(
        self, job: Job[T], note: Callable[[T], None] = lambda event: None, ended: Callable[[], None] = lambda: None
    ) -> None:
        self._job = job
        self._note = note
        self._ended = ended
        self._loop = asyncio.get_running_loop()
        self._batches: asyncio.Queue[list[T] | _End] = asyncio.Queue()
        threading.Thread(target=self._forward, name="edgespec-reader", daemon=True).start()

    async def __aenter__(self) -> Reading[T]:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._job.cancel()

    def __aiter__(self) -> Reading[T]:
        return self

    async def __anext__(self) -> list[T]:
        """Raises what the job raises."""
        batch = await self._batches.get()
        if not isinstance(batch, _End):
            return batch
        self._batches.put_nowait(batch)  # for whoever asks again
        if batch.error is not None:
            raise batch.error
        raise StopAsyncIteration

    def _forward(self) -> None:
        failure: BaseException | None = None
        try:
            for batch in self._job.batches(_FRAME_S):
                for event in batch:
                    self._note(event)
                self._loop.call_soon_threadsafe(self._batches.put_nowait, batch)
        except BaseException as error:  # noqa: BLE001 - the reader raises it
            failure = error
        with suppress(RuntimeError):  # the loop has been closed
            self._loop.call_soon_threadsafe(self._over, failure)

    def _over(self, error: BaseException | None) -> None:
        self._ended()
        self._batches.put_nowait(_End(error))


@dataclass(frozen=True, slots=True)
class _End:
    error: BaseException | None

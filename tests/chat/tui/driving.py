"""The chat on its real parts, driven by keys: what a user does, and what is waited for."""

from __future__ import annotations

import asyncio
import inspect
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import wraps
from time import monotonic
from typing import Any, TypeVar

from textual.message import Message
from textual.notifications import Notification, Notify
from textual.pilot import Pilot

from edgespec.backends.options import LoadOptions
from edgespec.chat import Store, Turn
from edgespec.chat.state import Chat
from edgespec.chat.tui.app import ChatApp
from edgespec.chat.tui.panel import StatusLine
from edgespec.chat.tui.prompt import Prompt
from edgespec.chat.tui.transcript import Answer, Notice, Transcript, UserMessage
from edgespec.client.client import EngineClient
from edgespec.client.local import LocalEngine
from edgespec.core.sampling import SamplingParams
from edgespec.models.load_config import LoadConfig

T = TypeVar("T")
ENDLESS = 50_000  # tokens
_KINDS = {"information": "note", "error": "error"}  # of notices, by the severity of their toasts
# A fixed length: the autopilot would measure first. The model's greedy answers do not end by themselves.
TOY = LoadConfig(model="tree", backend="toy", draft_max=3, load=LoadOptions(context_size=2 * ENDLESS))
EMBEDDED = LoadConfig(draft_max=3, load=LoadOptions(context_size=512, threads=1))
GREEDY = SamplingParams(temperature=0.0)


class Driver:
    """One app and its keyboard."""

    def __init__(self, app: ChatApp, pilot: Pilot[None], toasts: list[Notification]) -> None:
        """`toasts`: the notices so far that are shown for some seconds, which grows."""
        self.app = app
        self.pilot = pilot
        self._toasts = toasts

    @property
    def prompt(self) -> Prompt:
        return self.app.query_one(Prompt)

    @property
    def transcript(self) -> Transcript:
        return self.app.query_one(Transcript)

    @property
    def turns(self) -> list[Turn]:
        return self.app.recorder.turns

    @property
    def texts(self) -> list[str]:
        return [turn.text for turn in self.turns]

    @property
    def shown(self) -> list[str]:
        """Questions and answers on the screen."""
        return [item.text for item in self.transcript.items if isinstance(item, UserMessage | Answer)]

    @property
    def footers(self) -> list[str]:
        """What is below the answers."""
        return [answer.footer for answer in self.transcript.answers]

    def notices(self, kind: str = "") -> list[str]:
        """What the program has said: in a corner of the screen, then in the conversation; `kind` is note or error."""
        toasts = [each.message for each in self._toasts if kind in ("", _KINDS[each.severity])]
        kept = [item for item in self.transcript.items if isinstance(item, Notice)]
        return toasts + [each.text for each in kept if kind in ("", each.kind)]

    async def until(self, holds: Callable[[], object], seconds: float = 30.0) -> None:
        await until(holds, seconds, lambda: f"told: {self.notices()}")

    async def press(self, *keys: str) -> None:
        await self.pilot.press(*keys)

    async def send(self, text: str) -> None:
        """Write `text` and press Enter; what it begins may go on."""
        self.prompt.put(text)
        await self.pilot.press("enter")
        await self.pilot.pause()

    async def idle(self) -> None:
        await self.until(lambda: self.app.activity.job is None)

    async def ask(self, text: str) -> str:
        """The whole answer."""
        before = len(self.turns)
        await self.send(text)
        await self.until(lambda: len(self.turns) == before + 2)
        await self.idle()
        return self.turns[-1].text

    async def begin(self, text: str, characters: int = 30) -> Answer:
        """An answer that does not end by itself, once some of it is there."""
        self.app.chat.max_tokens, self.app.chat.sampling = ENDLESS, GREEDY
        await self.send(text)
        return await self.growing(characters)

    async def growing(self, characters: int = 30) -> Answer:
        await self.until(
            lambda: self.app.activity.answer is not None and len(self.app.activity.answer.text) >= characters
        )
        assert self.app.activity.answer is not None
        return self.app.activity.answer

    async def hears(self, line: str, *said: str, kind: str = "note") -> str:
        """Send a command; it says one thing, which has all of `said`."""
        before = Counter(self.notices(kind))
        new = lambda: list((Counter(self.notices(kind)) - before).elements())  # noqa: E731
        await self.send(line)
        await self.until(new)
        message = " | ".join(new())
        for each in said:
            assert each.casefold() in message.casefold(), (line, message)
        return message

    async def errs(self, line: str, *said: str) -> None:
        """A mistake is told in a sentence, perhaps with a next step, and nothing else changes."""
        before, shown = list(self.turns), self.shown
        message = await self.hears(line, *said, kind="error")
        sentence = message.partition(". ")[0]
        is_name = not sentence.split()[0].isalpha()  # such as top-p
        assert sentence and " | " not in message, message
        assert is_name or not message[0].islower(), message
        assert self.app.is_running and self.turns == before and self.shown == shown

    async def waits_amid(self, line: str) -> None:
        """A command during an answer waits for its end; it is taken back, and the answer is stopped."""
        errors = self.notices("error")
        await self.send(line)
        await self.until(lambda: self.app.queued == [line])
        assert self.app.activity.answer is not None and self.notices("error") == errors
        await self.press("up")
        assert self.prompt.text == line and not self.app.queued
        self.prompt.put("")
        await self.press("escape")
        await self.idle()


async def until(holds: Callable[[], object], seconds: float = 30.0, tell: Callable[[], str] = str) -> None:
    end = monotonic() + seconds
    while not holds():
        assert monotonic() < end, f"waited in vain; {tell()}"
        await asyncio.sleep(0.01)


def chat_of(max_tokens: int = 40, system: str | None = None) -> Chat:
    return Chat(system, GREEDY, max_tokens, 1, ())


def make_app(
    request: LoadConfig = TOY,
    *,
    chat: Chat | None = None,
    store: Store | None = None,
    client: EngineClient | None = None,
    **more: Any,
) -> ChatApp:
    """An app on the user's store, without animations."""
    store, client = store or Store.open(wait_s=0.1), client or LocalEngine()
    app = ChatApp(request, chat or chat_of(), store, client, sampling=lambda _: GREEDY, **more)
    app.animation_level = "none"
    return app


@asynccontextmanager
async def driving(request: LoadConfig = TOY, **more: Any) -> AsyncIterator[Driver]:
    """The app with its model open or refused."""
    app = make_app(request, **more)
    toasts: list[Notification] = []

    def hear(message: Message) -> None:
        if isinstance(message, Notify):
            toasts.append(message.notification)

    async with app.run_test(size=(100, 24), message_hook=hear) as pilot:
        driver = Driver(app, pilot, toasts)
        await driver.until(lambda: app.activity.job is None)
        await pilot.pause()  # what was said of the load may wait in the app's queue
        try:
            yield driver
        finally:
            if app.is_running and app.activity.job is not None:
                app.activity.job.cancel()
                await driver.idle()


def in_loop(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """A test that is a coroutine, for pytest."""

    @wraps(test)
    def run(**named: Any) -> None:
        async def main() -> None:
            await test(**named)

        asyncio.run(main())

    return run


def in_app(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """A test that drives an app of its own, which is its first parameter, for pytest."""

    @wraps(test)
    def run(**named: Any) -> None:
        async def main() -> None:
            async with driving() as driver:
                await test(driver, **named)

        asyncio.run(main())

    signature = inspect.signature(test)
    run.__signature__ = signature.replace(parameters=[*signature.parameters.values()][1:])  # type: ignore[attr-defined]
    return run


def numbers(chat: Driver) -> str:
    """What the status line says before the name of the draft."""
    return str(chat.app.query_one(StatusLine).content).rpartition("draft")[0]


async def again(chat: Driver, line: str) -> str:
    """Another answer."""
    last = max(turn.id for turn in chat.turns)
    await chat.send(line)
    await chat.until(lambda: chat.turns[-1].id > last and chat.turns[-1].finished and chat.app.activity.job is None)
    return chat.texts[-1]


async def varied(chat: Driver) -> None:
    """From now on no two answers are the same."""
    await chat.hears("/set temperature 1", "1")
    chat.app.chat.sampling = replace(chat.app.chat.sampling, logit_bias=((256, -1000.0),))  # none is empty
    chat.app.chat.seed = None

"""What the user says and the model answers: messages in order, one answer at a time, and the branches."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from time import perf_counter, thread_time
from typing import Any, TypeVar

import psutil
from textual import on, work
from textual.content import Content

from edgespec.answers.summary import sum_metrics, summarize
from edgespec.chat import Store, Turn
from edgespec.chat.code import may_be_code
from edgespec.chat.commands import is_command
from edgespec.chat.context import NEARLY_FULL, can_go_on, describe_end, make_room
from edgespec.chat.own_model import OwnModel, answer_settings
from edgespec.chat.recorder import ConversationRecorder, Fork
from edgespec.chat.state import Chat
from edgespec.chat.tui.opening import Opening
from edgespec.chat.tui.panel import Panel, StatusLine
from edgespec.chat.tui.progress import Activity, Progress, Toast, describe_error
from edgespec.chat.tui.prompt import Prompt, sanitize
from edgespec.chat.tui.race import FRAME_S, Race
from edgespec.chat.tui.transcript import Answer, Notice, Transcript, UserMessage
from edgespec.chat.tui.window import Queued, Window, capitalize
from edgespec.client.client import EngineClient, require_model
from edgespec.core.metrics import Meter
from edgespec.engine.events import AnswerStart, Event, Request
from edgespec.engine.events import Notice as EngineNotice
from edgespec.engine.model_info import ModelInfo
from edgespec.errors import Cancelled, EdgespecError
from edgespec.models.load_config import LoadConfig
from edgespec.models.registry import EMBEDDED_ALIAS
from edgespec.text.chat_template import Message
from edgespec.text.stream import Piece

T = TypeVar("T")
_REFRESH_INTERVAL_S = 0.5  # of the instruments, whose drawing costs more than that of an answer's new words
_REST_FACTOR = 9  # rest over the CPU time of a frame: drawing takes at most a tenth of a core
_MAX_REST_S = 0.25
_RECENT = 3  # conversations on the opening screen
CONTINUE_HINT = "; /continue goes on"  # below the last answer, if it was cut


class Dialogue(Window):
    """One conversation. What cannot be sent while a job runs waits in `queued`, as it was typed."""

    def __init__(self, request: LoadConfig, chat: Chat, store: Store, client: EngineClient) -> None:
        """`request` is what `client` has opened, or will."""
        super().__init__()
        self.request = request
        self.chat = chat
        report = lambda text: self.post_message(Toast(text, "error", stays=True))  # noqa: E731
        self.recorder = ConversationRecorder(chat, store, report)
        self.client = client
        self.activity = Activity()
        self.queued: list[str] = []
        self.failures: list[Notice] = []  # of jobs and of the engine, which stay until a model is opened
        self._drawn_cpu_s = 0.0  # thread_time() at the end of the last frame
        self._is_leaving = False  # once the answer under way has ended
        self._refreshed_s = 0.0  # perf_counter() of the instruments' last refresh

    @property
    def is_racing(self) -> bool:
        """Whether a race is on the screen, which uses the model as it is."""
        return any(isinstance(screen, Race) for screen in self.screen_stack)

    @property
    def is_incognito(self) -> bool:
        return self.recorder.is_incognito

    @work(exclusive=False)
    async def follow(self, events: AsyncIterable[T], show: Callable[[T], Awaitable[None]]) -> None:
        """Show the running job's events, one after the other, until it ends."""
        failure = ""
        try:
            async for event in events:
                await show(event)
        except Cancelled:
            await self.show_notice("stopped.")
        except Exception as error:  # noqa: BLE001 - an internal error must not end the conversation
            failure = describe_error(error)
        self.call_later(self._end_job, failure)  # in order with what the user does

    # What the commands need, see chat.room.

    def require_idle(self) -> None:
        self.activity.require_idle()

    def require_model(self) -> ModelInfo:
        return require_model(self.client)

    async def tell(self, *parts: str) -> None:
        await self.show_notice(", ".join(parts))
        self.refresh_instruments()

    def show_rewound(self, number: int, *, keep_question: bool) -> None:
        self.query_one(Transcript).cut(number, keep_question=keep_question)
        self.clear_instruments()

    async def answer_question(self) -> None:
        await self.make_room_for(self.chat.messages)
        await self.answer()

    def put_back(self, text: str) -> None:
        self.query_one(Prompt).put_back(text)

    def attach(self, _name: str, text: str) -> None:
        prompt = self.query_one(Prompt)
        prompt.put(f"{prompt.text}{text}")

    async def speculate(self, argument: str) -> ModelInfo:
        return await self.client.speculate(argument).wait()

    # What surrounds the conversation.

    async def add_notice(self, text: str, kind: str = "note") -> None:
        await super().add_notice(text, kind)
        self.refresh_opening()

    def show_failure(self, text: str) -> None:
        """Tell in the conversation what has ended a job or the engine, until a model is opened."""
        self.failures.append(Notice(capitalize(text), "error"))
        self.query_one(Transcript).add(self.failures[-1])
        self.refresh_opening()

    def refresh_opening(self) -> None:
        """Show examples and the last conversations in place of an empty conversation; set the titles."""
        turns, transcript = self.recorder.turns, self.query_one(Transcript)
        if not turns:
            recent = []
            with suppress(EdgespecError):
                recent = self.recorder.saved.recent(_RECENT)
            self.query_one(Opening).show(self.client.model_info, recent, is_busy=self.activity.job is not None)
        self.screen_stack[0].set_class(not turns, "opening")
        self.screen_stack[0].set_class(bool(transcript.items), "noticed")
        title, conversation = "New conversation", self.recorder.conversation
        if turns and conversation is not None:
            title = conversation.title
        subtitle = "not saved" if self.recorder.saved.is_in_memory else ""
        if self.is_incognito:
            title, subtitle = f"Incognito · {title}", "incognito: nothing is saved"
        pane = self.query_one("#pane")
        pane.border_title, pane.border_subtitle = Content(sanitize(title)), Content(subtitle)

    def refresh_instruments(self, interval_s: float = 0.0) -> None:
        """Show the current statistics in the panel and the status line, at most once in `interval_s`."""
        if perf_counter() - self._refreshed_s < interval_s:
            return
        self._refreshed_s = perf_counter()
        self.refresh_opening()
        if (model_info := self.client.model_info) is not None:
            meter, resident, available = self.activity.meter, self.client.resident, psutil.virtual_memory().available
            self.query_one(Panel).show(meter, model_info, resident, available, is_incognito=self.is_incognito)
            self.query_one(StatusLine).show(meter, model_info)

    # Questions.

    async def ask(self, text: str) -> None:
        """Add `text` to the conversation and generate an answer, once the running job has ended."""
        if self.activity.job is not None:
            self.queue(f"/{text}" if text.startswith("/") else text)
        else:
            await self._send(text)

    async def submit(self, text: str) -> None:
        """Send what was typed: a command after one slash, or a message, whose own slash is written twice."""
        if is_command(text):
            await self.run_command(text[1:])
        else:
            await self.ask(text.removeprefix("/") if text.startswith("//") else text)

    async def run_command(self, line: str) -> None:
        """Run a slash command, given without its slash."""
        raise NotImplementedError

    async def send_next(self) -> None:
        """Send what has waited longest: commands up to the next message, which needs an open model."""
        while self.queued and self.activity.job is None:
            text, *rest = self.queued
            if self.is_racing or (self.client.model_info is None and not is_command(text)):
                return
            self._show_queued(rest)
            await self.submit(text)
            if not is_command(text):
                return

    def queue(self, text: str) -> None:
        """Send `text`, as it was typed, once the running job has ended."""
        self._show_queued([*self.queued, text])

    def take_back(self) -> str | None:
        """Take the text that was queued last out of the queue, and return it; None if the queue is empty."""
        if not self.queued:
            return None
        *rest, text = self.queued
        self._show_queued(rest)
        return text

    def _show_queued(self, texts: Sequence[str]) -> None:
        self.queued[:] = texts
        self.query_one(Queued).show(self.queued)

    async def _send(self, text: str) -> None:
        """Send `text`, or put it back if it cannot be answered."""
        try:
            require_model(self.client)
            if self.recorder.drop_unanswered():
                await self.show_turns()
            await self.make_room_for([*self.chat.messages, Message("user", text)])
        except EdgespecError as error:
            self.put_back(text)
            await self.show_error(error)
            return
        self.recorder.ask(text)
        transcript = self.query_one(Transcript)
        for answer in transcript.answers[-1:]:
            answer.footer = answer.footer.removesuffix(CONTINUE_HINT)
        transcript.add(UserMessage(text, len(self.recorder.questions)))
        transcript.follow()
        await self.answer()

    async def make_room_for(self, messages: Sequence[Message]) -> None:
        """Choose what of `messages` the model reads. Raises ContextOverflow, and what counting their tokens raises."""
        size = require_model(self.client).context_size

        def count(prompt: tuple[Message, ...]) -> int:
            return self.client.count(prompt, {}).result()

        notice = await asyncio.to_thread(make_room, self.chat, messages, size, count)
        if notice is not None:
            await self.add_notice(notice)

    # Answers.

    async def answer(self) -> None:
        """Answer the last question, once there is room for it. Raises InvalidRequest if no model is open."""
        model_info = require_model(self.client)
        is_raw = model_info.chat_template is None
        self.recorder.begin_answer({"is_raw": is_raw, **answer_settings(self.request, model_info)})
        answer = Answer(is_raw=is_raw)
        self.query_one(Transcript).add(answer)
        self.apply_view_options()
        self._generate(answer, self.chat.request(model_info.sampling, memory=self.recorder.memory), {})

    async def continue_answer(self) -> None:
        """Go on with the last answer. Raises InvalidRequest if it is whole, ContextOverflow."""
        model_info = require_model(self.client)
        turn = self.recorder.require_cut_answer()
        thought = () if turn.text else (Message("assistant", turn.reasoning),)
        await self.make_room_for([*self.chat.messages, *thought])
        self.recorder.continue_answer()
        await self.show_turns()  # the screen may have been cleared
        transcript = self.query_one(Transcript)
        answer = transcript.answers[-1]
        answer.footer = ""
        transcript.follow()
        start = AnswerStart(turn.text, turn.reasoning)
        request = self.chat.request(model_info.sampling, start, self.recorder.memory)
        self._generate(answer, request, turn.metrics)

    def _generate(self, answer: Answer, request: Request, earlier: Mapping[str, Any]) -> None:
        """Let `answer` grow; `earlier` are the metrics of what it has."""
        self.activity = Activity(None, answer, Meter(0, perf_counter()), earlier=earlier)
        self.mark_branches()
        self._drawn_cpu_s = thread_time()
        job = self.activity.job = self.client.stream(request)
        self.follow(job.batches(), self.show_events)

    async def show_events(self, events: Sequence[Event]) -> None:
        """Show the next events of the answer, and rest: the model may need every core."""
        for event in events:
            self.activity.add(event)
            if isinstance(event, EngineNotice):
                await self.show_notice(event.text)
        pieces = [event for event in events if isinstance(event, Piece)]
        if (answer := self.activity.answer) is not None and pieces:
            answer.append(pieces)
            self.query_one(Transcript).update(answer)
            self.recorder.update_answer(answer.text, answer.reasoning, lambda: answer.spans)
        self.refresh_instruments(_REFRESH_INTERVAL_S)
        before_s, self._drawn_cpu_s = self._drawn_cpu_s, thread_time()
        await asyncio.sleep(max(FRAME_S, min(_MAX_REST_S, (self._drawn_cpu_s - before_s) * _REST_FACTOR)))

    @on(Progress.Changed)
    def _show_progress(self, message: Progress.Changed) -> None:
        if self.activity.job is not None:  # it may have ended since
            self.query_one("#progress", Progress).show(message.text, message.fraction)

    async def _end_job(self, failure: str) -> None:
        activity = self.activity
        self.query_one("#progress", Progress).show(None)
        answer, activity.answer = activity.answer, None
        if answer is not None:
            metrics = sum_metrics(activity.earlier, activity.finished)
            model_info, meter = self.client.model_info, activity.meter
            used = meter.prompt_tokens + meter.emitted_tokens
            is_whole = metrics.get("reason") == "stop"
            is_full = model_info is not None and not can_go_on(self.chat, used, model_info.context_size)
            answer.footer = summarize(metrics) + ("" if is_whole or is_full else CONTINUE_HINT)
            self.query_one(Transcript).update()
            self.recorder.finish_answer(answer.text, answer.reasoning, answer.spans, metrics)
            if model_info is not None and used >= NEARLY_FULL * model_info.context_size:
                await self.show_notice(describe_end(self.chat, used, model_info.context_size))
            if not answer.text and not answer.reasoning:
                await self.show_turns()  # the answer that it was to replace returns
        if failure:
            self.show_failure(failure)
        if activity.job is not None:  # it goes on if it could not be shown
            activity.job.cancel()
        activity.job = None
        await self._advise(answered=answer is not None)
        if self._is_leaving:
            self.exit()
        self.refresh_instruments()
        if not self._is_leaving:
            await self.send_next()

    async def _advise(self, *, answered: bool) -> None:
        """Name the next step if the conversation's model is not open, or only completes code."""
        conversation, model_info = self.recorder.conversation, self.client.model_info
        if conversation is None:
            return
        if model_info is None:
            said = f"the model of this conversation, {conversation.model}, is not open; Ctrl+G lists models."
            await self.show_notice(said)
        elif answered and model_info.name == EMBEDDED_ALIAS and not may_be_code(self.recorder.questions[-1].text):
            await self.show_notice(f"{EMBEDDED_ALIAS} completes Python code; Ctrl+G lists models that one can talk to.")

    # Conversations and their branches.

    async def resume(self, id: int) -> None:
        """Show a stored conversation and continue it."""
        try:
            self.recorder.resume(id)
        except EdgespecError as error:
            await self.show_error(error)
            return
        await self.show_conversation()

    async def show_conversation(self) -> None:
        """Draw the conversation that was chosen, and say if another model held it."""
        await self.show_turns()
        conversation, model_info = self.recorder.conversation, self.client.model_info
        if conversation is not None and model_info is not None and conversation.model != model_info.name:
            own = OwnModel.find(conversation, self.recorder.turns).reference or conversation.model
            await self.show_notice(f"this conversation was held with {conversation.model}; /model {own} opens it.")

    async def show_turns(self) -> None:
        self.query_one(Transcript).show(self.recorder.turns)
        self.apply_view_options()
        self.mark_branches()
        self.clear_instruments()

    def clear_instruments(self) -> None:
        """Show no numbers: the answer that they tell of is not the last one on the screen any more."""
        self.activity.meter, self.activity.finished = Meter(), None
        self.refresh_instruments()

    def mark_branches(self) -> None:
        """Show at each message that has others in its place which of them it is."""
        transcript, forks = self.query_one(Transcript), self.recorder.forks()
        selected = self.recorder.select_fork()
        by_turn = {fork.branches[fork.at]: fork for fork in forks if fork.at >= 0}
        for item, turn in self._list_messages():
            fork = by_turn.get(turn.id)
            is_selected = fork is not None and selected is not None and fork.parent == selected.parent
            item.mark(fork.label if fork else "", is_selected=is_selected)
        transcript.update()
        self.refresh_opening()

    @on(Transcript.BranchClicked)
    async def _click_branch(self, message: Transcript.BranchClicked) -> None:
        id = next(turn.id for item, turn in self._list_messages() if item is message.item)
        for fork in self.recorder.forks():
            if self.activity.job is None and fork.at >= 0 and fork.branches[fork.at] == id:
                await self.switch_branch(fork, (fork.at + message.by) % len(fork.branches))

    def _list_messages(self) -> list[tuple[UserMessage | Answer, Turn]]:
        """The messages on the screen with their turns, the last one first."""
        items = [item for item in self.query_one(Transcript).items if isinstance(item, UserMessage | Answer)]
        return list(zip(reversed(items), reversed(self.recorder.turns), strict=False))

    async def switch_branch(self, fork: Fork, to: int) -> None:
        """Show another branch of a fork, counted from 0, which is selected from then on. Raises CacheError."""
        self.recorder.switch_branch(fork, to)
        await self.show_turns()

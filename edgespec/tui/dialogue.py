"""What the user says and the model answers: messages in order, one answer at a time, and the branches."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, Callable, Mapping, Sequence
from time import perf_counter, thread_time
from typing import Any

from textual import on, work
from textual.message import Message as Event

from edgespec.conversations import Store, Turn
from edgespec.conversations.chat import NEARLY_FULL, Chat, OwnModel, describe_end, make_room
from edgespec.conversations.recorder import ConversationRecorder, Fork
from edgespec.engine.events import AnswerStart, Request
from edgespec.errors import EdgespecError
from edgespec.hub.cache import LocalPath, parse_reference
from edgespec.planner.plan import LoadConfig
from edgespec.service.client import EngineClient, Stream, require_model
from edgespec.text.chat_template import Message
from edgespec.tui.messages import Batch, BranchClicked, JobEnded, Toast
from edgespec.tui.progress import Activity
from edgespec.tui.prompt import Prompt
from edgespec.tui.race import Race
from edgespec.tui.transcript import Transcript
from edgespec.tui.turns import Answer, Notice, UserMessage
from edgespec.tui.window import Queued, Window

CONTINUE_HINT = " · /continue goes on"  # below the last answer, if it was cut


class Dialogue(Window):
    """One conversation. What cannot be sent while a job runs waits in `queued`, as it was typed."""

    def __init__(self, request: LoadConfig, chat: Chat, store: Store, client: EngineClient) -> None:
        """`request` is what `client` has opened, or will."""
        super().__init__()
        self.request = request
        self.chat = chat
        report = lambda text: self.post_message(Toast(text, kind="error", stays=True))  # noqa: E731
        self.recorder = ConversationRecorder(chat, store, report)
        self.client = client
        self.activity = Activity()
        self.queued: list[str] = []
        self._drawn_cpu_s = 0.0  # thread_time() at the end of the last frame
        self._is_nearly_full = False  # the context, as it was told

    @property
    def is_incognito(self) -> bool:
        return self.recorder.is_incognito

    @work(exclusive=False)
    async def follow(self, job: Stream[Any], events: AsyncIterable[Any], make: Callable[[Any], Event]) -> None:
        """Post a message for each of the job's events until it ends. A batch waits for the one before to be shown."""
        try:
            async for event in events:
                message = make(event)
                self.post_message(message)
                if isinstance(message, Batch):
                    await message.wait()
        except Exception as error:  # noqa: BLE001 - an internal error must not end the conversation
            self.post_message(Toast.from_error(error, stays=True))
        self.post_message(JobEnded(job))

    # Questions.

    async def ask(self, text: str) -> None:
        """Add `text` to the conversation and generate an answer, once the running job has ended."""
        if self.activity.job is not None:
            self.queue(f"/{text}" if text.startswith("/") else text)
        else:
            await self._send(text)

    async def submit(self, text: str) -> None:
        """Send what was typed: a command after one slash, or a message, whose own slash is written twice."""
        if _is_command(text):
            await self.run_command(text[1:])
        else:
            await self.ask(text.removeprefix("/") if text.startswith("//") else text)

    async def run_command(self, line: str) -> None:
        """Run a slash command, given without its slash."""
        raise NotImplementedError

    async def send_next(self) -> None:
        """Send what has waited longest: commands up to the next message, which needs an open model."""
        is_command = True
        while is_command and self.queued and self.activity.job is None and not self._is_racing:
            text, *rest = self.queued
            is_command = _is_command(text)
            if not is_command and self.client.model_info is None:
                await self._show_no_model()
                return
            self._show_queued(rest)
            await self.submit(text)

    @property
    def _is_racing(self) -> bool:
        return any(isinstance(screen, Race) for screen in self.screen_stack)

    def queue(self, text: str) -> None:
        """Send `text`, as it was typed, once the running job has ended."""
        self._show_queued([*self.queued, text])

    def take_back(self) -> str | None:
        """What was queued last, which is not sent then."""
        if not self.queued:
            return None
        *rest, text = self.queued
        self._show_queued(rest)
        return text

    def _show_queued(self, texts: Sequence[str]) -> None:
        self.queued[:] = texts
        self.query_one(Queued).show(self.queued)

    async def _send(self, text: str) -> None:
        """Ask; a message that cannot be answered returns to the prompt."""
        if self.client.model_info is None:
            self._return_to_prompt(text)
            await self._show_no_model()
            return
        try:
            if self.recorder.drop_unanswered():
                await self.show_turns()
            await self._make_room([*self.chat.messages, Message("user", text)])
        except EdgespecError as error:
            self._return_to_prompt(text)
            await self.show_error(error)
            return
        self.recorder.ask(text)
        transcript = self.query_one(Transcript)
        for answer in transcript.answers[-1:]:
            answer.footer = answer.footer.removesuffix(CONTINUE_HINT)
            transcript.update(answer)
        transcript.add(UserMessage(text, len(self.recorder.questions)))
        transcript.follow()
        await self.answer()

    def _return_to_prompt(self, text: str) -> None:
        prompt = self.query_one(Prompt)
        prompt.put(f"{text}\n\n{prompt.text}" if prompt.text.strip() else text)

    async def _show_no_model(self) -> None:
        await self.show_notice("no model is open; Ctrl+G lists those that can be opened.", "error")

    async def _make_room(self, messages: Sequence[Message]) -> None:
        """Choose what of `messages` the model reads. Raises ContextOverflow, and what stops a job."""
        size = require_model(self.client).context_size

        def count(prompt: tuple[Message, ...]) -> int:
            return self.client.count(prompt, {}).result()

        notice = await asyncio.to_thread(make_room, self.chat, messages, size, count)
        if notice is not None:
            await self.add_notice(notice)

    # Answers.

    async def answer(self) -> None:
        """Answer the last question. Raises InvalidRequest where no model is loaded, ContextOverflow."""
        model_info = require_model(self.client)
        await self._make_room(self.chat.messages)
        is_raw = model_info.chat_template is None
        opened = own_model(self.request).to_settings()
        self.recorder.begin_answer({"model": model_info.name, "draft": model_info.draft, "is_raw": is_raw, **opened})
        answer = Answer(is_raw=is_raw)
        self.query_one(Transcript).add(answer)
        self.apply_view_options()
        self._generate(answer, self.chat.request(model_info.sampling, memory=self.recorder.memory), {})

    async def continue_answer(self) -> None:
        """Go on with the last answer. Raises InvalidRequest where it is whole, ContextOverflow."""
        model_info = require_model(self.client)
        turn = self.recorder.require_cut_answer()
        thought = () if turn.text else (Message("assistant", turn.reasoning),)
        await self._make_room([*self.chat.messages, *thought])
        self.recorder.continue_answer()
        transcript = self.query_one(Transcript)
        if not transcript.answers or transcript.answers[-1].text != turn.text:  # the screen was cleared
            await self.show_turns()
        answer = transcript.answers[-1]
        answer.footer = ""
        transcript.follow()
        start = AnswerStart(turn.text, turn.reasoning)
        request = self.chat.request(model_info.sampling, start, self.recorder.memory)
        self._generate(answer, request, turn.metrics)

    def _generate(self, answer: Answer, request: Request, earlier: Mapping[str, Any]) -> None:
        """Let `answer` grow; `earlier` are the metrics of what it has."""
        self.activity.begin_answer(answer, perf_counter(), earlier)
        self.mark_branches()
        self._drawn_cpu_s = thread_time()
        job = self.activity.job = self.client.stream(request)
        self.follow(job, job.batches(), Batch)

    async def drop_answer(self, answer: Answer) -> None:
        """Take an empty answer off the screen. The one that it was to replace returns; notices stay."""
        transcript, turns = self.query_one(Transcript), self.recorder.turns
        transcript.drop(answer)
        if turns and turns[-1].role == "assistant":
            notices = [item for item in transcript.items if isinstance(item, Notice)]
            await self.show_turns()
            for notice in notices:
                transcript.add(notice)

    async def watch_context(self) -> None:
        """Tell, once, that the context is nearly full."""
        model_info, meter = self.client.model_info, self.activity.meter
        used = meter.prompt_tokens + meter.emitted_tokens
        if model_info is None or not used:
            return
        was_full, self._is_nearly_full = self._is_nearly_full, used >= NEARLY_FULL * model_info.context_size
        if self._is_nearly_full and not was_full:
            await self.show_notice(describe_end(self.chat, used, model_info.context_size))

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
        """Draw the conversation that was chosen, and tell where another model held it."""
        await self.show_turns()
        conversation, model_info = self.recorder.conversation, self.client.model_info
        if conversation is not None and model_info is not None and conversation.model != model_info.name:
            own = OwnModel.find(conversation, self.recorder.turns).reference or conversation.model
            await self.show_notice(f"this conversation was held with {conversation.model}; /model {own} opens it.")

    async def show_turns(self) -> None:
        """Redraw the conversation."""
        self.query_one(Transcript).show(self.recorder.turns)
        self.apply_view_options()
        self.mark_branches()

    def mark_branches(self) -> None:
        """Show at each message that has others in its place which of them it is."""
        transcript, forks = self.query_one(Transcript), self.recorder.forks()
        selected = self.recorder.select_fork()
        by_turn = {fork.branches[fork.at]: fork for fork in forks if fork.at >= 0}
        for item, turn in self._list_messages():
            fork = by_turn.get(turn.id)
            is_selected = fork is not None and selected is not None and fork.parent == selected.parent
            if item.mark(fork.label if fork else "", is_selected=is_selected):
                transcript.update(item)

    @on(BranchClicked)
    async def _click_branch(self, message: BranchClicked) -> None:
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


def _is_command(text: str) -> bool:
    return text.startswith("/") and not text.startswith("//")


def own_model(request: LoadConfig) -> OwnModel:
    """What opens the model again, from any folder."""
    reference = request.model
    if reference is not None and request.backend != "toy":
        parsed = parse_reference(reference)
        reference = str(parsed.path.resolve()) if isinstance(parsed, LocalPath) else reference
    return OwnModel(reference, request.draft, request.backend)

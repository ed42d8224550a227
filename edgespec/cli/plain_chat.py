"""The chat line by line, on a terminal or a pipe."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from contextlib import closing, suppress
from dataclasses import asdict
from functools import partial
from typing import Any

import click

from edgespec.answers.summary import RUNTIMES, describe_drafts, may_draft, sum_metrics, summarize
from edgespec.chat import Store
from edgespec.chat.commands import COMMANDS, index_commands, is_command, run_command
from edgespec.chat.context import NEARLY_FULL, can_go_on, describe_end, make_room
from edgespec.chat.own_model import answer_settings
from edgespec.chat.recorder import ConversationRecorder
from edgespec.chat.state import Chat
from edgespec.cli.engine import Answer
from edgespec.cli.interrupts import finish, interruptible
from edgespec.cli.terminal import TerminalReporter, report_bug
from edgespec.client.client import EngineClient, require_model
from edgespec.core.metrics import Metrics
from edgespec.core.sampling import SamplingParams
from edgespec.engine.events import AnswerStart, MemoryUse
from edgespec.engine.model_info import ModelInfo
from edgespec.errors import Cancelled, EdgespecError, InvalidRequest
from edgespec.models.load_config import LoadConfig
from edgespec.models.registry import SamplingDefaults
from edgespec.text.chat_template import Message
from edgespec.text.stream import Piece
from edgespec.units import significant

_COMMANDS = index_commands(COMMANDS)
_KEYS = '''
"""                      starts and ends a message of several lines
//                       begins a message whose first character is a slash
Ctrl-C stops an answer and keeps its text; twice quits. Ctrl-D quits.'''


class PlainChat:
    """One conversation, as a Room of chat.room whose coroutines never wait: nothing else goes on meanwhile."""

    def __init__(
        self,
        client: EngineClient,
        request: LoadConfig,
        chat: Chat,
        store: Store,
        sampling: Callable[[SamplingDefaults], SamplingParams],
        *,
        is_interactive: bool,
    ) -> None:
        """`request` is what `client` is to load. `sampling` is the model's, with the options of the user."""
        self.client = client
        self.request = request
        self.chat = chat
        self.recorder = ConversationRecorder(chat, store, partial(click.echo, err=True))
        self._sampling = sampling
        self._is_interactive = is_interactive
        self._metrics: Metrics | None = None  # of the last answer
        self._is_nearly_full = False  # the context, when the user was last told
        self._is_leaving = False
        self._attached = ""  # to the next message
        self._draft_line = ""  # what the next prompt begins with

    def open(self) -> ModelInfo:
        """Open the model, unless it is open; the engine may have died. Raises any EdgespecError, Cancelled."""
        if self.client.model_info is None:
            self._load(self.request)
        model_info = require_model(self.client)
        self.recorder.model = model_info.name
        return model_info

    def resume(self, id: int) -> None:
        """Continue a saved conversation. Raises InvalidRequest, CacheError."""
        self.recorder.resume(id)
        _run(self.show_conversation())

    def _load(self, request: LoadConfig) -> None:
        finish(self.client.open(request, TerminalReporter()))
        self.request = request
        model_info = require_model(self.client)
        self.chat.sampling = self.chat.default_sampling = self._sampling(model_info.sampling)

    def loop(self) -> int:
        """Run until /exit or the end of input; returns the exit code."""
        if self._is_interactive:
            with suppress(ImportError):
                import readline  # noqa: F401 - importing it gives input() editing and history
            info = require_model(self.client)
            click.echo(f"{_describe(info)}. /help lists commands, Ctrl-D quits.")
        was_interrupted = False  # Ctrl-C at the previous prompt
        with closing(self.recorder), suppress(EOFError, RuntimeError):  # RuntimeError: there is no stdin
            while not self._is_leaving:
                try:
                    line = self._read()
                except KeyboardInterrupt:
                    if was_interrupted:
                        break
                    was_interrupted = True
                    click.echo("\nPress Ctrl-C once more to quit.")
                    continue
                was_interrupted = False
                self._handle(line)
        return 0

    def _handle(self, line: str) -> None:
        """Run a command or answer a message, and print errors."""
        try:
            if is_command(line) or line.strip() == "?":
                _run(run_command(self, line.strip().removeprefix("/"), _COMMANDS))
            elif line.strip() or self._attached:
                self._ask(line.removeprefix("/") if line.startswith("//") else line)
        except EdgespecError as error:
            click.echo(f"{error.message}\n{error.hint}".rstrip(), err=True)
        except Cancelled:
            click.echo("interrupted", err=True)
        except OSError:
            raise  # the terminal is gone
        except Exception as error:  # noqa: BLE001 - an internal error must not end the conversation
            report_bug(error)

    def _read(self) -> str:
        prompt = ">>> " if self._is_interactive else ""
        line = _edit_line(prompt, self._draft_line) if self._draft_line else input(prompt)
        self._draft_line = ""
        if not line.startswith('"""'):
            return line
        lines = [line[3:]]
        while not lines[-1].endswith('"""') or (len(lines) == 1 and not lines[0]):
            lines.append(input("... " if self._is_interactive else ""))
        return "\n".join(lines).removesuffix('"""').strip("\n")

    def _ask(self, text: str) -> None:
        self.open()
        text = f"{self._attached}{text}"
        self._make_room([*self.chat.messages, Message("user", text)])
        self._attached = ""
        self.recorder.ask(text)
        self._answer_question()

    def _answer_question(self) -> None:
        model_info = self.open()
        self.recorder.begin_answer(answer_settings(self.request, model_info))
        self._answer(AnswerStart(""))

    def _make_room(self, messages: list[Message]) -> None:
        """Choose what of `messages` the model reads, and print what is left out. Raises ContextOverflow."""
        size = require_model(self.client).context_size
        notice = make_room(self.chat, messages, size, lambda prompt: self.client.count(prompt, {}).result())
        if notice is not None:
            click.echo(f"note: {notice}", err=True)

    def _answer(self, start: AnswerStart) -> None:
        """Let the last answer grow, which begins with `start`; a question that gets none is removed."""
        info, recorder = require_model(self.client), self.recorder
        memory = None if recorder.is_incognito else recorder.memory or MemoryUse()
        earlier = recorder.turns[-1].metrics
        answer = Answer({"answer": start.text, "reasoning": start.reasoning})
        try:
            finished = answer.read(self.client.stream(self.chat.request(info.sampling, start, memory)), _show)
        finally:
            metrics = sum_metrics(earlier, answer.finished)
            recorder.finish_answer(answer.texts["answer"], answer.texts["reasoning"], (), metrics)
            if not any(answer.texts.values()):
                recorder.drop_unanswered()
        click.echo()
        self._metrics = finished.metrics
        used = finished.metrics.prompt_tokens + finished.metrics.emitted_tokens
        was_nearly_full, self._is_nearly_full = self._is_nearly_full, used >= NEARLY_FULL * info.context_size
        if self._is_nearly_full and not was_nearly_full:
            answer.notices.append(describe_end(self.chat, used, info.context_size))
        for text in answer.notices:
            click.echo(f"note: {text}", err=True)
        if self._is_interactive or finished.reason in ("cancelled", "repetition"):
            is_cut = finished.reason != "stop" and any(answer.texts.values())
            is_offered = is_cut and can_go_on(self.chat, used, info.context_size)
            line = summarize(metrics, may_draft=may_draft(info)) + ("; /continue goes on" if is_offered else "")
            click.echo(click.style(line, dim=True), err=True)

    # What the commands need, see chat.room.

    def require_idle(self) -> None:
        """Nothing else goes on while a command runs."""

    def require_model(self) -> ModelInfo:
        return self.open()

    async def tell(self, *parts: str) -> None:
        for part in parts:
            click.echo(part)

    async def show_help(self) -> None:
        click.echo("\n".join(f"{each.usage:24} {each.summary}" for each in COMMANDS) + _KEYS)

    async def show_stats(self) -> None:
        if self._metrics is None:
            raise InvalidRequest("there is no answer yet.", hint="Ask something first.")
        for name, value in asdict(self._metrics).items():
            values = value if isinstance(value, tuple) else (value,)
            shown = [
                significant(each, 4) if isinstance(each, float) else str(each) for each in values if each is not None
            ]
            click.echo(f"{name:18} {' '.join(shown) or '-'}")

    async def show_turns(self) -> None:
        """The terminal keeps what it has shown."""

    async def show_conversation(self) -> None:
        conversation, turns = self.recorder.conversation, self.recorder.turns
        if conversation is not None:
            click.echo(f"{conversation.title} ({len(turns)} messages)")
        for turn in turns[-2:]:
            click.echo(f"{'>>> ' if turn.role == 'user' else ''}{turn.text}")

    def show_rewound(self, number: int, *, keep_question: bool) -> None:
        """The terminal keeps what it has shown."""

    async def answer_question(self) -> None:
        self.open()
        self._make_room(self.chat.messages)
        self._answer_question()

    async def continue_answer(self) -> None:
        self.open()
        turn = self.recorder.require_cut_answer()
        thought = () if turn.text else (Message("assistant", turn.reasoning),)
        self._make_room([*self.chat.messages, *thought])
        self.recorder.continue_answer()
        self._answer(AnswerStart(turn.text, turn.reasoning))

    def put_back(self, text: str) -> None:
        if "\n" in text or not self._is_interactive:  # readline edits one line
            click.echo(f"removed, to be sent again as you change it:\n{text}")
        else:
            self._draft_line = text

    def attach(self, name: str, text: str) -> None:
        self._attached += text
        click.echo(f"{name} goes with the next message")

    async def choose_model(self) -> None:
        name = require_model(self.client).name
        click.echo(f"{name} is open; /model REF opens another. `edgespec list` shows the models on this machine.")

    async def open_model(self, request: LoadConfig) -> None:
        self._load(request)
        info = require_model(self.client)
        click.echo(f"{_describe(info)}.")

    async def change_draft(self, request: LoadConfig) -> None:
        list(interruptible(self.client.change_draft(request, TerminalReporter())))
        self.request = request
        click.echo(f"draft: {require_model(self.client).draft}")

    async def speculate(self, argument: str) -> ModelInfo:
        return self.client.speculate(argument).result()

    async def leave(self) -> None:
        self._is_leaving = True


def _run(command: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine that never waits."""
    with suppress(StopIteration):
        command.send(None)
        raise AssertionError("the command waits")


def _describe(info: ModelInfo) -> str:
    return f"{info.name} on {RUNTIMES[info.backend]}, {describe_drafts(info.draft)}"


def _show(piece: Piece) -> None:
    click.echo(click.style(piece.text, dim=True) if piece.channel == "reasoning" else piece.text, nl=False)


def _edit_line(prompt: str, text: str) -> str:
    """Read a line that begins as `text`, if the terminal can edit lines."""
    try:
        import readline
    except ImportError:
        click.echo(f"before: {text}")
        return input(prompt)
    readline.set_startup_hook(lambda: readline.insert_text(text))
    try:
        return input(prompt)
    finally:
        readline.set_startup_hook(None)

"""The plain chat loop: reads lines, streams answers, runs slash commands. It holds no engine logic."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace

import click

from edgespec.cli.interrupts import interruptible
from edgespec.cli.terminal import TerminalReporter, format_summary, report_bug
from edgespec.conversations.chat import Chat, describe_speculation, parse_path
from edgespec.conversations.commands import ALIASES, SHARED, SlashCommand, apply_setting, format_help, parse_command
from edgespec.conversations.context import NEARLY_FULL, describe_end, make_room
from edgespec.core.metrics import Metrics
from edgespec.core.protocols import Step
from edgespec.engine.events import AnswerStart, Finished, MemoryUse, Notice
from edgespec.errors import Cancelled, EdgespecError, InvalidRequest
from edgespec.planner.draft_request import describe_words
from edgespec.planner.plan import LoadConfig
from edgespec.service.client import require_model
from edgespec.service.local import LocalEngine
from edgespec.text.chat_template import Message
from edgespec.text.stream import Piece
from edgespec.units import count, significant

_COMMANDS = SHARED | {"clear": SlashCommand("clear", "", "delete all messages")}
_BY_NAME = _COMMANDS | {"save!": replace(SHARED["save"], name="save!")}
_NOTHING = AnswerStart("")
_KEYS = '''
"""                      starts and ends a message of several lines
Ctrl-C stops an answer and keeps its text; twice quits. Ctrl-D quits.'''


@dataclass(frozen=True, slots=True)
class _Cut:
    """An answer that did not end by itself, and the messages before it."""

    messages: list[Message]
    start: AnswerStart


class Repl:
    """One conversation on one terminal or pipe."""

    def __init__(
        self, engine: LocalEngine, request: LoadConfig, chat: Chat, *, interactive: bool, is_incognito: bool
    ) -> None:
        """`request` is what `engine` has loaded. `is_incognito`: the memory keeps nothing of the first conversation."""
        self._engine = engine
        self._request = request
        self._chat = chat
        self._interactive = interactive
        self._is_incognito = is_incognito
        self._metrics: Metrics | None = None  # of the last answer
        self._cut: _Cut | None = None  # the last answer, unless it is whole
        self._is_nearly_full = False  # as it was told
        names = (
            "help",
            "stats",
            "spec",
            "draft",
            "set",
            "clear",
            "retry",
            "continue",
            "undo",
            "incognito",
            "save",
            "load",
        )
        self._actions: dict[str, Callable[[str], None]] = {name: getattr(self, f"_{name}") for name in names}
        self._actions["save!"] = lambda argument: self._save(argument, overwrite=True)

    def loop(self) -> int:
        """Run until /exit or the end of input; returns the exit code."""
        if self._interactive:
            with suppress(ImportError):
                import readline  # noqa: F401 - importing it gives input() editing and history
            info = require_model(self._engine)
            click.echo(f"{info.name} on {info.backend}, draft {info.draft}. /help for help, Ctrl-D to quit.")
        was_interrupted = False  # Ctrl-C at the previous prompt
        while True:
            try:
                line = self._read()
                was_interrupted = False
            except (EOFError, RuntimeError):  # RuntimeError: there is no stdin
                return 0
            except KeyboardInterrupt:
                if was_interrupted:
                    return 0
                was_interrupted = True
                click.echo("\nPress Ctrl-C once more to quit.")
                continue
            if not self._handle(line):
                return 0

    def _handle(self, line: str) -> bool:
        """Run a command or answer a message, and print errors; False for /exit."""
        try:
            if line.startswith("/"):
                command, argument = parse_command(line[1:], _BY_NAME, ALIASES)
                if command.name == "exit":
                    return False
                self._actions[command.name](argument)
            elif line.strip():
                messages = [*self._chat.messages, Message("user", line)]
                self._make_room(messages)
                self._chat.messages[:] = messages
                self._answer()
        except EdgespecError as error:
            click.echo(f"{error.message}\n{error.hint}", err=True)
        except Cancelled:
            click.echo("interrupted", err=True)
        except OSError:
            raise  # the terminal is gone
        except Exception as error:  # noqa: BLE001 - an internal error must not end the conversation
            report_bug(error)
        return True

    def _read(self) -> str:
        line = input(">>> " if self._interactive else "")
        if not line.startswith('"""'):
            return line
        lines = [line[3:]]
        while not lines[-1].endswith('"""') or (len(lines) == 1 and not lines[0]):
            lines.append(input("... " if self._interactive else ""))
        return "\n".join(lines).removesuffix('"""').strip("\n")

    def _make_room(self, messages: list[Message]) -> None:
        """See `make_room`."""
        size = require_model(self._engine).context_size
        notice = make_room(self._chat, messages, size, lambda prompt: self._engine.count(prompt, {}).result())
        if notice is not None:
            click.echo(f"note: {notice}", err=True)

    def _answer(self, start: AnswerStart = _NOTHING) -> None:
        """Generate what follows `start` for the present messages; a question that gets no answer is removed."""
        info, question = require_model(self._engine), list(self._chat.messages)
        memory = None if self._is_incognito else MemoryUse()
        texts = {"answer": start.text, "reasoning": start.reasoning}
        steps: list[Step] = []
        notices: list[str] = []
        finished: Finished | None = None
        try:
            for event in interruptible(self._engine.stream(self._chat.request(info.sampling, start, memory))):
                if isinstance(event, Piece):
                    is_reasoning = event.channel == "reasoning"
                    click.echo(click.style(event.text, dim=True) if is_reasoning else event.text, nl=False)
                    texts[event.channel] += event.text
                elif isinstance(event, Step):
                    steps.append(event)
                elif isinstance(event, Notice):
                    notices.append(event.text)
                elif isinstance(event, Finished):
                    finished = event
        finally:
            if texts["answer"]:
                self._chat.messages.append(Message("assistant", texts["answer"]))
            else:
                self._chat.undo()  # templates require alternating roles
            is_whole = (finished is not None and finished.reason == "stop") or not any(texts.values())
            self._cut = None if is_whole else _Cut(question, AnswerStart(texts["answer"], texts["reasoning"]))
        assert finished is not None
        click.echo()
        self._metrics = finished.metrics
        used = finished.metrics.prompt_tokens + finished.metrics.emitted_tokens
        was_nearly_full, self._is_nearly_full = self._is_nearly_full, used >= NEARLY_FULL * info.context_size
        if self._is_nearly_full and not was_nearly_full:
            notices.append(describe_end(self._chat, used, info.context_size))
        for text in notices:
            click.echo(f"note: {text}", err=True)
        if self._interactive or finished.reason == "cancelled":
            line = format_summary(finished.metrics, steps, info.drafters, finished.reason)
            click.echo(click.style(line + ("" if is_whole else "; /continue goes on"), dim=True), err=True)

    def _continue(self, _argument: str) -> None:
        if self._cut is None:
            raise InvalidRequest("there is no answer that was cut.", hint="/retry answers the last question again.")
        cut = self._cut
        self._make_room([*cut.messages, Message("assistant", cut.start.reasoning + cut.start.text)])
        self._chat.messages[:] = cut.messages
        self._answer(cut.start)

    def _help(self, _argument: str) -> None:
        click.echo(format_help(_COMMANDS.values()) + _KEYS)

    def _stats(self, _argument: str) -> None:
        if self._metrics is None:
            raise InvalidRequest("there is no answer yet.", hint="Ask something first.")
        for name, value in self._metrics.to_dict().items():
            shown = "-" if value is None else significant(value, 4) if isinstance(value, float) else value
            if isinstance(value, tuple):
                shown = " ".join(f"{each:.2f}" for each in value) or "-"
            click.echo(f"{name:18} {shown}")

    def _spec(self, argument: str) -> None:
        info = self._engine.speculate(argument).result() if argument else require_model(self._engine)
        click.echo(describe_speculation(info.speculation, info.draft, is_paused=info.is_paused))

    def _draft(self, argument: str) -> None:
        if argument:
            request = replace(self._request, draft=argument)
            list(interruptible(self._engine.change_draft(request, TerminalReporter())))
            self._request = request
        choices = "" if argument else f" (choose from {describe_words()})"
        click.echo(f"draft: {require_model(self._engine).draft}{choices}")

    def _set(self, argument: str) -> None:
        for name, value in apply_setting(self._chat, argument):
            click.echo(f"{name:18} {value}")

    def _clear(self, _argument: str) -> None:
        self._chat.messages.clear()
        self._chat.left_out, self._cut = 0, None

    def _incognito(self, _argument: str) -> None:
        self._clear("")
        self._is_incognito = not self._is_incognito
        click.echo(
            "incognito: the memory keeps nothing of this conversation" if self._is_incognito else "not incognito"
        )

    def _retry(self, _argument: str) -> None:
        messages = self._chat.messages
        before = list(messages)
        question = self._chat.undo()
        if question is None:
            raise InvalidRequest("there is no question to answer again.", hint="Ask something first.")
        messages.append(Message("user", question))
        try:
            self._answer()
        finally:
            if not messages or messages[-1].role != "assistant":
                messages[:] = before  # without a new answer, keep the old one

    def _undo(self, _argument: str) -> None:
        question, self._cut = self._chat.undo(), None
        click.echo("nothing to undo" if question is None else f"removed: {question.splitlines()[0][:70]}")

    def _save(self, argument: str, *, overwrite: bool = False) -> None:
        self._chat.save(parse_path(argument), overwrite=overwrite)
        click.echo(f"saved {count(len(self._chat.messages), 'message')}")

    def _load(self, argument: str) -> None:
        self._chat.load(parse_path(argument))
        self._cut = None
        click.echo(f"loaded {count(len(self._chat.messages), 'message')}")

"""The plain chat loop: reads lines, streams answers, runs slash commands. It holds no engine logic."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

import click

from edgespec.cli.interrupts import interruptible
from edgespec.cli.terminal import TerminalReporter, format_summary, report_bug
from edgespec.conversations.chat import Chat, describe_speculation, parse_path
from edgespec.conversations.commands import ALIASES, SHARED, SlashCommand, apply_setting, format_help, parse_command
from edgespec.core.metrics import Metrics
from edgespec.core.protocols import Step
from edgespec.engine.events import Finished, Notice
from edgespec.errors import Cancelled, EdgespecError, InvalidRequest
from edgespec.planner.draft_request import describe_words
from edgespec.planner.plan import LoadConfig
from edgespec.service.client import require_model
from edgespec.service.local import LocalEngine
from edgespec.text.chat_template import Message
from edgespec.text.stream import Piece

_COMMANDS = SHARED | {"clear": SlashCommand("clear", "", "delete all messages")}
_KEYS = '''
"""                      starts and ends a message of several lines
Ctrl-C stops an answer and keeps its text; twice quits. Ctrl-D quits.'''


class Repl:
    """One conversation on one terminal or pipe."""

    def __init__(self, engine: LocalEngine, request: LoadConfig, chat: Chat, *, interactive: bool) -> None:
        """`request` is what `engine` has loaded."""
        self._engine = engine
        self._request = request
        self._chat = chat
        self._interactive = interactive
        self._metrics: Metrics | None = None  # of the last answer
        names = ("help", "stats", "spec", "draft", "set", "clear", "retry", "undo", "save", "load")
        self._actions: dict[str, Callable[[str], None]] = {name: getattr(self, f"_{name}") for name in names}

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
                command, argument = parse_command(line[1:], _COMMANDS, ALIASES)
                if command.name == "exit":
                    return False
                self._actions[command.name](argument)
            elif line.strip():
                self._chat.messages.append(Message("user", line))
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

    def _answer(self) -> None:
        """Generate for the present messages; a question that gets no answer is removed."""
        answer: list[str] = []
        steps: list[Step] = []
        notices: list[str] = []
        try:
            for event in interruptible(self._engine.stream(self._chat.request())):
                if isinstance(event, Piece):
                    is_reasoning = event.channel == "reasoning"
                    click.echo(click.style(event.text, dim=True) if is_reasoning else event.text, nl=False)
                    if not is_reasoning:
                        answer.append(event.text)
                elif isinstance(event, Step):
                    steps.append(event)
                elif isinstance(event, Notice):
                    notices.append(event.text)
                elif isinstance(event, Finished):
                    finished = event
        finally:
            if answer:
                self._chat.messages.append(Message("assistant", "".join(answer)))
            else:
                self._chat.undo()  # templates require alternating roles
        click.echo()
        for text in notices:
            click.echo(f"note: {text}", err=True)
        self._metrics = finished.metrics
        if self._interactive or finished.reason == "cancelled":
            line = format_summary(finished.metrics, steps, require_model(self._engine).drafters, finished.reason)
            click.echo(click.style(line, dim=True), err=True)

    def _help(self, _argument: str) -> None:
        click.echo(format_help(_COMMANDS.values()) + _KEYS)

    def _stats(self, _argument: str) -> None:
        if self._metrics is None:
            raise InvalidRequest("there is no answer yet.", hint="Ask something first.")
        for name, value in self._metrics.to_dict().items():
            shown = "-" if value is None else f"{value:.4g}" if isinstance(value, float) else value
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
        question = self._chat.undo()
        click.echo("nothing to undo" if question is None else f"removed: {question.splitlines()[0][:70]}")

    def _save(self, argument: str) -> None:
        self._chat.save(parse_path(argument))
        click.echo(f"saved {len(self._chat.messages)} messages")

    def _load(self, argument: str) -> None:
        self._chat.load(parse_path(argument))
        click.echo(f"loaded {len(self._chat.messages)} messages")

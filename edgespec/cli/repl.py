"""The plain chat loop: reads lines, streams answers, obeys slash commands. It holds no engine logic."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

import click

from edgespec.cli.host import Host
from edgespec.cli.terminal import report_bug, summary
from edgespec.conversations.chat import SETTINGS, Chat, change_speculation, path_of, speculation_told
from edgespec.core.metrics import Metrics
from edgespec.engine.events import Finished, Notice
from edgespec.errors import Cancelled, EdgespecError, InvalidRequest
from edgespec.planner.plan import LoadConfig
from edgespec.text.chat_template import Message
from edgespec.text.stream import Piece

_HELP = """\
/help                 this list
/stats                figures of the last answer
/spec on|off|auto|N   speculation on, off, as much as pays, or N drafted tokens at a time
/draft KIND|REF       draft by auto, model, ngram, none, or a model of your choice
/set [NAME VALUE]     show or change: {settings}
/clear                forget the conversation
/retry                answer the last question anew
/undo                 take the last question and its answer back
/save FILE            write the conversation to a file
/load FILE            read it back
/exit                 leave (Ctrl-D too)
\"\"\"                   begins and ends a message of several lines
Ctrl-C stops an answer and keeps its text; twice leaves."""


class Repl:
    """One conversation on one terminal or pipe."""

    def __init__(self, host: Host, opened_as: LoadConfig, chat: Chat, *, interactive: bool) -> None:
        self._host = host
        self._request = opened_as
        self._chat = chat
        self._interactive = interactive
        self._last: Metrics | None = None
        self._commands = {
            "help": self._help, "?": self._help, "stats": self._stats, "spec": self._spec, "draft": self._draft,
            "set": self._set, "clear": self._clear, "retry": self._retry, "undo": self._undo, "save": self._save,
            "load": self._load,
        }  # fmt: skip

    def loop(self) -> int:
        """Until /exit or the end of input; returns the exit code."""
        if self._interactive:
            with suppress(ImportError):
                import readline  # noqa: F401 - importing it gives input() editing and history
            loaded = self._host.loaded
            click.echo(f"{loaded.name} on {loaded.backend}, draft {loaded.draft}. /help for help, Ctrl-D to leave.")
        pressed = False  # Ctrl-C at the prompt just before
        while True:
            try:
                line = self._read()
                pressed = False
            except (EOFError, RuntimeError):  # the end of the input, or there never was one
                return 0
            except KeyboardInterrupt:
                if pressed:
                    return 0
                pressed = True
                click.echo("\nCtrl-C once more leaves.")
                continue
            if line.strip() in ("/exit", "/bye", "/quit"):
                return 0
            try:
                if line.startswith("/"):
                    self._command(line[1:])
                elif line.strip():
                    self._chat.messages.append(Message("user", line))
                    self._answer()
            except EdgespecError as error:
                click.echo(f"{error.message}\n{error.hint}", err=True)
            except Cancelled:
                click.echo("interrupted", err=True)
            except OSError:
                raise  # the terminal has gone
            except Exception as error:  # noqa: BLE001 - a bug of ours must not take the conversation with it
                report_bug(error)

    def _read(self) -> str:
        line = input(">>> " if self._interactive else "")
        if not line.startswith('"""'):
            return line
        lines = [line[3:]]
        while not lines[-1].endswith('"""') or (len(lines) == 1 and not lines[0]):
            lines.append(input("... " if self._interactive else ""))
        return "\n".join(lines).removesuffix('"""').strip("\n")

    def _command(self, line: str) -> None:
        name, _, argument = line.partition(" ")
        command = self._commands.get(name)
        if command is None:
            raise InvalidRequest(f"there is no command /{name}.", hint="/help lists them.")
        command(argument.strip())

    def _answer(self) -> None:
        """Generate for the conversation as it is; a refused question is taken back."""
        answer: list[str] = []
        notices: list[str] = []
        try:
            for event in self._host.stream(self._chat.request()):
                if isinstance(event, Piece):
                    reasoning = event.channel == "reasoning"
                    click.echo(click.style(event.text, dim=True) if reasoning else event.text, nl=False)
                    if not reasoning:
                        answer.append(event.text)
                elif isinstance(event, Notice):
                    notices.append(event.text)
                elif isinstance(event, Finished):
                    finished = event
        finally:
            if answer:
                self._chat.messages.append(Message("assistant", "".join(answer)))
            else:
                self._chat.undo()  # a question without an answer would be in the way of the next one
        click.echo()
        for text in notices:
            click.echo(f"note: {text}", err=True)
        self._last = finished.metrics
        if self._interactive or finished.reason == "cancelled":
            click.echo(
                click.style(summary(finished.metrics, self._host.loaded.draft, finished.reason), dim=True), err=True
            )

    def _help(self, _argument: str) -> None:
        click.echo(_HELP.format(settings=", ".join(SETTINGS)))

    def _stats(self, _argument: str) -> None:
        if self._last is None:
            raise InvalidRequest("there is no answer yet.", hint="Ask something first.")
        for name, value in self._last.to_dict().items():
            shown = "-" if value is None else f"{value:.4g}" if isinstance(value, float) else value
            if isinstance(value, tuple):
                shown = " ".join(f"{each:.2f}" for each in value) or "-"
            click.echo(f"{name:18} {shown}")

    def _spec(self, argument: str) -> None:
        engine = self._host.loaded.engine
        if argument:
            change_speculation(engine, argument)
        click.echo(speculation_told(engine.speculation, self._host.loaded.draft, is_paused=engine.is_paused))

    def _draft(self, argument: str) -> None:
        if argument:
            request = replace(self._request, draft=argument)
            self._host.change_draft(request)
            self._request = request
        click.echo(f"draft: {self._host.loaded.draft}")

    def _set(self, argument: str) -> None:
        name, _, value = argument.partition(" ")
        if name:
            self._chat.set(name.replace("-", "_"), value.strip())
        chat = self._chat
        for setting in SETTINGS:
            current = chat.setting(setting)
            if not name or setting == name.replace("-", "_"):
                click.echo(f"{setting:18} {'-' if current is None else current}")

    def _clear(self, _argument: str) -> None:
        self._chat.messages.clear()

    def _retry(self, _argument: str) -> None:
        messages = self._chat.messages
        before = list(messages)
        question = self._chat.undo()
        if question is None:
            raise InvalidRequest("there is no question to answer anew.", hint="Ask something first.")
        messages.append(Message("user", question))
        try:
            self._answer()
        finally:
            if not messages or messages[-1].role != "assistant":
                messages[:] = before  # no new answer: the old one stays

    def _undo(self, _argument: str) -> None:
        question = self._chat.undo()
        click.echo("nothing to take back" if question is None else f"took back: {question.splitlines()[0][:70]}")

    def _save(self, argument: str) -> None:
        self._chat.save(path_of(argument))
        click.echo(f"saved {len(self._chat.messages)} messages")

    def _load(self, argument: str) -> None:
        self._chat.load(path_of(argument))
        click.echo(f"loaded {len(self._chat.messages)} messages")

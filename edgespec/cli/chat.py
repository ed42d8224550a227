"""`edgespec chat`: full-screen on a terminal, line by line elsewhere."""

from __future__ import annotations

import gc
import os
import sys
from contextlib import closing, suppress
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import click
from click.core import ParameterSource

from edgespec.api.options import resolve_sampling
from edgespec.cli.completion import complete_conversation, complete_model
from edgespec.cli.engine import Answer, open_engine
from edgespec.cli.options import generation_options, load_config, offer, rare_option
from edgespec.cli.terminal import TerminalReporter, finish, interruptible, report_bug
from edgespec.conversations import Store
from edgespec.conversations.chat import (
    ALIASES,
    NEARLY_FULL,
    REPLACING,
    SHARED,
    Chat,
    OwnModel,
    apply_setting,
    can_go_on,
    describe_end,
    describe_speculation,
    format_help,
    make_room,
    parse_command,
    parse_path,
)
from edgespec.conversations.recorder import ConversationRecorder, open_store
from edgespec.core.metrics import Metrics, told_speedup
from edgespec.core.sampling import SamplingParams
from edgespec.engine.events import AnswerStart, MemoryUse
from edgespec.errors import Cancelled, EdgespecError, InvalidRequest
from edgespec.options import LEARN
from edgespec.planner.draft_finder import describe_words
from edgespec.planner.plan import LoadConfig
from edgespec.registry.schema import SamplingDefaults
from edgespec.service.client import EngineClient, ModelInfo, require_model
from edgespec.service.process import EngineProcess
from edgespec.service.summary import summarize
from edgespec.text.chat_template import Message
from edgespec.text.stream import Piece
from edgespec.units import significant

if TYPE_CHECKING:
    from edgespec.backends import BackendName


@click.command("chat")
@click.argument("model", required=False, metavar="[REF]", shell_complete=complete_model)
@click.option("--plain", is_flag=True, help="Chat line by line instead of full-screen.")
@click.option("--continue", "continue_last", is_flag=True, help="Continue the last conversation, with its model.")
@click.option(
    "--resume",
    type=click.IntRange(min=1),
    metavar="ID",
    help="Continue a conversation; `edgespec history` lists them.",
    shell_complete=complete_conversation,
)
@rare_option("--rolling", is_flag=True, help="Leave out the oldest turns when the context is full.")
@click.option("--incognito", is_flag=True, help="Save nothing of this chat: no conversation, no prompts, no memory.")
@offer(LEARN)
@generation_options
def chat_command(
    model: str | None,
    plain: bool,
    continue_last: bool,
    resume: int | None,
    rolling: bool,
    incognito: bool,
    **options: Any,
) -> int:
    """Chat with a model: an alias, user/repo:QUANT, hf:user/repo/file.gguf, or a path.

    Without REF, a conversation that is continued opens its own model. A new one opens EDGESPEC_MODEL, else the model
    that was opened last, else smollm2-135m if its package is installed; else a list of small models is shown first. F1
    (or /help) lists keys and commands. Full-screen chats are saved in the data folder that `edgespec doctor` shows.
    """
    if incognito and (continue_last or resume):
        raise InvalidRequest("a saved conversation is not incognito.", hint="Drop --incognito.")
    request = load_config(model, options | ({"memory": False} if incognito else {}))
    resolve_sampling(options, SamplingDefaults())  # raises before anything is loaded
    settings = options["max_tokens"], options["seed"], options["stop"]
    chat = Chat(options["system"], SamplingParams(), *settings, rolling=rolling)
    if not plain and not options["verbose"] and _is_terminal():
        gc.disable()  # while modules are loaded, none of which goes again
        from edgespec.tui.app import ChatApp

        gc.enable()
        store = open_store()
        if continue_last and resume is None:
            resume = next((conversation.id for conversation in store.recent(1)), None)
        request = _choose_model(store, resume, request)
        sampling = partial(resolve_sampling, options)
        with closing(EngineProcess("F5 opens the model again.")) as client:
            app = partial(ChatApp, request, chat, store, client, is_incognito=incognito)
            is_choosing = request.model is None and request.backend is None and resume is None
            window = app(sampling=sampling, resume=resume, is_choosing=is_choosing)
            window.run()
            if window.failure is not None:
                raise window.failure
            return 0
    if continue_last or resume:
        hint = "Run it in a terminal, without --plain and --verbose."
        raise InvalidRequest("--continue and --resume need the full-screen chat.", hint=hint)
    with closing(_start_engine(request, verbose=options["verbose"])) as engine:
        is_interactive = sys.stdin is not None and sys.stdin.isatty()
        repl = Repl(engine, request, chat, interactive=is_interactive, is_incognito=incognito)
        chat.sampling = chat.default_sampling = resolve_sampling(options, repl.open_model().sampling)
        return repl.loop()


def _start_engine(request: LoadConfig, *, verbose: bool) -> EngineClient:
    """An engine in a process of its own, or one in this process that shows the log of its runtime."""
    return open_engine(request, verbose=True) if verbose else EngineProcess("A new message opens the model again.")


def _choose_model(store: Store, id: int | None, request: LoadConfig) -> LoadConfig:
    """`request` for the model of a stored conversation, or of a new one where none is continued.

    What the user gave stays. Raises InvalidRequest.
    """
    from edgespec.tui.settings import find_first_model

    if request.model is not None:
        return request
    if id is None or store.notice is not None:
        return replace(request, model=find_first_model()) if request.backend is None else request
    conversation = store.resume(id)
    own, context = OwnModel.find(conversation, store.path(conversation.leaf)), click.get_current_context()
    is_default = {name: context.get_parameter_source(name) is ParameterSource.DEFAULT for name in ("draft", "backend")}
    return replace(
        request,
        model=own.reference,
        draft=own.draft if is_default["draft"] else request.draft,
        backend=cast("BackendName | None", own.backend) if is_default["backend"] else request.backend,
    )


def _is_terminal() -> bool:
    """Whether stdin, stdout and stderr are a terminal that can draw a full screen."""
    streams = (sys.stdin, sys.stdout, sys.stderr)
    return all(each is not None and each.isatty() for each in streams) and os.environ.get("TERM") != "dumb"


# The plain chat loop: reads lines, streams answers, runs slash commands. It holds no engine logic.


_BY_NAME = SHARED | {REPLACING.name: REPLACING}
_KEYS = '''
"""                      starts and ends a message of several lines
Ctrl-C stops an answer and keeps its text; twice quits. Ctrl-D quits.'''


def _show(piece: Piece) -> None:
    click.echo(click.style(piece.text, dim=True) if piece.channel == "reasoning" else piece.text, nl=False)


class Repl:
    """One conversation on one terminal or pipe."""

    def __init__(
        self, engine: EngineClient, request: LoadConfig, chat: Chat, *, interactive: bool, is_incognito: bool
    ) -> None:
        """`request` is what `engine` is to load. `is_incognito`: the memory keeps nothing of the first conversation."""
        self._engine = engine
        self._request = request
        self._chat = chat
        self._interactive = interactive
        self._recorder = ConversationRecorder(chat, Store.in_memory(), partial(click.echo, err=True))
        self._metrics: Metrics | None = None  # of the last answer
        self._is_nearly_full = False  # as it was told
        if is_incognito:
            self._recorder.start_incognito(is_on=True)

    def open_model(self) -> ModelInfo:
        """Open the model, unless it is open; the engine may have died. Raises any EdgespecError, Cancelled."""
        if self._engine.model_info is None:
            finish(self._engine.open(self._request, TerminalReporter()))
            self._recorder.model = require_model(self._engine).name
        return require_model(self._engine)

    def loop(self) -> int:
        """Run until /exit or the end of input; returns the exit code."""
        if self._interactive:
            with suppress(ImportError):
                import readline  # noqa: F401 - importing it gives input() editing and history
            info = require_model(self._engine)
            click.echo(f"{info.name} on {info.backend}, draft {info.draft}. /help for help, Ctrl-D to quit.")
        was_interrupted = False  # Ctrl-C at the previous prompt
        with closing(self._recorder), suppress(EOFError, RuntimeError):  # RuntimeError: there is no stdin
            while True:
                try:
                    line = self._read()
                except KeyboardInterrupt:
                    if was_interrupted:
                        break
                    was_interrupted = True
                    click.echo("\nPress Ctrl-C once more to quit.")
                    continue
                was_interrupted = False
                if not self._handle(line):
                    break
        return 0

    def _handle(self, line: str) -> bool:
        """Run a command or answer a message, and print errors; False for /exit."""
        try:
            if line.startswith("/"):
                command, argument = parse_command(line[1:], _BY_NAME, ALIASES)
                if command.name == "exit":
                    return False
                overwrites = {"overwrite": True} if command is REPLACING else {}
                getattr(self, f"_{command.name.removesuffix('!')}")(argument, **overwrites)
            elif line.strip():
                self.open_model()
                self._make_room([*self._chat.messages, Message("user", line)])
                self._recorder.ask(line)
                self._recorder.begin_answer({})
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
        """Choose what of `messages` the model reads, and print what is left out. Raises ContextOverflow."""
        size = require_model(self._engine).context_size
        notice = make_room(self._chat, messages, size, lambda prompt: self._engine.count(prompt, {}).result())
        if notice is not None:
            click.echo(f"note: {notice}", err=True)

    def _answer(self, start: AnswerStart = AnswerStart("")) -> None:  # noqa: B008 - it is immutable
        """Let the last answer grow, which begins with `start`; a question that gets none is removed."""
        info, recorder = require_model(self._engine), self._recorder
        memory = None if recorder.is_incognito else MemoryUse()
        answer = Answer({"answer": start.text, "reasoning": start.reasoning})
        try:
            finished = answer.read(self._engine.stream(self._chat.request(info.sampling, start, memory)), _show)
        finally:
            reason = "error" if answer.finished is None else answer.finished.reason
            recorder.finish_answer(answer.texts["answer"], answer.texts["reasoning"], (), {"reason": reason})
            if not any(answer.texts.values()):
                recorder.drop_unanswered()
        click.echo()
        self._metrics = finished.metrics
        used = finished.metrics.prompt_tokens + finished.metrics.emitted_tokens
        was_nearly_full, self._is_nearly_full = self._is_nearly_full, used >= NEARLY_FULL * info.context_size
        if self._is_nearly_full and not was_nearly_full:
            answer.notices.append(describe_end(self._chat, used, info.context_size))
        for text in answer.notices:
            click.echo(f"note: {text}", err=True)
        if self._interactive or reason in ("cancelled", "repetition"):
            line = summarize(asdict(finished.metrics) | {"reason": reason}, has_drafters=bool(info.drafters))
            is_cut = reason != "stop" and any(answer.texts.values())
            is_offered = is_cut and can_go_on(self._chat, used, info.context_size)
            goes_on = "; /continue goes on" if is_offered else ""
            click.echo(click.style(line + goes_on, dim=True), err=True)

    def _continue(self, _argument: str) -> None:
        self.open_model()
        turn = self._recorder.require_cut_answer()
        thought = () if turn.text else (Message("assistant", turn.reasoning),)
        self._make_room([*self._chat.messages, *thought])
        self._recorder.continue_answer()
        self._answer(AnswerStart(turn.text, turn.reasoning))

    def _help(self, _argument: str) -> None:
        click.echo(format_help(SHARED.values()) + _KEYS)

    def _stats(self, _argument: str) -> None:
        if self._metrics is None:
            raise InvalidRequest("there is no answer yet.", hint="Ask something first.")
        found = self._metrics
        told = told_speedup(found.times_plain, found.drafted_tokens, found.emitted_tokens)
        for name, value in asdict(replace(found, times_plain=told)).items():
            values = value if isinstance(value, tuple) else (value,)
            shown = [
                significant(each, 4) if isinstance(each, float) else str(each) for each in values if each is not None
            ]
            click.echo(f"{name:18} {' '.join(shown) or '-'}")

    def _spec(self, argument: str) -> None:
        info = self.open_model()
        if argument:
            info = self._engine.speculate(argument).result()
            self._request = info.keep_speculation(self._request)
        click.echo(describe_speculation(info.speculation, info.draft, is_paused=info.is_paused))

    def _draft(self, argument: str) -> None:
        self.open_model()
        if argument:
            request = replace(self._request, draft=argument)
            list(interruptible(self._engine.change_draft(request, TerminalReporter())))
            self._request = request
        choices = "" if argument else f" (choose from {describe_words()})"
        click.echo(f"draft: {require_model(self._engine).draft}{choices}")

    def _set(self, argument: str) -> None:
        for name, value in apply_setting(self._chat, argument):
            click.echo(f"{name:18} {value}")

    def _new(self, _argument: str) -> None:
        self._recorder.start_new()

    def _incognito(self, _argument: str) -> None:
        self._recorder.start_incognito(is_on=not self._recorder.is_incognito)
        is_on = self._recorder.is_incognito
        click.echo("incognito: the memory keeps nothing of this conversation" if is_on else "not incognito")

    def _retry(self, _argument: str) -> None:
        if not self._recorder.questions:
            raise InvalidRequest("there is no question to answer again.", hint="Ask something first.")
        self.open_model()
        self._recorder.rewind(len(self._recorder.questions), keep_question=True)
        self._make_room(self._chat.messages)
        self._recorder.begin_answer({})
        self._answer()

    def _undo(self, _argument: str) -> None:
        n = len(self._recorder.questions)
        click.echo(f"removed: {self._recorder.rewind(n).splitlines()[0][:70]}" if n else "nothing to undo")

    def _export(self, argument: str, *, overwrite: bool = False) -> None:
        path = parse_path(argument)
        self._recorder.export(path, overwrite=overwrite)
        click.echo(f"wrote {path}")

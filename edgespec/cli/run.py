"""`edgespec run`: answer one prompt on stdout, with statistics on stderr or everything as one JSON object."""

from __future__ import annotations

import json
import select
import sys
from contextlib import closing, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import click

from edgespec.cli.completion import complete_model
from edgespec.cli.interrupts import INTERRUPTED
from edgespec.cli.options import generation_options, load_config, preset_option, rare_option
from edgespec.cli.terminal import explain_rounds
from edgespec.errors import InvalidRequest, reason_of

if TYPE_CHECKING:
    from edgespec.chat.recorder import ConversationRecorder
    from edgespec.chat.state import Chat
    from edgespec.cli.engine import Answer
    from edgespec.client.client import EngineClient
    from edgespec.engine.events import Finished, Request
    from edgespec.engine.model_info import ModelInfo
    from edgespec.engine.structure import Structure
    from edgespec.models.load_config import LoadConfig
    from edgespec.text.stream import Piece

_PATIENCE_S = 3.0  # for standard input to begin, beside a prompt


@click.command("run")
@click.argument("words", nargs=-1, metavar="[REF] [PROMPT]", shell_complete=complete_model)
@click.option(
    "--model",
    "-m",
    metavar="REF",
    help="Alias, user/repo:QUANT, hf:user/repo/file.gguf, or a path.",
    shell_complete=complete_model,
)
@click.option("--file", "-f", type=click.File("rb"),
              help="Read the text before PROMPT, or all of it, from a file; '-' is standard input.")  # fmt: skip
@rare_option("--raw", is_flag=True, help="Send the prompt without the chat template.")
@click.option(
    "--continue", "-c", "continue_last", is_flag=True, help="Ask in the last conversation, and save the answer there."
)
@click.option("--format", "answer_format", type=click.Choice(["json"]), help="The answer is a JSON object.")
@click.option("--schema", metavar="FILE", type=click.File("rb"), help="The answer is JSON that follows a schema.")
@preset_option
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout, nothing else.")
@rare_option("--explain", is_flag=True, help="Print a table of all rounds with the reason for each draft on stderr.")
@generation_options
def run_command(
    words: tuple[str, ...],
    model: str | None,
    file: BinaryIO | None,
    raw: bool,
    continue_last: bool,
    answer_format: str | None,
    schema: BinaryIO | None,
    as_json: bool,
    explain: bool,
    **options: Any,
) -> int:
    """Answer one PROMPT (argument, --file, or standard input) by a model, and exit; REF alone chats line by line.

    A text of --file or of standard input comes before PROMPT: `git diff | edgespec run "Write a commit message."`.
    Without --model, the model of EDGESPEC_MODEL answers, else the demo model.
    """
    from edgespec.answers.summary import may_draft, sum_metrics, summarize
    from edgespec.api.options import resolve_sampling
    from edgespec.models.registry import SamplingDefaults

    model, prompt = _split_words(words, model)
    if model is not None and prompt is None and file is None and _is_typed():
        from edgespec.cli.chat import chat_command

        chat = {"model": model, "plain": True, "continue_last": continue_last}
        return int(click.get_current_context().invoke(chat_command, **chat, **options) or 0)
    text = _read_prompt(prompt, file)
    if not (text if raw else text.strip()):
        raise InvalidRequest("the prompt is empty.", hint="Give one as an argument, with --file, or on standard input.")
    if raw and (options["system"] or continue_last):
        what = "an earlier conversation needs" if continue_last else "a system message needs"
        raise InvalidRequest(f"{what} the chat template.", hint="Drop --raw.")
    structure = _read_structure(answer_format, schema)
    resolve_sampling(options, SamplingDefaults())  # raises before anything is loaded
    is_kept = _is_typed() and sys.stdout.isatty() and options["memory"] is not False and not raw
    with closing(_open_conversation(options, continues=continue_last, is_kept=is_kept)) as recorder:
        info, answer = _answer(text, recorder, load_config(model, options), structure, options, raw=raw, quiet=as_json)
    finished = answer.finished
    assert finished is not None
    answer.notices += finished.warnings
    notices = answer.notices + ([] if raw or as_json else _advise(info, text))
    rounds = explain_rounds(answer.steps) if explain else []
    if as_json:
        click.echo(json.dumps(_format_result(info, finished, answer.texts), ensure_ascii=False))
    else:
        click.echo()
        click.echo(summarize(sum_metrics({}, finished), may_draft=may_draft(info)), err=True)
    for line in (*rounds, *(f"note: {text}" for text in notices)):
        click.echo(line, err=True)
    return INTERRUPTED if finished.reason == "cancelled" else 0


def _split_words(words: tuple[str, ...], model: str | None) -> tuple[str | None, str | None]:
    """The model and the prompt. Of two words the first is the model; a single one is, if it names one."""
    if len(words) > (2 if model is None else 1):
        raise click.UsageError("There are several words: put the prompt in quotes.")
    if len(words) == 2:
        return words
    prompt = words[0] if words else None
    return (prompt, None) if model is None and prompt is not None and _names_model(prompt) else (model, prompt)


def _names_model(word: str) -> bool:
    """Whether a word can only be meant as a model: an alias, or an existing file or folder of one."""
    from edgespec.models.registry import load_registry

    if " " in word or not word:
        return False
    return word in load_registry().entries or (Path(word).suffix == ".gguf" and Path(word).is_file())


def _is_typed() -> bool:
    return sys.stdin is not None and sys.stdin.isatty()


def _advise(info: ModelInfo, text: str) -> list[str]:
    """A notice for a question in prose to the embedded model, which completes code; nothing for other models."""
    from edgespec.chat.code import may_be_code
    from edgespec.models.registry import EMBEDDED_ALIAS

    if info.name != EMBEDDED_ALIAS or may_be_code(text):
        return []
    return [f"{EMBEDDED_ALIAS} completes Python code; `edgespec chat` lists models that one can talk to."]


def _open_conversation(options: dict[str, Any], *, continues: bool, is_kept: bool) -> ConversationRecorder:
    """The last conversation, or a new one, which is saved if it `is_kept`. Raises InvalidRequest if there is none."""
    from edgespec.chat import Store
    from edgespec.chat.recorder import ConversationRecorder, open_store
    from edgespec.chat.state import Chat
    from edgespec.core.sampling import SamplingParams

    settings = options["max_tokens"], options["seed"], options["stop"]
    chat = Chat(options["system"], SamplingParams(), *settings)
    store = open_store() if continues or is_kept else Store.in_memory()
    recorder = ConversationRecorder(chat, store, lambda text: click.echo(f"note: {text}", err=True))
    if continues:
        last = store.recent(1)
        if not last:
            recorder.close()
            raise InvalidRequest("there is no conversation to continue.", hint="`edgespec chat` begins one.")
        recorder.resume(last[0].id)
        if options["system"]:
            chat.system = options["system"]
            recorder.use_system()
    return recorder


def _answer(
    text: str,
    recorder: ConversationRecorder,
    config: LoadConfig,
    structure: Structure | None,
    options: dict[str, Any],
    *,
    raw: bool,
    quiet: bool,
) -> tuple[ModelInfo, Answer]:
    """Open the model and answer; the text is shown unless `quiet`. In an earlier conversation its own model answers,
    unless the user names one.
    """
    from edgespec.answers.summary import sum_metrics
    from edgespec.api.options import resolve_sampling
    from edgespec.chat.own_model import OwnModel
    from edgespec.cli.engine import Answer, open_engine
    from edgespec.client.client import require_model

    answer = Answer({"answer": "", "reasoning": ""})

    def show(piece: Piece) -> None:
        if not quiet:
            click.echo(piece.text, nl=False, err=piece.channel == "reasoning")

    if recorder.conversation is not None and config.model is None and config.backend is None:
        own = OwnModel.find(recorder.conversation, recorder.turns)
        config = replace(config, model=own.reference, backend=own.backend)
    with closing(open_engine(config, verbose=options["verbose"])) as engine:
        info = require_model(engine)
        recorder.chat.sampling = resolve_sampling(options, info.sampling)
        request = _build_raw(text, recorder.chat, info) if raw else _ask(text, recorder, engine, config)
        try:
            answer.read(engine.stream(replace(request, structure=structure)), show)
        finally:
            if not raw:
                measured = sum_metrics({}, answer.finished)
                recorder.finish_answer(answer.texts["answer"], answer.texts["reasoning"], (), measured)
    return info, answer


def _ask(text: str, recorder: ConversationRecorder, engine: EngineClient, config: LoadConfig) -> Request:
    """Add a question to the conversation. Raises ContextOverflow."""
    from edgespec.chat.context import make_room
    from edgespec.chat.own_model import answer_settings
    from edgespec.client.client import require_model
    from edgespec.engine.events import MemoryUse
    from edgespec.text.chat_template import Message

    info, chat = require_model(engine), recorder.chat
    messages = [*chat.messages, Message("user", text)]
    make_room(chat, messages, info.context_size, lambda prompt: engine.count(prompt, {}).result())
    recorder.model = info.name
    recorder.ask(text)
    recorder.begin_answer(answer_settings(config, info))
    return chat.request(info.sampling, memory=recorder.memory or MemoryUse())


def _build_raw(text: str, chat: Chat, info: ModelInfo) -> Request:
    from edgespec.engine.events import MemoryUse

    return replace(chat.request(info.sampling, memory=MemoryUse()), prompt=text)


def _read_structure(answer_format: str | None, schema: BinaryIO | None) -> Structure | None:
    """The JSON that the answer is to be. Raises InvalidRequest."""
    from edgespec.engine.structure import json_structure

    if schema is None:
        return None if answer_format is None else json_structure()
    try:
        return json_structure(json.load(schema))
    except (ValueError, RecursionError) as error:  # ValueError also for text that is not UTF-8
        raise InvalidRequest(f"{schema.name} is not JSON: {reason_of(error)}.", hint="Name a JSON schema.") from error


def _format_result(info: ModelInfo, finished: Finished, texts: dict[str, str]) -> dict[str, object]:
    return {
        "text": texts["answer"],
        **({"reasoning": texts["reasoning"]} if texts["reasoning"] else {}),
        "tokens": finished.tokens,
        "finish_reason": finished.reason,
        "backend": info.backend,
        "model": info.name,
        "draft": info.draft,
        **({"settings": info.settings.chosen} if info.settings else {}),
        **({"exact_width": info.exact_width} if info.exact_width else {}),
        "seed": finished.seed,
        "metrics": asdict(finished.metrics),
    }


def _read_prompt(argument: str | None, file: BinaryIO | None) -> str:
    """The text of `file` or of standard input, then the prompt, as far as they are given."""
    if file is not None:
        return _join(file.read(), argument)
    if argument == "-":
        return _join(_read_stdin(), None)
    if sys.stdin is None or _is_typed():
        if argument is None:
            raise click.UsageError("There is no prompt: give one as an argument, with --file, or on standard input.")
        return argument
    if argument is None or _has_input():
        return _join(_read_stdin(), argument)
    click.echo(
        f"note: standard input is open, but nothing came for {_PATIENCE_S:g} s, so only the prompt is used."
        " `--file -` waits longer; `< /dev/null` does not wait.",
        err=True,
    )
    return argument


def _join(data: bytes, question: str | None) -> str:
    if b"\0" in data:
        raise InvalidRequest("the input is not text.", hint="Give a text file, or text on standard input.")
    text = data.decode("utf-8", "replace")
    if question is None or not text.strip():
        return text if question is None else question
    return "{}\n\n{}".format(text.rstrip("\n"), question)


def _read_stdin() -> bytes:
    return b"" if sys.stdin is None else sys.stdin.buffer.read()


def _has_input() -> bool:
    """Whether standard input has text, or its end, within `_PATIENCE_S`: who starts this may leave a pipe open."""
    with suppress(OSError, ValueError):  # it cannot be waited for: a file
        return bool(select.select([sys.stdin.fileno()], [], [], _PATIENCE_S)[0])
    return True

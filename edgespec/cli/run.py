"""`edgespec run`: answer one prompt on stdout, with statistics on stderr or everything as one JSON object."""

from __future__ import annotations

import json
import select
import sys
from contextlib import closing, suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import click

from edgespec.cli.completion import complete_model
from edgespec.cli.options import generation_options, load_config, rare_option
from edgespec.cli.terminal import INTERRUPTED, explain_rounds
from edgespec.errors import InvalidRequest

if TYPE_CHECKING:
    from edgespec.engine.events import Finished, Request
    from edgespec.service.client import ModelInfo
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
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout, nothing else.")
@rare_option("--explain", is_flag=True, help="Print a table of all rounds with the reason for each draft on stderr.")
@generation_options
def run_command(
    words: tuple[str, ...],
    model: str | None,
    file: BinaryIO | None,
    raw: bool,
    as_json: bool,
    explain: bool,
    **options: Any,
) -> int:
    """Answer one PROMPT (argument, --file, or standard input) by a model, and exit; REF alone chats line by line.

    A text of --file or of standard input comes before PROMPT: `git diff | edgespec run "Write a commit message."`.
    Without --model, the model of EDGESPEC_MODEL answers, else the demo model.
    """
    from edgespec.api.options import resolve_sampling
    from edgespec.cli.engine import Answer, open_engine
    from edgespec.registry.schema import SamplingDefaults
    from edgespec.service.client import require_model
    from edgespec.service.summary import summarize

    model, prompt = _split_words(words, model)
    if model is not None and prompt is None and file is None and _is_typed():
        from edgespec.cli.chat import chat_command

        return int(click.get_current_context().invoke(chat_command, model=model, plain=True, **options) or 0)
    text = _read_prompt(prompt, file)
    if not (text if raw else text.strip()):
        raise InvalidRequest("the prompt is empty.", hint="Give one as an argument, with --file, or on standard input.")
    if raw and options["system"]:
        raise InvalidRequest("a system message needs the chat template.", hint="Drop --raw or --system.")
    resolve_sampling(options, SamplingDefaults())  # raises before anything is loaded
    answer = Answer({"answer": "", "reasoning": ""})

    def show(piece: Piece) -> None:
        if not as_json:
            click.echo(piece.text, nl=False, err=piece.channel == "reasoning")

    with closing(open_engine(load_config(model, options), verbose=options["verbose"])) as engine:
        info = require_model(engine)
        finished = answer.read(engine.stream(_build_request(text, raw, options, info)), show)
    notices = answer.notices + ([] if raw or as_json else _advise(info, text))
    rounds = explain_rounds(answer.steps) if explain else []
    if as_json:
        click.echo(json.dumps(_format_result(info, finished, answer.texts), ensure_ascii=False))
    else:
        click.echo()
        measured = asdict(finished.metrics) | {"reason": finished.reason}
        click.echo(summarize(measured, has_drafters=bool(info.drafters)), err=True)
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
    from edgespec.registry.schema import load_registry

    if " " in word or not word:
        return False
    return word in load_registry().entries or (Path(word).suffix == ".gguf" and Path(word).is_file())


def _is_typed() -> bool:
    return sys.stdin is not None and sys.stdin.isatty()


def _advise(info: ModelInfo, text: str) -> list[str]:
    """What is said to a question that the model answers with code; for other models nothing."""
    from edgespec.conversations.chat import may_be_code
    from edgespec.registry.schema import EMBEDDED_ALIAS

    if info.name != EMBEDDED_ALIAS or may_be_code(text):
        return []
    return [f"{EMBEDDED_ALIAS} completes Python code; `edgespec chat` lists models that one can talk to."]


def _build_request(text: str, raw: bool, options: dict[str, Any], info: ModelInfo) -> Request:
    from edgespec.api.options import resolve_sampling
    from edgespec.engine.events import MemoryUse, Request
    from edgespec.engine.repetition import ENDLESS
    from edgespec.text.chat_template import Message

    system = [Message("system", options["system"])] if options["system"] else []
    return Request(
        prompt=text if raw else (*system, Message("user", text)),
        sampling=resolve_sampling(options, info.sampling),
        max_tokens=options["max_tokens"] or info.sampling.max_tokens,
        seed=options["seed"],
        stop=options["stop"],
        repetition=ENDLESS,
        memory=MemoryUse(),
    )


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

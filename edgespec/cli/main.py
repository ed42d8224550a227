"""The `edgespec` command: its subcommands, and the conversion of errors to text and exit codes."""

from __future__ import annotations

import importlib
import io
import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack, suppress

import click

from edgespec import __version__
from edgespec.cli.interrupts import INTERRUPTED
from edgespec.cli.terminal import report_bug
from edgespec.cli.usage import describe_usage
from edgespec.errors import Cancelled, EdgespecError, find_near

OUTPUT_LOST = 74  # EX_IOERR of sysexits.h

# By group, in the order of --help: the summary of each command, and its module. Only a command that runs is imported.
_GROUPS = {
    "Everyday": {
        "chat": ("Chat with a model, full-screen", "chat"),
        "run": ("Answer one prompt on standard output", "run"),
        "history": ("List or search saved conversations", "history"),
        "memory": ("Add or remove texts that answers are drafted from", "memory"),
        "doctor": ("Check this machine and its runtimes", "doctor"),
    },
    "Models": {
        "recommend": ("Which models suit this machine, and how fast", "recommend"),
        "list": ("List aliases and downloaded models", "models"),
        "pull": ("Download a model with its draft", "models"),
        "show": ("Describe a model before its download", "show"),
        "plan": ("Estimate memory and speed of a model", "plan"),
        "rm": ("Remove a downloaded model", "models"),
    },
    "Serving": {
        "serve": ("Serve models over HTTP, like OpenAI and Anthropic", "serve"),
        "key": ("Make, list and remove API keys of the server", "key"),
        "service": ("Print a unit of systemd or launchd for the server", "service"),
        "ps": ("List the models of a running server", "server"),
        "stop": ("Unload a model of a running server", "server"),
        "launch": ("Print another program's settings for the server", "launch"),
        "export": ("Print the command that serves a model on another engine", "export"),
        "worker": ("Lend this machine to a model on another one", "worker"),
    },
    "Measuring and tuning": {
        "bench": ("Compare drafts with plain decoding", "bench"),
        "verify": ("Check that drafts change no answer and no tool call", "verify"),
        "tune": ("Measure a model in advance", "tune"),
        "draft": ("Compare drafts, prepare self-drafts", "draft"),
        "adapt": ("Train the draft of a model on its answers here", "adapt"),
    },
    "Shell": {"completion": ("Print the completion script of a shell", "completion")},
}
_COMMANDS = {name: module for group in _GROUPS.values() for name, (_, module) in group.items()}
_ALIASES = {"ls": "list"}  # as other programs call them
# What commands of Ollama, llm and LM Studio are here.
_ELSEWHERE = {
    "create": "`edgespec serve --config FILE` has a table of settings for each model",
    "cp": "`edgespec serve NAME=REF` serves a model by another name",
    "download": "`edgespec pull` downloads a model",
    "embed": "`edgespec serve` has /v1/embeddings",
    "get": "`edgespec pull` downloads a model",
    "import": "any command takes the path of a GGUF file or an MLX folder",
    "load": "`edgespec serve NAME` loads a model",
    "logs": "`edgespec history` lists conversations",
    "models": "`edgespec list` lists models",
    "prompt": "`edgespec run PROMPT` answers a prompt",
    "remove": "`edgespec rm` removes a model",
    "search": "`edgespec recommend TEXT` searches the hub",
    "server": "`edgespec serve` starts a server",
    "start": "`edgespec serve` starts a server",
    "status": "`edgespec ps` lists the models of a server",
    "templates": "`edgespec chat --preset NAME` begins with settings that /preset save NAME kept",
    "unload": "`edgespec stop NAME` unloads a model of a server",
}

_WELCOME = """\
edgespec runs language models on this machine, with exact speculative decoding.

  edgespec chat            chat with a small model
  edgespec recommend       which models suit this machine
  edgespec chat NAME       download one of them, and chat with it

`edgespec --help` lists all commands, `edgespec doctor` checks this machine."""


class _Commands(click.Group):
    """Lists commands in groups, and imports a command's module on first use."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        module = _COMMANDS.get(cmd_name)
        if module is None:
            return None
        from edgespec.cli.examples import format_examples
        from edgespec.cli.options import add_help_all  # `--help` needs neither

        command: click.Command = getattr(importlib.import_module(f"edgespec.cli.{module}"), f"{cmd_name}_command")
        parts = command.commands if isinstance(command, click.Group) else {}
        for name, each in [(cmd_name, command), *((f"{cmd_name} {name}", part) for name, part in parts.items())]:
            each.epilog = format_examples(name)
            add_help_all(each, name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        width = max(len(name) for name in _COMMANDS)
        for title, commands in _GROUPS.items():
            with formatter.section(title):
                formatter.write_dl([(name.ljust(width), summary) for name, (summary, _) in commands.items()])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        args = [_ALIASES.get(each, each) if i == 0 else each for i, each in enumerate(args)]
        if args[:1] == ["help"]:  # `help COMMAND`
            args = [*args[1:2], "--help"]
        if args and args[0] not in _COMMANDS and not args[0].startswith("-"):
            raise click.UsageError(f"There is no command '{args[0]}'.{_suggest(args[0])}", ctx)
        if args == ["--help"]:
            click.echo(ctx.get_help())
            ctx.exit()
        return super().resolve_command(ctx, args)


@click.group(
    cls=_Commands,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100, "show_default": True},
    epilog="\b\n`edgespec COMMAND --help` shows a command's options and examples.",
)
@click.version_option(__version__, prog_name="edgespec")
@click.pass_context
def cli(ctx: click.Context) -> None:
    """Run language models locally with exact speculative decoding.

    Without a model, commands open the one in EDGESPEC_MODEL, else smollm2-135m if its package is installed, else
    python-6m, an embedded pair that completes Python code.
    """
    if ctx.invoked_subcommand is None:
        click.echo(_WELCOME)


def _suggest(name: str) -> str:
    """What may have been meant by the name of a command that there is not."""
    if name in _ELSEWHERE:
        return f" Here {_ELSEWHERE[name]}."
    if " " in name:
        return " `edgespec run PROMPT` answers a prompt."
    near = find_near(name, _COMMANDS)
    return f" Did you mean '{near}'?" if near else ""


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point: run a command and exit with its code."""
    sys.exit(run(argv))


def run(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; every expected error is printed as a sentence and a hint."""
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a character that the locale lacks must not end the program
            stream.reconfigure(errors="replace")
    with suppress(OSError):  # stderr may be closed
        return _run(argv)
    return OUTPUT_LOST


def _run_ranked(argv: Sequence[str] | None) -> int:
    """Run the command. Under mlx.launch rank 0 runs it, and the other ranks follow."""
    with ExitStack() as stack:
        if "MLX_RANK" in os.environ:
            from edgespec.engine.rank_worker import mlx_worker
            from edgespec.machines.ranks import listen_for_ranks, take_ranks
            from edgespec.machines.wire import dismiss

            ranks = take_ranks()
            if ranks is not None and ranks.rank:
                return mlx_worker(ranks)
            if ranks is not None:
                stack.callback(dismiss, listen_for_ranks(ranks))
        result = cli.main(args=argv, prog_name="edgespec", standalone_mode=False)
    return result if isinstance(result, int) else 0


def _run(argv: Sequence[str] | None) -> int:
    try:
        return _run_ranked(argv)
    except click.ClickException as error:
        _show_usage_error(error)
        return error.exit_code
    except EdgespecError as error:
        hint = f"\nhint: {_to_sentence(error.hint)}" if error.hint else ""
        click.echo(f"error: {_to_sentence(error.message)}{hint}", err=True)
        return error.exit_code
    except (Cancelled, KeyboardInterrupt, click.Abort):
        click.echo("interrupted", err=True)
        return INTERRUPTED
    except SystemExit as end:
        if end.code == 1:  # click's end when the reader of the output has left
            return OUTPUT_LOST
        raise
    except OSError as error:
        file = f" of {error.filename}" if error.filename else ""
        click.echo(f"error: The operating system reports{file}: {error.strerror or error}.", err=True)
        click.echo("hint: Check free disk space and the permissions of the files.", err=True)
        return OUTPUT_LOST
    except Exception as error:  # noqa: BLE001 - an internal error: the traceback goes to a file
        report_bug(error)
        return 70


def _show_usage_error(error: click.ClickException) -> None:
    """Print click's error in the form of the program's own errors."""
    if isinstance(error, getattr(click.exceptions, "NoArgsIsHelpError", ())):
        error.show()
        return
    context = error.ctx if isinstance(error, click.UsageError) else None
    if context is not None:
        click.echo(context.get_usage(), err=True)
    message = describe_usage(error)
    click.echo(f"error: {_to_sentence(message)}", err=True)
    if context is not None:
        click.echo(f"hint: Run `{context.command_path} --help`.", err=True)


def _to_sentence(text: str) -> str:
    text = text.strip()
    first = text.split(" ", 1)[0].rstrip(":,")
    if first.isalpha() and first != "edgespec":  # not a file name, a model name or the command
        text = text[:1].upper() + text[1:]
    return text if text.endswith((".", "!", "?", "?)")) else text + "."

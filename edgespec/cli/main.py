"""The `edgespec` command: its subcommands, and the conversion of errors to text and exit codes."""

from __future__ import annotations

import importlib
import io
import sys
from collections.abc import Sequence
from contextlib import suppress

import click

from edgespec import __version__
from edgespec.cli.interrupts import INTERRUPTED
from edgespec.errors import Cancelled, EdgespecError

OUTPUT_LOST = 74  # EX_IOERR of sysexits.h

# In the order of --help.
_COMMANDS = {
    "chat": "edgespec.cli.chat",
    "run": "edgespec.cli.run",
    "serve": "edgespec.cli.serve",
    "ps": "edgespec.cli.ps",
    "stop": "edgespec.cli.ps",
    "launch": "edgespec.cli.launch",
    "pull": "edgespec.cli.models",
    "list": "edgespec.cli.models",
    "show": "edgespec.cli.show",
    "rm": "edgespec.cli.models",
    "draft": "edgespec.cli.draft",
    "plan": "edgespec.cli.plan",
    "tune": "edgespec.cli.tune",
    "bench": "edgespec.cli.bench",
    "doctor": "edgespec.cli.doctor",
    "completion": "edgespec.cli.completion",
}


class _Commands(click.Group):
    """Imports a command's module on first use."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        module = _COMMANDS.get(cmd_name)
        if module is None:
            return None
        command: click.Command = getattr(importlib.import_module(module), f"{cmd_name}_command")
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in _COMMANDS and not args[0].startswith("-"):
            import difflib

            near = difflib.get_close_matches(args[0], _COMMANDS, 1)
            suggestion = f" Did you mean '{near[0]}'?" if near else ""
            raise click.UsageError(f"There is no command '{args[0]}'.{suggestion}", ctx)
        return super().resolve_command(ctx, args)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="edgespec")
def cli() -> None:
    """Run language models locally with exact speculative decoding.

    `edgespec chat` and `edgespec run` work offline with a small embedded model; name a model for more.
    """


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


def _run(argv: Sequence[str] | None) -> int:
    try:
        result = cli.main(args=argv, prog_name="edgespec", standalone_mode=False)
        return result if isinstance(result, int) else 0
    except click.ClickException as error:
        _show_usage_error(error)
        return error.exit_code
    except EdgespecError as error:
        click.echo(f"error: {_to_sentence(error.message)}", err=True)
        click.echo(f"hint: {_to_sentence(error.hint)}", err=True)
        return error.exit_code
    except (Cancelled, KeyboardInterrupt, click.Abort):
        click.echo("interrupted", err=True)
        return INTERRUPTED
    except OSError as error:
        click.echo(f"error: The operating system reports: {error.strerror or error}.", err=True)
        click.echo("hint: Check free disk space and the permissions of the files.", err=True)
        return OUTPUT_LOST
    except Exception as error:  # noqa: BLE001 - an internal error: the traceback goes to a file
        from edgespec.cli.terminal import report_bug

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
    click.echo(f"error: {_to_sentence(error.format_message())}", err=True)
    if context is not None:
        click.echo(f"hint: Run `{context.command_path} --help`.", err=True)


def _to_sentence(text: str) -> str:
    text = text.strip()
    first = text.split(" ", 1)[0].rstrip(":,")
    if first.isalpha() and first != "edgespec":  # not a file name, a model name or the command
        text = text[:1].upper() + text[1:]
    return text if text.endswith((".", "!", "?")) else text + "."

"""The help, its examples, docs/cli.md, and options with a second spelling, which no help text or message shows."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from typing import Any

import click
import pytest

import edgespec.errors
from edgespec.cli.examples import EXAMPLES
from edgespec.cli.interrupts import INTERRUPTED
from edgespec.cli.main import OUTPUT_LOST
from edgespec.cli.main import cli as group
from edgespec.cli.options import show_all_options
from tests.cli.conftest import Cli
from tests.gguf_models import REPOSITORY

README = REPOSITORY / "README.md"
_CONTEXT = click.Context(group, info_name="edgespec")


def find_command(name: str) -> click.Command:
    command = group.get_command(_CONTEXT, name)
    assert command is not None
    return command


def test_without_a_command_the_first_steps_are_shown(cli: Cli) -> None:
    done = cli()
    assert done.returncode == 0 and done.stderr == ""
    assert re.findall(r"^  edgespec (\w+)", done.stdout, re.MULTILINE) == ["chat", "recommend", "chat"]


def test_help_lists_every_command_once_in_a_group(cli: Cli) -> None:
    shown = cli("--help", COLUMNS="80").stdout
    listed = re.findall(r"^  ([a-z]+)  +\w", shown, re.MULTILINE)
    assert [name for name in listed if name in group.list_commands(_CONTEXT)] == group.list_commands(_CONTEXT)
    assert max(map(len, shown.splitlines())) <= 80 and "..." not in shown.split("Everyday:")[1]
    for title in ("Everyday:", "Models:", "Serving:", "Measuring and tuning:"):
        assert f"\n{title}\n" in shown


@pytest.mark.parametrize("name", group.list_commands(_CONTEXT))
def test_the_examples_of_a_command_are_valid(name: str) -> None:
    command = find_command(name)
    names = [name, *(f"{name} {each}" for each in command.commands)] if isinstance(command, click.Group) else [name]
    for full in names:
        for line, _ in EXAMPLES[full]:
            inner = re.search(r"edgespec (.*?)(?:\)\"| [|<].*)?$", line)
            assert inner is not None
            words = shlex.split(inner[1])
            context: click.Context = command.make_context(name, words[1:], parent=_CONTEXT)
            if isinstance(command, click.Group):
                _, sub, rest = command.resolve_command(context, [*context._protected_args, *context.args])
                assert sub is not None
                sub.make_context(sub.name, rest, parent=context)
        assert "Examples:" in command.get_help(click.Context(command))


@pytest.mark.parametrize("name", group.list_commands(_CONTEXT))
def test_an_option_has_one_default(name: str) -> None:
    command = find_command(name)
    for each in (command, *(command.commands.values() if isinstance(command, click.Group) else ())):
        context = click.Context(each, parent=_CONTEXT, **group.context_settings)
        show_all_options(context)
        for option in re.split(r"^  -", each.get_help(context), flags=re.MULTILINE):
            assert option.count("[default:") <= 1, option


@pytest.mark.parametrize("name", ["chat", "run", "serve", "bench"])
def test_help_is_short_and_help_all_has_every_option(cli: Cli, name: str) -> None:
    command = find_command(name)
    options = {max(each.opts, key=len) for each in command.params if isinstance(each, click.Option)}
    short, whole = cli(name, "--help").stdout, cli(name, "--help-all").stdout
    listed = [set(re.findall(r"^  (?:-., )?(--[a-z-]+)", text, re.MULTILINE)) for text in (short, whole)]
    assert {"--draft", "--ctx", "--threads", "--gpu-layers", "--backend"} <= listed[0] and len(listed[0]) <= 18
    assert options <= listed[1]
    last = f"`edgespec {name} --help-all` shows all {len(options)} options."
    assert short.splitlines()[-1].strip() == whole.splitlines()[-1].strip() == last


def parse(name: str, *arguments: str) -> dict[str, Any]:
    return find_command(name).make_context(name, list(arguments)).params


def test_bench_repeats_lengths() -> None:
    assert parse("bench", "--draft-max", "3", "--draft-max", "7")["draft_lengths"] == (3, 7)


def test_the_command_reference_is_current() -> None:
    """In a process of its own: click keeps what it has worked out of a command, whoever asked first."""
    script = REPOSITORY / "docs" / "cli_reference.py"
    made = subprocess.run([sys.executable, script], capture_output=True, check=True, timeout=60)
    current = (REPOSITORY / "docs" / "cli.md").read_bytes()
    assert current == made.stdout, "run: uv run python docs/cli_reference.py > docs/cli.md"


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("rnu hi", "There is no command 'rnu'. Did you mean 'run'?"),
        ("qwerty", "There is no command 'qwerty'.\n"),
        ("search qwen", "There is no command 'search'. Here `edgespec recommend TEXT` searches the hub."),
        ("run hi --temp 1", "There is no option --temp. Did you mean --temperature?"),
        ("run hi --contxt 1", "There is no option --contxt. Did you mean --ctx?"),
        ("run hi --qwerty", "There is no option --qwerty.\n"),
        ("run hi --ctx abc", "Invalid value for '--ctx': 'abc' is not a number."),
        ("run hi --temperature 200", "200.0 is not between 0 and 100."),
        ("run hi --max-tokens 0", "0 is less than 1."),
    ],
)
def test_mistakes_are_told_in_words(cli: Cli, line: str, told: str) -> None:
    done = cli(*line.split())
    assert done.returncode == 2 and told in done.stderr and "hint: " in done.stderr


def test_help_is_a_command_too(cli: Cli) -> None:
    assert cli("help").stdout == cli("--help").stdout
    assert cli("help", "run").stdout == cli("run", "--help").stdout


def test_the_readme_lists_the_commands_that_write_json() -> None:
    found = set()
    for name in group.list_commands(_CONTEXT):
        command = find_command(name)
        parts = command.commands if isinstance(command, click.Group) else {"": command}
        found |= {f"{name} {part}".rstrip() for part, each in parts.items() if "--json" in _flags(each)}
    sentence = re.search(r"These commands accept `--json`: (.*?)\.", README.read_text(encoding="utf-8"), re.DOTALL)
    assert sentence is not None and set(re.findall(r"`([a-z ]+)`", sentence[1])) == found


def test_the_readme_lists_the_exit_codes() -> None:
    listed = set(map(int, re.findall(r"^\| (\d+) \| ", README.read_text(encoding="utf-8"), re.MULTILINE)))
    kinds = [each for each in vars(edgespec.errors).values() if isinstance(each, type)]
    errors = {each.exit_code for each in kinds if issubclass(each, edgespec.errors.EdgespecError)}
    assert listed == errors | {70, OUTPUT_LOST, INTERRUPTED}


def _flags(command: click.Command) -> list[str]:
    return [flag for each in command.params for flag in each.opts]

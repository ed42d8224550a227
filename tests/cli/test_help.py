"""The help: groups, the first three commands, and examples that the commands take."""

from __future__ import annotations

import re
import shlex

import click
import pytest

from edgespec.cli.examples import EXAMPLES
from edgespec.cli.main import cli as group
from tests.cli.conftest import Cli

_CONTEXT = click.Context(group, info_name="edgespec")


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
    command = group.get_command(_CONTEXT, name)
    assert command is not None
    names = [name, *(f"{name} {each}" for each in command.commands)] if isinstance(command, click.Group) else [name]
    for full in names:
        for line, _ in EXAMPLES[full]:
            inner = re.search(r"edgespec (.*?)(?:\)\"| [|<].*)?$", line)
            assert inner is not None
            words = shlex.split(inner[1])
            context: click.Context = command.make_context(name, words[1:], parent=_CONTEXT)
            if isinstance(command, click.Group):
                _, sub, rest = command.resolve_command(context, words[1:])
                assert sub is not None
                sub.make_context(sub.name, rest, parent=context)
        assert "Examples:" in command.get_help(click.Context(command))


@pytest.mark.parametrize("name", ["chat", "run", "serve", "bench"])
def test_help_is_short_and_help_all_has_every_option(cli: Cli, name: str) -> None:
    command = group.get_command(_CONTEXT, name)
    assert command is not None
    options = {max(each.opts, key=len) for each in command.params if isinstance(each, click.Option)}
    short, whole = cli(name, "--help").stdout, cli(name, "--help-all").stdout
    listed = [set(re.findall(r"^  (?:-., )?(--[a-z-]+)", text, re.MULTILINE)) for text in (short, whole)]
    assert {"--draft", "--ctx", "--threads", "--gpu-layers", "--backend"} <= listed[0] and len(listed[0]) <= 15
    assert options <= listed[1]
    last = f"`edgespec {name} --help-all` shows all {len(options)} options."
    assert short.splitlines()[-1].strip() == whole.splitlines()[-1].strip() == last


def test_options_that_help_leaves_out_are_completed(cli: Cli) -> None:
    done = cli(_EDGESPEC_COMPLETE="bash_complete", COMP_WORDS="edgespec run --to", COMP_CWORD="2")
    assert done.stdout.splitlines() == ["plain,--top-k", "plain,--top-p"]

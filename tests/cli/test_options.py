"""Options with a second spelling: every command accepts it, no help text or message shows it."""

from __future__ import annotations

from typing import Any

import click
import pytest

from edgespec.cli.main import cli
from edgespec.cli.options import load_config, show_all_options

SPELLINGS = ["--draft-max", "3", "--draft-tree", "6", "--acceptance", "sample"]
SYNONYMS = ["--gamma", "3", "--nodes", "6", "--verify", "sample"]


def find_command(name: str) -> click.Command:
    command = cli.get_command(click.Context(cli), name)
    assert command is not None
    return command


def parse(name: str, *arguments: str) -> dict[str, Any]:
    return find_command(name).make_context(name, list(arguments)).params


@pytest.mark.parametrize("name", ["chat", "run", "serve"])
def test_synonyms_mean_the_same(name: str) -> None:
    config = load_config(None, parse(name, *SPELLINGS))
    assert (config.draft_max, config.draft_tree, config.acceptance) == (3, 6, "sample")
    assert parse(name, *SYNONYMS) == parse(name, *SPELLINGS) != parse(name)


def test_bench_repeats_both_spellings() -> None:
    assert parse("bench", "--draft-max", "3", "--gamma", "7")["draft_lengths"] == (3, 7)


@pytest.mark.parametrize("name", ["chat", "run", "serve", "bench"])
def test_help_shows_no_synonym(name: str) -> None:
    command = find_command(name)
    context = click.Context(command)
    show_all_options(context)
    text = command.get_help(context)
    assert "--draft-max N" in text
    assert not [synonym for synonym in ("--gamma", "--nodes", "--verify") if synonym in text]


@pytest.mark.parametrize("spelling", ["--draft-max", "--gamma"])
def test_messages_show_no_synonym(spelling: str) -> None:
    with pytest.raises(click.BadParameter) as caught:
        parse("run", spelling, "64")
    assert "'--draft-max'" in caught.value.format_message() and "--gamma" not in caught.value.format_message()

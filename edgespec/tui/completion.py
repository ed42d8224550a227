"""How a slash command that is being typed can go on: names of commands, then what a command takes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path

from edgespec.conversations.chat import SETTINGS
from edgespec.conversations.commands import SlashCommand, requires_argument
from edgespec.errors import EdgespecError
from edgespec.planner.draft_finder import AUTO, NONE, list_words
from edgespec.registry.schema import load_registry
from edgespec.tui.prompt import MAX_COMPLETIONS, Completion

_SPEC = {"on": "as chosen before", "off": "plain decoding", "auto": "as much as pays", "4": "tokens per step"}

Values = Iterable[tuple[str, str, bool]]
"""(argument, summary, whether it is whole) for each value."""


def complete_line(
    line: str, commands: Mapping[str, SlashCommand], aliases: Mapping[str, str], themes: Iterable[str]
) -> list[Completion]:
    """The lines that `line` can become. It begins with a slash, and may end in the middle of a word."""
    name, space, argument = line.removeprefix("/").partition(" ")
    if name.startswith("/"):
        return []  # a message
    if not space:
        return _complete_name(name, commands, aliases)
    command = aliases.get(name, name)
    values: Values = ((theme, "", True) for theme in sorted(themes)) if command == "theme" else ()
    if (listing := _ARGUMENTS.get(command)) is not None:
        values = listing(argument)
    found = [
        Completion(f"/{name} {value}", value, summary, is_whole)
        for value, summary, is_whole in values
        if value.startswith(argument) and value != argument
    ]
    return found[:MAX_COMPLETIONS]


def _complete_name(start: str, commands: Mapping[str, SlashCommand], aliases: Mapping[str, str]) -> list[Completion]:
    """Names before aliases; an alias is listed only where no name matches."""
    names = [name for name in commands if name.startswith(start)]
    names = names or sorted({aliases[alias] for alias in aliases if alias.startswith(start)})
    if names == [start] and not commands[start].arguments:
        return []
    return [
        Completion(
            f"/{name} " if commands[name].arguments else f"/{name}",
            f"/{name} {commands[name].arguments}".rstrip(),
            commands[name].summary,
            not requires_argument(commands[name]),
        )
        for name in names
    ]


def _list_drafts(argument: str) -> Values:
    """Drafters after the last '+', without those before it."""
    *before, _ = argument.split("+")
    taken = {part.partition(":")[0] for part in before}
    prefix = "".join(f"{part}+" for part in before)
    if not before:
        yield AUTO, "all that are available", True
        yield NONE, "plain decoding", True
    for word, spec in list_words():
        if word not in taken:
            is_whole = spec.needs != "server"  # whose address follows
            yield prefix + word + "://" * (not is_whole), spec.summary, is_whole


@lru_cache(maxsize=1)
def _read_aliases() -> Sequence[tuple[str, str]]:
    try:
        return [(entry.alias, entry.description) for entry in load_registry().entries.values()]
    except EdgespecError:
        return ()


def _list_paths(argument: str) -> Values:
    """Entries of the folder in `argument`; hidden ones where the name so far begins with a dot."""
    folder, slash, start = argument.rpartition("/")
    try:
        paths = sorted(Path(f"{folder}{slash}" or ".").expanduser().iterdir())
        for path in paths:
            if not path.name.startswith(".") or start.startswith("."):
                is_folder = path.is_dir()
                yield f"{folder}{slash}{path.name}{'/' if is_folder else ''}", "", not is_folder
    except (OSError, RuntimeError, ValueError):
        return


_ARGUMENTS: Mapping[str, Callable[[str], Values]] = {
    "draft": _list_drafts,
    "set": lambda _: [(f"{name} ", "", False) for name in SETTINGS],
    "spec": lambda _: [(word, summary, True) for word, summary in _SPEC.items()],
    "model": lambda _: [(alias, description, True) for alias, description in _read_aliases()],
    **dict.fromkeys(("attach", "export", "import", "save", "load"), _list_paths),
}

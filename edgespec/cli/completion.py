"""What the shell offers for an argument, and `edgespec completion`, which prints its scripts."""

from __future__ import annotations

from contextlib import closing, suppress

import click
from click.shell_completion import CompletionItem, get_completion_class

from edgespec.errors import EdgespecError

_MAX_CONVERSATIONS = 20


def complete_model(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Aliases and downloaded repositories that begin with `incomplete`; files if there are none."""
    return _offer(_list_models(), incomplete) or [CompletionItem(incomplete, type="file")]


def complete_download(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    from edgespec.models.hub import Hub

    return _offer(dict.fromkeys((each.reference.repo for each in Hub.from_environment().list_models()), ""), incomplete)


def complete_served(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Offer what complete_model does, also after `NAME=`."""
    name, equals, start = incomplete.rpartition("=")
    found = _offer(_list_models(), start)
    return [CompletionItem(f"{name}{equals}{each.value}", help=each.help) for each in found] or [
        CompletionItem(start, type="file")
    ]


def complete_conversation(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """The ids of the last conversations, with their titles."""
    from edgespec.chat import Store

    with suppress(EdgespecError), closing(Store.open(wait_s=0.1)) as store:
        return _offer({str(each.id): each.title for each in store.recent(_MAX_CONVERSATIONS)}, incomplete)
    return []


def complete_source(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Offer the ids of conversations; if none matches, files."""
    return complete_conversation(ctx, param, incomplete) or [CompletionItem(incomplete, type="file")]


def complete_category(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    from edgespec.bench.prompt_sets import CATEGORIES

    return _offer(dict.fromkeys(CATEGORIES, ""), incomplete)


def complete_self_drafts(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    from edgespec.engine.selfdraft_cache import list_cached_drafts

    return _offer(dict.fromkeys([*(each.model for each in list_cached_drafts()), "all"], ""), incomplete)


def _list_models() -> dict[str, str]:
    """Aliases with their descriptions, and the repositories of downloaded models."""
    from edgespec.models.hub import Hub
    from edgespec.models.registry import load_registry

    found: dict[str, str] = {}
    with suppress(EdgespecError):
        found |= {name: entry.description for name, entry in load_registry().entries.items()}
        found |= {each.reference.repo: "downloaded" for each in Hub.from_environment().list_models()}
    return found


def _offer(names: dict[str, str], incomplete: str) -> list[CompletionItem]:
    return [CompletionItem(name, help=told or None) for name, told in names.items() if name.startswith(incomplete)]


@click.command("completion")
@click.argument("shell", metavar="SHELL", type=click.Choice(["bash", "zsh", "fish"]))
def completion_command(shell: str) -> None:
    """Print the completion script of SHELL: bash, zsh or fish."""
    from edgespec.cli.main import cli

    completion = get_completion_class(shell)
    assert completion is not None
    click.echo(completion(cli, {}, "edgespec", "_EDGESPEC_COMPLETE").source())

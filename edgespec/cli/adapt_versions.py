"""The other commands of `edgespec adapt`: the versions of drafts, and the texts that they are trained on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from edgespec.cli.adapt_export import export_command
from edgespec.cli.completers import complete_model
from edgespec.units import count

if TYPE_CHECKING:
    from edgespec.registry.adapted import AdaptedDrafts, AdaptedPair, Gain

_NONE = "No draft is adapted yet; `edgespec adapt MODEL` adapts the one of a model."


def open_drafts() -> AdaptedDrafts:
    """The adapted drafts of the user."""
    from edgespec.conversations.adapted import adapted_folder
    from edgespec.registry.adapted import AdaptedDrafts

    return AdaptedDrafts(adapted_folder())


def describe_gain(gain: Gain) -> dict[str, Any]:
    return {
        "tokens_before": gain.before,
        "tokens_after": gain.after,
        "gain_low": gain.low,
        "gain_high": gain.high,
        "held_out_conversations": gain.n_conversations,
    }


@click.command("list")
@click.option("--json", "as_json", is_flag=True, help="JSON on stdout.")
def list_command(as_json: bool) -> None:
    """List the adapted drafts by model; a star marks the version in use."""
    pairs = open_drafts().pairs()
    if as_json:
        click.echo(json.dumps([row for pair in pairs for row in _describe_versions(pair)]))
        return
    if not pairs:
        click.echo(_NONE)
    for pair in pairs:
        click.echo("\n".join(_format_versions(pair)))


def _describe_versions(pair: AdaptedPair) -> Iterator[dict[str, Any]]:
    active = pair.active_number()
    for version, card in pair.versions().items():
        row: dict[str, Any] = {"version": version, "active": version == active, "path": str(pair.folder / str(version))}
        if card is not None:
            row |= {"model": card.target, "draft": card.base, "date": card.date, "tokens": card.n_tokens}
            row |= {"loss": card.loss, "minutes": card.minutes, **describe_gain(card.gain)}
        yield row


def _format_versions(pair: AdaptedPair) -> Iterator[str]:
    from edgespec.cli.table import format_table

    cards, active = pair.versions(), pair.active_number()
    known = [card for card in cards.values() if card is not None]
    if known:
        yield f"{known[0].target}, drafts made from {known[0].base}"
    table = [("", "VERSION", "DATE", "TOKENS", "TOKENS A ROUND", "BEFORE", "GAIN")]
    for version, card in cards.items():
        mark = "*" if version == active else ""
        if card is None:
            table.append((mark, str(version), "damaged", "", "", "", ""))
            continue
        gain = card.gain
        table.append((
            mark, str(version), card.date, f"{card.n_tokens:,}", f"{gain.after:.2f}", f"{gain.before:.2f}",
            f"{gain.low:+.2f} to {gain.high:+.2f}",
        ))  # fmt: skip
    yield from format_table(table, frozenset({3, 4, 5}))


@click.command("use")
@click.argument("version", type=click.IntRange(0))
@click.argument("model", metavar="[MODEL]", required=False, shell_complete=complete_model)
def use_command(version: int, model: str | None) -> None:
    """Draft with VERSION from now on; 0 is the draft before any training.

    Running engines change to it after the answers that they are giving.
    """
    pair, name = _find_pair(model)
    pair.use(version)
    click.echo(_tell_use(version, name))


@click.command("revert")
@click.argument("model", metavar="[MODEL]", required=False, shell_complete=complete_model)
def revert_command(model: str | None) -> None:
    """Draft with the version before the one in use, or with the draft before any training."""
    pair, name = _find_pair(model)
    click.echo(_tell_use(pair.revert(), name))


def _tell_use(version: int, name: str | None) -> str:
    draft = f"version {version}" if version else "the draft before any training"
    return f"{name or 'the model'} drafts with {draft}"


def _find_pair(model: str | None) -> tuple[AdaptedPair, str | None]:
    """The versions for a target, which may be left out where there is one, and the target's name.

    The name is None where all cards are damaged; these versions are those of `model` where no others are. Raises
    UnknownModel, InvalidRequest.
    """
    from edgespec.errors import InvalidRequest, UnknownModel

    found = [(pair, _name_target(pair)) for pair in open_drafts().pairs()]
    if model is not None:
        found = [each for each in found if each[1] == model] or [each for each in found if each[1] is None]
    if not found:
        of = "" if model is None else f" of {model}"
        raise UnknownModel(f"no draft{of} is adapted.", hint="`edgespec adapt list` shows those that are.")
    if len(found) > 1:
        names = sorted({name for _, name in found if name is not None})
        raise InvalidRequest(
            "drafts of several models are adapted.",
            hint=f"Name one: {', '.join(names)}."
            if names
            else "All are damaged; `edgespec adapt list --json` shows where.",
        )
    return found[0]


def _name_target(pair: AdaptedPair) -> str | None:
    return next((card.target for card in reversed(list(pair.versions().values())) if card is not None), None)


@click.group("data")
def data_command() -> None:
    """The texts that drafts are trained on: those of `edgespec memory`."""


data_command.add_command(export_command)


@data_command.command("status")
@click.option("--json", "as_json", is_flag=True, help="JSON on stdout.")
def status_command(as_json: bool) -> None:
    """Show how much there is to train on, by tokenizer, and what is missing."""
    from dataclasses import asdict

    from edgespec.adapt.data import read_status
    from edgespec.cli.table import format_table
    from edgespec.conversations.memory import memory_folder
    from edgespec.registry.consent import may_train

    rows, allowed = read_status(memory_folder()), may_train(open_drafts().folder)
    if as_json:
        click.echo(json.dumps({"allowed": allowed, "texts": [asdict(row) for row in rows]}, ensure_ascii=False))
        return
    if not rows:
        click.echo("Nothing is kept yet. `edgespec chat` keeps what is said.")
        return
    table = [("MODEL", "CONVERSATIONS", "TOKENS", "OF DOCUMENTS", "")]
    for row in rows:
        name = row.model or f"unknown ({row.tokenizer[:8]})"
        table.append((
            name, f"{row.n_conversations:,}", f"{row.n_tokens:,}", f"{row.n_documents:,}", row.missing or "enough"
        ))  # fmt: skip
    click.echo("\n".join(format_table(table, frozenset({1, 2, 3}))))
    click.echo("Training is allowed." if allowed else "Training was not allowed yet; `edgespec adapt` asks.", err=True)


@data_command.command("clear")
def clear_command() -> None:
    """Remove the texts, and the state of trainings that were not complete; `edgespec adapt` then asks again.

    This is `edgespec memory clear` for the user's own texts, with documents. Adapted drafts stay.
    """
    from contextlib import closing

    from edgespec.adapt.data import clear_runs
    from edgespec.conversations.memory import memory_folder
    from edgespec.memory.store import TextStore
    from edgespec.registry.consent import forbid_training

    drafts, n = open_drafts(), 0
    if memory_folder().is_dir():
        with closing(TextStore.open(memory_folder())) as store:
            n = store.clear("")
    clear_runs(drafts.folder)
    forbid_training(drafts.folder)
    click.echo(f"removed {count(n, 'token')}")

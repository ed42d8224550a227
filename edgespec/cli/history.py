"""`edgespec history`: saved conversations, with the ids that `edgespec chat --resume` takes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import TYPE_CHECKING

import click

from edgespec.cli.options import json_option
from edgespec.cli.output import format_table, format_time, print_result, shorten

if TYPE_CHECKING:
    from edgespec.chat import SearchHit


@click.command("history")
@click.argument("words", nargs=-1, metavar="[TEXT]...")
@click.option("--limit", type=click.IntRange(1), default=20, metavar="N", help="List at most N.")
@json_option
def history_command(words: tuple[str, ...], limit: int, as_json: bool) -> None:
    """List saved conversations, the last one first; with TEXT, those in which all of its words occur.

    Words match inside of words too, and case does not matter. `edgespec chat --resume ID` continues a conversation.
    """
    from edgespec.chat import SearchHit, Store

    text = " ".join(words).strip()
    with closing(Store.open()) as store:
        if store.notice is not None:
            click.echo(f"note: {store.notice}", err=True)
        hits = store.search(text, limit) if text else [SearchHit(each, None, "") for each in store.recent(limit)]
    facts = [
        {"id": c.id, "title": c.title, "model": c.model, "changed": c.changed, "snippet": hit.snippet}
        for hit in hits
        for c in [hit.conversation]
    ]
    print_result(facts, _format(hits, text), as_json=as_json)


def _format(hits: list[SearchHit], text: str) -> Iterator[str]:
    if not hits:
        nothing = "No conversation is saved yet. `edgespec chat` saves what you write there."
        yield f"No conversation has all words of '{text}'." if text else nothing
        return
    table = [("ID", "CHANGED", "MODEL", "CONVERSATION")]
    for hit in hits:
        c = hit.conversation
        shown = c.title if hit.snippet in ("", c.title) else f"{c.title}: {hit.snippet}"
        table.append((str(c.id), format_time(c.changed), shorten(c.model, 20), shown))
    yield from format_table(table)
    click.echo("\n`edgespec chat --resume ID` continues one.", err=True)

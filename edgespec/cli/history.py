"""`edgespec history`: saved conversations, with the ids that `edgespec chat --resume` takes."""

from __future__ import annotations

import json

import click


@click.command("history")
@click.argument("words", nargs=-1, metavar="[TEXT]...")
@click.option("--limit", type=click.IntRange(1), default=20, show_default=True, metavar="N", help="List at most N.")
@click.option("--json", "as_json", is_flag=True, help="JSON on stdout.")
def history_command(words: tuple[str, ...], limit: int, as_json: bool) -> None:
    """List saved conversations, the last one first; with TEXT, those in which all of its words occur.

    Words match inside of words too, and case does not matter. `edgespec chat --resume ID` continues a conversation.
    """
    from datetime import datetime

    from edgespec.cli.terminal import format_table, shorten
    from edgespec.conversations import Store

    text = " ".join(words)
    store = Store.open()
    try:
        if store.notice is not None:
            click.echo(f"note: {store.notice}", err=True)
        if text.strip():
            found = [(hit.conversation, hit.snippet) for hit in store.search(text, limit)]
        else:
            found = [(conversation, "") for conversation in store.recent(limit)]
    finally:
        store.close()
    if as_json:
        rows = [
            {"id": c.id, "title": c.title, "model": c.model, "changed": c.changed, "snippet": snippet}
            for c, snippet in found
        ]
        click.echo(json.dumps(rows, ensure_ascii=False))
        return
    if not found:
        nothing = "No conversation is saved yet. `edgespec chat` saves what you write there."
        click.echo(f"No conversation has all words of '{text}'." if text.strip() else nothing)
        return
    table = [("ID", "CHANGED", "MODEL", "CONVERSATION")]
    for conversation, snippet in found:
        changed = datetime.fromtimestamp(conversation.changed).strftime("%Y-%m-%d %H:%M")
        shown = conversation.title if snippet in ("", conversation.title) else f"{conversation.title}: {snippet}"
        table.append((str(conversation.id), changed, shorten(conversation.model, 20), shown))
    click.echo("\n".join(format_table(table)))
    click.echo("\n`edgespec chat --resume ID` continues one.", err=True)

"""`edgespec memory`: the texts that later ones are drafted from."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import click

from edgespec.cli.completers import complete_memory_key, complete_source
from edgespec.cli.memory_add import add_command, build_indexes, open_store
from edgespec.units import count, gib

if TYPE_CHECKING:
    from edgespec.memory.store import Record, SpaceStatus
    from edgespec.text.tokenizer import Tokenizer

_NOTHING = "Nothing is kept yet. `edgespec chat` keeps what is said, `edgespec memory add` adds documents."


@click.group("memory")
def memory_command() -> None:
    """What earlier answers and added documents said, which drafts later answers.

    It changes the speed of answers and never their text. `--no-memory` neither reads nor keeps anything.
    """


memory_command.add_command(add_command)


@memory_command.command("status")
@click.option("--json", "as_json", is_flag=True, help="JSON on stdout.")
def status_command(as_json: bool) -> None:
    """Show how many tokens are kept, of what, in how many bytes."""
    from edgespec.conversations.memory import memory_folder
    from edgespec.memory.store import DEFAULT_LIMIT_BYTES

    folder = memory_folder()
    spaces, n_bytes = [], 0
    if folder.is_dir():
        with open_store() as store:
            spaces, n_bytes = store.status(), store.size()
    if as_json:
        rows = [_describe(each) for each in spaces]
        facts = {"folder": str(folder), "bytes": n_bytes, "limit_bytes": DEFAULT_LIMIT_BYTES, "texts": rows}
        click.echo(json.dumps(facts, ensure_ascii=False))
        return
    click.echo("\n".join(_format_status(spaces)) if spaces else _NOTHING)
    if n_bytes:
        click.echo(f"\n{gib(n_bytes)} of {gib(DEFAULT_LIMIT_BYTES)} in {folder}", err=True)


def _describe(space: SpaceStatus) -> dict[str, object]:
    from edgespec.server.keys import read_namespace

    return {
        "model": space.model,
        "tokenizer": space.tokenizer,
        "key": read_namespace(space.namespace) or None,
        "tokens": space.n_tokens - space.n_corpus_tokens,
        "documents": space.n_documents,
        "document_tokens": space.n_corpus_tokens,
        "index_bytes": space.segment_bytes,
        "newest": space.newest,
    }


def _format_status(spaces: list[SpaceStatus]) -> Iterator[str]:
    from datetime import datetime

    from edgespec.cli.table import format_table
    from edgespec.server.keys import read_namespace

    table = [("MODEL", "KEY", "TOKENS OF ANSWERS", "OF DOCUMENTS", "DOCUMENTS", "INDEX", "NEWEST")]
    for each in spaces:
        table.append((
            each.model or f"unknown ({each.tokenizer[:8]})",
            read_namespace(each.namespace) or "-",
            f"{each.n_tokens - each.n_corpus_tokens:,}",
            f"{each.n_corpus_tokens:,}",
            f"{each.n_documents:,}",
            gib(each.segment_bytes),
            datetime.fromtimestamp(each.newest).strftime("%Y-%m-%d %H:%M"),
        ))  # fmt: skip
    yield from format_table(table, frozenset({2, 3, 4, 5}))


@memory_command.command("export")
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--force", is_flag=True, help="Replace FILE if it exists.")
def export_command(file: Path, force: bool) -> None:
    """Write all texts to FILE as JSON lines.

    Each line is a part of an answer, of a prompt or of a document, as text where its model is on this machine, else as
    token ids. Only its user can read FILE.
    """
    from edgespec.errors import CacheError, InvalidRequest, reason_of
    from edgespec.files import replace_file

    if file.exists() and not force:
        raise InvalidRequest(f"{file} exists.", hint="Name another file, or use --force.")
    n = 0
    try:
        with open_store() as store, _open_tokenizers(store.status()) as tokenizers, replace_file(file) as partial:
            partial.chmod(0o600)
            with partial.open("w", encoding="utf-8") as out:
                for record in store.export():
                    fields = _describe_record(record, tokenizers.get(record.tokenizer))
                    out.write(json.dumps(fields, ensure_ascii=False) + "\n")
                    n += 1
    except OSError as error:
        hint = "Free some space, or name a file in a folder that can be written."
        raise CacheError(f"{file} cannot be written: {reason_of(error)}.", hint=hint) from error
    click.echo(f"wrote {count(n, 'text')} to {file}")


@contextmanager
def _open_tokenizers(spaces: list[SpaceStatus]) -> Iterator[dict[str, Tokenizer]]:
    """The tokenizers of the models that are known and on this machine, by what identifies them."""
    from edgespec.errors import EdgespecError
    from edgespec.hub.hub import Hub
    from edgespec.planner.plan import LoadConfig
    from edgespec.planner.vocabulary import open_vocabulary
    from edgespec.registry.schema import load_registry
    from edgespec.registry.tokenizer_compat import identify_tokenizer

    registry, hub = load_registry(), Hub.from_environment()
    with ExitStack() as opened:
        found: dict[str, Tokenizer] = {}
        for tokenizer, model in {each.tokenizer: each.model for each in spaces}.items():
            if model is not None:
                with suppress(EdgespecError):
                    vocabulary = opened.enter_context(open_vocabulary(LoadConfig(model), registry, hub))
                    found[identify_tokenizer(vocabulary)] = vocabulary
            if tokenizer not in found:
                click.echo(f"note: texts of {model or tokenizer[:8]} are written as token ids", err=True)
        yield found


def _describe_record(record: Record, tokenizer: Tokenizer | None) -> dict[str, object]:
    from edgespec.server.keys import read_namespace

    text: dict[str, object] = {"tokens": record.tokens}
    if tokenizer is not None:  # control tokens, which add nothing to a text, are spelled
        pieces = (tokenizer.piece(each) or tokenizer.special_text(each).encode() for each in record.tokens)
        text = {"text": b"".join(pieces).decode("utf-8", "replace")}
    return {
        "kind": record.kind,
        "source": record.source,
        "key": read_namespace(record.namespace) or None,
        "time": record.time,
        "tokenizer": record.tokenizer,
        **text,
    }


@memory_command.command("forget")
@click.argument("source", metavar="ID|PATH|NAME", shell_complete=complete_source)
def forget_command(source: str) -> None:
    """Remove the texts of a conversation or of documents.

    `edgespec history` lists the ids of conversations. A folder names all documents in it. Any other name is that of a
    `memory_source` in Python. The conversation itself and the files stay.
    """
    from edgespec.conversations.memory import name_source
    from edgespec.errors import InvalidRequest

    with open_store() as store:
        if source.isascii() and source.isdigit():
            what, n = f"conversation {source}", store.forget(name_source(int(source)))
        else:
            path = Path(source).resolve()
            what, n = str(path), store.forget_path(path)
            if not n:  # a name that a program has given
                what, n = source, store.forget(source)
        kept = store.status()
    if not n:
        raise InvalidRequest(
            f"the memory has no texts of {what}.",
            hint="Conversations have ids, see `edgespec history`; a path is that of an added document or above it.",
        )
    click.echo(f"removed {count(n, 'token')} of {what}")
    _index_again(kept)


@memory_command.command("clear")
@click.option("--corpus", "only_documents", is_flag=True, help="Only the documents that were added.")
@click.option("--key", metavar="NAME", shell_complete=complete_memory_key, help="Only the texts of an API key.")
@click.option("--yes", "-y", is_flag=True, help="Do not ask for confirmation.")
def clear_command(only_documents: bool, key: str | None, yes: bool) -> None:
    """Remove all texts, or those of one kind or key.

    What was learned from them is removed too. Saved conversations stay.
    """
    from edgespec.server.keys import name_namespace

    with open_store() as store:
        namespace = None if key is None else name_namespace(key)
        spaces = [each for each in store.status() if namespace in (None, each.namespace)]
        n = sum(each.n_corpus_tokens if only_documents else each.n_tokens for each in spaces)
        of = "" if key is None else f" of the key {key}"
        if not n:
            click.echo(f"there is nothing to remove{of}")
            return
        if not yes:
            what = "documents" if only_documents else "answers, prompts and documents"
            click.confirm(f"Remove {count(n, 'token')} of {what}{of}?", abort=True, err=True)
        click.echo(f"removed {count(store.clear(namespace, only_documents=only_documents), 'token')}{of}")
        kept = store.status()
    _index_again(kept)


def _index_again(spaces: list[SpaceStatus]) -> None:
    """Build the indexes that had removed texts beside others."""
    from edgespec.memory.texts import SpaceKey

    build_indexes(SpaceKey(each.tokenizer, each.namespace) for each in spaces)

"""`edgespec memory add`: files as documents that later answers are drafted from."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from edgespec.cli.completers import complete_model
from edgespec.units import count, gib

if TYPE_CHECKING:
    from edgespec.memory.corpus import Corpus
    from edgespec.memory.documents import Document, Skipped
    from edgespec.memory.store import TextStore
    from edgespec.memory.texts import SpaceKey
    from edgespec.text.tokenizer import Tokenizer


@click.command("add")
@click.argument("paths", nargs=-1, required=True, metavar="PATH...", type=click.Path(path_type=Path))
@click.option(
    "--model",
    "-m",
    metavar="REF",
    shell_complete=complete_model,
    help="A model with the tokenizer to use. [default: the last one of the chat, else the demo]",
)
@click.option("--dry-run", is_flag=True, help="List the files that would be added.")
def add_command(paths: tuple[Path, ...], model: str | None, dry_run: bool) -> None:
    """Add files and folders, such as a code base.

    Skips what .gitignore files exclude, files that are not text, links, and files larger than 1 MiB. Adding files again
    replaces those that have changed. Models with the same tokenizer share the documents. They have at most half of the
    memory.
    """
    from edgespec.cli.terminal import report_activity
    from edgespec.errors import InvalidRequest
    from edgespec.memory.documents import Skipped, find_documents

    skipped = Skipped()
    documents = []
    for document in find_documents(paths, skipped):
        documents.append(document)
        if len(documents) % 100 == 0:
            report_activity(f"{len(documents):,} files")
    report_activity("")
    if not documents:
        raise InvalidRequest(f"there is no file to add{_tell(skipped)}.", hint="Name text files or folders with some.")
    if dry_run:
        for document in documents:
            click.echo(str(document.path))
        total = gib(sum(each.size for each in documents))
        click.echo(f"{count(len(documents), 'file')}, {total}{_tell(skipped)}", err=True)
        return
    _add(paths, documents, model, skipped)


@contextmanager
def open_store() -> Iterator[TextStore]:
    """The user's memory, which is created where it is missing."""
    from edgespec.conversations.memory import memory_folder
    from edgespec.memory.store import TextStore

    with closing(TextStore.open(memory_folder())) as store:
        if store.notice is not None:
            click.echo(f"note: {store.notice}", err=True)
        yield store


def _add(paths: tuple[Path, ...], documents: list[Document], model: str | None, skipped: Skipped) -> None:
    """Store the documents that `paths` name, and index them."""
    from edgespec.hub.hub import Hub
    from edgespec.memory.texts import SpaceKey
    from edgespec.planner.plan import LoadConfig
    from edgespec.planner.vocabulary import open_vocabulary
    from edgespec.registry.schema import load_registry
    from edgespec.registry.tokenizer_compat import identify_tokenizer
    from edgespec.tui.settings import read_last_model

    registry = load_registry()
    model = model or read_last_model() or registry.default
    with open_vocabulary(LoadConfig(model), registry, Hub.from_environment()) as tokenizer:
        click.echo(f"with the tokenizer of {model}; --model takes another", err=True)
        identity = identify_tokenizer(tokenizer)
        with open_store() as store:
            corpus = store.open_corpus(identity)
            try:
                if n_gone := sum(corpus.remove_missing(path.resolve()) for path in paths):
                    click.echo(f"removed {count(n_gone, 'document')} of files that are gone")
                _store(documents, tokenizer, corpus, skipped)
            finally:  # also of those that were stored before Ctrl-C
                store.name_tokenizer(identity, model)
                corpus.finish()
    build_indexes([SpaceKey(identity, "")])


def _store(documents: list[Document], tokenizer: Tokenizer, corpus: Corpus, skipped: Skipped) -> None:
    """Store documents one by one, and tell how many."""
    from edgespec.cli.terminal import Progress
    from edgespec.memory.corpus import SHARE, NoRoom
    from edgespec.memory.documents import read_document
    from edgespec.memory.store import DEFAULT_LIMIT_BYTES

    n_files, n_tokens = 0, 0
    try:
        with Progress("reading") as progress:
            progress.expect(len(documents))
            for i, document in enumerate(documents):
                progress.step(f"{n_tokens:,} tokens")
                try:
                    tokens = tokenizer.encode(read_document(document.path), parse_special=False)
                    n_new = corpus.add(document.path, tokens)
                except OSError:
                    skipped.add("unreadable")
                    continue
                except NoRoom:
                    left, share = count(len(documents) - i, "file"), gib(int(SHARE * DEFAULT_LIMIT_BYTES))
                    progress.note(
                        f"{left} left out: documents have {share} at most. `edgespec memory forget PATH` frees room."
                    )
                    break
                n_tokens += n_new
                n_files += n_new > 0
                if not n_new:
                    skipped.add("known already")
    finally:
        click.echo(f"added {count(n_files, 'file')}, {count(n_tokens, 'token')}{_tell(skipped)}")


def build_indexes(keys: Iterable[SpaceKey]) -> None:
    """Build the indexes that an engine would build when it is idle."""
    from edgespec.cli.terminal import report_activity
    from edgespec.conversations.memory import memory_folder
    from edgespec.memory.memory import Memory
    from edgespec.memory.store import DEFAULT_LIMIT_BYTES

    namespaces: dict[str, list[str]] = {}
    for key in keys:
        namespaces.setdefault(key.tokenizer, []).append(key.namespace)
    report_activity("building the index; Ctrl-C leaves it to the next chat")
    for tokenizer, names in namespaces.items():
        with closing(Memory(memory_folder(), tokenizer, DEFAULT_LIMIT_BYTES)) as memory:
            for name in names:
                memory.space(name)
            memory.set_idle(True)
            memory.flush()
        if notice := memory.take_notice():
            click.echo(f"note: {notice}", err=True)
    report_activity("")


def _tell(skipped: Skipped) -> str:
    return f"; skipped: {skipped}" if skipped.counts else ""

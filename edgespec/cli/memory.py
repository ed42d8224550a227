"""`edgespec memory`: the texts that later ones are drafted from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edgespec.cli.completion import complete_model, complete_source
from edgespec.cli.options import confirm, force_option, json_option, open_hub, yes_option
from edgespec.cli.output import format_table, format_time, print_result, write_lines
from edgespec.cli.terminal import TerminalReporter, report_activity
from edgespec.errors import EdgespecError, InvalidRequest
from edgespec.units import count, gib

if TYPE_CHECKING:
    from edgespec.memory.administration import Record, SpaceStatus, TextStore
    from edgespec.memory.corpus import Corpus
    from edgespec.memory.documents import Document
    from edgespec.text.tokenizer import Tokenizer


_NOTHING = "Nothing is kept yet. `edgespec chat` keeps what is said, `edgespec memory add` adds documents."


@click.group("memory")
def memory_command() -> None:
    """What earlier answers and added documents said, which drafts later answers.

    It changes the speed of answers and never their text. `--no-memory` neither reads nor keeps anything.
    """


@memory_command.command("add")
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
    from edgespec.chat.tui.settings import find_first_model
    from edgespec.memory.documents import find_documents
    from edgespec.models.load_config import LoadConfig
    from edgespec.models.target import open_vocabulary
    from edgespec.models.tokenizer_compat import identify_tokenizer

    skipped: Counter[str] = Counter()
    report_activity("looking for files …")
    documents = [*find_documents(paths, skipped)]
    report_activity("")
    if not documents:
        raise InvalidRequest(
            f"there is no file to add{_format_skipped(skipped)}.", hint="Name text files or folders with some."
        )
    if dry_run:
        for document in documents:
            click.echo(str(document.path))
        total = gib(sum(each.size for each in documents))
        click.echo(f"{count(len(documents), 'file')}, {total}{_format_skipped(skipped)}", err=True)
        return
    registry, hub = open_hub()
    model = model or find_first_model() or registry.default
    with open_vocabulary(LoadConfig(model), registry, hub) as tokenizer, open_store() as store:
        click.echo(f"with the tokenizer of {model}; --model takes another", err=True)
        identity = identify_tokenizer(tokenizer)
        corpus = store.open_corpus(identity)
        try:
            if n_gone := sum(corpus.remove_missing(path.resolve()) for path in paths):
                click.echo(f"removed {count(n_gone, 'document')} of files that are gone")
            _store(documents, tokenizer, corpus, skipped)
        finally:  # also of those that were stored before Ctrl-C
            store.name_tokenizer(identity, model)
            corpus.finish()
    build_indexes([(identity, "")])


@contextmanager
def open_store() -> Iterator[TextStore]:
    """The user's memory, which is created if it is missing."""
    from edgespec.folders import memory_folder
    from edgespec.memory.administration import TextStore

    with closing(TextStore.open(memory_folder())) as store:
        if store.notice is not None:
            click.echo(f"note: {store.notice}", err=True)
        yield store


def _store(documents: list[Document], tokenizer: Tokenizer, corpus: Corpus, skipped: Counter[str]) -> None:
    """Store documents one by one, and tell how many."""
    from edgespec.memory.administration import DEFAULT_LIMIT_BYTES
    from edgespec.memory.corpus import SHARE, NoRoom
    from edgespec.memory.documents import read_document

    n_files, n_tokens, reporter = 0, 0, TerminalReporter()
    try:
        for i, document in enumerate(documents):
            reporter.draw("reading", i + 1, len(documents), f"{n_tokens:,} tokens")
            try:
                tokens = tokenizer.encode(read_document(document.path), parse_special=False)
                n_new = corpus.add(document.path, tokens)
            except OSError:
                skipped["unreadable"] += 1
                continue
            except NoRoom:
                left, share = count(len(documents) - i, "file"), gib(int(SHARE * DEFAULT_LIMIT_BYTES))
                reporter.notice(
                    f"{left} left out: documents have {share} at most. `edgespec memory forget PATH` frees room."
                )
                break
            n_tokens += n_new
            n_files += n_new > 0
            if not n_new:
                skipped["known already"] += 1
    finally:
        reporter.end_bar()
        click.echo(f"added {count(n_files, 'file')}, {count(n_tokens, 'token')}{_format_skipped(skipped)}")


def build_indexes(spaces: Iterable[tuple[str, str]]) -> None:
    """Build the indexes that an engine would build when it is idle, of spaces as (tokenizer, namespace)."""
    from edgespec.folders import memory_folder
    from edgespec.memory.administration import DEFAULT_LIMIT_BYTES
    from edgespec.memory.memory import Memory

    report_activity("building the index; Ctrl-C leaves it to the next chat")
    for tokenizer, group in groupby(sorted(spaces), key=itemgetter(0)):
        with closing(Memory(memory_folder(), tokenizer, DEFAULT_LIMIT_BYTES)) as memory:
            for _, namespace in group:
                memory.space(namespace)
            memory.set_idle(True)
            memory.flush()
        if notice := memory.take_notice():
            click.echo(f"note: {notice}", err=True)
    report_activity("")


def _format_skipped(skipped: Counter[str]) -> str:
    return "; skipped: " + ", ".join(f"{n:,} {reason}" for reason, n in skipped.items()) if skipped else ""


@memory_command.command("status")
@json_option
def status_command(as_json: bool) -> None:
    """Show the tokens kept for each model, and the bytes used."""
    from edgespec.folders import memory_folder
    from edgespec.memory.administration import DEFAULT_LIMIT_BYTES
    from edgespec.memory.prefix_files import LIMIT_BYTES, measure_prefixes

    folder = memory_folder()
    spaces, n_bytes = [], 0
    if folder.is_dir():
        with open_store() as store:
            spaces, n_bytes = store.status(), store.size()
    texts = [_describe(each) for each in spaces]
    caches = measure_prefixes(folder)
    facts = {"folder": str(folder), "bytes": n_bytes, "limit_bytes": DEFAULT_LIMIT_BYTES, "texts": texts}
    facts |= {"cache_bytes": caches, "cache_limit_bytes": LIMIT_BYTES}
    print_result(facts, _format_status(texts) if texts else [_NOTHING], as_json=as_json)
    if n_bytes and not as_json:
        kept = f"{gib(n_bytes)} of {gib(DEFAULT_LIMIT_BYTES)} of texts, {gib(caches)} of {gib(LIMIT_BYTES)} of caches"
        click.echo(f"\n{kept} in {folder}", err=True)


def _describe(space: SpaceStatus) -> dict[str, Any]:
    from edgespec.server.record import read_namespace

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


def _format_status(texts: list[dict[str, Any]]) -> Iterator[str]:
    rows = [
        (
            each["model"] or f"unknown ({each['tokenizer'][:8]})",
            each["key"] or "-",
            f"{each['tokens']:,}",
            f"{each['document_tokens']:,}",
            f"{each['documents']:,}",
            gib(each["index_bytes"]),
            format_time(each["newest"]),
        )
        for each in texts
    ]
    header = ("MODEL", "KEY", "TOKENS OF ANSWERS", "OF DOCUMENTS", "DOCUMENTS", "INDEX", "NEWEST")
    yield from format_table([header, *rows], frozenset({2, 3, 4, 5}))


@memory_command.command("export")
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
@force_option
def export_command(file: Path, force: bool) -> None:
    """Write all texts to FILE, or - for stdout, as JSON lines.

    Each line is a part of an answer, of a prompt or of a document, as text where its model is on this machine, else as
    token ids. Only its user can read FILE.
    """
    with open_store() as store, _open_tokenizers(store.status()) as tokenizers:
        records = (_describe_record(each, tokenizers.get(each.tokenizer)) for each in store.export())
        n = write_lines(file, records, force=force)
    click.echo(f"wrote {count(n, 'text')} to {file}", err=str(file) == "-")


@contextmanager
def _open_tokenizers(spaces: list[SpaceStatus]) -> Iterator[dict[str, Tokenizer]]:
    """The tokenizers of the models that are known and on this machine, by what identifies them."""
    from edgespec.models.load_config import LoadConfig
    from edgespec.models.target import open_vocabulary
    from edgespec.models.tokenizer_compat import identify_tokenizer

    registry, hub = open_hub()
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
    from edgespec.server.record import read_namespace

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
    `memory_source` in Python. The conversation itself and the files stay. An `edgespec adapt` that has not ended begins
    anew.
    """
    from edgespec.chat.remembered import name_source
    from edgespec.folders import adapted_folder
    from edgespec.models.versions import clear_runs

    with open_store() as store:
        if source.isascii() and source.isdigit():
            what, n = f"conversation {source}", store.forget(name_source(int(source)))
        else:
            path = Path(source).resolve()
            what, n = str(path), store.forget_path(path)
            if not n:  # a name that a program has given
                what, n = source, store.forget(source)
        kept = [(each.tokenizer, each.namespace) for each in store.status()]
    if not n:
        raise InvalidRequest(
            f"the memory has no texts of {what}.",
            hint="Conversations have ids, see `edgespec history`; a path is that of an added document or above it.",
        )
    clear_runs(adapted_folder(), own_texts=False)
    click.echo(f"removed {count(n, 'token')} of {what}")
    build_indexes(kept)


@memory_command.command("clear")
@click.option("--corpus", "only_documents", is_flag=True, help="Only the documents that were added.")
@click.option("--key", metavar="NAME", help="Only the texts of an API key.")
@yes_option
def clear_command(only_documents: bool, key: str | None, yes: bool) -> None:
    """Remove all texts, or those of one kind or key.

    What was learned from them is removed too, and trainings that have not ended begin anew. Saved conversations and
    adapted drafts stay. Where all texts go, those that `edgespec draft train` has written go too, and `edgespec adapt`
    asks again before it trains.
    """
    from edgespec.folders import adapted_folder
    from edgespec.models.versions import clear_runs, forbid_training, list_runs
    from edgespec.server.record import name_namespace

    is_all = key is None and not only_documents
    has_trainings = is_all and bool(list_runs(adapted_folder(), own_texts=True))
    with open_store() as store:
        namespace = None if key is None else name_namespace(key)
        spaces = [each for each in store.status() if namespace in (None, each.namespace)]
        n = sum(each.n_corpus_tokens if only_documents else each.n_tokens for each in spaces)
        of = "" if key is None else f" of the key {key}"
        what = "documents" if only_documents else "answers, prompts and documents"
        found = [f"{count(n, 'token')} of {what}{of}"] if n else []
        found += ["what trainings have written and kept"] if has_trainings else []
        if found and not yes:
            confirm(f"Remove {' and '.join(found)}?")
        if n:
            n = store.clear(namespace, only_documents=only_documents)
        kept = [(each.tokenizer, each.namespace) for each in store.status()]
    if is_all:
        forbid_training(adapted_folder())
    if key is None:  # texts of keys are not trained on
        clear_runs(adapted_folder(), own_texts=is_all)
    click.echo(f"removed {' and '.join(found)}" if found else f"there is nothing to remove{of}")
    if n:
        build_indexes(kept)

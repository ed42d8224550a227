"""The memory of earlier texts at several sizes: time to build and to load its index, bytes on disk, time of a lookup.

    uv run python -m benchmarks.memory [--tokens 1000000,10000000]

The texts are Python's own source files in the vocabulary of the embedded model, stored as documents. Once all are used,
they come again with one token in 50 replaced, like files that were edited. A query is the end of a part of a stored
file, of which up to 3 of 64 tokens are replaced. All times are CPU times. stdout ends with one JSON line.
"""

from __future__ import annotations

import random
import resource
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from time import process_time, thread_time

import click
import numpy as np

from benchmarks.harness import TARGET, load_model, print_result
from edgespec.backends.options import LoadOptions
from edgespec.memory.administration import TextStore
from edgespec.memory.memory import Memory
from edgespec.memory.space import MemorySpace

_TOKENIZER = "python-6m"
_EDITED = 50  # tokens for each one that is replaced in a copy
_QUERY = 64  # tokens
_LIMIT = 2**40  # bytes: nothing is removed
_MAX_CHARACTERS = 200_000  # of a file


def read_sources(folder: Path, n_tokens: int) -> list[list[int]]:
    """The Python files below `folder`, as tokens, until there are `n_tokens`."""
    tokenizer = load_model("llamacpp", TARGET, LoadOptions(threads=1)).tokenizer
    files = sorted(file for file in folder.rglob("*.py") if "site-packages" not in file.parts)
    random.Random(0).shuffle(files)
    sources: list[list[int]] = []
    total = 0
    for file in files:
        text = file.read_text(encoding="utf-8", errors="replace")[:_MAX_CHARACTERS]
        sources.append(tokenizer.encode(text, parse_special=False)[: n_tokens - total])
        total += len(sources[-1])
        if total >= n_tokens:
            break
    return sources


def repeat(sources: Sequence[list[int]], n_tokens: int) -> Iterator[tuple[str, list[int]]]:
    """(name, tokens) of the sources, then of edited copies, until there are `n_tokens`."""
    rng = np.random.default_rng(0)
    vocabulary = np.unique(np.concatenate([np.array(source) for source in sources]))
    total, i = 0, 0
    while total < n_tokens:
        tokens = np.array(sources[i % len(sources)][: n_tokens - total])
        if i >= len(sources):
            places = rng.integers(0, max(1, len(tokens)), len(tokens) // _EDITED)
            tokens[places] = rng.choice(vocabulary, len(places))
        total += len(tokens)
        yield f"file-{i}", tokens.tolist()
        i += 1


def time_lookups(space: MemorySpace, sources: Sequence[Sequence[int]], n: int) -> tuple[list[float], list[int]]:
    """Microseconds of `n` lookups of 8 places, and the lengths of their matches."""
    rng = random.Random(1)
    times, lengths = [], []
    for _ in range(n):
        source = rng.choice(sources)
        end = rng.randrange(1, len(source))
        query = list(source[max(0, end - _QUERY) : end])
        for _ in range(rng.randrange(4)):
            query[rng.randrange(len(query))] = rng.choice(source)
        start_s = thread_time()
        matches = space.find(query, 8)
        times.append(1e6 * (thread_time() - start_s))
        lengths.append(matches.length if matches else 0)
    return times, lengths


def measure(sources: Sequence[list[int]], n_tokens: int, n_lookups: int) -> dict[str, float]:
    """One row of the result."""
    with tempfile.TemporaryDirectory() as path:
        folder = Path(path)
        store = TextStore.open(folder)
        stored = [(name, tokens) for name, tokens in repeat(sources, n_tokens) if len(tokens) > 1]
        start_s = process_time()
        corpus = store.open_corpus(_TOKENIZER, limit_bytes=_LIMIT)
        n_stored = sum(corpus.add(Path(name), tokens) for name, tokens in stored)
        corpus.finish()
        store_s = process_time() - start_s
        memory = Memory(folder, _TOKENIZER, _LIMIT)
        space = memory.space("")
        start_s = process_time()
        memory.set_idle(True)
        memory.flush()
        build_s = process_time() - start_s
        memory.close()
        start_s = process_time()
        memory = Memory(folder, _TOKENIZER, _LIMIT)
        space = memory.space("")
        load_s = process_time() - start_s
        times, lengths = time_lookups(space, [tokens for _, tokens in stored], n_lookups)
        facts = {
            "tokens": n_stored,
            "store_s": round(store_s, 2),
            "build_s": round(build_s, 2),
            "load_s": round(load_s, 3),
            "segments": store.query("SELECT count(*) FROM segments")[0][0],
            "bytes_per_token": round(store.size() / n_stored, 1),
            "lookup_us": round(float(np.median(times)), 1),
            "lookup_p99_us": round(float(np.quantile(times, 0.99)), 1),
            "mean_match": round(float(np.mean(lengths)), 1),
        }
        memory.close()
        store.close()
    return facts


@click.command()
@click.option("--tokens", default="1000000,10000000", show_default=True, help="Sizes, separated by commas.")
@click.option("--lookups", type=click.IntRange(1), default=5000, show_default=True)
@click.option(
    "--sources",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    default=Path(sysconfig.get_path("stdlib")),
    help="A folder of Python files.  [default: the standard library]",
)
def main(tokens: str, lookups: int, sources: Path) -> None:
    """Measure the memory of earlier texts."""
    sizes = [int(size) for size in tokens.split(",")]
    texts = read_sources(sources, max(sizes))
    rows = [measure(texts, size, lookups) for size in sizes]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    facts = {"source_tokens": sum(map(len, texts)), "rows": rows, "peak_mib": round(peak / 2**20)}
    print_result("memory", facts, TARGET)


if __name__ == "__main__":
    main()

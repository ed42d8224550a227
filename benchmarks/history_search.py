"""Milliseconds of a search over all conversations, in a file of generated words.

    uv run python -m benchmarks.history_search [--conversations 2000] [--turns 20]

Medians of a word that no text has, of a frequent one, and of two that few texts have together; and of opening the file,
which checks it. stdout ends with one JSON line.
"""

from __future__ import annotations

import random
import statistics
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import perf_counter

import click

from benchmarks.harness import print_result
from edgespec.chat import Store, Turn

_LETTERS = "etaoinshrdlucmfwypvbgkjqxz"
_LENGTHS = (120, 800)  # characters of a question and of an answer
_QUERIES = {"absent_ms": "zqzqzq", "frequent_ms": "the", "two_words_ms": "qxj vzk"}


def fill(path: Path, conversations: int, turns: int) -> None:
    """Write a file of conversations without branches, of `turns` turns each."""
    rng = random.Random(0)
    words = ["".join(rng.choices(_LETTERS, k=rng.randint(2, 9))) for _ in range(20_000)]
    store = Store.open(path)
    for _ in range(conversations):
        texts = [" ".join(rng.choices(words, k=_LENGTHS[i % 2] // 6)) for i in range(turns)]
        said = [
            Turn(i, 0, i - 1 if i else None, "assistant" if i % 2 else "user", text, "", [], {}, {}, True, 1.0)
            for i, text in enumerate(texts)
        ]
        store.insert(store.new("model"), said)
    store.close()


def measure(work: Callable[[], object], repeats: int) -> float:
    """Median milliseconds."""
    times = []
    for _ in range(repeats):
        start_s = perf_counter()
        work()
        times.append(1000 * (perf_counter() - start_s))
    return round(statistics.median(times), 1)


@click.command()
@click.option("--conversations", type=click.IntRange(1), default=2000, show_default=True)
@click.option("--turns", type=click.IntRange(1), default=20, show_default=True)
@click.option("--repeats", type=click.IntRange(1), default=7, show_default=True)
def main(conversations: int, turns: int, repeats: int) -> None:
    """Time searches of stored conversations."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "conversations.db"
        fill(path, conversations, turns)
        size = path.stat().st_size
        open_ms = measure(lambda: Store.open(path).close(), repeats)
        store = Store.open(path)
        times = {name: measure(partial(store.search, query), repeats) for name, query in _QUERIES.items()}
        store.close()
    facts = {"conversations": conversations, "turns": turns, "file_bytes": size, "open_ms": open_ms}
    print_result("history_search", facts | times)


if __name__ == "__main__":
    main()

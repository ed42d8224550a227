"""Forwards under the settings that are chosen for a model, against llama.cpp's defaults: contexts x rows.

    uv run python -m benchmarks.settings MODEL.gguf [--threads 1] [--contexts 16,700,3000] [--rows 1,4,16] [--repeats 7]

The settings are measured first, for --seconds. Both arms then take turns on contexts filled by copies of their cells
(backends/llamacpp/model.py), in the order default, chosen, chosen, default. A speedup is the median of the pairs'
ratios. `--kv-type q8_0` adds an arm with such a cache. --threads defaults to the idle cores. stdout ends with one JSON
line.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import click

from benchmarks.harness import MODEL_PATH, print_result
from edgespec.backends.llamacpp.model import LlamaModel, load
from edgespec.backends.llamacpp.session import LlamaSession
from edgespec.backends.options import KvType, LoadOptions
from edgespec.backends.settings import ROOM, RuntimeSettings
from edgespec.core.decoding import read_prompt
from edgespec.core.protocols import NO_DRAFT, Draft


def parse_numbers(_context: click.Context, _option: click.Parameter, text: str) -> list[int]:
    """Whole numbers, separated by commas. Raises click.BadParameter."""
    try:
        return sorted({int(part) for part in text.split(",")})
    except ValueError:
        raise click.BadParameter("use numbers such as 1,4,16.") from None


def open_arm(model: LlamaModel, settings: RuntimeSettings, cells: int, closing: ExitStack) -> LlamaSession:
    """A session under `settings`."""
    model.use(settings)
    session = model.open_as(LlamaSession, cells)
    closing.callback(session.close)
    read_prompt(session, [1])
    return session


def time_forward(session: LlamaSession, rows: int) -> float:
    """Seconds of a forward of `rows` rows whose draft is rejected; the cache then holds what it held before."""
    at = session.position
    tokens = [(i * 7919 + 11) % session.capabilities.vocab_size for i in range(rows)]
    draft = Draft.chain(tokens[1:]) if rows > 1 else NO_DRAFT
    started = perf_counter()
    session.forward(tokens[0], draft)
    elapsed_s = perf_counter() - started
    session.commit(())
    session.rewind(at)
    return elapsed_s


def compare(arms: dict[str, LlamaSession], rows: int, repeats: int) -> dict[str, Any]:
    """Median milliseconds of each arm, and the median, least and greatest speed of each over the first one's."""
    times: dict[str, list[float]] = {name: [] for name in arms}
    for session in arms.values():
        time_forward(session, rows)  # warm-up
    for n in range(2 * repeats):
        for name in list(arms) if n % 2 else reversed(arms):
            times[name].append(time_forward(arms[name], rows))
    first, *others = arms
    ratios = {name: [a / b for a, b in zip(times[first], times[name], strict=True)] for name in others}
    return {
        "ms": {name: round(median(each) * 1e3, 2) for name, each in times.items()},
        "speed": {name: [round(of(each), 3) for of in (median, min, max)] for name, each in ratios.items()},
    }


@click.command()
@click.argument("model", type=MODEL_PATH)
@click.option("--threads", type=int)
@click.option("--contexts", default="16,700,3000", show_default=True, callback=parse_numbers)
@click.option("--rows", default="1,4,16", show_default=True, callback=parse_numbers)
@click.option("--repeats", type=click.IntRange(1), default=7, show_default=True)
@click.option("--seconds", default=10.0, show_default=True, help="For choosing the settings.")
@click.option("--kv-type", type=click.Choice(["q8_0", "q4_0"]), help="Add an arm with this cache.")
def main(
    model: Path,
    threads: int | None,
    contexts: list[int],
    rows: list[int],
    repeats: int,
    seconds: float,
    kv_type: KvType | None,
) -> None:
    """Time forwards of the GGUF file MODEL."""
    options = LoadOptions(threads=threads, context_size=2 * (max(contexts) + ROOM))
    target = load(model, options)
    settings = target.measure_settings(seconds) or RuntimeSettings()
    for line in settings.describe():
        click.echo(line, err=True)
    found = []
    with ExitStack() as closing:
        closing.callback(target.close)
        cells = max(contexts) + ROOM
        arms = {"default": open_arm(target, RuntimeSettings(), cells, closing)}
        arms["chosen"] = open_arm(target, settings, cells, closing)
        if kv_type is not None:
            other = load(model, replace(options, kv_type=kv_type))
            closing.callback(other.close)
            arms[kv_type] = open_arm(other, RuntimeSettings(), cells, closing)
        for length in contexts:
            for session in arms.values():
                session.extend(length)
            for n in rows:
                found.append({"context": length, "rows": n, **compare(arms, n, repeats)})
                click.echo(str(found[-1]), err=True)
    result = {"model": model.name, "threads": threads, "settings": asdict(settings), "forwards": found}
    print_result("settings", result, model)


if __name__ == "__main__":
    main()

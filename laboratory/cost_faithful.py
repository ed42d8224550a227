"""Embed a small llama model's function in a larger llama shape: the small model's tokens at the large model's cost.

    uv run python -m laboratory.cost_faithful 1b out.gguf [--source small.gguf] [--type Q4_0] [--check]
    uv run python -m laboratory.cost_faithful 100m folder [--source folder] [--type 4bit] [--group 64] [--check]
    uv run python -m laboratory.cost_faithful own folder --source model.gguf --type F16

The shape `own` is the small model's: the result is a copy of it in the other format or type.

Embeddings are padded with zeros. Norm weights are scaled by sqrt(d/D), their epsilon by d/D. The small heads go into
their kv groups. Rows of attention output and ffn-down outside the small block are zero, so the added width does not
reach the residual stream. Added layers have zero outputs; everything else is random. The result computes the small
model's logits, up to quantization, and reads and multiplies all weights of the large one.

Label figures from such models "cost-faithful": their acceptance is that of the small pair, not of real models of that
size. The vocabulary stays the small one, so the head is cheaper than a real one's. stdout ends with one JSON line.
"""

from __future__ import annotations

import math
import tempfile
from dataclasses import asdict
from pathlib import Path

import click

from benchmarks.harness import MODEL_PATH, TARGET, print_result
from edgespec.errors import EdgespecError
from laboratory.embedding.agreement import Agreement, compare, open_for_check
from laboratory.embedding.encodings import FOLDER_TYPES, GGUF_TYPES, choose_storage
from laboratory.embedding.files import write
from laboratory.embedding.shapes import OWN, SHAPES, find_tightest_shape, fit_shape
from laboratory.embedding.sources import open_source

GROUP, TOKENS = 64, 32


def build(
    source: Path,
    destination: Path,
    shape: str,
    quant: str | None = None,
    group: int = GROUP,
    context: int | None = None,
) -> None:
    """Write `destination`: the function of `source` in `quant`, at the cost of SHAPES[shape] or its own.

    `destination` is a GGUF file if its name ends in .gguf, else a folder for MLX; `group` is for 4bit and 8bit;
    `context` is the context length that the result states, by default the source's. Raises click.ClickException.
    """
    small = open_source(source)
    large = fit_shape(shape, small.shape)
    storage = choose_storage(destination, quant, group, small.shape, large, tied=small.tied)
    write(small, destination, large, storage, context)


def check(
    source: Path, built: Path, shape: str, quant: str | None = None, group: int = GROUP, tokens: int = TOKENS
) -> tuple[Agreement, Agreement]:
    """Compare `built` with the small model: quantized in the same way, and as it is.

    The other arguments are those of `build`; `tokens` follow each of a few prompts. Raises click.ClickException,
    EdgespecError.
    """
    small = open_source(source)
    large = fit_shape(shape, small.shape)
    storage = choose_storage(built, quant, group, small.shape, large, tied=small.tied)
    other = open_for_check(built)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"small{built.suffix}"
        write(small, path, find_tightest_shape(small.shape, large, storage.block), storage)
        model = open_for_check(path)
        rounded = compare(model, other, storage.rounding, tokens)
        model.close()
    model = open_for_check(source)
    exact = compare(model, other, math.inf, tokens)
    model.close()
    other.close()
    return rounded, exact


@click.command()
@click.argument("shape", type=click.Choice([*SHAPES, OWN]))
@click.argument("destination", type=click.Path(path_type=Path))
@click.option("--source", type=MODEL_PATH, default=TARGET, help="[default: the embedded target]")
@click.option(
    "--type",
    "quant",
    type=click.Choice(list(dict.fromkeys(GGUF_TYPES + FOLDER_TYPES))),
    help="[default: Q4_0 for a GGUF file, 4bit for a folder]",
)
@click.option(
    "--group", type=click.Choice(["32", "64"]), default=str(GROUP), show_default=True, help="Of 4bit and 8bit."
)
@click.option(
    "--context",
    type=click.IntRange(1),
    help="Tokens of the longest text, as stated.  [default: the source's]",
)
@click.option("--check", "checks", is_flag=True, help="Compare its tokens and logits with the small model's.")
def main(
    shape: str, destination: Path, source: Path, quant: str | None, group: str, context: int | None, checks: bool
) -> None:
    """Embed the source in a model of SHAPE at DESTINATION: a GGUF file if it ends in .gguf, else a folder."""
    result: dict[str, object] = {"shape": shape, "type": quant, "path": str(destination)}
    try:
        build(source, destination, shape, quant, int(group), context)
        files = [destination] if destination.is_file() else list(destination.iterdir())
        result["bytes"] = sum(file.stat().st_size for file in files)
        click.echo(f"{destination}: {result['bytes']:,} bytes", err=True)
        if checks:
            rounded, exact = check(source, destination, shape, quant, int(group))
            click.echo(f"the small model quantized in the same way: {rounded}", err=True)
            click.echo(f"the small model as it is: {exact.equal} of {exact.tokens} tokens agree", err=True)
            if rounded.faults or 2 * exact.equal < exact.tokens:
                raise click.ClickException(f"{destination.name} does not compute the small model's function.")
            result |= {"quantized": asdict(rounded), "exact": asdict(exact)}
    except EdgespecError as error:
        raise click.ClickException(f"{error.message} {error.hint}") from error
    print_result("cost_faithful", result)


if __name__ == "__main__":
    main()

"""Embed a small llama model's exact function in a larger llama shape: its tokens at the large model's cost.

    uv run python -m laboratory.cost_faithful 1b out.gguf [--source small.gguf] [--type Q4_0] [--check]
    uv run python -m laboratory.cost_faithful 100m folder [--source folder] [--type 4bit] [--group 64] [--check]

Embeddings are padded with zeros, norm weights scaled by sqrt(d/D) and their epsilon by d/D, the small heads placed
within their kv groups; rows of attention output and ffn-down outside the small block are zero, so that the added width
never reaches the residual stream; everything else is random, and added layers have zero outputs. The result computes
the small model's logits (up to quantization) while it streams every byte and multiplies every block of the large one.
Label figures from such models "cost-faithful": they say nothing of what a real model of that size accepts. The
vocabulary stays the small one, so the large model's head is cheaper than that of a real one.
"""

from __future__ import annotations

import math
import tempfile
from pathlib import Path

import click

from edgespec.errors import EdgespecError
from laboratory.embedding.agreement import Agreement, compare, open_for_check
from laboratory.embedding.encodings import FOLDER_TYPES, GGUF_TYPES, storage_for
from laboratory.embedding.files import write
from laboratory.embedding.shapes import SHAPES, shape_for, tightest
from laboratory.embedding.sources import open_source

EMBEDDED = Path(__file__).resolve().parent.parent / "edgespec" / "assets" / "python-6m" / "target.gguf"
GROUP, TOKENS = 64, 32


def build(source: Path, destination: Path, shape: str, quant: str | None = None, group: int = GROUP) -> None:
    """Write `destination`: the function of `source` at the cost of SHAPES[shape] in `quant`.

    A GGUF file where it is called .gguf, else a folder for MLX, whose 4 and 8 bits come in groups of `group`. Raises
    click.ClickException.
    """
    small = open_source(source)
    large = shape_for(shape, small.shape)
    write(small, destination, large, storage_for(destination, quant, group, small.shape, large, tied=small.tied))


def check(
    source: Path, built: Path, shape: str, quant: str | None = None, group: int = GROUP, tokens: int = TOKENS
) -> tuple[Agreement, Agreement]:
    """What `build` wrote with these arguments, against the small model rounded in the same way, and as it is.

    `tokens` follow each of a few prompts. Raises click.ClickException, EdgespecError.
    """
    small = open_source(source)
    large = shape_for(shape, small.shape)
    storage = storage_for(built, quant, group, small.shape, large, tied=small.tied)
    other = open_for_check(built)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"small{built.suffix}"
        write(small, path, tightest(small.shape, large, storage.block), storage)
        model = open_for_check(path)
        rounded = compare(model, other, storage.rounding, tokens)
        model.close()
    model = open_for_check(source)
    exact = compare(model, other, math.inf, tokens)
    model.close()
    other.close()
    return rounded, exact


@click.command()
@click.argument("shape", type=click.Choice(list(SHAPES)))
@click.argument("destination", type=click.Path(path_type=Path))
@click.option(
    "--source", type=click.Path(exists=True, path_type=Path), default=EMBEDDED, help="[default: the embedded target]"
)
@click.option(
    "--type",
    "quant",
    type=click.Choice(list(dict.fromkeys(GGUF_TYPES + FOLDER_TYPES))),
    help="[default: Q4_0 for a GGUF file, 4bit for a folder]",
)
@click.option(
    "--group", type=click.Choice(["32", "64"]), default=str(GROUP), show_default=True, help="Of 4bit and 8bit."
)
@click.option("--check", "checks", is_flag=True, help="Compare tokens and logits with the small model's.")
def main(shape: str, destination: Path, source: Path, quant: str | None, group: str, checks: bool) -> None:
    """Embed SOURCE in a model of SHAPE at DESTINATION: a GGUF file where it is called .gguf, else a folder."""
    try:
        build(source, destination, shape, quant, int(group))
        files = [destination] if destination.is_file() else list(destination.iterdir())
        click.echo(f"{destination}: {sum(file.stat().st_size for file in files):,} bytes")
        if checks:
            rounded, exact = check(source, destination, shape, quant, int(group))
            click.echo(f"the small model rounded in the same way: {rounded}")
            click.echo(f"the small model as it is: {exact.equal} of {exact.tokens} tokens agree")
            if rounded.faults or 2 * exact.equal < exact.tokens:
                raise click.ClickException(f"{destination.name} does not compute the small model's function.")
    except EdgespecError as error:
        raise click.ClickException(f"{error.message} {error.hint}") from error


if __name__ == "__main__":
    main()

"""What a JSON schema costs, and what drafts win under it: plain and drafted decoding, with and without a schema.

    uv run python -m benchmarks.structured                       # the embedded pair
    uv run python -m benchmarks.structured TARGET.gguf --draft DRAFT.gguf --tokens 48

Arms are interleaved over the prompts, A B C D then D C B A. Ratios are medians over prompts and repeats of one prompt's
tokens/s after the first token. `mask_s` is the time that one grammar mask takes. stdout ends with one JSON line.
"""

from __future__ import annotations

from pathlib import Path
from statistics import median
from time import perf_counter

import click
import numpy as np

from benchmarks.harness import DRAFT, MODEL_PATH, PLAIN, TARGET, generate, load_pair, print_result
from edgespec.autopilot.speculation import Speculation
from edgespec.backends.options import LoadOptions
from edgespec.core.sampling import Sampler, SamplingParams
from edgespec.engine.engine import Engine
from edgespec.engine.events import Request
from edgespec.engine.grammar_compiler import GrammarCompiler
from edgespec.engine.grammar_mask import GrammarMask
from edgespec.engine.structure import Structure, json_structure

PROMPTS = (
    "def read_lines(path):\n",
    "class Stack:\n    def __init__(self):\n",
    "import json\n\nrecord = ",
    "config = ",
)
SCHEMA = {
    "type": "object",
    "properties": {
        "identifier": {"type": "string", "maxLength": 24},
        "description": {"type": "string", "maxLength": 60},
        "is_enabled": {"type": "boolean"},
        "sizes": {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 6},
        "kind": {"enum": ["function", "class", "module"]},
    },
    "required": ["identifier", "description", "is_enabled", "sizes", "kind"],
    "additionalProperties": False,
}
DRAFTED = Speculation(("ngram", "model"))
RATIOS = (("plain, schema", "plain"), ("drafted", "plain"), ("drafted, schema", "plain, schema"))


@click.command()
@click.argument("target", type=MODEL_PATH, default=TARGET)
@click.option("--draft", type=MODEL_PATH, default=DRAFT)
@click.option("--tokens", type=click.IntRange(2), default=120, show_default=True)
@click.option("--repeats", type=click.IntRange(1), default=5, show_default=True)
@click.option("--temperature", default=0.0, show_default=True)
def main(target: Path, draft: Path, tokens: int, repeats: int, temperature: float) -> None:
    """Compare four arms on the GGUF file TARGET and its draft."""
    engine = load_pair("llamacpp", target, draft, LoadOptions(threads=1, context_size=1024))
    structure = json_structure(SCHEMA)
    speeds = measure_speeds(engine, structure, SamplingParams(temperature=temperature), tokens, repeats)
    ratios = {
        f"{a} / {b}": median(x / y for x, y in zip(speeds[a], speeds[b], strict=True) if x and y) for a, b in RATIOS
    }
    for name, values in speeds.items():
        click.echo(f"{name:18} {median(values):8.1f} tok/s", err=True)
    for name, ratio in ratios.items():
        click.echo(f"{name:32} {ratio:.2f}", err=True)
    mask_s = time_mask(engine, structure)
    click.echo(f"mask: {mask_s * 1e6:.0f} us, vocabulary of {engine.target.tokenizer.vocab_size:,}", err=True)
    engine.close()
    settings = {"tokens": tokens, "temperature": temperature, "repeats": repeats}
    print_result("structured", {"ratios": ratios, "mask_s": mask_s, **settings}, target, draft)


def measure_speeds(
    engine: Engine, structure: Structure, sampling: SamplingParams, tokens: int, repeats: int
) -> dict[str, list[float]]:
    """[repeats x prompts] tokens/s of each arm, in the same order; 0 where an answer has one token."""
    arms = {
        "plain": (PLAIN, None),
        "drafted": (DRAFTED, None),
        "plain, schema": (PLAIN, structure),
        "drafted, schema": (DRAFTED, structure),
    }
    speeds: dict[str, list[float]] = {name: [] for name in arms}
    for repeat in range(repeats + 1):
        for i, prompt in enumerate(PROMPTS):
            for name in list(arms) if (repeat + i) % 2 else reversed(arms):
                speculation, schema = arms[name]
                request = Request(prompt, sampling, tokens, seed=1, structure=schema)
                speed = generate(engine, speculation, request).metrics.tokens_per_second
                if repeat:  # the first is a warm-up
                    speeds[name].append(speed or 0.0)
    return speeds


def time_mask(engine: Engine, structure: Structure) -> float:
    """Seconds that the mask adds to one row's distribution within a string, beyond the sampler's own."""
    tokenizer = engine.target.tokenizer
    sampler = Sampler(SamplingParams(temperature=0), tokenizer.vocab_size)
    masked = GrammarMask(GrammarCompiler(tokenizer).compile(structure).result(), sampler, 0)
    prefix = tokenizer.encode('{"identifier": "read', parse_special=False)
    logits = np.random.default_rng(0).standard_normal(tokenizer.vocab_size).astype(np.float32)
    times = []
    for _ in range(200):
        start_s = perf_counter()
        masked.distribution(logits, prefix)
        middle_s = perf_counter()
        sampler.distribution(logits, prefix)
        times.append(2 * middle_s - start_s - perf_counter())
    return median(times)


if __name__ == "__main__":
    main()

"""What a JSON schema costs and what drafts win under it: plain and drafted, with and without a structure.

    uv run python -m benchmarks.structured                       # the embedded pair
    uv run python -m benchmarks.structured TARGET.gguf --draft DRAFT.gguf --tokens 48

Arms are interleaved over the prompts, A B C D then D C B A. Tokens/s after the first token; ratios are medians over
prompts and repeats of one prompt's arms. Also the time that one mask takes. stdout ends with one JSON line.
"""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median
from time import perf_counter

import click
import numpy as np

from benchmarks.machine import describe
from edgespec.backends.llamacpp.model import load
from edgespec.backends.options import LoadOptions
from edgespec.core.sampling import Sampler, SamplingParams
from edgespec.engine.drafting import Speculation
from edgespec.engine.engine import Engine
from edgespec.engine.events import Finished, Request
from edgespec.engine.structured_output import GrammarCompiler, Structure, json_structure

ASSETS = Path(__file__).parent.parent / "edgespec" / "assets" / "python-6m"
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
_PLAIN, _DRAFTED = Speculation("none", 0), Speculation("model")


@click.command()
@click.argument("target", type=click.Path(exists=True, path_type=Path), default=ASSETS / "target.gguf")
@click.option("--draft", type=click.Path(exists=True, path_type=Path), default=ASSETS / "draft.gguf")
@click.option("--tokens", default=120, show_default=True)
@click.option("--repeats", default=5, show_default=True)
@click.option("--temperature", default=0.0, show_default=True)
def main(target: Path, draft: Path, tokens: int, repeats: int, temperature: float) -> None:
    options = LoadOptions(threads=1, context_size=1024)
    engine = Engine(load(target, options), load(draft, options), _DRAFTED)
    structure = json_structure(SCHEMA)
    arms = {"plain": (_PLAIN, None), "drafted": (_DRAFTED, None), "plain, schema": (_PLAIN, structure),
            "drafted, schema": (_DRAFTED, structure)}  # fmt: skip
    params = SamplingParams(temperature=temperature)
    speeds: dict[str, list[float]] = {name: [] for name in arms}
    for repeat in range(repeats + 1):
        for i, prompt in enumerate(PROMPTS):
            order = list(arms) if (repeat + i) % 2 else list(reversed(arms))
            took = {name: _speed(engine, prompt, params, tokens, *arms[name]) for name in order}
            if repeat:  # the first warms up
                for name, speed in took.items():
                    speeds[name].append(speed)
    ratios = {
        f"{over} / {under}": median(a / b for a, b in zip(speeds[over], speeds[under], strict=True))
        for over, under in (("plain, schema", "plain"), ("drafted", "plain"), ("drafted, schema", "plain, schema"))
    }
    for name, each in speeds.items():
        click.echo(f"{name:18} {median(each):8.1f} tok/s")
    for name, ratio in ratios.items():
        click.echo(f"{name:32} {ratio:.2f}")
    mask_s = _mask_seconds(engine, structure)
    click.echo(f"a masked law: {mask_s * 1e6:.0f} us, vocabulary of {engine.target.tokenizer.vocab_size:,}")
    click.echo(json.dumps({"benchmark": "structured", "ratios": ratios, "mask_s": mask_s, "tokens": tokens,
                           "temperature": temperature, "repeats": repeats, **describe(target, draft)}))  # fmt: skip


def _speed(
    engine: Engine,
    prompt: str,
    params: SamplingParams,
    tokens: int,
    speculation: Speculation,
    structure: Structure | None,
) -> float:
    engine.speculation = speculation
    *_, finished = engine.stream(Request(prompt, params, tokens, seed=1, structure=structure))
    assert isinstance(finished, Finished) and finished.metrics.tokens_per_second is not None
    return finished.metrics.tokens_per_second


def _mask_seconds(engine: Engine, structure: Structure) -> float:
    """Of the law of one row within a string, beyond what the sampler takes."""
    tokenizer = engine.target.tokenizer
    sampler = Sampler(SamplingParams(temperature=0), tokenizer.vocab_size)
    distribution = GrammarCompiler(tokenizer).constrain(structure, sampler, 0)
    prefix = tokenizer.encode('{"identifier": "read', parse_special=False)
    logits = np.random.default_rng(0).standard_normal(tokenizer.vocab_size).astype(np.float32)
    times = []
    for _ in range(200):
        began_s = perf_counter()
        distribution.distribution(logits, prefix)
        middle_s = perf_counter()
        sampler.distribution(logits, prefix)
        times.append(2 * middle_s - began_s - perf_counter())
    return median(times)


if __name__ == "__main__":
    main()

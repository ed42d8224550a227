"""Greedy output of every drafter against plain decoding on twenty prompts; tau and alpha by depth for each.

    uv run python -m benchmarks.parity [--backend mlx] [--target T] [--draft D] [--tokens 96] [--temperature 0]

Every fork is reported with the gap between the two tokens' logits and the noise measured there. Speeds are medians over
the prompts of the ratio to plain decoding of the same prompt in the same run; the machine's noise is in them. stdout
ends with one JSON line.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import click

from benchmarks.machine import describe
from edgespec.backends import BackendName, open_model
from edgespec.backends.options import LoadOptions
from edgespec.bench.divergence import first_divergence
from edgespec.core.sampling import SamplingParams
from edgespec.engine.drafting import Speculation
from edgespec.engine.engine import Engine
from edgespec.engine.events import Finished, Request
from edgespec.text.chat_template import encode_prompt
from laboratory.cost_faithful import EMBEDDED
from tests.engine.prompts import CODE

ARMS = {
    "model, chain of 3": Speculation("model", 3, 3),
    "model, chain of 7": Speculation("model", 7, 7),
    "model, tree of 7, depth 3": Speculation("model", 3, 7),
    "ngram, chain of 7": Speculation("ngram", 7, 7),
    "ngram, tree of 7, depth 4": Speculation("ngram", 4, 7),
}
PLAIN = Speculation("none", 0, 0)


def generate(engine: Engine, speculation: Speculation, prompt: str, tokens: int, temperature: float) -> Finished:
    engine.speculation = speculation
    *_, finished = engine.stream(Request(prompt, SamplingParams(temperature=temperature), tokens, seed=1))
    assert isinstance(finished, Finished)
    return finished


@click.command()
@click.option("--backend", type=click.Choice(["llamacpp", "mlx"]), default="llamacpp", show_default=True)
@click.option("--target", type=click.Path(exists=True, path_type=Path), default=EMBEDDED)
@click.option("--draft", type=click.Path(exists=True, path_type=Path), default=EMBEDDED.with_name("draft.gguf"))
@click.option("--tokens", default=96, show_default=True)
@click.option("--threads", default=1, show_default=True)
@click.option("--temperature", default=0.0, show_default=True)
@click.option("--exact", is_flag=True)
def main(
    backend: BackendName, target: Path, draft: Path, tokens: int, threads: int, temperature: float, exact: bool
) -> None:
    options = LoadOptions(threads=threads, context_size=1024, exact=exact)
    models = [open_model(backend, p, options, progress=lambda f: None, check=lambda: None) for p in (target, draft)]
    engine = Engine(models[0], models[1], PLAIN)
    session = models[0].open_session(lambda: None)
    arms: dict[str, dict[str, object]] = {}
    rows = {name: [] for name in ARMS}
    forks: dict[str, list[dict[str, object]]] = {name: [] for name in ARMS}
    for prompt in CODE:
        plain = generate(engine, PLAIN, prompt, tokens, temperature)
        for name, speculation in ARMS.items():
            other = generate(engine, speculation, prompt, tokens, temperature)
            rows[name].append(
                (other.metrics, (other.metrics.tokens_per_second or 0) / (plain.metrics.tokens_per_second or 1))
            )
            ids = encode_prompt(models[0].tokenizer, prompt, parse_special=True)
            if fork := first_divergence(session, ids, plain.tokens, other.tokens):
                near = {"near_tie": fork.is_near_tie} if temperature == 0 else {}
                found = {"position": fork.position, "gap": round(fork.gap, 5), "noise": round(fork.noise, 5), **near}
                forks[name].append(found)
    for name, measured in rows.items():
        metrics = [m for m, _ in measured]
        deepest = max(len(m.alpha_by_depth) for m in metrics)
        drafted, accepted = sum(m.drafted_tokens for m in metrics), sum(m.accepted_tokens for m in metrics)
        emitted, forwards = sum(m.emitted_tokens - 1 for m in metrics), sum(m.target_forwards for m in metrics)
        by_depth = [
            statistics.mean(m.alpha_by_depth[d] for m in metrics if len(m.alpha_by_depth) > d) for d in range(deepest)
        ]
        arms[name] = {
            "equal": len(CODE) - len(forks[name]),
            "of": len(CODE),
            "forks": forks[name],
            "tau": round(emitted / forwards, 3),
            "acceptance_rate": round(accepted / max(drafted, 1), 3),
            "alpha_by_depth": [round(a, 2) for a in by_depth],
            "speed_ratio_median": round(statistics.median(ratio for _, ratio in measured), 2),
        }
        click.echo(f"{name}: {arms[name]}", err=True)
    session.close()
    engine.close()
    result = {
        "benchmark": "parity",
        "backend": backend,
        "tokens": tokens,
        "threads": threads,
        "temperature": temperature,
        "exact": exact,
    }
    click.echo(json.dumps({**result, "arms": arms, **describe(target, draft)}))


if __name__ == "__main__":
    main()

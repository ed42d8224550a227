"""Greedy output of every drafter against plain decoding on twenty prompts, with tau and alpha by depth of each.

    uv run python -m benchmarks.parity [--backend mlx] [--target T] [--draft D] [--tokens 96] [--temperature 0]

Every divergence is reported with the gap between the two tokens' logits and the noise measured at that position. The
speed ratio is a median over the prompts: tokens/s over plain decoding's of the same prompt in the same run. stdout ends
with one JSON line.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from benchmarks.harness import CODE, DRAFT, MODEL_PATH, PLAIN, TARGET, generate, load_pair, print_result
from edgespec.autopilot.speculation import Speculation
from edgespec.backends import BackendName
from edgespec.backends.options import LoadOptions
from edgespec.bench.divergence import first_divergence
from edgespec.core.metrics import Metrics
from edgespec.core.protocols import Session
from edgespec.core.sampling import SamplingParams
from edgespec.engine.engine import Engine
from edgespec.engine.events import Finished, Request

ARMS = {
    "model, chain of 3": Speculation(("model",), 3, 3),
    "model, chain of 7": Speculation(("model",), 7, 7),
    "model, tree of 7, depth 3": Speculation(("model",), 3, 7),
    "ngram, chain of 7": Speculation(("ngram",), 7, 7),
    "ngram, tree of 7, depth 4": Speculation(("ngram",), 4, 7),
}


@click.command()
@click.option("--backend", type=click.Choice(["llamacpp", "mlx"]), default="llamacpp", show_default=True)
@click.option("--target", type=MODEL_PATH, default=TARGET)
@click.option("--draft", type=MODEL_PATH, default=DRAFT)
@click.option("--prompts", type=click.IntRange(1, len(CODE)), default=len(CODE), show_default=True)
@click.option("--tokens", type=click.IntRange(2), default=96, show_default=True)
@click.option("--threads", default=1, show_default=True)
@click.option("--temperature", default=0.0, show_default=True)
@click.option("--exact", is_flag=True, help="Keep the cache in order, so that trees give the same logits as chains.")
def main(
    backend: BackendName,
    target: Path,
    draft: Path,
    prompts: int,
    tokens: int,
    threads: int,
    temperature: float,
    exact: bool,
) -> None:
    """Compare five ways to draft with plain decoding."""
    engine = load_pair(backend, target, draft, LoadOptions(threads=threads, context_size=1024, exact=exact))
    session = engine.target.open_session()
    metrics: dict[str, list[Metrics]] = defaultdict(list)
    ratios: dict[str, list[float]] = defaultdict(list)
    divergences: dict[str, list[dict[str, Any]]] = {name: [] for name in ARMS}
    for prompt in CODE[:prompts]:
        request = Request(prompt, SamplingParams(temperature=temperature), tokens, seed=1)
        plain = generate(engine, PLAIN, request)
        for name, speculation in ARMS.items():
            drafted = generate(engine, speculation, request)
            metrics[name].append(drafted.metrics)
            ratios[name].append((drafted.metrics.tokens_per_second or 0) / (plain.metrics.tokens_per_second or 1))
            divergences[name] += locate_divergence(engine, session, prompt, plain, drafted, greedy=temperature == 0)
    session.close()
    engine.close()
    arms = {name: summarize(metrics[name], ratios[name], divergences[name]) for name in ARMS}
    for name, summary in arms.items():
        click.echo(f"{name}: {summary}", err=True)
    options = {"backend": backend, "tokens": tokens, "threads": threads, "temperature": temperature, "exact": exact}
    print_result("parity", {**options, "arms": arms}, target, draft)


def locate_divergence(
    engine: Engine, session: Session, prompt: str, plain: Finished, drafted: Finished, *, greedy: bool
) -> list[dict[str, Any]]:
    """The first position where the outputs differ, with logit gap and noise; empty where they are equal."""
    fork = first_divergence(session, engine.encode(prompt), plain.tokens, drafted.tokens)
    if fork is None:
        return []
    near_tie = {"near_tie": fork.is_near_tie} if greedy else {}
    return [{"position": fork.position, "gap": round(fork.gap, 5), "noise": round(fork.noise, 5), **near_tie}]


def summarize(
    metrics: Sequence[Metrics], ratios: Sequence[float], divergences: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """One arm's row; alpha by depth is a mean over the prompts whose drafts reached that depth."""
    drafted, accepted = sum(m.drafted_tokens for m in metrics), sum(m.accepted_tokens for m in metrics)
    emitted, forwards = sum(m.emitted_tokens - 1 for m in metrics), sum(m.target_forwards for m in metrics)
    depths = range(max(len(m.alpha_by_depth) for m in metrics))
    alphas = [statistics.mean(m.alpha_by_depth[d] for m in metrics if len(m.alpha_by_depth) > d) for d in depths]
    return {
        "equal": len(metrics) - len(divergences),
        "of": len(metrics),
        "forks": divergences,
        "tau": round(emitted / forwards, 3),
        "acceptance_rate": round(accepted / max(drafted, 1), 3),
        "alpha_by_depth": [round(a, 2) for a in alphas],
        "speed_ratio_median": round(statistics.median(ratios), 2),
    }


if __name__ == "__main__":
    main()

"""edgespec on MLX beside mlx_lm's own generation: same weights, same prompts, one run.

    uv run python -m benchmarks.mlx_peer TARGET DRAFT [--tokens 64] [--bits 8] [--gamma 3] [--prompts 20]

TARGET and DRAFT are model folders; `--bits` converts them first (computed in single precision on a CPU, as everything
is there). For every prompt the arms take turns. Reported: greedy outputs against mlx_lm's plain generation, forks with
gap and noise; rounds a second (a round is one target forward), the median round of a prompt compared with mlx_lm's;
tokens a round at temperature 1 of each exact rule against mlx_lm's, which accepts while its samples match. stdout ends
with one JSON line.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from collections import defaultdict
from pathlib import Path
from time import perf_counter
from typing import Any

import click
import mlx.core as mx
import numpy as np

from benchmarks.machine import describe
from edgespec.backends.mlx.library import load_mlx
from edgespec.backends.mlx.model import MlxModel, load
from edgespec.backends.options import LoadOptions
from edgespec.bench.divergence import first_divergence
from edgespec.core.protocols import Step
from edgespec.core.sampling import SamplingParams
from edgespec.engine.drafting import Speculation
from edgespec.engine.engine import Engine
from edgespec.engine.events import Finished, Request
from edgespec.text.chat_template import encode_prompt
from tests.engine.prompts import CODE
from tests.mlx_models import quantized_copy

PLAIN = Speculation("none", 0, 0)


class Peer:
    """mlx_lm's generators on models loaded by mlx_lm."""

    def __init__(self, target: Path, draft: Path, gamma: int) -> None:
        from mlx_lm.utils import load_model

        self._models = [load_model(path)[0] for path in (target, draft)]
        if mx.default_device() != mx.gpu:
            for model in self._models:
                model.set_dtype(mx.float32)  # as edgespec does
                mx.eval(model.parameters())
        self._gamma = gamma

    def plain(self, prompt: list[int], tokens: int) -> tuple[list[int], list[float]]:
        """Tokens, and the time at the end of each round."""
        from mlx_lm.generate import generate_step

        found, at = [], []
        for token, _ in generate_step(mx.array(prompt), self._models[0], max_tokens=tokens):
            found.append(int(token))
            at.append(perf_counter())
        return found, at

    def speculative(self, prompt: list[int], tokens: int, temperature: float) -> tuple[list[int], list[float]]:
        from mlx_lm.generate import speculative_generate_step
        from mlx_lm.sample_utils import make_sampler

        steps = speculative_generate_step(
            mx.array(prompt),
            *self._models,
            num_draft_tokens=self._gamma,
            max_tokens=tokens,
            sampler=make_sampler(temp=temperature) if temperature else None,
        )
        found, at = [], []
        for token, _, from_draft in steps:
            found.append(int(token))
            if not from_draft:
                at.append(perf_counter())
        return found, at


def ours(
    engine: Engine, speculation: Speculation, prompt: str, tokens: int, temperature: float, seed: int
) -> tuple[Finished, list[float]]:
    """The same of edgespec, prefill's token left out of the rounds."""
    engine.speculation = speculation
    at = []
    for event in engine.stream(Request(prompt, SamplingParams(temperature=temperature), tokens, seed)):
        if isinstance(event, Step) and event.index:
            at.append(event.at_s)
    assert isinstance(event, Finished)
    return event, at


@click.command()
@click.argument("target", type=click.Path(exists=True, path_type=Path))
@click.argument("draft", type=click.Path(exists=True, path_type=Path))
@click.option("--tokens", default=64, show_default=True)
@click.option("--gamma", default=3, show_default=True)
@click.option("--bits", type=click.Choice(["3", "4", "6", "8"]), help="Quantize both first.")
@click.option("--prompts", default=len(CODE), show_default=True)
@click.option("--sampled/--no-sampled", default=True, show_default=True, help="Compare acceptance at temperature 1.")
def main(target: Path, draft: Path, tokens: int, gamma: int, bits: str | None, prompts: int, sampled: bool) -> None:
    load_mlx()
    with tempfile.TemporaryDirectory() as folder:
        if bits:
            target, draft = (quantized_copy(p, Path(folder) / p.name, int(bits)) for p in (target, draft))
        result = measure(target, draft, tokens, gamma, prompts, sampled)
    click.echo(json.dumps({"benchmark": "mlx_peer", "tokens": tokens, "gamma": gamma, "bits": bits, **result}))


def measure(target: Path, draft: Path, tokens: int, gamma: int, n_prompts: int, sampled: bool) -> dict[str, Any]:
    models = [load(path, LoadOptions(context_size=1024)) for path in (target, draft)]
    engine, peer = Engine(models[0], models[1], PLAIN), Peer(target, draft, gamma)
    chain, tree = Speculation("model", gamma, gamma), Speculation("model", gamma, 2 * gamma)
    ratios: dict[str, list[float]] = defaultdict(list)
    forks: dict[str, list[dict[str, object]]] = {name: [] for name in ("plain", "chain", "tree", "ngram", "peer chain")}
    per_round: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for n, text in enumerate(CODE[:n_prompts]):
        prompt = encode_prompt(models[0].tokenizer, text, parse_special=True)
        expected, peer_plain = peer.plain(prompt, tokens)
        out, our_plain = ours(engine, PLAIN, text, tokens, 0, 0)
        found, peer_chain = peer.speculative(prompt, tokens, 0)
        drafted, our_chain = ours(engine, chain, text, tokens, 0, 0)
        outputs = {"plain": out, "chain": drafted} | {
            name: ours(engine, speculation, text, tokens, 0, 0)[0]
            for name, speculation in (("tree", tree), ("ngram", Speculation("ngram", gamma, gamma)))
        }
        emitted = {name: out.tokens for name, out in outputs.items()} | {"peer chain": tuple(found)}
        for name, told in emitted.items():
            if fork := first_divergence(models[0].open_session(), prompt, expected, told):
                forks[name].append(
                    {"position": fork.position, "gap": fork.gap, "noise": fork.noise, "near": fork.is_near_tie}
                )
        if sampled:
            count(per_round, models[0], engine, peer, text, prompt, tokens, gamma, n)
        if min(len(at) for at in (peer_plain, our_plain, peer_chain, our_chain)) < 8:
            continue  # the text ended early
        ratios["plain rounds/s"].append(round_s(peer_plain) / round_s(our_plain))
        ratios["chain rounds/s"].append(round_s(peer_chain) / round_s(our_chain))
        ratios["our chain's tokens/s to our plain's"].append(speed(drafted) / speed(out))
        click.echo(f"{n + 1}/{n_prompts} " + ", ".join(f"{k} {v[-1]:.2f}" for k, v in ratios.items()), err=True)
    return {
        "ratios_to_mlx_lm": {name: summary(values) for name, values in ratios.items()},
        "equal_to_mlx_lm_plain": {name: f"{n_prompts - len(found)}/{n_prompts}" for name, found in forks.items()},
        "forks": forks,
        "tokens_per_round_at_temperature_1": {name: round(a / b, 3) for name, (a, b) in per_round.items()},
        **describe(target, draft),
    }


def count(
    totals: dict[str, list[int]], model: MlxModel, engine: Engine, peer: Peer, text: str, prompt: list[int],
    tokens: int, gamma: int, seed: int,
) -> None:  # fmt: skip
    """Add tokens and rounds of one prompt at temperature 1, for each rule."""
    mx.random.seed(seed)
    found, at = peer.speculative(prompt, tokens, 1.0)
    sums = [("mlx_lm, match", len(found), len(at))]
    for rule in ("sample", "rejection", "block"):
        metrics = ours(engine, Speculation("model", gamma, gamma, rule), text, tokens, 1.0, seed)[0].metrics
        sums.append((rule, metrics.emitted_tokens - 1, metrics.target_forwards))
    for name, emitted, forwards in sums:
        totals[name][0] += emitted
        totals[name][1] += forwards


def speed(finished: Finished) -> float:
    return finished.metrics.tokens_per_second or float("nan")


def round_s(at: list[float]) -> float:
    """Median seconds of a round; the first ones, which open the pipeline, left out."""
    return statistics.median(np.diff(at[2:]))


def summary(values: list[float]) -> dict[str, float]:
    low, middle, high = np.percentile(values, [25, 50, 75])
    return {"median": round(float(middle), 3), "p25": round(float(low), 3), "p75": round(float(high), 3),
            "mean": round(statistics.mean(values), 3)}  # fmt: skip


if __name__ == "__main__":
    main()

"""edgespec on MLX compared with mlx_lm's own generation: the same weights and prompts in one run.

    uv run python -m benchmarks.mlx_peer TARGET DRAFT [--tokens 64] [--bits 8] [--draft-max 3] [--prompts 20]

TARGET and DRAFT are model folders; `--bits` quantizes both first. The arms of a prompt take turns. The first figure is
whether greedy outputs equal mlx_lm's plain generation, with the gap and noise of each divergence. The next are the
median time of a round (one target forward) over mlx_lm's, and the tokens/s of the autopilot, which is the default, over
those of mlx_lm's chain. The last is tokens a round at temperature 1, for each exact rule and for mlx_lm's, which
accepts while its samples match. On a CPU both sides compute in single precision. stdout ends with one JSON line.
"""

from __future__ import annotations

import statistics
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

import click
import mlx.core as mx
import numpy as np

from benchmarks.harness import CODE, PLAIN, load_pair, print_result
from benchmarks.peers_arms import load_mlx_lm
from edgespec.autopilot.speculation import Speculation
from edgespec.backends.mlx.library import load_mlx
from edgespec.backends.options import LoadOptions
from edgespec.bench.divergence import first_divergence
from edgespec.core.protocols import Step
from edgespec.core.sampling import SamplingParams
from edgespec.engine.engine import Engine
from edgespec.engine.events import Finished, Request

RULES = ("sample", "rejection", "block")
MIN_ROUNDS = 8  # a text that ends earlier is not timed
ADAPTIVE = Speculation(("ngram", "model"))


@dataclass(frozen=True, slots=True)
class PeerText:
    """Tokens of mlx_lm; for each round the time at its end, and the number of tokens by then."""

    tokens: list[int]
    ends: list[float]
    counts: list[int]

    @property
    def tokens_per_second(self) -> float:
        """After the first round."""
        return (self.counts[-1] - self.counts[0]) / (self.ends[-1] - self.ends[0])


class MlxLmPair:
    """mlx_lm's generators on models that mlx_lm has loaded."""

    def __init__(self, target: Path, draft: Path, draft_max: int) -> None:
        self._models = load_mlx_lm([target, draft])
        self._draft_max = draft_max

    def generate_plain(self, prompt: list[int], tokens: int) -> tuple[list[int], list[float]]:
        """The tokens, and the time at the end of each round."""
        from mlx_lm.generate import generate_step

        text, ends = [], []
        for token, _ in generate_step(mx.array(prompt), self._models[0], max_tokens=tokens):
            text.append(int(token))
            ends.append(perf_counter())
        return text, ends

    def generate_drafted(self, prompt: list[int], tokens: int, temperature: float) -> PeerText:
        """The same by speculative decoding."""
        from mlx_lm.generate import speculative_generate_step
        from mlx_lm.sample_utils import make_sampler

        steps = speculative_generate_step(
            mx.array(prompt),
            *self._models,
            num_draft_tokens=self._draft_max,
            max_tokens=tokens,
            sampler=make_sampler(temp=temperature) if temperature else None,
        )
        found = PeerText([], [], [])
        for token, _, from_draft in steps:
            found.tokens.append(int(token))
            if not from_draft:
                found.ends.append(perf_counter())
                found.counts.append(len(found.tokens))
        return found


@dataclass
class Comparison:
    """Results of the prompts so far; `rounds` is (tokens, rounds) at temperature 1."""

    engine: Engine
    pair: MlxLmPair
    tokens: int
    draft_max: int
    ratios: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    divergences: dict[str, list[dict[str, Any]]] = field(default_factory=lambda: defaultdict(list))
    rounds: dict[str, tuple[int, int]] = field(default_factory=lambda: defaultdict(lambda: (0, 0)))

    def compare_greedy(self, text: str) -> None:
        """Add one prompt's divergences and, where the text is long enough, its ratios."""
        prompt = self.engine.encode(text)
        chain = Speculation(("model",), self.draft_max, self.draft_max)
        reference, peer_plain_ends = self.pair.generate_plain(prompt, self.tokens)
        plain, plain_ends = self._generate(PLAIN, text)
        peer_chain = self.pair.generate_drafted(prompt, self.tokens, 0)
        drafted, chain_ends = self._generate(chain, text)
        tree = self._generate(Speculation(("model",), self.draft_max, 2 * self.draft_max), text)[0]
        ngram = self._generate(Speculation(("ngram",), self.draft_max, self.draft_max), text)[0]
        adaptive = self._generate(ADAPTIVE, text)[0]
        finished = {"plain": plain, "chain": drafted, "tree": tree, "ngram": ngram, "autopilot": adaptive}
        outputs = {name: each.tokens for name, each in finished.items()}
        for name, output in {**outputs, "peer chain": tuple(peer_chain.tokens)}.items():
            self._compare_output(name, prompt, reference, output)
        if min(map(len, (peer_plain_ends, plain_ends, peer_chain.ends, chain_ends))) < MIN_ROUNDS:
            return
        self.ratios["plain rounds/s"].append(median_round_s(peer_plain_ends) / median_round_s(plain_ends))
        self.ratios["chain rounds/s"].append(median_round_s(peer_chain.ends) / median_round_s(chain_ends))
        speeds = {name: each.metrics.tokens_per_second or float("nan") for name, each in finished.items()}
        self.ratios["our chain's tokens/s to our plain's"].append(speeds["chain"] / speeds["plain"])
        self.ratios["our autopilot's tokens/s to our plain's"].append(speeds["autopilot"] / speeds["plain"])
        self.ratios["our autopilot's tokens/s to the peer chain's"].append(
            speeds["autopilot"] / peer_chain.tokens_per_second
        )

    def compare_sampled(self, text: str, seed: int) -> None:
        """Add one prompt's tokens and rounds at temperature 1, for each rule."""
        mx.random.seed(seed)
        output = self.pair.generate_drafted(self.engine.encode(text), self.tokens, 1.0)
        self._count("mlx_lm, match", len(output.tokens), len(output.ends))
        for rule in RULES:
            speculation = Speculation(("model",), self.draft_max, self.draft_max, rule)  # type: ignore[arg-type]
            metrics = self._generate(speculation, text, 1.0, seed)[0].metrics
            self._count(rule, metrics.emitted_tokens - 1, metrics.target_forwards)

    def summarize(self, n_prompts: int) -> dict[str, Any]:
        """The JSON result."""
        return {
            "ratios_to_mlx_lm": {name: quartiles(values) for name, values in self.ratios.items()},
            "equal_to_mlx_lm_plain": {
                name: f"{n_prompts - len(each)}/{n_prompts}" for name, each in self.divergences.items()
            },
            "forks": self.divergences,
            "tokens_per_round_at_temperature_1": {name: round(a / b, 3) for name, (a, b) in self.rounds.items()},
        }

    def _generate(
        self, speculation: Speculation, text: str, temperature: float = 0, seed: int = 0
    ) -> tuple[Finished, list[float]]:
        """The last event, and the end of each round after prefill."""
        self.engine.speculation = speculation
        ends = []
        for event in self.engine.stream(Request(text, SamplingParams(temperature=temperature), self.tokens, seed)):
            if isinstance(event, Step) and event.index:
                ends.append(event.at_s)
        assert isinstance(event, Finished)
        return event, ends

    def _compare_output(self, name: str, prompt: list[int], reference: Sequence[int], output: Sequence[int]) -> None:
        found = self.divergences[name]
        with closing(self.engine.target.open_session()) as session:
            fork = first_divergence(session, prompt, reference, output)
        if fork:
            found.append({"position": fork.position, "gap": fork.gap, "noise": fork.noise, "near": fork.is_near_tie})

    def _count(self, rule: str, emitted: int, forwards: int) -> None:
        before = self.rounds[rule]
        self.rounds[rule] = (before[0] + emitted, before[1] + forwards)


@click.command()
@click.argument("target", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("draft", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--tokens", type=click.IntRange(2), default=64, show_default=True)
@click.option("--draft-max", "draft_max", type=click.IntRange(1), default=3, show_default=True)
@click.option("--bits", type=click.Choice(["3", "4", "6", "8"]), help="Quantize both first.")
@click.option("--prompts", type=click.IntRange(1, len(CODE)), default=len(CODE), show_default=True)
@click.option("--sampled/--no-sampled", default=True, show_default=True, help="Compare acceptance at temperature 1.")
def main(target: Path, draft: Path, tokens: int, draft_max: int, bits: str | None, prompts: int, sampled: bool) -> None:
    """Compare both programs on the model folders TARGET and DRAFT."""
    load_mlx()
    with tempfile.TemporaryDirectory() as folder:
        if bits:
            target, draft = (quantize(path, Path(folder) / path.name, int(bits)) for path in (target, draft))
        engine = load_pair("mlx", target, draft, LoadOptions(context_size=1024))
        comparison = Comparison(engine, MlxLmPair(target, draft, draft_max), tokens, draft_max)
        for n, text in enumerate(CODE[:prompts]):
            comparison.compare_greedy(text)
            if sampled:
                comparison.compare_sampled(text, n)
            latest = ", ".join(f"{name} {values[-1]:.2f}" for name, values in comparison.ratios.items())
            click.echo(f"{n + 1}/{prompts} {latest}", err=True)
        settings = {"tokens": tokens, "gamma": draft_max, "bits": bits}
        print_result("mlx_peer", {**settings, **comparison.summarize(prompts)}, target, draft)


def quantize(source: Path, path: Path, bits: int) -> Path:
    """Convert a model folder with mlx_lm, computing in single precision."""
    from mlx_lm import convert

    convert(str(source), str(path), quantize=True, q_group_size=32, q_bits=bits, dtype="float32")
    return path


def median_round_s(ends: Sequence[float]) -> float:
    """Without the first rounds, which fill the pipeline."""
    return float(np.median(np.diff(ends[2:])))


def quartiles(values: Sequence[float]) -> dict[str, float]:
    low, middle, high = (round(float(each), 3) for each in np.percentile(values, [25, 50, 75]))
    return {"median": middle, "p25": low, "p75": high, "mean": round(statistics.mean(values), 3)}


if __name__ == "__main__":
    main()

"""What speculation gains over llama.cpp workers on a slow network, against the formula.

    uv run python -m benchmarks.workers [--target 1b.gguf] [--draft 100m.gguf] [--workers 1] [--rtt-ms 5 ...]

The workers and the model are processes of one thread on hosts of `benchmarks.slow_link`. For each delay the model
continues code, plainly and with drafts of a fixed length, in turns; with --autopilot by its choice too. Texts that are
not those of the model in one process are counted, and those among them that rounding explains. The formula is E (T1 +
N) / (R + N). T1 and R are the times without a delay, of a plain step and of a round (verification and draft). E is
tokens a round. N is the network's time, one measured round trip for each worker. stdout ends with one JSON line. Linux,
and rights to make network namespaces.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from statistics import median
from typing import Any

import click

from benchmarks.harness import (
    CODE,
    DRAFT,
    EDGESPEC,
    MODEL_PATH,
    PLAIN,
    TARGET,
    ask,
    count_near_ties,
    end,
    generate,
    generate_rounds,
    list_loaded,
    load_model,
    print_result,
)
from benchmarks.slow_link import SlowLink, find_obstacle
from edgespec.autopilot.speculation import Speculation
from edgespec.autopilot.stats import DraftStats
from edgespec.backends.options import LoadOptions
from edgespec.core.sampling import SamplingParams
from edgespec.engine.engine import Engine
from edgespec.engine.events import Request

_CLIENT = "client"  # the first argument of the process that has the model
_PORT = 50052
_PROFILE_S = 2.0


@click.command()
@click.option("--target", type=MODEL_PATH, default=TARGET, help="[default: the embedded target]")
@click.option("--draft", type=MODEL_PATH, default=DRAFT, help="[default: the embedded draft]")
@click.option("--workers", "count", type=click.IntRange(1, 8), default=1, show_default=True)
@click.option(
    "--rtt-ms", "delays_ms", type=click.FloatRange(0), multiple=True, default=(0.1, 1, 5, 20), show_default=True
)
@click.option(
    "--loss", type=click.FloatRange(0, 0.5), default=0.0, show_default=True, help="Of packets, with each delay."
)
@click.option("--short-packets", is_flag=True, help="Packets of 1,500 bytes, as with --loss, not of 65,000.")
@click.option("--draft-max", type=click.IntRange(1), default=3, show_default=True)
@click.option("--autopilot", is_flag=True, help="Measure its choice too.")
@click.option("--prompts", type=click.IntRange(1, len(CODE)), default=4, show_default=True)
@click.option("--tokens", type=click.IntRange(2), default=48, show_default=True)
@click.option("--repeats", type=click.IntRange(1), default=3, show_default=True)
def main(
    target: Path, draft: Path, count: int, delays_ms: Sequence[float], loss: float, short_packets: bool, **sizes: Any
) -> None:
    """Compare plain and speculative decoding by delay."""
    if reason := find_obstacle():
        raise click.ClickException(f"There is no slow network: {reason}.")
    with SlowLink(1 + count, is_lossy=short_packets or loss > 0) as link, ExitStack() as stack:
        addresses = [link.address(host) for host in range(1, 1 + count)]
        for host, address in enumerate(addresses, 1):
            options = ["worker", "--host", address, "--port", str(_PORT), "--threads", "1", "--trust-network"]
            stack.callback(end, subprocess.Popen(link.command(host, [*EDGESPEC, *options]), stdout=subprocess.DEVNULL))
            _wait_for(link, address)
        words = [str(target), str(draft), ",".join(addresses), json.dumps(sizes)]
        client = subprocess.Popen(
            link.command(0, [sys.executable, "-m", "benchmarks.workers", _CLIENT, *words]),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        stack.callback(end, client)
        rows: list[dict[str, Any]] = []
        ask(client)  # the first forwards take longer
        for delay_ms in (0.0, *delays_ms):
            link.set(delay_ms / 1000, loss if delay_ms else 0.0)
            rows.append({"set_ms": delay_ms, "rtt_ms": 1000 * link.measure_rtt(), **ask(client)})
            _add_formula(rows[-1], rows[0], count)
            click.echo(rows[-1], err=True)
    sizes |= {"workers": count, "loss": loss, "short_packets": short_packets or loss > 0}
    print_result("workers", {**sizes, "delays": rows}, target, draft)


def _wait_for(link: SlowLink, address: str) -> None:
    program = f"from edgespec.machines.workers import ask_worker; ask_worker('{address}:{_PORT}')"
    for _ in range(100):
        command = link.command(0, [sys.executable, "-c", program])
        if subprocess.run(command, capture_output=True, check=False).returncode == 0:
            return
    raise click.ClickException(f"the worker at {address} does not answer.")


def _add_formula(row: dict[str, Any], first: dict[str, Any], count: int) -> None:
    """The gain that the formula gives for a row, from the first one, which has no delay."""
    network_s = count * (row["rtt_ms"] - first["rtt_ms"]) / 1000
    step_s, round_s, tokens = first["plain"]["round_s"], first["drafts"]["round_s"], row["drafts"]["tokens_per_round"]
    row["formula_gain"] = tokens * (step_s + network_s) / (round_s + network_s)


def _serve(target: str, draft: str, addresses: str, sizes: str) -> None:
    """Load the model over the workers, then measure once for each line of the input."""
    options = LoadOptions(context_size=1024, threads=1)
    workers = tuple(f"{address}:{_PORT}" for address in addresses.split(","))
    divided = LoadOptions(context_size=1024, threads=1, workers=workers, trusts_network=True)
    with ExitStack() as stack:
        pair = list_loaded(model=load_model("llamacpp", Path(draft), options))
        alone = stack.enter_context(closing(Engine(load_model("llamacpp", Path(target), options), [], PLAIN)))
        engine = stack.enter_context(closing(Engine(load_model("llamacpp", Path(target), divided), pair, PLAIN)))
        client = Client(engine, alone, **json.loads(sizes))
        for _ in sys.stdin:
            print(json.dumps(client.measure()), flush=True)


class Client:
    """A model over several machines, and what it says in one process."""

    def __init__(
        self, engine: Engine, alone: Engine, draft_max: int, autopilot: bool, prompts: int, tokens: int, repeats: int
    ) -> None:
        self._engine, self._repeats, self._has_autopilot = engine, repeats, autopilot
        self._requests = [Request(text, SamplingParams(temperature=0.0), tokens) for text in CODE[:prompts]]
        self._texts = [generate(alone, PLAIN, request).tokens for request in self._requests]
        self._prompts = [alone.encode(text) for text in CODE[:prompts]]
        self._session = alone.target.open_session()
        self._arms = {"plain": PLAIN, "drafts": Speculation(("model",), draft_max)}
        if autopilot:
            self._arms["autopilot"] = Speculation(("ngram", "model"))

    def measure(self) -> dict[str, Any]:
        """By arm, the medians of tokens/s, seconds a round and paired gain; and how many texts are equal."""
        if self._has_autopilot:
            self._engine.draft_stats = DraftStats(self._engine.measure(_PROFILE_S))
        speeds: dict[str, list[float]] = {name: [] for name in self._arms}
        rounds: dict[str, list[float]] = {name: [] for name in self._arms}
        tokens: dict[str, list[float]] = {name: [] for name in self._arms}
        others: list[tuple[list[int], Sequence[int], Sequence[int]]] = []  # the prompt, its text, the other text
        for _ in range(self._repeats):
            for name, speculation in self._arms.items():
                seconds, n_tokens, n_rounds = 0.0, 0, 0
                for i, request in enumerate(self._requests):
                    finished, steps = generate_rounds(self._engine, speculation, request)
                    n = sum(len(step.tokens) for step in steps)
                    seconds += (finished.metrics.tpot_s or 0.0) * n
                    n_tokens, n_rounds = n_tokens + n, n_rounds + len(steps)
                    if finished.tokens != self._texts[i]:
                        others.append((self._prompts[i], self._texts[i], finished.tokens))
                speeds[name].append(n_tokens / seconds)
                rounds[name].append(seconds / n_rounds)
                tokens[name].append(n_tokens / n_rounds)
        texts = self._repeats * len(self._arms) * len(self._requests)
        near_ties = count_near_ties(self._session, others)
        result: dict[str, Any] = {"texts": texts, "other_texts": len(others), "near_ties": near_ties}
        for name in self._arms:
            gains = [speed / plain for speed, plain in zip(speeds[name], speeds["plain"], strict=True)]
            result[name] = {
                "tokens_per_second": median(speeds[name]),
                "round_s": median(rounds[name]),
                "tokens_per_round": median(tokens[name]),
                "gain": median(gains),
            }
        return result


if __name__ == "__main__":
    if sys.argv[1:2] == [_CLIENT]:
        _serve(*sys.argv[2:])
    else:
        main()

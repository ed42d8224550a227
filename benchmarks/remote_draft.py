"""A draft on another machine behind a slow network: tokens/s by delay, and an answer whose draft server is killed.

    uv run python -m benchmarks.remote_draft [--target 1b.gguf] [--draft 100m.gguf] [--rtt-ms 5 ...] [--loss 0.05]

The draft server, with one thread, and the target are processes on two hosts of `benchmarks.slow_link`. For each delay
the target continues code in turns: plainly, with the draft in its own process ("local"), with the one of the server
("remote"), and by the autopilot's choice ("autopilot"). Drafts otherwise have a fixed length. A gain is the median over
the repeats of tokens/s over plain decoding's. "draft_ms" is the mean of a drafted round.

Texts that are not plain decoding's are counted, and those among them that rounding explains. At last the server is
killed in the middle of an answer, and started again while another one is generated. stdout ends with one JSON line.
Linux, and rights to make network namespaces.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import mean, median
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
    load_model,
    print_result,
)
from benchmarks.slow_link import SlowLink, find_obstacle
from edgespec.backends.options import LoadOptions
from edgespec.controller.stats import DraftStats
from edgespec.core.protocols import Step
from edgespec.core.sampling import SamplingParams
from edgespec.drafters import drafter_specs
from edgespec.drafters.remote import RemoteDraft, parse_address
from edgespec.engine.drafting import LoadedDrafter, Speculation
from edgespec.engine.engine import Engine
from edgespec.engine.events import Event, Finished, Notice, Request
from edgespec.errors import EdgespecError

_CLIENT = "client"  # the first argument of the process that has the target
_PORT = 7438
_PROFILE_S = 2.0
_KILL_RTT_S = 0.005


@click.command()
@click.option("--target", type=MODEL_PATH, default=TARGET, help="[default: the embedded target]")
@click.option("--draft", type=MODEL_PATH, default=DRAFT, help="[default: the embedded draft]")
@click.option(
    "--rtt-ms", "delays_ms", type=click.FloatRange(0), multiple=True, default=(0.1, 1, 5, 20), show_default=True
)
@click.option(
    "--loss", type=click.FloatRange(0, 0.5), default=0.0, show_default=True, help="Of packets, with each delay."
)
@click.option(
    "--threads", type=click.IntRange(1), default=1, show_default=True, help="Of the target; those of the draft are one."
)
@click.option("--draft-max", type=click.IntRange(1), default=3, show_default=True)
@click.option("--temperature", type=click.FloatRange(0), default=0.0, show_default=True)
@click.option("--prompts", type=click.IntRange(1, len(CODE)), default=4, show_default=True)
@click.option("--tokens", type=click.IntRange(2), default=48, show_default=True)
@click.option("--repeats", type=click.IntRange(1), default=3, show_default=True)
def main(target: Path, draft: Path, delays_ms: Sequence[float], loss: float, threads: int, **sizes: Any) -> None:
    """Compare plain decoding, a local draft and a remote one by delay."""
    if reason := find_obstacle():
        raise click.ClickException(f"There is no slow network: {reason}.")
    with SlowLink(is_lossy=loss > 0) as link, ExitStack() as stack:
        servers = [stack.enter_context(closing(_Server(link, draft)))]
        words = [str(target), str(draft), link.address(1), str(threads), json.dumps(sizes)]
        client = subprocess.Popen(
            link.command(0, [sys.executable, "-m", "benchmarks.remote_draft", _CLIENT, *words]),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        stack.callback(end, client)
        rows: list[dict[str, Any]] = []
        for delay_ms in delays_ms:
            link.set(delay_ms / 1000, loss)
            rows.append({"set_ms": delay_ms, "rtt_ms": 1000 * link.measure_rtt(), **ask(client, "measure")})
            click.echo(rows[-1], err=True)
        link.set(_KILL_RTT_S)
        ask(client, "begin")
        servers[0].close()
        killed = ask(client, "finish")
        ask(client, "begin")
        servers.append(stack.enter_context(closing(_Server(link, draft))))
        restarted = ask(client, "finish")
    sizes["threads"] = threads
    print_result("remote_draft", {**sizes, "loss": loss, "delays": rows, "killed": killed, "restarted": restarted},
                 target, draft)  # fmt: skip


class _Server:
    """`edgespec draft serve` on host 1, when it listens."""

    def __init__(self, link: SlowLink, draft: Path) -> None:
        options = ["--host", link.address(1), "--no-key", "--threads", "1", "--port", str(_PORT)]
        command = link.command(1, [*EDGESPEC, "draft", "serve", str(draft), *options])
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        assert self._process.stdout is not None
        if "Serving" not in self._process.stdout.readline():
            raise click.ClickException("the draft server did not start.")

    def close(self) -> None:
        end(self._process)


def _run_client(target: str, draft: str, address: str, threads: str, sizes: str) -> None:
    """Load the target, then do what each line of the input says."""
    options, specs = LoadOptions(context_size=1024, threads=1), drafter_specs()
    url = parse_address(f"http://{address}:{_PORT}")
    with ExitStack() as stack:
        model = load_model("llamacpp", Path(target), replace(options, threads=int(threads)))
        local = LoadedDrafter(specs["model"], "local", load_model("llamacpp", Path(draft), options))
        engine = Engine(model, [local, LoadedDrafter(specs["remote"], "remote", RemoteDraft(url))], PLAIN)
        stack.callback(engine.release_draft)
        client = _Client(engine, **json.loads(sizes))
        for line in sys.stdin:
            print(json.dumps(getattr(client, line.strip())()), flush=True)


@dataclass
class _Counts:
    """Of the answers of one arm: tokens/s of each repeat; of all rounds the seconds of drafting and their number."""

    speeds: list[float] = field(default_factory=list)
    draft_s: list[float] = field(default_factory=list)
    tokens: int = 0
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0

    def describe(self, plain: _Counts) -> dict[str, float]:
        gains = [ours / theirs for ours, theirs in zip(self.speeds, plain.speeds, strict=True)]
        return {
            "tokens_per_second": median(self.speeds),
            "gain": median(gains),
            "tokens_per_round": self.tokens / self.rounds,
            "accepted": self.accepted / max(1, self.drafted),
            "drafted_rounds": len(self.draft_s) / self.rounds,
            "draft_ms": 1000 * mean(self.draft_s or [0.0]),
        }


class _Client:
    """The target's process."""

    def __init__(
        self, engine: Engine, draft_max: int, temperature: float, prompts: int, tokens: int, repeats: int
    ) -> None:
        self._arms = {
            "plain": PLAIN,
            "local": Speculation(("model",), draft_max),
            "remote": Speculation(("remote",), draft_max),
            "autopilot": Speculation(("remote",)),
        }
        self._engine, self._repeats = engine, repeats
        self._requests = [Request(text, SamplingParams(temperature), tokens, seed=None if temperature else 1)
                          for text in CODE[:prompts]]  # fmt: skip
        self._texts = [generate(self._engine, PLAIN, each).tokens for each in self._requests]
        self._prompts = [self._engine.encode(text) for text in CODE[:prompts]]
        self._session = self._engine.target.open_session(lambda: None)
        self._is_greedy = temperature == 0
        self._long = Request(CODE[0], SamplingParams(0.0), 3 * tokens)
        self._events: Iterator[Event] = iter(())
        self._seen: list[Event] = []

    def measure(self) -> dict[str, Any]:
        """By arm what _Counts describes, and how many texts are equal."""
        self._engine.draft_stats = DraftStats(self._engine.measure(_PROFILE_S))
        counts = {name: _Counts() for name in self._arms}
        others: list[tuple[list[int], Sequence[int], Sequence[int]]] = []
        for _ in range(self._repeats):
            for name, speculation in self._arms.items():
                n, seconds = 0, 0.0
                for i, request in enumerate(self._requests):
                    finished, rounds = generate_rounds(self._engine, speculation, request)
                    n += sum(len(step.tokens) for step in rounds)
                    seconds += rounds[-1].at_s - rounds[0].at_s if len(rounds) > 1 else 0.0
                    n -= len(rounds[0].tokens)
                    _count(counts[name], rounds)
                    if self._is_greedy and finished.tokens != self._texts[i]:
                        others.append((self._prompts[i], self._texts[i], finished.tokens))
                counts[name].speeds.append(n / seconds)
        near_ties = count_near_ties(self._session, others)
        texts = self._repeats * len(self._arms) * len(self._requests) * self._is_greedy
        result: dict[str, Any] = {"texts": texts, "other_texts": len(others), "near_ties": near_ties}
        return result | {name: each.describe(counts["plain"]) for name, each in counts.items()}

    def begin(self) -> dict[str, Any]:
        """Generate a quarter of an answer with remote drafts of a fixed length."""
        self._engine.speculation = self._arms["remote"]
        self._events, self._seen = self._engine.stream(self._long), []
        while sum(isinstance(event, Step) for event in self._seen) < (self._long.max_tokens or 0) // 12:
            self._seen.append(next(self._events))
        return {}

    def finish(self) -> dict[str, Any]:
        """The rest of that answer: whether it is plain decoding's, and what the user is told."""
        before, slowest, at = len(self._seen), 0.0, time.perf_counter()
        for event in self._events:
            if isinstance(event, Step):
                slowest, at = max(slowest, event.at_s - at), event.at_s
            self._seen.append(event)
        finished = self._seen[-1]
        assert isinstance(finished, Finished)
        plain = generate(self._engine, PLAIN, self._long)
        after = [event for event in self._seen[before:] if isinstance(event, Step)]
        is_equal = count_near_ties(self._session, [(self._prompts[0], plain.tokens, finished.tokens)]) == 1
        return {
            "equal": is_equal,
            "drafted_before": sum(event.n_drafted for event in self._seen[:before] if isinstance(event, Step)),
            "drafted_after": sum(step.n_drafted for step in after),
            "slowest_round_s": slowest,
            "plain_round_s": plain.metrics.tpot_s,
            "notices": [event.text for event in self._seen if isinstance(event, Notice)],
        }


def _count(counts: _Counts, rounds: Sequence[Step]) -> None:
    counts.tokens += sum(len(step.tokens) for step in rounds)
    counts.rounds += len(rounds)
    counts.drafted += sum(step.n_drafted for step in rounds)
    counts.accepted += sum(step.n_accepted for step in rounds)
    counts.draft_s += [step.draft_s for step in rounds if step.n_drafted]


if __name__ == "__main__":
    try:
        if sys.argv[1:2] == [_CLIENT]:
            _run_client(*sys.argv[2:])
        else:
            main()
    except EdgespecError as error:
        sys.exit(f"{error.message} {error.hint}")

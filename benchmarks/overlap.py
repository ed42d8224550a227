"""Drafting while the target verifies: what it costs both models, a time line, and tokens/s with and without it.

    uv run python -m benchmarks.overlap [--target T --draft D] [--drafts right --drafts wrong] [--length 3] \
        [--prompts 6] [--tokens 64] [--repeats 2] [--threads 1] [--draft-threads 1] [--cores 1 3] \
        [--gpu-layers N --draft-gpu-layers 0]

A fixed length drafts, alone and with `benchmarks.ahead`, after which the draft model goes on in a thread while the
target verifies. All arms run each prompt in alternating order, greedily. A ratio is the median over the texts of plain
decoding's seconds for a token over the arm's, without those of the first rounds. "wall" is by the clock. "busy" counts
the processor time of the thread that runs the target, and the time in which it waited for the other one; other programs
change it less than "wall". It means nothing with more threads or on a device. "waited_ms" is the mean of those waits.

The wrong draft is as sure as the right one. With --cores the target's thread and the draft's each stay on one. With
--exact greedy texts have to be equal. The costs and the time line of a few rounds go to stderr. stdout ends with one
JSON line.
"""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from time import perf_counter, thread_time
from typing import Any

import click

from benchmarks.ahead import AheadDrafter, AheadSession, TruncatedSession
from benchmarks.harness import DRAFT, MODEL_PATH, TARGET, load_model, print_result
from benchmarks.promise import shift_head, take_in_turn
from edgespec.autopilot.fixed import FixedLength
from edgespec.backends import Model
from edgespec.backends.options import LoadOptions
from edgespec.core.decoding import decode_one, read_prompt
from edgespec.core.loop import speculate
from edgespec.core.protocols import NO_DRAFT, Budget, Draft, Session, Step
from edgespec.core.rng import CounterRng
from edgespec.core.sampling import Sampler, SamplingParams
from edgespec.core.verify import SampleMatching
from edgespec.drafters.sequential import SequentialDrafter
from edgespec.text.chat_template import encode_prompt

ROWS = (1, 2, 4, 8)
TIMES = 12  # of a forward, for its costs
FILLED = 64  # tokens of context
FIRST = 3  # the first step that counts: the draft model has read the prompt
SHOWN = 6  # rounds of the time line
WIDTH = 60  # characters of its lanes


@dataclass
class Arm:
    """One way to decode, and what was counted of it. Seconds are for a token."""

    name: str
    length: int
    session: AheadSession | TruncatedSession | None = None
    seconds: list[tuple[float, float] | None] = field(default_factory=list)  # wall and busy, of each text that counts
    texts: list[list[int]] = field(default_factory=list)
    rounds: int = 0
    emitted: int = 0
    drafted: int = 0
    accepted: int = 0

    def summarize(self, plain: Arm) -> dict[str, Any]:
        pairs = [(a, b) for a, b in zip(plain.seconds, self.seconds, strict=True) if a and b]
        if not pairs:
            raise click.ClickException(f"no text lasted for more than {FIRST} rounds; give more --tokens.")
        found = {
            "wall": median(a[0] / b[0] for a, b in pairs),
            "busy": median(a[1] / b[1] for a, b in pairs),
            "tokens_per_round": self.emitted / self.rounds,
            "accepted": self.accepted / max(1, self.drafted),
            "equal": sum(a == b for a, b in zip(plain.texts, self.texts, strict=True)) / len(self.texts),
        }
        if isinstance(self.session, AheadSession):
            found["forecasts_right"] = self.session.n_right / max(1, self.session.n_forecasts)
            found["waited_ms"] = 1e3 * self.session.waited_s / max(1, self.session.n_forecasts)
        return {name: round(value, 3) for name, value in found.items()}


class Pair:
    """A target's session, and the sessions of a draft model for drafting with and without a thread."""

    def __init__(self, target: Model, draft: Model, length: int, cores: tuple[int, int] | None) -> None:
        self.tokenizer = target.tokenizer
        self.target = target.open_session()
        vocab_size = self.tokenizer.vocab_size
        self.ahead = AheadSession(TruncatedSession(draft.open_session(), vocab_size), cores[1] if cores else None)
        beside = TruncatedSession(draft.open_session(), vocab_size)
        self.arms = [Arm("plain", 0), Arm("drafting", length, beside), Arm("ahead", length, self.ahead)]

    def run(self, arm: Arm, prompt: Sequence[int], max_tokens: int) -> list[Step]:
        """Decode greedily; returns the rounds."""
        drafters = []
        if arm.session is not None:
            kind = AheadDrafter if isinstance(arm.session, AheadSession) else SequentialDrafter
            drafters.append(kind("model", arm.session))  # type: ignore[arg-type]  # each with its session
        vocab_size = self.tokenizer.vocab_size
        controller = FixedLength(drafters, Budget(arm.length, arm.length), vocab_size)
        verifier = SampleMatching(Sampler(SamplingParams(temperature=0), vocab_size), CounterRng(1))
        steps, marks = [], []
        stop = self.tokenizer.end_of_generation
        for event in speculate(self.target, controller, verifier, prompt, max_tokens=max_tokens, stop=stop):
            if isinstance(event, Step):
                steps.append(event)
                marks.append(thread_time() + self.ahead.waited_s)
        self.ahead.stop()
        arm.texts.append([token for step in steps for token in step.tokens])
        counted = steps[FIRST:]
        n, first = sum(len(step.tokens) for step in counted), FIRST - 1
        seconds = ((steps[-1].at_s - steps[first].at_s) / n, (marks[-1] - marks[first]) / n) if n else None
        arm.seconds.append(seconds)
        arm.rounds, arm.emitted = arm.rounds + len(counted), arm.emitted + n
        arm.drafted += sum(step.n_drafted for step in counted)
        arm.accepted += sum(step.n_accepted for step in counted)
        return steps

    def measure_costs(self, draft: Session) -> dict[str, dict[str, float]]:
        """Median milliseconds of processor time of the target's forwards by rows and of the draft's, alone and beside
        each other."""
        tokens = [(i * 7919 + 11) % self.tokenizer.vocab_size for i in range(FILLED)]
        times: dict[str, tuple[list[float], list[float]]] = {f"{rows} rows": ([], []) for rows in ROWS}
        times["draft"] = ([], [])
        is_done = threading.Event()

        def keep_drafting(found: list[float], least: int) -> None:
            read_prompt(draft, tokens)
            while len(found) < least or not is_done.is_set():
                started = thread_time()
                decode_one(draft, tokens[0])
                found.append(1e3 * (thread_time() - started))
                if draft.position > 2 * FILLED:
                    draft.rewind(FILLED)

        read_prompt(self.target, tokens)
        for _ in range(TIMES):
            for is_beside in (0, 1):
                is_done.clear()
                drafting = threading.Thread(target=keep_drafting, args=(times["draft"][is_beside], 0))
                if is_beside:
                    drafting.start()
                for rows in ROWS:
                    started = thread_time()
                    self.target.forward(tokens[0], Draft.chain(tokens[1:rows]) if rows > 1 else NO_DRAFT).argmax()
                    self.target.commit(())
                    times[f"{rows} rows"][is_beside].append(1e3 * (thread_time() - started))
                self.target.rewind(FILLED)
                is_done.set()
                if is_beside:
                    drafting.join()
        keep_drafting(times["draft"][0], TIMES)
        draft.close()
        return {
            name: {"alone_ms": round(median(alone), 3), "beside_ms": round(median(beside), 3)}
            for name, (alone, beside) in times.items()
        }

    def close(self) -> None:
        for arm in self.arms:
            if arm.session is not None:
                arm.session.close()
        self.target.close()


def draw_time_line(steps: Sequence[Step], forwards: Sequence[tuple[float, float]]) -> list[str]:
    """Two lanes for each of the last rounds: D the target's thread drafts, V it verifies; A the other thread drafts."""
    lines = []
    for before, step in list(zip(steps[FIRST - 1 :], steps[FIRST:], strict=False))[-SHOWN:]:
        start, end = before.at_s, step.at_s
        verified = end - step.commit_s - step.sample_s
        lanes = [("D", start, verified - step.verify_s)], [("V", verified - step.verify_s, verified)]
        ahead = [("A", a, b) for a, b in forwards if start <= a < end]
        right = f"{step.n_accepted} of {step.n_drafted} accepted"
        lines.append(f"round {step.index}: {1e3 * (end - start):.1f} ms, {right}, {len(ahead)} forwards ahead")
        lines += [f"  |{_draw(lane, start, end)}|" for lane in (lanes[0] + lanes[1], ahead)]
    return lines


def _draw(spans: Sequence[tuple[str, float, float]], start: float, end: float) -> str:
    lane = [" "] * WIDTH
    for letter, since, until in spans:
        first, last = (int(WIDTH * (each - start) / (end - start)) for each in (since, until))
        for at in range(max(0, first), min(WIDTH, max(last, first + 1))):
            lane[at] = letter if at > first or lane[at] == " " else "|"
    return "".join(lane)


@click.command()
@click.option("--target", type=MODEL_PATH, default=TARGET)
@click.option("--draft", type=MODEL_PATH, default=DRAFT)
@click.option("--drafts", multiple=True, type=click.Choice(["right", "wrong"]), default=["right", "wrong"])
@click.option("--length", type=click.IntRange(1, 15), default=3, show_default=True, help="Tokens of a draft.")
@click.option("--prompts", "n", type=click.IntRange(1), default=6, show_default=True)
@click.option("--tokens", type=click.IntRange(16), default=64, show_default=True)
@click.option("--repeats", type=click.IntRange(1), default=2, show_default=True)
@click.option("--threads", default=1, show_default=True)
@click.option("--draft-threads", default=1, show_default=True)
@click.option("--cores", type=(int, int), help="Of the target and of the draft, each with one thread (Linux).")
@click.option("--gpu-layers", type=int)
@click.option("--draft-gpu-layers", type=int)
@click.option("--context", default=2048, show_default=True, help="Prompts of more than a quarter are left out.")
@click.option("--exact", is_flag=True, help="Load both so that texts do not depend on drafts.")
def main(
    target: Path,
    draft: Path,
    drafts: Sequence[str],
    length: int,
    n: int,
    tokens: int,
    repeats: int,
    threads: int,
    draft_threads: int,
    cores: tuple[int, int] | None,
    gpu_layers: int | None,
    draft_gpu_layers: int | None,
    context: int,
    exact: bool,
) -> None:
    """Measure drafting while the target verifies."""
    options = LoadOptions(context, threads, batch_threads=threads, gpu_layers=gpu_layers, exact=exact)
    beside = LoadOptions(context, draft_threads, batch_threads=draft_threads, gpu_layers=draft_gpu_layers, exact=exact)
    if cores:
        os.sched_setaffinity(0, {cores[0]})
    large, rows = load_model("llamacpp", target, options), []
    encoded = [encode_prompt(large.tokenizer, each.turns[0], parse_special=True) for each in take_in_turn(999, ())]
    prompts = [each for each in encoded if len(each) <= context // 4][:n]
    for kind in drafts:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / draft.name if kind == "wrong" else draft
            if kind == "wrong":
                shift_head(draft, path)
            small = load_model("llamacpp", path, beside)
        rows.append({"draft": kind, **_measure(Pair(large, small, length, cores), small, prompts, tokens, repeats)})
        small.close()
    large.close()
    said = {"length": length, "tokens": tokens, "threads": threads, "draft_threads": draft_threads, "exact": exact}
    print_result("overlap", {**said, "prompts": len(prompts), "rows": rows}, target, draft)


def _measure(
    pair: Pair, draft: Model, prompts: Sequence[Sequence[int]], tokens: int, repeats: int
) -> dict[str, dict[str, Any]]:
    costs = pair.measure_costs(draft.open_session())
    for name, cost in costs.items():
        click.echo(f"{name:>8}: {cost['alone_ms']:8.3f} ms alone, {cost['beside_ms']:8.3f} ms beside", err=True)
    started = perf_counter()
    steps: list[Step] = []
    for turn in range(repeats * len(prompts)):
        prompt = prompts[turn % len(prompts)]
        for arm in pair.arms if turn % 2 else reversed(pair.arms):
            done = pair.run(arm, prompt, tokens)
            steps = done if arm.session is pair.ahead else steps
    plain = pair.arms[0]
    found = {arm.name: arm.summarize(plain) for arm in pair.arms}
    click.echo("\n".join(draw_time_line(steps, [each for each in pair.ahead.forwards if each[0] > started])), err=True)
    for name, figures in found.items():
        click.echo(f"{name:>8}: {figures}", err=True)
    pair.close()
    return {"costs": costs, "arms": found}


if __name__ == "__main__":
    main()

"""Sessions of five answers about one file that is edited in between: what the memory of earlier texts gains.

    uv run python -m benchmarks.sessions [--target T.gguf] [--sessions 8] [--tokens 160] [--repeats 1] [--threads 1]
        [--edits 1] [--exact] [--curve 250:1=1,2=1.7,4=1.27,8=2.47,16=3.46,64=13]

A prompt is part of one of Python's own source files; the next one has `--edits` more lines changed. Arms answer each
prompt in turn, in reverse order on every second one, each with statistics and a namespace of its own. The arms are
"ngram"; "off", which is ngram and suffix without a memory; "suffix" and "ngram+suffix" with one that is empty where a
session begins. Speeds are geometric means of the ratio of tokens/s to plain decoding, "cold" of the first answers and
"warm" of the others. With --curve, forwards are charged with given times, and with --exact all arms have the same
answers: see benchmarks.lookups. "same" counts the answers that plain decoding has too. stdout ends with one JSON line.
"""

from __future__ import annotations

import random
import statistics
import sysconfig
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import click

from benchmarks.harness import MODEL_PATH, PLAIN, TARGET, list_drafters, load_model, print_result
from benchmarks.lookups import Arm, make_arm, measure_speed, parse_curve
from edgespec.autopilot.profile import Profile
from edgespec.backends.options import LoadOptions
from edgespec.core.protocols import Step
from edgespec.core.sampling import SamplingParams
from edgespec.engine.engine import Engine
from edgespec.engine.events import Finished, MemoryUse, Request
from edgespec.memory.memory import Memory

_TURNS = 5
_CHARACTERS = 1500  # of a prompt
_LIMIT = 2**30  # bytes
_ARMS = {"plain": "plain", "ngram": "ngram", "off": "ngram+suffix", "suffix": "suffix", "ngram+suffix": "ngram+suffix"}
_REMEMBERING = ("suffix", "ngram+suffix")


@click.command()
@click.option("--target", type=MODEL_PATH, default=TARGET)
@click.option("--sessions", "n", type=click.IntRange(1), default=8, show_default=True)
@click.option("--edits", type=click.IntRange(0), default=1, show_default=True)
@click.option("--tokens", type=click.IntRange(4), default=160, show_default=True)
@click.option("--repeats", type=click.IntRange(1), default=1, show_default=True)
@click.option("--threads", default=1, show_default=True)
@click.option("--exact", is_flag=True, help="Give all arms the same answers, as --exact of edgespec.")
@click.option("--curve", callback=lambda _, __, text: parse_curve(text), help="Costs of forwards, not measured.")
def main(
    target: Path, n: int, edits: int, tokens: int, repeats: int, threads: int, exact: bool, curve: Profile | None
) -> None:
    """Compare plain decoding, lookups in the text, and lookups in earlier texts."""
    model = load_model("llamacpp", target, LoadOptions(threads=threads, context_size=2048, exact=exact))
    with tempfile.TemporaryDirectory() as folder:
        engine = Engine(model, list_drafters(["ngram", "suffix"]), PLAIN, len(_ARMS), Memory(Path(folder), "", _LIMIT))
        profile = curve or engine.measure(2.0)
        arms = {name: make_arm(drafters, profile, is_fixed=curve is not None) for name, drafters in _ARMS.items()}
        for repeat in range(repeats):
            for session, prompts in enumerate(make_sessions(n, edits)):
                for turn, prompt in enumerate(prompts):
                    request = Request(prompt, SamplingParams(temperature=0), tokens)
                    run_arms(engine, arms, request, f"{repeat}-{session}", turn, curve)
        engine.close()
    rows = [{"arm": name, **summarize(arm, arms["plain"])} for name, arm in arms.items()]
    for row in rows:
        click.echo(str(row), err=True)
    said = {"sessions": n, "tokens": tokens, "repeats": repeats, "edits": edits}
    print_result("sessions", {**said, "arms": rows}, target)


def make_sessions(n: int, edits: int) -> Iterator[list[str]]:
    """[_TURNS] prompts of each of `n` sessions."""
    rng = random.Random(0)
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    for file in rng.sample([each for each in files if each.stat().st_size > 4 * _CHARACTERS], n):
        lines = file.read_text(encoding="utf-8")[_CHARACTERS : 2 * _CHARACTERS].splitlines()
        prompts = []
        for _ in range(_TURNS):
            prompts.append("\n".join(lines))
            for _ in range(edits):
                at = rng.randrange(len(lines) // 2)
                lines[at] = f"{lines[at]}  # changed {rng.randrange(100)}"
        yield prompts


def run_arms(
    engine: Engine, arms: dict[str, Arm], request: Request, session: str, turn: int, curve: Profile | None
) -> None:
    """Answer `request` by each arm; the memory is indexed afterwards, as where an engine waits for the next request."""
    answers: dict[str, tuple[int, ...]] = {}
    for name in list(arms)[:: 1 if turn % 2 else -1]:
        arm = arms[name]
        engine.speculation, engine.draft_stats = arm.speculation, arm.stats
        use = MemoryUse(f"{session} {name}") if name in _REMEMBERING else None
        steps: list[Step] = []
        for event in engine.stream(Request(request.prompt, request.sampling, request.max_tokens, memory=use)):
            if isinstance(event, Step) and event.index:
                steps.append(event)
            elif isinstance(event, Finished):
                speed = event.metrics.tokens_per_second if curve is None else measure_speed(arm, steps, curve)
                arm.speeds[f"{turn}"].append(speed or 0.0)
                answers[name] = event.tokens
        arm.steps += steps
    for name, arm in arms.items():
        arm.same += answers[name] == answers["plain"]
    assert engine.memory is not None
    engine.memory.set_idle(True)
    engine.memory.flush()
    engine.memory.set_idle(False)


def summarize(arm: Arm, plain: Arm) -> dict[str, Any]:
    ratios: dict[str, list[float]] = defaultdict(list)
    for turn, speeds in arm.speeds.items():
        pairs = zip(speeds, plain.speeds[turn], strict=True)
        ratios["cold" if turn == "0" else "warm"] += [own / other for own, other in pairs if own and other]
    drafted = sum(step.n_drafted for step in arm.steps)
    return {
        "tau": round(sum(len(step.tokens) for step in arm.steps) / len(arm.steps), 2),
        "accepted": round(sum(step.n_accepted for step in arm.steps) / drafted, 3) if drafted else None,
        **{f"{when} x plain": round(statistics.geometric_mean(found), 3) for when, found in ratios.items()},
        "worst": round(min(chain(*ratios.values())), 2),
        "draft_us": round(statistics.median(step.draft_s for step in arm.steps) * 1e6),
        "same": arm.same,
    }


if __name__ == "__main__":
    main()

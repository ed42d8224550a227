"""Recorded texts and proposals replayed against a controller on a virtual clock: deterministic, and without models."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np

from edgespec.controller.adaptive import Autopilot
from edgespec.controller.cost_model import Profile
from edgespec.controller.stats import DraftStats
from edgespec.core.protocols import Budget, Controller, Draft, Step
from edgespec.core.scores import Scores
from edgespec.drafters.draft_model import Candidates, DraftModelStepper

Curve = Callable[[int], float]
READING = 0.25  # of the time of a drafted token, to read one of the text
NO_SCORES = cast(Scores, None)  # controllers do not read them
# Plain steps by rows, and of a drafted token.
CURVES = {
    "1B, Q4_0": ({1: 1, 2: 1.94, 3: 2.81, 4: 1.89, 5: 2.83, 8: 3.6, 12: 4.5, 16: 4.97}, 0.12),
    "8B, Q4_0": ({1: 1, 2: 1.7, 3: 2.27, 4: 1.27, 5: 1.91, 6: 2.58, 8: 2.47, 12: 3.71, 16: 3.46}, 0.12),
    "1B, Q8_0": ({1: 1, 2: 3.0, 3: 3.5, 4: 4.0, 6: 6.9, 8: 4.6, 16: 7.2}, 0.12),
    "1B, Q4_K": ({1: 1, 2: 1.98, 4: 3.33, 8: 6.2, 16: 6.9}, 0.12),
    "a GPU": ({1: 1, 2: 1.06, 4: 1.2, 5: 1.4, 6: 1.6, 7: 1.9, 8: 2.15, 9: 2.4, 16: 3.0}, 0.06),
}
FIXED = [(source, gamma) for source in ("model", "ngram") for gamma in (1, 2, 3, 4, 5, 7)]


@dataclass(frozen=True)
class Trace:
    """A prompt, the target's text after it, and the draft model's path at each position of the text but the first."""

    id: str
    category: str
    prompt: list[int]
    text: list[int]
    paths: list[list[Candidates]]


def read_traces(path: Path) -> list[Trace]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        recorded = json.load(file)["traces"]
    return [
        Trace(t["id"], t["category"], t["prompt"], t["text"], [[Candidates(*each) for each in s] for s in t["spines"]])
        for t in recorded
    ]


class ReplayStepper:
    """A DraftModelStepper over a trace."""

    is_sampled = False

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._read = 0
        self._path: list[Candidates] = []
        self.drafted = 0.0  # tokens, those that were only read counted as READING

    def lag(self, tokens: Sequence[int]) -> int:
        return len(tokens) - self._read

    def start(self, tokens: Sequence[int], window: int = 10_000) -> Candidates | None:
        self._path = self._trace.paths[len(tokens) - len(self._trace.prompt) - 1]
        self.drafted += READING * (min(window, self.lag(tokens)) - 1)
        self._read, self._at = len(tokens), 0
        self.drafted += 1
        return self._path[0]

    def step(self, token: int) -> Candidates | None:
        self._at += 1
        if self._at >= len(self._path):
            return None
        self.drafted += 1
        return self._path[self._at]

    def sync(self, text: Sequence[int]) -> None: ...


def accepted(draft: Draft, truth: Sequence[int]) -> int:
    """How many tokens of `truth` a path of the draft foretells."""
    node, depth = -1, 0
    while depth < len(truth):
        following = [child for child in draft.children(node) if draft.tokens[child] == truth[depth]]
        if not following:
            break
        node, depth = following[0], depth + 1
    return depth


@dataclass
class Clock:
    """Virtual seconds. The noise is in the times that a controller measures, not in those that an arm is charged."""

    curve: Curve
    draft_s: float
    rng: np.random.Generator | None = None

    def noise(self) -> float:
        if self.rng is None:
            return 1.0
        return float(self.rng.lognormal(0, 0.05)) * (3.0 if self.rng.random() < 0.02 else 1.0)


def replay(controller: Controller, stepper: ReplayStepper, trace: Trace, clock: Clock) -> float:
    """Seconds that the text takes after its first token."""
    history = [*trace.prompt, trace.text[0]]
    end = len(trace.prompt) + len(trace.text)
    controller.begin(trace.prompt, NO_SCORES)
    seconds, index = 0.0, 0
    while len(history) < end:
        drafted = stepper.drafted
        draft = controller.propose(history, Budget(end - len(history) - 1, 63))
        drafting = (stepper.drafted - drafted) * clock.draft_s
        truth = trace.text[len(history) - len(trace.prompt) :]
        n = accepted(draft, truth[:-1])
        tested = n + bool(n < len(draft))
        tokens = tuple(truth[: n + 1])
        forward = clock.curve(len(draft) + 1)
        seconds += drafting + forward
        index += 1
        history += tokens
        noise = clock.noise()
        controller.record(
            Step(
                index,
                tokens,
                len(draft),
                n,
                tested,
                0.0,
                drafting * noise,
                forward * noise,
                decision=controller.decision,
            )
        )
    controller.end()
    return seconds


class Fixed:
    """Chains of `depth` from the trace's model or from lookups, without a controller."""

    expects_plain = False

    def __init__(self, source: str, depth: int, stepper: ReplayStepper) -> None:
        from edgespec.drafters.ngram import NgramDrafter

        self._source, self._depth, self._stepper = source, depth, stepper
        self._ngram = NgramDrafter()
        self.decision = None

    def begin(self, prompt: Sequence[int], scores: Scores) -> None:
        self._ngram.begin(prompt, scores)

    def propose(self, tokens: Sequence[int], limit: Budget) -> Draft:
        depth = min(self._depth, limit.depth)
        if self._source == "ngram":
            return self._ngram.propose(tokens, Budget(depth, depth))
        found: list[int] = []
        options = self._stepper.start(tokens) if depth else None
        while options is not None:
            found.append(options.tokens[0])
            if len(found) >= depth:
                break
            options = self._stepper.step(found[-1])
        return Draft.chain(found)

    def record(self, step: Step) -> None: ...

    def end(self) -> None: ...


def autopilot(draft_stats: DraftStats, stepper: ReplayStepper | None, *, trees: bool = True) -> Autopilot:
    return Autopilot(draft_stats, "greedy", cast(DraftModelStepper, stepper), trees=trees)


def make_profile(clock: Clock, most: int = 16) -> Profile:
    return Profile({rows: clock.curve(rows) for rows in range(1, most + 1)}, clock.draft_s, READING * clock.draft_s)


def make_clock(name: str, *, seed: int | None = None) -> Clock:
    """The clock of a measured curve; noisy with a seed."""
    points, draft_s = CURVES[name]
    rows = sorted(points)
    times = [points[n] for n in rows]
    return Clock(
        lambda n: float(np.interp(n, rows, times)) * max(1.0, n / rows[-1]),
        draft_s,
        None if seed is None else np.random.default_rng(seed),
    )


def count_plain_steps(trace: Trace) -> float:
    """On a clock that counts plain steps."""
    return float(len(trace.text) - 1)


def fixed_speeds(traces: list[Trace], clock: Clock) -> dict[tuple[str, int], np.ndarray]:
    """[texts] times plain decoding, for each of FIXED."""

    def one(source: str, gamma: int, trace: Trace) -> float:
        stepper = ReplayStepper(trace)
        return count_plain_steps(trace) / replay(Fixed(source, gamma, stepper), stepper, trace, clock)

    return {(source, gamma): np.array([one(source, gamma, t) for t in traces]) for source, gamma in FIXED}


def autopilot_speeds(traces: list[Trace], clock: Clock, draft_stats: DraftStats | None = None) -> np.ndarray:
    """[texts] speedup over plain decoding, one text after the other, with the statistics of those before."""
    draft_stats = draft_stats or DraftStats(make_profile(clock))
    steppers = [ReplayStepper(trace) for trace in traces]
    return np.array(
        [
            count_plain_steps(t) / replay(autopilot(draft_stats, s), s, t, clock)
            for t, s in zip(traces, steppers, strict=True)
        ]
    )


def oracle(fixed: dict[tuple[str, int], np.ndarray]) -> np.ndarray:
    """[texts] the speedup of the best fixed length or plain decoding for each text, chosen with hindsight."""
    speeds = np.array(list(fixed.values()))
    return np.maximum(1.0, speeds.max(axis=0))


def mean(speeds: np.ndarray) -> float:
    """Geometric."""
    return float(np.exp(np.log(speeds).mean()))

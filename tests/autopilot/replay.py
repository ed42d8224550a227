"""Recorded texts and proposals replayed against a controller on a virtual clock: deterministic, and without models."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import numpy as np

from edgespec.autopilot.adaptive import Adaptive
from edgespec.autopilot.fixed import FixedLength
from edgespec.autopilot.profile import DraftCost, Profile
from edgespec.autopilot.stats import DraftStats
from edgespec.core.draft_tree import DraftTree
from edgespec.core.drafter import Drafter, TokenDraw
from edgespec.core.protocols import Budget, Controller, Draft, Round, Step
from edgespec.core.scores import Scores
from edgespec.drafters.ngram import NgramDrafter

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
VOCABULARY = 4096
FIXED = [(source, gamma) for source in ("model", "ngram") for gamma in (1, 2, 3, 4, 5, 7)]


@dataclass(frozen=True)
class Candidates:
    """What the draft model proposed at one depth, the best first."""

    tokens: list[int]
    probabilities: list[float]


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


class ReplayDrafter(Drafter):
    """A draft model over a trace."""

    def __init__(self, trace: Trace, name: str = "model") -> None:
        self.name = name
        self._trace = trace
        self._read = 0
        self.drafted = 0.0  # tokens, those that were only read counted as READING

    def begin(self, text: Sequence[int], draw: TokenDraw | None) -> None:
        """It reads a text when it is asked."""

    def pending_tokens(self, text: Sequence[int]) -> int:
        return len(text) - self._read

    def expand(self, tree: DraftTree, text: Sequence[int], limit: Budget) -> Iterator[None]:
        path = self._trace.paths[len(text) - len(self._trace.prompt) - 1]
        self.drafted += READING * (min(len(text) if limit.read is None else limit.read, self.pending_tokens(text)) - 1)
        self._read = len(text)
        parent = -1
        for candidates in path[: limit.depth]:
            self.drafted += 1
            candidates = self.change(candidates, text)
            nodes = [
                tree.add(parent, token, self.name, p)
                for token, p in zip(candidates.tokens, candidates.probabilities, strict=True)
            ]
            parent = nodes[0]
            yield

    def change(self, candidates: Candidates, text: Sequence[int]) -> Candidates:
        return candidates


def accepted(draft: Draft, truth: Sequence[int]) -> tuple[int, ...]:
    """The path of the draft that foretells most tokens of `truth`."""
    path: list[int] = []
    for token in truth:
        following = [child for child in draft.children(path[-1] if path else -1) if draft.tokens[child] == token]
        if not following:
            break
        path.append(following[0])
    return tuple(path)


@dataclass
class Clock:
    """Virtual seconds. The noise is in the times that a controller measures, not in those that an arm is charged.

    curve      of a forward by its rows, after a few tokens
    draft_s    of a drafted token
    attention  what each token of context adds to a forward, by its rows
    """

    curve: Curve
    draft_s: float
    rng: np.random.Generator | None = None
    attention: Curve = lambda rows: 0.0

    def forward_s(self, rows: int, position: int) -> float:
        return self.curve(rows) + position * self.attention(rows)

    def slowdown(self) -> float:
        """How many times slower than usual forwards and drafts are now."""
        return 1.0

    def spend(self, n_tokens: int, seconds: float) -> None:
        """A round took `seconds` for `n_tokens`."""

    def noise(self) -> float:
        if self.rng is None:
            return 1.0
        return float(self.rng.lognormal(0, 0.05)) * (3.0 if self.rng.random() < 0.02 else 1.0)


def replay(controller: Controller, drafters: Sequence[ReplayDrafter], trace: Trace, clock: Clock) -> float:
    """Seconds that the text takes after its first token."""
    history = [*trace.prompt, trace.text[0]]
    end = len(trace.prompt) + len(trace.text)
    controller.begin(trace.prompt)
    seconds, index = 0.0, 0
    while len(history) < end:
        drafted = sum(each.drafted for each in drafters)
        draft = controller.propose(history, Budget(end - len(history) - 1, 63))
        slowdown = clock.slowdown()
        drafting = (sum(each.drafted for each in drafters) - drafted) * clock.draft_s * slowdown
        truth = trace.text[len(history) - len(trace.prompt) :]
        path = accepted(draft, truth[:-1])
        n = len(path)
        tested = n + bool(draft.children(path[-1] if path else -1))
        tokens = tuple(truth[: n + 1])
        forward = clock.forward_s(len(draft) + 1, len(history) - 1) * slowdown
        seconds += drafting + forward
        clock.spend(len(tokens), drafting + forward)
        index += 1
        history += tokens
        noise = clock.noise()
        controller.observe(Round(history, tokens, draft, path, tested, NO_SCORES))
        step = Step(index, tokens, len(draft), n, tested, 0.0, drafting * noise, forward * noise)
        controller.record(replace(step, decision=controller.decision))
    controller.end()
    return seconds


def adaptive(draft_stats: DraftStats, drafters: Sequence[Drafter], *, trees: bool = True) -> Adaptive:
    return Adaptive([NgramDrafter(), *drafters], draft_stats, "greedy", VOCABULARY, takes_trees=lambda: trees)


def make_profile(clock: Clock, drafters: Sequence[str] = ("model",), most: int = 16) -> Profile:
    cost = DraftCost({1: clock.draft_s}, READING * clock.draft_s)
    return Profile({rows: clock.curve(rows) for rows in range(1, most + 1)}, dict.fromkeys(drafters, cost))


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


def plain_s(trace: Trace, clock: Clock) -> float:
    """Seconds of plain decoding."""
    start = len(trace.prompt)
    return sum(clock.forward_s(1, position) for position in range(start, start + len(trace.text) - 1))


def fixed_speeds(traces: list[Trace], clock: Clock) -> dict[tuple[str, int], np.ndarray]:
    """[texts] times plain decoding, for each of FIXED."""

    def one(source: str, gamma: int, trace: Trace) -> float:
        model = ReplayDrafter(trace)
        drafter = model if source == "model" else NgramDrafter()
        controller = FixedLength([drafter], Budget(gamma, gamma), VOCABULARY)
        return count_plain_steps(trace) / replay(controller, [model], trace, clock)

    return {(source, gamma): np.array([one(source, gamma, t) for t in traces]) for source, gamma in FIXED}


def adaptive_speeds(traces: list[Trace], clock: Clock, draft_stats: DraftStats | None = None) -> np.ndarray:
    """[texts] speedup over plain decoding, one text after the other, with the statistics of those before."""
    draft_stats = draft_stats or DraftStats(make_profile(clock))

    def one(trace: Trace) -> float:
        model = ReplayDrafter(trace)
        return count_plain_steps(trace) / replay(adaptive(draft_stats, [model]), [model], trace, clock)

    return np.array([one(trace) for trace in traces])


def oracle(fixed: dict[tuple[str, int], np.ndarray]) -> np.ndarray:
    """[texts] the speedup of the best fixed length or plain decoding for each text, chosen with hindsight."""
    speeds = np.array(list(fixed.values()))
    best: np.ndarray = np.maximum(1.0, speeds.max(axis=0))
    return best


def mean(speeds: np.ndarray) -> float:
    """Geometric."""
    return float(np.exp(np.log(speeds).mean()))

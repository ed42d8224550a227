"""Run the arms of a benchmark interleaved; yields a record for each generation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from edgespec.bench.prompt_sets import BenchPrompt
from edgespec.controller.cost_model import CostModel, DraftCost, Profile
from edgespec.controller.stats import DraftStats
from edgespec.core.metrics import Metrics
from edgespec.core.protocols import Capabilities, CheckCancelled, Draft, Session, Step
from edgespec.core.sampling import Logits, SamplingParams
from edgespec.core.verify import read_prompt
from edgespec.engine.drafting import Speculation
from edgespec.engine.engine import Engine
from edgespec.engine.events import Finished, Request
from edgespec.errors import ContextOverflow
from edgespec.text.chat_template import Message
from edgespec.text.stream import Piece

# Find where two greedy outputs diverge, and whether that is a near-tie of the target or an error.


# Tokens before the position that are decoded in steps, where those before them are read as a prompt; and tokens of a
# step: the root, and as many accepted ones as follow. The first way is a forward of one row.
_WAYS = ((0, 1), (24, 1), (24, 4))


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first position (of the outputs, from 0) where they differ.

    gap    difference of the two tokens' logits in a forward of one row
    noise  largest change of a logit at this position by how the tokens before it are decoded: one by one, in bursts,
           or as a prompt
    """

    position: int
    gap: float
    noise: float

    @property
    def is_near_tie(self) -> bool:
        """Whether rounding explains the difference: each of the two logits may change by `noise`."""
        return self.gap <= 2 * self.noise

    def describe(self) -> dict[str, Any]:
        return {**asdict(self), "near_tie": self.is_near_tie}


def first_divergence(
    session: Session, prompt: Sequence[int], plain: Sequence[int], other: Sequence[int]
) -> Divergence | None:
    """Compare two greedy outputs for `prompt`; None if one is a prefix of the other."""
    for i, (a, b) in enumerate(zip(plain, other, strict=False)):
        if a != b:
            history = [*prompt, *plain[:i]]
            ways = np.stack([_score(session, history, *way) for way in _WAYS])
            gap = abs(float(ways[0, a] - ways[0, b]))
            return Divergence(i, gap, float((ways.max(axis=0) - ways.min(axis=0)).max()))
    return None


def _score(session: Session, history: Sequence[int], n_decoded: int, burst: int) -> Logits:
    """[V] logits after `history`, whose last tokens are accepted in bursts, in a tree after a rejected branch."""
    n_bursts = min(n_decoded, len(history) - 1) // burst
    start = len(history) - 1 - n_bursts * burst
    session.rewind(0)
    scores = read_prompt(session, history[: max(start, 1)])
    if len(history) == 1:
        return scores.logits(0).copy()
    for i in range(session.position, len(history) - burst, burst):
        root, *rest = history[i : i + burst]
        has_branch = session.capabilities.tree and bool(rest)
        session.forward(root, _with_rejected_branch(rest, session.capabilities) if has_branch else Draft.chain(rest))
        session.commit(range(2, 2 + len(rest)) if has_branch else range(len(rest)))
    missing = history[session.position :]
    scores = session.forward(missing[0], Draft.chain(missing[1:]))
    z = scores.logits(len(missing) - 1).copy()
    session.commit(range(len(missing) - 1))
    return z


def _with_rejected_branch(tokens: Sequence[int], capabilities: Capabilities) -> Draft:
    """`tokens` as a chain, after another branch of two nodes."""
    other = (tokens[0] + 1) % capabilities.vocab_size
    parents = [-1, 0, -1, *range(2, 1 + len(tokens))]
    return Draft(np.array([other, other, *tokens], np.int32), np.array(parents, np.int32))


PLAIN, AUTOPILOT = "plain", "autopilot"  # arms that every summary refers to


@dataclass(frozen=True, slots=True)
class Header:
    """The conditions of a benchmark."""

    date: str
    processor: str
    system: str
    versions: dict[str, str | None]
    files: dict[str, str]
    backend: str
    model: str
    draft: str | None
    threads: int
    context_size: int
    max_tokens: int
    repeats: int

    def facts(self) -> dict[str, str]:
        """The same as text."""
        return {
            "model": self.model,
            "draft": self.draft or "none",
            "backend": self.backend,
            "threads": str(self.threads),
            "processor": self.processor,
            "system": self.system,
            "date": self.date,
            "context": f"{self.context_size} tokens",
            "limit": f"{self.max_tokens} tokens",
            "repeats": str(self.repeats),
            "versions": ", ".join(f"{name} {version}" for name, version in self.versions.items() if version),
            "digests (size and both ends)": ", ".join(f"{name} {digest}" for name, digest in self.files.items()),
        }


@dataclass(frozen=True, slots=True)
class Cost:
    """Costs at one position: seconds of a target forward by rows, and of the drafters that take time, by name."""

    position: int
    rows: Mapping[int, float]
    drafts: Mapping[str, DraftCost]


@dataclass(frozen=True, slots=True)
class Run:
    """One generation.

    bound_s  seconds for its rounds by the measured cost curve
    fork     where a greedy output differs from plain decoding's; an error unless it is a near-tie
    """

    arm: str
    prompt: str
    category: str
    temperature: float
    repeat: int
    metrics: Metrics
    bound_s: float | None
    fork: Divergence | None


Record = Header | Cost | Run


def describe_record(record: Record) -> dict[str, Any]:
    """A line of the raw data, as JSON has it."""
    found = {"kind": type(record).__name__.lower(), **asdict(record)}
    if isinstance(record, Run) and record.fork is not None:
        found["fork"] = record.fork.describe()
    return found


@dataclass(frozen=True, slots=True)
class Arm:
    """One decoding configuration. `gamma` None is the autopilot, which starts each prompt untrained if `cold`."""

    name: str
    drafters: tuple[str, ...]
    gamma: int | None
    cold: bool = False


_PLAIN = Arm(PLAIN, (), 0)


@dataclass(frozen=True, slots=True)
class Skipped:
    """A prompt that does not fit in the context."""

    prompt: str
    reason: str


def list_arms(drafters: Sequence[str], gammas: Sequence[int]) -> list[Arm]:
    """Plain decoding, the autopilot with all drafters, and fixed draft lengths for each drafter."""
    names = tuple(drafters)
    fixed = [Arm(f"{name} {gamma}", (name,), gamma) for name in names for gamma in gammas]
    return [_PLAIN, Arm(AUTOPILOT, names, None), *fixed, Arm(f"{AUTOPILOT} cold", names, None, cold=True)]


@dataclass(slots=True)
class Bench:
    """Each repeat runs all arms on every prompt; every second repeat runs the arms in reverse order."""

    engine: Engine
    arms: Sequence[Arm]
    prompts: Sequence[BenchPrompt]
    temperatures: Sequence[float]
    repeats: int
    max_tokens: int
    _profile: Profile = field(init=False)
    _draft_stats: DraftStats = field(init=False)
    _plain: dict[tuple[str, float], tuple[list[int], Finished]] = field(init=False, default_factory=dict)

    @property
    def runs(self) -> int:
        """Number of generations, without the warm-up."""
        turns = sum(len(prompt.turns) for prompt in self.prompts)
        return len(self.arms) * self.repeats * turns * len(self.temperatures)

    def run(self, profile: Profile, check: CheckCancelled) -> Iterator[Run | Skipped]:
        """Yield the runs; `profile` is the engine's. Raises Cancelled, BackendError.

        The engine's own statistics are restored at the end.
        """
        self._profile = profile
        saved = self.engine.draft_stats
        session = self.engine.target.open_session(check)
        skipped: set[str] = set()
        try:
            self._warm_up(session, check)
            self._draft_stats = DraftStats(self._profile)
            for repeat in range(self.repeats):
                for prompt in self.prompts:
                    for temperature in self.temperatures:
                        if prompt.id in skipped:
                            continue
                        try:
                            for arm in self.arms if repeat % 2 == 0 else reversed(self.arms):
                                yield from self._converse(session, arm, prompt, temperature, repeat, check)
                        except ContextOverflow as error:
                            skipped.add(prompt.id)
                            yield Skipped(prompt.id, error.message)
        finally:
            self.engine.draft_stats = saved
            session.close()

    def _warm_up(self, session: Session, check: CheckCancelled) -> None:
        """Run every arm once on the first prompt that fits, without recording it."""
        self._draft_stats = DraftStats(self._profile)
        for prompt in self.prompts:
            with suppress(ContextOverflow):
                for arm in self.arms:
                    list(self._converse(session, arm, prompt, 0.0, 0, check))
                return

    def _converse(
        self, session: Session, arm: Arm, prompt: BenchPrompt, temperature: float, repeat: int, check: CheckCancelled
    ) -> Iterator[Run]:
        """Run all turns of a conversation; yields a record for each."""
        engine = self.engine
        # The seed only pairs the arms, so the autopilot takes the acceptance rule of an unseeded request.
        rule = Speculation(arm.drafters).choose_rule(temperature, seeded=False) if arm.gamma is None else "sample"
        engine.speculation = Speculation(arm.drafters, arm.gamma, acceptance=rule)
        engine.draft_stats = DraftStats(self._profile) if arm.cold else self._draft_stats
        messages: list[Message] = []
        for at, turn in enumerate(prompt.turns):
            messages.append(Message("user", turn))
            request = Request(tuple(messages), SamplingParams(temperature=temperature), self.max_tokens, seed=repeat)
            answer, steps = "", []
            for event in engine.stream(request, check):
                if isinstance(event, Piece):
                    answer += event.text if event.channel == "answer" else ""  # reasoning is not sent back
                elif isinstance(event, Step):
                    steps.append(event)
                elif isinstance(event, Finished):
                    finished = event
            check()  # a cancelled generation is not recorded
            messages.append(Message("assistant", answer))
            key = (f"{prompt.id}/{at + 1}", temperature)
            text = engine.encode(request.prompt)
            if arm is _PLAIN:
                self._plain[key] = text, finished
            plain_text, plain = self._plain[key]
            comparable = temperature == 0 and text == plain_text  # unequal once an earlier answer diverged
            yield Run(
                arm=arm.name,
                prompt=key[0],
                category=prompt.category,
                temperature=temperature,
                repeat=repeat,
                metrics=finished.metrics,
                bound_s=self._lower_bound(plain, steps) if arm.gamma is None else None,
                fork=first_divergence(session, text, plain.tokens, finished.tokens) if comparable else None,
            )

    def _lower_bound(self, plain: Finished, steps: Sequence[Step]) -> float | None:
        """Seconds for these rounds by the cost profile, scaled to the speed of plain decoding's last run."""
        costs, tpot_s = CostModel(self._profile), plain.metrics.tpot_s
        if tpot_s is None:
            return None
        drafted = [pair for step in steps if step.decision for pair in step.decision.drafted.items()]
        drafted_s = sum(self._profile.drafts[name].path_s(n) for name, n in drafted if name in self._profile.drafts)
        forwards_s = sum(costs.seconds(step.n_drafted + 1) for step in steps[1:])
        return (forwards_s + drafted_s) * tpot_s / costs.seconds(1)

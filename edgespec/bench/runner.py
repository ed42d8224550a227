"""Run the arms of a benchmark interleaved; yields a record for each generation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from edgespec.autopilot.cost_model import CostModel
from edgespec.autopilot.profile import Profile
from edgespec.autopilot.speculation import Speculation
from edgespec.autopilot.stats import DraftStats
from edgespec.bench.divergence import first_divergence
from edgespec.bench.prompt_sets import BenchPrompt
from edgespec.bench.records import Run
from edgespec.cancel import check_cancelled
from edgespec.core.protocols import Session, Step
from edgespec.core.sampling import SamplingParams
from edgespec.engine.engine import Engine
from edgespec.engine.events import Finished, Request
from edgespec.errors import ContextOverflow
from edgespec.text.chat_template import Message
from edgespec.text.stream import Piece

PLAIN, AUTOPILOT = "plain", "autopilot"  # arms that every summary refers to


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

    def run(self, profile: Profile) -> Iterator[Run | Skipped]:
        """Yield the runs; `profile` is the engine's. Raises Cancelled, BackendError.

        The engine's own statistics are restored at the end.
        """
        self._profile = profile
        saved = self.engine.draft_stats
        session = self.engine.target.open_session()
        skipped: set[str] = set()
        try:
            self._warm_up(session)
            self._draft_stats = DraftStats(self._profile)
            for repeat in range(self.repeats):
                for prompt in self.prompts:
                    for temperature in self.temperatures:
                        if prompt.id in skipped:
                            continue
                        try:
                            for arm in self.arms if repeat % 2 == 0 else reversed(self.arms):
                                yield from self._converse(session, arm, prompt, temperature, repeat)
                        except ContextOverflow as error:
                            skipped.add(prompt.id)
                            yield Skipped(prompt.id, error.message)
        finally:
            self.engine.draft_stats = saved
            session.close()

    def _warm_up(self, session: Session) -> None:
        """Run every arm once on the first prompt that fits, without recording it."""
        self._draft_stats = DraftStats(self._profile)
        for prompt in self.prompts:
            with suppress(ContextOverflow):
                for arm in self.arms:
                    list(self._converse(session, arm, prompt, 0.0, 0))
                return

    def _converse(
        self, session: Session, arm: Arm, prompt: BenchPrompt, temperature: float, repeat: int
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
            for event in engine.stream(request):
                if isinstance(event, Piece):
                    answer += event.text if event.channel == "answer" else ""  # reasoning is not sent back
                elif isinstance(event, Step):
                    steps.append(event)
                elif isinstance(event, Finished):
                    finished = event
            check_cancelled()  # a cancelled generation is not recorded
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

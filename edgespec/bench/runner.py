"""Run the arms of a bench interleaved: a record for each generation, as it is measured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any

from edgespec.bench.divergence import first_divergence
from edgespec.bench.prompt_sets import BenchPrompt
from edgespec.bench.records import AUTOPILOT, PLAIN
from edgespec.bench.repetition import repetition_speed
from edgespec.controller.cost_model import CostModel, Profile
from edgespec.controller.stats import DraftStats
from edgespec.core.protocols import CheckCancelled, Session, Step
from edgespec.core.sampling import SamplingParams
from edgespec.engine.drafting import DraftKind, Speculation
from edgespec.engine.engine import Engine
from edgespec.engine.events import Finished, Request
from edgespec.errors import ContextOverflow
from edgespec.text.chat_template import Message
from edgespec.text.stream import Piece


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to decode. `gamma` None is the autopilot, which knows nothing of earlier prompts if `cold`."""

    name: str
    kind: DraftKind
    gamma: int | None
    cold: bool = False


_PLAIN = Arm(PLAIN, "none", 0)


@dataclass(frozen=True, slots=True)
class Skipped:
    """A prompt that does not fit into the context."""

    prompt: str
    reason: str


def arms(draft: DraftKind, gammas: Sequence[int]) -> list[Arm]:
    """Plain, the autopilot with every drafter there is, and fixed lengths of each."""
    kinds: list[DraftKind] = ["ngram", "model"] if draft == "model" else ["ngram"]
    fixed = [Arm(f"{kind} {gamma}", kind, gamma) for kind in kinds for gamma in gammas]
    return [_PLAIN, Arm(AUTOPILOT, draft, None), *fixed, Arm(f"{AUTOPILOT} cold", draft, None, cold=True)]


@dataclass(slots=True)
class Bench:
    """Each repeat goes through all prompts, and through the arms of each, there and on the next repeat back."""

    engine: Engine
    arms: Sequence[Arm]
    prompts: Sequence[BenchPrompt]
    temperatures: Sequence[float]
    repeats: int
    max_tokens: int
    profile: Profile
    _draft_stats: DraftStats = field(init=False)
    _plain: dict[tuple[str, float], tuple[list[int], Finished]] = field(init=False, default_factory=dict)

    @property
    def runs(self) -> int:
        """Generations in all, the warm-up left out."""
        turns = sum(len(prompt.turns) for prompt in self.prompts)
        return len(self.arms) * self.repeats * turns * len(self.temperatures)

    def run(self, check: CheckCancelled) -> Iterator[dict[str, Any] | Skipped]:
        """Records of kind 'run'. Raises Cancelled, BackendError; what came before stays valid.

        What the engine had learned before is left as it was.
        """
        known = self.engine.draft_stats
        session = self.engine.target.open_session(check)
        left_out: set[str] = set()
        try:
            self._warm_up(session, check)
            self._draft_stats = DraftStats(self.profile)
            for repeat in range(self.repeats):
                for prompt in self.prompts:
                    for temperature in self.temperatures:
                        if prompt.id in left_out:
                            continue
                        try:
                            for arm in self.arms if repeat % 2 == 0 else reversed(self.arms):
                                yield from self._converse(session, arm, prompt, temperature, repeat, check)
                        except ContextOverflow as error:
                            left_out.add(prompt.id)
                            yield Skipped(prompt.id, error.message)
        finally:
            self.engine.draft_stats = known
            session.close()

    def _warm_up(self, session: Session, check: CheckCancelled) -> None:
        """Every arm once, on the first prompt that fits; not recorded."""
        self._draft_stats = DraftStats(self.profile)
        for prompt in self.prompts:
            with suppress(ContextOverflow):
                for arm in self.arms:
                    list(self._converse(session, arm, prompt, 0.0, 0, check))
                return

    def _converse(
        self,
        session: Session,
        arm: Arm,
        prompt: BenchPrompt,
        temperature: float,
        repeat: int,
        check: CheckCancelled,
    ) -> Iterator[dict[str, Any]]:
        """A record for each turn, which sees the answers to those before it."""
        engine = self.engine
        # The autopilot draws its drafts where it would without a seed, which here only pairs the arms.
        rule = Speculation(arm.kind).rule_for(temperature, seeded=False) if arm.gamma is None else "sample"
        engine.speculation = Speculation(arm.kind, arm.gamma, rule=rule)
        engine.draft_stats = DraftStats(self.profile) if arm.cold else self._draft_stats
        messages: list[Message] = []
        for at, turn in enumerate(prompt.turns):
            messages.append(Message("user", turn))
            request = Request(tuple(messages), SamplingParams(temperature=temperature), self.max_tokens, seed=repeat)
            answer, steps = "", []
            for event in engine.stream(request, check):
                if isinstance(event, Piece):
                    answer += event.text if event.channel == "answer" else ""  # reasoning is no part of a chat
                elif isinstance(event, Step):
                    steps.append(event)
                elif isinstance(event, Finished):
                    finished = event
            check()  # a cancelled generation is no measurement
            messages.append(Message("assistant", answer))
            key = (f"{prompt.id}/{at + 1}", temperature)
            text = engine.encode(request.prompt)
            if arm is _PLAIN:
                self._plain[key] = text, finished
            plain_text, plain = self._plain[key]
            copied_tokens, copied_s = repetition_speed(text, steps)
            comparable = temperature == 0 and text == plain_text  # or an answer before has already parted
            yield {
                "kind": "run",
                "arm": arm.name,
                "prompt": key[0],
                "category": prompt.category,
                "temperature": temperature,
                "repeat": repeat,
                "warm": False,
                "metrics": finished.metrics.to_dict(),
                "copied_tokens": copied_tokens,
                "copied_s": copied_s,
                "bound_s": self._bound(plain, steps) if arm.gamma is None else None,
                "fork": self._fork(session, text, plain, finished) if comparable else None,
            }

    def _bound(self, plain: Finished, steps: Sequence[Step]) -> float | None:
        """Seconds of these rounds by the profile alone, at the speed of plain decoding's last run of the prompt."""
        costs, tpot_s = CostModel(self.profile), plain.metrics.tpot_s
        if tpot_s is None:
            return None
        drafted_s = (self.profile.draft_s or 0.0) * sum(step.decision.walked for step in steps if step.decision)
        forwards_s = sum(costs.seconds(step.n_drafted + 1) for step in steps[1:])
        return (forwards_s + drafted_s) * tpot_s / costs.seconds(1)

    @staticmethod
    def _fork(session: Session, prompt: Sequence[int], plain: Finished, other: Finished) -> dict[str, Any] | None:
        fork = first_divergence(session, prompt, plain.tokens, other.tokens)
        return {**asdict(fork), "near_tie": fork.is_near_tie} if fork else None

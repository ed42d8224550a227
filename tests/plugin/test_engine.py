"""An engine on the toy runtime with drafters that are not edgespec's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from edgespec_automaton import SPEC, AutomatonDrafter

from edgespec.autopilot.speculation import Speculation
from edgespec.backends import open_model
from edgespec.backends.options import LoadOptions
from edgespec.cancel import Check, iterate
from edgespec.core.drafter import Outcome
from edgespec.core.protocols import Round
from edgespec.core.sampling import SamplingParams
from edgespec.drafters.registry import DrafterSpec
from edgespec.engine.engine import Engine
from edgespec.engine.events import Event, Finished, Notice, Request
from edgespec.engine.loaded_drafter import LoadedDrafter
from edgespec.errors import BackendError
from edgespec.models.drafts import DrafterPlan

REQUEST = Request("the sea shore ", SamplingParams(temperature=0), max_tokens=60)


class FailingDrafter(AutomatonDrafter):
    """Fails when it hears of the first round."""

    def observe(self, done: Round) -> Sequence[Outcome]:
        raise KeyError("nothing is known")


def generate(spec: DrafterSpec | None, draft_max: int | None = 4, check: Check = lambda: None) -> list[Event]:
    """All events of an answer that is drafted by `spec`; a fixed length of 4, or the autopilot for None."""
    target = open_model("toy", Path("tree"), LoadOptions())
    drafters = [] if spec is None else [LoadedDrafter(DrafterPlan(spec))]
    names = tuple(each.spec.name for each in drafters)
    engine = Engine(target, drafters, Speculation(names, draft_max if names else 0))
    try:
        return list(iterate(engine.stream(REQUEST), check))
    finally:
        engine.close()


def tokens(events: Sequence[Event]) -> tuple[int, ...]:
    return next(event.tokens for event in events if isinstance(event, Finished))


def notices(events: Sequence[Event]) -> list[str]:
    return [event.text for event in events if isinstance(event, Notice)]


def accepted(events: Sequence[Event]) -> int:
    return next(event.metrics.accepted_tokens for event in events if isinstance(event, Finished))


@pytest.mark.parametrize("draft_max", [4, None], ids=["fixed", "adaptive"])
def test_the_text_is_that_of_plain_decoding(draft_max: int | None) -> None:
    events = generate(SPEC, draft_max)
    assert tokens(events) == tokens(generate(None))
    assert draft_max is None or accepted(events) > 0
    assert notices(events) == []


@pytest.mark.parametrize("draft_max", [4, None], ids=["fixed", "adaptive"])
def test_a_failure_costs_the_proposals_alone(draft_max: int | None) -> None:
    events = generate(replace(SPEC, open=lambda _: FailingDrafter()), draft_max)
    assert tokens(events) == tokens(generate(None))
    assert notices(events) == ["The drafter automaton failed and was left out: 'nothing is known'."]


def test_an_error_of_the_runtime_is_reported_after_one_of_a_drafter() -> None:
    calls = 0

    def check() -> None:
        nonlocal calls
        calls += 1
        if calls == 40:
            raise BackendError("the device is gone.", hint="Try again.")

    with pytest.raises(BackendError, match="the device is gone"):
        generate(replace(SPEC, open=lambda _: FailingDrafter()), check=check)


def test_a_drafter_of_another_name_than_its_spec_is_refused() -> None:
    events = generate(replace(SPEC, name="tree", words=()))
    assert tokens(events) == tokens(generate(None))
    (notice,) = notices(events)
    assert notice.startswith("The drafter tree cannot be used: its name is 'automaton'")

"""Engines on the trained pair."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from edgespec.autopilot.cost_model import CostModel
from edgespec.autopilot.profile import DraftCost, Profile
from edgespec.autopilot.speculation import Speculation
from edgespec.autopilot.stats import DraftStats
from edgespec.backends import Model, open_model
from edgespec.backends.attached_draft import AttachedDraft
from edgespec.backends.options import LoadOptions
from edgespec.cancel import Check, iterate
from edgespec.drafters.registry import drafter_specs
from edgespec.engine.engine import Engine
from edgespec.engine.events import Finished, Request
from edgespec.engine.loaded_drafter import LoadedDrafter
from edgespec.models.drafts import DrafterPlan
from edgespec.text.stream import Piece
from tests.gguf_models import find_trained

PLAIN = Speculation()


class Cheap(CostModel):
    """Rows and drafted tokens cost next to nothing, whatever the clock says, so that as much as possible is drafted."""

    def observe(self, rows: int, position: int, seconds: float) -> None:
        super().observe(rows, position, 1.0 + 0.01 * rows)

    def observe_drafting(self, drafter: str, seconds: float, expected_s: float) -> None: ...


def eager(read_s: float = 0.001) -> DraftStats:
    cost = DraftCost({1: 0.01}, read_s)
    draft_stats = DraftStats(Profile({1: 1.0, 16: 1.1}, {"model": cost, "self": cost}))
    draft_stats.costs = Cheap(draft_stats.costs.profile)
    return draft_stats


def list_loaded(**sources: Model | AttachedDraft) -> list[LoadedDrafter]:
    """Lookups, and a drafter for each of `sources` by its name."""
    specs, found = drafter_specs(), {"ngram": None, **sources}
    return [LoadedDrafter(DrafterPlan(specs[name]), each) for name, each in found.items()]


def open_engine(target: Path, draft: Path, options: LoadOptions) -> Engine:
    models = [open_model("llamacpp", p, options) for p in (target, draft)]
    return Engine(models[0], list_loaded(model=models[1]), PLAIN, options.caches)


@pytest.fixture(scope="session")
def engine() -> Iterator[Engine]:
    opened = open_engine(find_trained("target"), find_trained("draft"), LoadOptions(threads=1, context_size=512))
    yield opened
    opened.close()


def generate(engine: Engine, request: Request, check: Check = lambda: None) -> tuple[str, Finished]:
    """The whole answer and the last event."""
    pieces: list[str] = []
    finished = None
    for event in iterate(engine.stream(request), check):
        if isinstance(event, Piece):
            pieces.append(event.text)
        if isinstance(event, Finished):
            finished = event
    assert finished is not None
    return "".join(pieces), finished

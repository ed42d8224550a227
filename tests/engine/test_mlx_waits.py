"""How often the host waits for the device in a round on MLX."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

import edgespec.backends.mlx
from edgespec.autopilot.cost_model import CostModel
from edgespec.autopilot.profile import DraftCost, Profile
from edgespec.autopilot.speculation import Speculation
from edgespec.autopilot.stats import DraftStats
from edgespec.backends.mlx.model import MlxModel, load
from edgespec.backends.options import LoadOptions
from edgespec.core.protocols import Step
from edgespec.core.sampling import SamplingParams
from edgespec.drafters.registry import drafter_specs
from edgespec.engine.engine import Engine
from edgespec.engine.events import Request
from edgespec.engine.loaded_drafter import LoadedDrafter
from edgespec.models.drafts import DrafterPlan
from tests.backends.test_mlx_selfdraft import make_draft
from tests.engine.prompts import CODE
from tests.gguf_models import DRAFT, TARGET

PACKAGE = Path(edgespec.backends.mlx.__file__).parent


class FixedCosts(CostModel):
    """Drafting always pays, whatever it takes."""

    def observe(self, rows: int, position: int, seconds: float) -> None:
        super().observe(rows, position, 1.0 + 0.01 * rows)


def cheap(name: str) -> DraftStats:
    stats = DraftStats(Profile({1: 1.0, 16: 1.1}, {name: DraftCost({1: 0.01}, 0.001)}))
    stats.costs = FixedCosts(stats.costs.profile)
    return stats


@pytest.fixture(scope="module")
def target() -> Iterator[MlxModel]:
    model = load(TARGET, LoadOptions(context_size=256))
    yield model
    model.close()


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """[1] the calls that have waited for the device so far."""
    count = [0]
    evaluate = mx.eval

    def counting(*arrays: Any) -> None:
        count[0] += 1
        evaluate(*arrays)

    monkeypatch.setattr(mx, "eval", counting)
    return count


@pytest.mark.parametrize("name", ["model", "self"])
@pytest.mark.parametrize("draft_max", [None, 3])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_drafted_round_waits_once(
    target: MlxModel, waits: list[int], name: str, draft_max: int | None, temperature: float
) -> None:
    source = load(DRAFT, LoadOptions(context_size=256)) if name == "model" else make_draft(target, "layerskip:2")
    engine = Engine(target, [LoadedDrafter(DrafterPlan(drafter_specs()[name]), source)], Speculation())
    engine.draft_stats = cheap(name)
    request = Request(CODE[1], SamplingParams(temperature=temperature), max_tokens=24, seed=3)
    drafted = 0
    try:
        list(engine.stream(request))  # plain decoding is measured
        engine.speculation = Speculation((name,), draft_max)
        before = 0
        for event in engine.stream(request):
            if isinstance(event, Step):
                if event.n_drafted > 1 and drafted:  # the first drafted round also reads the prompt
                    assert waits[0] - before == 1
                drafted += event.n_drafted > 1
                before = waits[0]
        assert drafted > 3
    finally:
        engine.release_draft()


def test_arrays_come_to_the_host_at_one_place() -> None:
    """Where rounds run, `library.read` alone converts arrays of the device, so the test above counts all waits."""
    for name in ("session", "selfdraft", "runner", "scores", "caches"):
        code = (PACKAGE / f"{name}.py").read_text(encoding="utf-8")
        assert "np.array(" not in code and ".item()" not in code

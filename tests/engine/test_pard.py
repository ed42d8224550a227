"""A trained PARD model (tests/fixtures/pard) on both runtimes: several tokens from one forward of the draft."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgespec.autopilot.speculation import Speculation
from edgespec.backends import Model, open_model
from edgespec.backends.options import LoadOptions
from edgespec.bench.divergence import first_divergence
from edgespec.core.sampling import SamplingParams
from edgespec.drafters.registry import drafter_specs
from edgespec.engine.engine import Engine
from edgespec.engine.events import Finished, Request
from edgespec.engine.loaded_drafter import LoadedDrafter
from edgespec.models.drafts import DrafterPlan
from tests.engine.prompts import CODE
from tests.gguf_models import TARGET

FOLDER = Path(__file__).parents[1] / "fixtures/pard"
MASK = 3


def open_(backend: str, path: Path) -> Model:
    options = LoadOptions(threads=1, context_size=256)
    return open_model(backend, path, options)  # type: ignore[arg-type]


def answer(engine: Engine, text: str, temperature: float = 0.0, seed: int | None = 5) -> Finished:
    *_, finished = engine.stream(Request(text, SamplingParams(temperature=temperature), 40, seed))
    assert isinstance(finished, Finished)
    return finished


@pytest.mark.parametrize("backend", ["llamacpp", "mlx"])
def test_blocks_are_accepted_and_change_no_text(backend: str) -> None:
    target, pard = open_(backend, TARGET), open_(backend, FOLDER / "model.gguf")
    engine = Engine(target, [LoadedDrafter(DrafterPlan(drafter_specs()["pard"], mask_token=MASK), pard)], Speculation())
    try:
        drafted = accepted = 0
        for text in CODE[:2]:
            expected = {t: answer(engine, text, t).tokens for t in (0.0, 0.8)}
            for speculation in (Speculation(("pard",), 3), Speculation(("pard",), 3, 6)):
                engine.speculation = speculation
                found = answer(engine, text)
                drafted, accepted = drafted + found.metrics.drafted_tokens, accepted + found.metrics.accepted_tokens
                if found.tokens != expected[0.0]:
                    prompt = engine.encode(text)
                    fork = first_divergence(target.open_session(), prompt, expected[0.0], found.tokens)
                    assert fork is not None and fork.is_near_tie
            engine.speculation = Speculation(("pard",), 3, acceptance="sample")
            assert answer(engine, text, 0.8).tokens == expected[0.8], "a seed gives the text of plain decoding"
            engine.speculation = Speculation()
        assert accepted > drafted / 4, "a model that saw no mask tokens in training gets next to nothing right"
    finally:
        engine.close()

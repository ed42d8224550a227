"""Trained heads as --draft: loaded beside their target, and the answers with their drafts."""

from __future__ import annotations

from pathlib import Path

from edgespec.backends.options import LoadOptions
from edgespec.core.protocols import Step
from edgespec.core.sampling import SamplingParams
from edgespec.engine.engine import Engine
from edgespec.engine.events import Finished, Notice, Request
from edgespec.engine.loaded_model import LoadedModel
from edgespec.engine.open import Loader
from edgespec.models.load_config import LoadConfig
from tests.reporter import Heard

PROMPTS = ("def read_lines(path):", "class Config:\n    def __init__(self", "import os\n\n\ndef list_files(folder")


def load(heard: Heard, target: Path, draft: str, draft_max: int | None = 3) -> LoadedModel:
    options = LoadOptions(threads=1, context_size=512, exact=True)
    return Loader().load(LoadConfig(str(target), load=options, draft=draft, draft_max=draft_max))


def generate(engine: Engine, temperature: float = 0.0) -> tuple[list[tuple[int, ...]], int, int]:
    """(the tokens of each text, how many were drafted, how many of these accepted); nothing else was said."""
    texts, drafted, accepted = [], 0, 0
    for prompt in PROMPTS:
        for event in engine.stream(Request(prompt, SamplingParams(temperature=temperature), 64, seed=5)):
            assert not isinstance(event, Notice), event
            if isinstance(event, Step):
                drafted, accepted = drafted + event.n_drafted, accepted + event.n_accepted
            elif isinstance(event, Finished):
                texts.append(event.tokens)
    return texts, drafted, accepted


def answer_plainly(heard: Heard, target: Path, temperature: float = 0.0) -> list[tuple[int, ...]]:
    """The tokens of each text without drafts."""
    plain = load(heard, target, "none")
    texts, drafted, _ = generate(plain.engine, temperature)
    plain.engine.close()
    assert not drafted
    return texts


def check_texts(
    heard: Heard, target: Path, draft: str, wanted: list[tuple[int, ...]], temperature: float
) -> LoadedModel:
    """The texts with a trained head are `wanted`, and many drafts are accepted. Returns the closed model."""
    loaded = load(heard, target, draft)
    found, drafted, accepted = generate(loaded.engine, temperature)
    assert found == wanted
    assert accepted > drafted * (0.35 if temperature == 0 else 0.2), "trained for this target"
    loaded.engine.close()
    return loaded


def check_autopilot(heard: Heard, target: Path, draft: str, name: str) -> None:
    """It prices the drafter `name` beside lookups, and the texts are those without drafts."""
    loaded = load(heard, target, f"{draft}+ngram", None)
    costs = loaded.engine.draft_stats.costs
    assert costs.has_cost(name) and costs.unit_s(name) > 0
    found, _, _ = generate(loaded.engine)
    loaded.engine.close()
    assert found == answer_plainly(heard, target)

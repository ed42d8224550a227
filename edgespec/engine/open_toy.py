"""Opens the toy runtime, whose models have no files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from edgespec.autopilot.store import current_setting
from edgespec.backends import open_model
from edgespec.engine.engine import Engine
from edgespec.engine.loaded_drafter import LoadedDrafter
from edgespec.engine.loaded_model import LoadedModel, describe_model
from edgespec.engine.open_memory import open_memory, open_prefixes
from edgespec.memory.memory import Memory
from edgespec.models.draft_words import AUTO, naming_drafters, parse_draft
from edgespec.models.drafts import DrafterPlan
from edgespec.models.load_config import LoadConfig


def open_toy(config: LoadConfig, memory: Memory | None = None) -> LoadedModel:
    """A toy model with its drafters. Raises UnknownModel, InvalidRequest."""
    name = config.model or "tree"
    auto = "ngram+suffix+model" if config.memory is not None else "ngram+model"
    terms = parse_draft(auto if config.draft == AUTO else config.draft)
    drafters = [_load_drafter(each, config) for each in terms]
    speculation = config.speculate(each.spec for each in drafters)
    target = open_model("toy", Path(name), config.load)
    memory = memory or open_memory(config.memory, target, name)
    key = current_setting("toy", config.load)
    prefixes = open_prefixes(config.memory, memory, key, target, Path(name))
    engine = Engine(target, drafters, speculation, config.load.caches, memory, prefixes)
    engine.is_paused = config.is_paused
    return LoadedModel(engine, describe_model(engine, name, None, None), Path(name), key, None, None, config, None)


def _load_drafter(plan: DrafterPlan, config: LoadConfig) -> LoadedDrafter:
    if plan.spec.needs != "model":
        return LoadedDrafter(replace(plan, self_draft=None))
    with naming_drafters(plan.reference):
        return LoadedDrafter(plan, open_model("toy", Path(plan.reference or "draft"), config.load))

"""What a user asks for when a model is opened."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from edgespec.autopilot.speculation import Rule, Speculation
from edgespec.backends import BackendName
from edgespec.backends.options import LoadOptions
from edgespec.drafters.registry import DrafterSpec
from edgespec.memory.administration import DEFAULT_LIMIT_BYTES


@dataclass(frozen=True, slots=True)
class MemoryOptions:
    """The folder of earlier texts, and how many bytes of them are kept at most.

    keeps_caches  whether the KV caches of texts are kept in files when a model is closed
    """

    folder: Path
    limit_bytes: int = DEFAULT_LIMIT_BYTES
    keeps_caches: bool = True


@dataclass(frozen=True, slots=True)
class LearnOptions:
    """When the draft of an open model is trained on the newest texts.

    new_tokens  of answers that have been stored since the last training
    idle_s      seconds for which the engine has been idle
    minutes     of a training at most
    training    further options of `edgespec adapt`
    """

    new_tokens: int = 4000
    idle_s: float = 10.0
    minutes: float = 10.0
    training: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class LoadConfig:
    """What to load.

    model       a reference, or None for the registry's default
    backend     None: the best for this machine
    draft       'auto' (all drafters that are available), 'none', or drafters as draft_words.parse_draft takes them
    draft_max   maximum draft depth; None: the autopilot decides
    draft_tree  maximum draft tokens in all; None: as many as draft_max, a chain
    acceptance  the acceptance rule, see Speculation
    is_paused   nothing is drafted until `/spec on`
    max_bytes   that the process of the model may take; None: what is free
    force       load even if it does not fit in memory
    fetch_heads  'auto' takes the head that the registry pairs with the target even if it is not downloaded yet
    memory      where earlier texts are kept; None: they are not, and nothing drafts from them
    adapted     the folder of drafts that were adapted to their user; None: they are not used
    learn       when the draft is trained while the engine is idle; None: it is not
    """

    model: str | None = None
    backend: BackendName | None = None
    draft: str = "auto"
    draft_max: int | None = None
    draft_tree: int | None = None
    acceptance: Rule = "auto"
    is_paused: bool = False
    load: LoadOptions = field(default_factory=LoadOptions)
    max_bytes: int | None = None
    force: bool = False
    fetch_heads: bool = False
    memory: MemoryOptions | None = None
    adapted: Path | None = None
    learn: LearnOptions | None = None

    def speculate(self, drafters: Iterable[DrafterSpec]) -> Speculation:
        """How to draft with `drafters`. Raises InvalidRequest for options that do not go together."""
        names = tuple(each.name for each in drafters)
        return Speculation(names, self.draft_max if names else 0, self.draft_tree, self.acceptance)

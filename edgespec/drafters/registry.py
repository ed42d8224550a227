"""The registry of drafters: the built-in ones, and those of installed packages.

A package adds a drafter by an entry point of the group `edgespec.drafters`, whose value is a DrafterSpec or a list of
them. docs/write-a-drafter.md has an example.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, Literal

from edgespec.core.drafter import BlockSession, Drafter, DraftSession
from edgespec.core.protocols import Session
from edgespec.errors import STOPS, reason_of

if TYPE_CHECKING:
    from edgespec.memory.space import MemorySpace

GROUP = "edgespec.drafters"
SELF = "self"  # the drafter of self-drafts
_HEADS = {
    "mtp": "MTP layers of the target",
    "eagle3": "a trained EAGLE-3 head of the target",
    "eagle": "a trained EAGLE-1 or EAGLE-2 head",
    "dflash": "a trained DFlash head: several tokens in one forward",
    "dspark": "a trained DSpark head: several tokens in one forward",
    "medusa": "trained Medusa heads: several tokens at once",
    "hydra": "trained Hydra heads",
}
LOOKUPS = ("ngram", "suffix")  # they copy earlier text, most often in one way
RESERVED = {"auto", "autopilot", "none", "plain", "structure"}  # they mean something else where drafters are named


@dataclass
class SlotMemory:
    """What the present generation of a slot may draft from beside its text; the engine sets it before each `begin`.

    space   the earlier texts; None if it may use none
    epoch   of `space` when the generation began
    quotes  returns the tokens of what tools have said, as a call of a tool would quote it
    """

    space: MemorySpace | None = None
    epoch: int = 0
    quotes: Callable[[], Sequence[int]] = tuple


@dataclass(frozen=True, slots=True)
class SlotResources:
    """What a drafter of one slot is made from.

    target      the session that it drafts for, which it must not change
    vocab_size  the target's; a proposal outside it is refused
    session     a session of the draft that was loaded for this drafter; the drafter closes it. None if it needs none
    mask_token  the id that stands for an unknown token in a PARD model; None if the model names none
    head        a session of the trained head that was loaded for this drafter, likewise
    memory      the memory of earlier texts, whose `space` may change from generation to generation
    """

    target: Session
    vocab_size: int
    session: Session | None = None
    mask_token: int | None = None
    head: DraftSession | BlockSession | None = None
    memory: SlotMemory = field(default_factory=SlotMemory)

    def require_session(self) -> Session:
        """Raises ValueError if no draft was loaded."""
        if self.session is None:
            raise ValueError("no draft was loaded for this drafter")
        return self.session


@dataclass(frozen=True, slots=True)
class DrafterSpec:
    """A kind of drafter.

    name       in `--draft`, in statistics and beside its tokens: lower-case letters, digits and hyphens
    summary    one line for help, the drafter list and `doctor`
    open       makes the drafter of one slot; raises EdgespecError or ValueError
    needs      what has to be loaded for it: 'nothing', a draft 'model', a trained 'head', a part of the 'target', or
               the 'memory' of earlier texts
    draws      whether it can draw its tokens at random, for the rejection rules
    words      what names it in `--draft`, if not `name`
    in_auto    whether 'auto' takes it, if it is available
    configure  reads the options that follow the name and a colon in `--draft`, and returns the `open` for them; raises
               InvalidRequest. None if it takes no options
    """

    name: str
    summary: str
    open: Callable[[SlotResources], Drafter]
    needs: Literal["nothing", "model", "head", "target", "memory"] = "nothing"
    draws: bool = False
    words: tuple[str, ...] = ()
    in_auto: bool = True
    configure: Callable[[str], Callable[[SlotResources], Drafter]] | None = None

    @property
    def all_words(self) -> tuple[str, ...]:
        return self.words or (self.name,)


def drafter_specs() -> Mapping[str, DrafterSpec]:
    """All drafters by name: the built-in ones first, then those of packages."""
    return {**_built_in(), **_installed()[0]}


def refused_plugins() -> Mapping[str, str]:
    """The entry points that could not be used, with the reason."""
    return _installed()[1]


def find_spec(word: str) -> DrafterSpec | None:
    """The drafter that `word` names in `--draft`; None if there is none."""
    return next((spec for spec in drafter_specs().values() if word in spec.all_words), None)


@cache
def _built_in() -> Mapping[str, DrafterSpec]:
    def spec(name: str, summary: str, **more: Any) -> DrafterSpec:
        return DrafterSpec(name, summary, partial(_open, name), **more)

    heads = (spec(kind, summary, needs="head", draws=True) for kind, summary in _HEADS.items())
    words = ("layerskip", "skip", "qspec", "sparse")
    summary = "the target itself with fewer layers, fewer bits or less context"
    guesses = "n-grams of the target's own guesses, which it makes where 55 more rows take at most 0.1 of a plain step"
    specs = (
        spec("ngram", "what followed the same tokens earlier in the text"),
        spec("suffix", "what followed the same tokens in earlier texts", needs="memory"),
        spec("recycling", "what the target found probable after the same token before", in_auto=False),
        spec("lookahead", guesses, in_auto=False, configure=_configure_lookahead),
        spec("model", "a small model of the same family", needs="model", draws=True),
        *heads,
        spec("pard", "a PARD model: several tokens in one forward", needs="model", draws=True),
        spec(SELF, summary, needs="target", draws=True, words=words),
    )
    return {spec.name: spec for spec in specs}


@cache
def _installed() -> tuple[Mapping[str, DrafterSpec], Mapping[str, str]]:
    """(drafters of packages by name, reasons by entry point)"""
    found: dict[str, DrafterSpec] = {}
    refused: dict[str, str] = {}
    taken = {word for spec in _built_in().values() for word in (spec.name, *spec.all_words)} | RESERVED
    for entry in entry_points(group=GROUP):
        try:
            value = entry.load()
            for spec in value if isinstance(value, list | tuple) else (value,):
                _check_spec(spec, taken)
                found[spec.name] = spec
                taken.update((spec.name, *spec.all_words))
        except STOPS:
            raise
        except BaseException as error:  # noqa: BLE001 - somebody else's code
            refused[entry.name] = reason_of(error)
    return found, refused


def _check_spec(spec: object, taken: set[str]) -> None:
    """Raise ValueError for a spec that cannot be registered."""
    if not isinstance(spec, DrafterSpec):
        raise ValueError(f"it is a {type(spec).__name__}, not a DrafterSpec")
    for word in (spec.name, *spec.all_words):
        if not re.fullmatch(r"[a-z][a-z0-9-]*", word):
            raise ValueError(f"'{word}' is not a name of lower-case letters, digits and hyphens")
        if word in taken:
            raise ValueError(f"the name '{word}' is taken")
    if spec.needs != "nothing":
        raise ValueError("drafters of packages cannot have a model loaded for them")


def _open(name: str, resources: SlotResources) -> Drafter:
    """The built-in drafter of this name. Their modules import this one."""
    from edgespec.drafters.block import BlockDrafter
    from edgespec.drafters.ngram import NgramDrafter
    from edgespec.drafters.pard import PardSession
    from edgespec.drafters.sequential import ModelDraftSession, SequentialDrafter

    vocab_size, memory, head = resources.vocab_size, resources.memory, resources.head
    match name:
        case "ngram":
            return NgramDrafter(memory)
        case "suffix":
            from edgespec.drafters.suffix import SuffixDrafter

            return SuffixDrafter(memory)
        case "recycling":
            from edgespec.drafters.recycling import RecyclingDrafter, SuccessorTable

            load = partial(SuccessorTable.load, vocab_size)
            return RecyclingDrafter(lambda: load(None) if memory.space is None else memory.space.table(name, load))
        case "lookahead":
            return _configure_lookahead(None)(resources)
        case "pard":
            if resources.mask_token is None:
                raise ValueError("this model names no mask token, so it is not a PARD model")
            return BlockDrafter(name, PardSession(resources.require_session(), vocab_size, resources.mask_token))
        case "model" | "self":
            return SequentialDrafter(name, ModelDraftSession(resources.require_session(), vocab_size))
    if head is None:
        raise ValueError("no head was loaded for this drafter")
    return BlockDrafter(name, head) if isinstance(head, BlockSession) else SequentialDrafter(name, head)


def _configure_lookahead(options: str | None) -> Callable[[SlotResources], Drafter]:
    """`options` is W,N,G; None for the usual window. Raises InvalidRequest."""
    from edgespec.drafters.lookahead import LookaheadDrafter, WindowShape, parse_shape

    shape = WindowShape() if options is None else parse_shape(options)
    return lambda resources: LookaheadDrafter(shape)

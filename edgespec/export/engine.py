"""What an engine is for an export: how it names the models and states their options."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from edgespec.backends import FileBackend
from edgespec.export.plan import Draft, ExportPlan

MODELFILE, TENSORRT_FILE = "edgespec.Modelfile", "tensorrt-llm.yml"
ALWAYS = ""  # the remark holds whatever drafts


@dataclass(frozen=True, slots=True)
class Engine:
    """A program that serves models.

    title     its name for people, with the version whose source the keys were read in
    backend   whose files it loads; None for the original weights
    command   its first words, before those of the target
    methods   its own name of a drafter, by ours
    options   makes the words that turn a drafter of a length on
    target    makes the words that name the target, or what is served in its place for a draft
    quantize  the option that quantizes original weights to 8 bits at the start; "" without one
    remarks   a sentence about its drafts, and the drafters that it concerns
    files     makes the files that the command needs, by name
    has_many  whether it has lookups that work beside a draft, and find their lengths themselves
    measure   where it shows how many drafted tokens are accepted; "" if that is not known
    refuse    why it cannot load the files of a draft; None if it can
    compares  the drafters, by our name, whose vocab_size it compares with the target's when it starts
    """

    title: str
    backend: FileBackend | None
    command: tuple[str, ...]
    methods: Mapping[str, str]
    options: Callable[[ExportPlan, Draft, int], Sequence[str]]
    target: Callable[[ExportPlan, Draft | None], Sequence[str]] = lambda plan, draft: [plan.target.require_original()]
    quantize: str = ""
    remarks: Mapping[str, Collection[str]] = field(default_factory=dict)
    files: Callable[[ExportPlan, Draft | None, int], Mapping[str, str]] = lambda plan, draft, length: {}
    has_many: bool = False
    measure: str = ""
    refuse: Callable[[Draft], str | None] = lambda draft: None
    compares: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Choice:
    """The drafter that an engine takes.

    draft     None: the engine drafts nothing
    length    tokens that it drafts; None if the engine finds the number itself
    refusals  why others are not taken, by drafter, in the order of preference
    """

    draft: Draft | None
    length: int | None
    refusals: Mapping[str, str]

"""What is exported, and the result, apart from any engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from edgespec.backends import FileBackend
from edgespec.models.references import HubFile, HubQuant, HubRepo, LocalPath, Reference
from edgespec.models.registry import Acceptance


@dataclass(frozen=True, slots=True)
class Weights:
    """One model, in the forms in which engines load it.

    files         the GGUF file or MLX folder in use: a path if it is on this machine
    original      `user/repo` on Hugging Face, or the path of a folder in its format; None if it is not known
    known_from    what names `original`, for a remark
    is_quantized  whether the originals have weights of more bits than `files`
    vocab_size    rows of its embedding; None if that is not known
    """

    reference: Reference
    files: HubRepo | HubQuant | HubFile | LocalPath
    original: str | None = None
    known_from: str = ""
    is_quantized: bool = False
    vocab_size: int | None = None

    @property
    def is_folder(self) -> bool:
        return self.original is not None and self.original.startswith("/")

    def require_original(self) -> str:
        """`original`, which is known: the export has checked that for engines that load it."""
        assert self.original is not None
        return self.original


@dataclass(frozen=True, slots=True)
class Measured:
    """What the autopilot has learned of a drafter on this machine, one answer at a time.

    acceptance  of a drafted token after which only accepted ones came, 0 to 1
    sampling    under which most of it was learned, such as 'sample at 0.0, answer'
    """

    acceptance: float
    sampling: str


@dataclass(frozen=True, slots=True)
class Draft:
    """One drafter of the pair.

    method      its name in `--draft`, or the kind of a trained head
    weights     None for lookups, self-drafts, and heads in the target's own files
    block       tokens that a head drafts at once; None for others, and if its files were not read
    version     of a draft that was adapted to the user; None for others
    acceptance  of the registry, on less and on more predictable texts
    """

    method: str
    weights: Weights | None = None
    block: int | None = None
    version: int | None = None
    acceptance: Acceptance | None = None
    measured: Measured | None = None

    @property
    def label(self) -> str:
        version = f", version {self.version}" if self.version is not None else ""
        return self.method if self.weights is None else f"{self.weights.reference} ({self.method}{version})"


@dataclass(frozen=True, slots=True)
class ExportPlan:
    """A target with what drafts for it.

    drafts   the preferred one first
    is_auto  whether the drafters were found, and not named by the user
    machine  the processor that figures were measured on
    """

    name: str
    backend: FileBackend
    target: Weights
    drafts: tuple[Draft, ...]
    is_auto: bool
    machine: str


@dataclass(frozen=True, slots=True)
class Exported:
    """What an engine needs to serve a pair.

    commands  in order, as words; the last one serves
    files     by name, beside which the commands are run
    remarks   sentences of this engine
    """

    commands: tuple[tuple[str, ...], ...]
    files: Mapping[str, str] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()

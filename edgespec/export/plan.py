"""What is exported, and the result, apart from any engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from edgespec.backends import FileBackend
from edgespec.controller.cost_model import Profile
from edgespec.controller.stats import DraftStats
from edgespec.hub.cache import HubFile, HubQuant, HubRepo, LocalPath, Reference
from edgespec.registry.schema import Acceptance


@dataclass(frozen=True, slots=True)
class Weights:
    """One model, in the forms in which engines load it.

    files       the GGUF file or MLX folder in use: a path where it is on this machine
    original    `user/repo` on Hugging Face, or the path of a folder in its format; None where it is not known
    known_from  what names `original`, for a remark
    bits        of a weight in `files`; None where that is not known, and where the originals have as few
    vocab_size  rows of its embedding; None where that is not known
    """

    reference: Reference
    files: HubRepo | HubQuant | HubFile | LocalPath
    original: str | None = None
    known_from: str = ""
    bits: int | None = None
    vocab_size: int | None = None

    @property
    def is_folder(self) -> bool:
        """Whether `original` is a folder on this machine."""
        return self.original is not None and self.original.startswith("/")

    def require_original(self) -> str:
        """`original`, where an engine that loads it has been checked to know it."""
        assert self.original is not None
        return self.original


@dataclass(frozen=True, slots=True)
class Measured:
    """What the autopilot has learned of a drafter on this machine, one answer at a time.

    acceptance  of a drafted token after which only accepted ones came, 0 to 1
    sampling    under which most of it was learned, such as 'sample at 0.0, answer'
    length      of the fixed chain that is fastest by this and the measured costs; 0 where plain decoding is
    speedup     of that chain over plain decoding, by the same
    """

    acceptance: float
    sampling: str
    length: int
    speedup: float


@dataclass(frozen=True, slots=True)
class Draft:
    """One drafter of the pair.

    method      its name in `--draft`, or the kind of a trained head
    weights     None for lookups, self-drafts, and heads in the target's own files
    block       tokens that a head drafts at once; None for others, and where its files were not read
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
        """For people."""
        version = f", version {self.version}" if self.version is not None else ""
        return self.method if self.weights is None else f"{self.weights.reference} ({self.method}{version})"


@dataclass(frozen=True, slots=True)
class ExportPlan:
    """A target with what drafts for it.

    drafts   the preferred one first
    is_auto  whether the drafters were found, and not named by the user
    machine  the processor that figures were measured on
    hints    sentences on what else could be exported
    """

    name: str
    backend: FileBackend
    target: Weights
    drafts: tuple[Draft, ...]
    is_auto: bool
    machine: str
    hints: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Container:
    """A service of Docker Compose.

    image       of Docker Hub; of another place `${VARIABLE:?...}`, which the user sets
    entrypoint  in place of the image's own; empty for that
    volumes     (source, target): a path that can be read there, or the name of a volume of Docker
    remark      a sentence for its user
    """

    image: str
    command: tuple[str, ...]
    port: int
    volumes: tuple[tuple[str, str], ...] = ()
    entrypoint: tuple[str, ...] = ()
    has_gpu: bool = True
    remark: str = ""


@dataclass(frozen=True, slots=True)
class Exported:
    """What an engine needs to serve a pair.

    commands  in order, as words; the last one serves
    files     by name, beside which the commands are run
    remarks   sentences of this engine
    """

    commands: tuple[tuple[str, ...], ...]
    container: Container | None = None
    files: Mapping[str, str] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()


# What the autopilot has stored of a drafter, as the figures of an export.


_MIN_EVIDENCE = 6.0  # tokens, discounted: those of one answer
_MAX_LENGTH = 15


def read_measured(stats: DraftStats, drafter: str) -> Measured | None:
    """Read what is known of `drafter` under its most frequent way of sampling; None where it was hardly ever asked."""
    found = [
        (key, each.first_choice.evidence) for key, each in stats.drafters.items() if key.startswith(f"{drafter}; ")
    ]
    if not found:
        return None
    key, (accepted, tested) = max(found, key=lambda each: each[1][1])
    if tested < _MIN_EVIDENCE:
        return None
    acceptance = min(accepted / tested, 1.0)
    length, speedup = find_best_length(stats.costs.profile, drafter, acceptance)
    return Measured(acceptance, key.partition("; ")[2], length, speedup)


def find_best_length(profile: Profile, drafter: str, acceptance: float) -> tuple[int, float]:
    """(length, speedup over plain decoding) of the fastest chain whose tokens are each accepted at rate `acceptance`.

    (0, 1.0) if none is faster. A drafter whose time was not measured takes none.
    """
    cost = profile.drafts.get(drafter)
    best, expected, reached = (0, 1.0), 1.0, 1.0
    for length in range(1, min(_MAX_LENGTH, max(profile.rows) - 1) + 1):
        reached *= acceptance
        expected += reached
        seconds = profile.seconds(length + 1) + (cost.path_s(length) if cost is not None else 0.0)
        best = max(best, (length, expected * profile.seconds(1) / seconds), key=lambda each: each[1])
    return best

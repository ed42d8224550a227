"""What the drafter contract runs over: each drafter of the registry on each runtime that has it."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from edgespec.backends import Model
from edgespec.backends.attached_draft import AttachedDraft, AttachedHead, parse
from edgespec.backends.llamacpp.model import load as load_llama
from edgespec.backends.mlx.model import load as load_mlx
from edgespec.backends.options import LoadOptions
from edgespec.backends.toy import LetterModel, ToyRuntimeModel
from edgespec.core.drafter import Drafter
from edgespec.core.protocols import Session
from edgespec.drafters import registry
from edgespec.drafters.registry import SELF, DrafterSpec, SlotMemory, drafter_specs
from edgespec.engine.loaded_drafter import LoadedDrafter
from edgespec.formats.head_file import read_head
from edgespec.memory.memory import Memory
from edgespec.models.drafts import DrafterPlan
from edgespec.text.tokenizer import Tokenizer
from tests.backends.head_kinds import KINDS, TargetShape, kinds_on
from tests.backends.mtp_heads import make_mixture
from tests.contract.runtimes import ON_DEVICE
from tests.gguf_models import DRAFT, REPOSITORY, TARGET

CONTEXT = 256
PARD = REPOSITORY / "tests" / "fixtures" / "pard"
PLUGIN = REPOSITORY / "tests" / "plugin" / "edgespec-automaton"
MASK = json.loads((PARD / "config.json").read_text())["pard_token"]
TOYS = ("toy-linear", "toy-tree", "toy-recurrent")
LETTERS = [97, 98, 99, 97, 98, 99, 100, 97, 98, 101, 102, 97, 98, 99, 103, 104, 103, 105, 106, 103]
TEXT = "for value in values:\n    print(value)\n\n\ndef add(a, b):\n    return a + b, [1, 2, 3]\n"
SHARED = "shared llama.cpp"  # several sessions over one context, which adopt each other's prefixes
METHODS = {
    "llama.cpp": ("layerskip:2", "qspec:4", "sparse:4,250"),
    "mlx": ("layerskip:1", "qspec:4", "sparse:4,250"),
}
HEADS = {runtime: kinds_on(runtime) for runtime in ("llama.cpp", "mlx")}

# A draft of fewer bits keeps its own keys and values of the tokens that were accepted, so its scores depend on them.
_TOLERANCE = {"llama.cpp": 1e-3, "mlx": 2e-3, "qspec:4 on llama.cpp": 0.25}

LOOKAHEAD = "lookahead:2,3,2"  # a window that the small drafts here have room for
WITHOUT_ATTACHED = ("ngram", "suffix", "recycling", LOOKAHEAD, "model", "pard", "automaton")  # a plugin
LEARNING = ("recycling", "lookahead")  # from scores
NAMES = [
    *(f"{drafter} on {runtime}" for runtime in TOYS for drafter in WITHOUT_ATTACHED),
    *(f"{each} on {runtime}" for runtime in METHODS for each in (*WITHOUT_ATTACHED, *METHODS[runtime])),
    *(f"{each} on {runtime}" for runtime in HEADS for each in HEADS[runtime]),
]
ADOPTING = [
    *(name for name in NAMES if name.endswith(TOYS)),
    *(name.replace("llama.cpp", SHARED) for name in NAMES if name.endswith("llama.cpp")),
]


@dataclass(frozen=True)
class Subject:
    """A loaded drafter and the target that it drafts for.

    tolerance  by which a probability may change with the number of rows of a forward
    is_exact   whether the target's scores do not depend on the number of rows
    memory     earlier texts, for a drafter that needs them: TEXT, and in a namespace "letters" LETTERS
    """

    name: str
    target: Model
    loaded: LoadedDrafter
    tolerance: float
    is_exact: bool
    memory: Memory | None = None

    @property
    def drafter(self) -> str:
        return self.loaded.spec.name

    @property
    def learns_from_scores(self) -> bool:
        """Whether what it proposes depends on the scores that it has seen, not on the text alone."""
        return self.drafter in LEARNING

    @property
    def takes_trees(self) -> bool:
        return self.target.no_tree_reason is None

    @property
    def vocab_size(self) -> int:
        return self.target.tokenizer.vocab_size

    def open(self, target: Session) -> Drafter:
        return self.loaded.open(target, self.vocab_size, self.open_slot_memory())

    def open_slot_memory(self) -> SlotMemory:
        """A slot's, with the letters."""
        return SlotMemory(self.memory.space("letters") if self.memory is not None else None)

    def replaced(self, spec: DrafterSpec) -> Subject:
        """The same with another way to open the drafter."""
        return replace(self, loaded=replace(self.loaded, plan=replace(self.loaded.plan, spec=spec)))


class Loader:
    """Loads runtimes and their drafts once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._models: dict[tuple[str, str], Model | AttachedDraft | AttachedHead] = {}
        self._memories: dict[str, Memory] = {}

    def load(self, name: str) -> Subject:
        """A subject of NAMES."""
        drafter, runtime = name.split(" on ")
        word, _, options = drafter.partition(":")
        spec = drafter_specs().get(word) or drafter_specs()[SELF]
        if spec.configure is not None:
            spec = replace(spec, open=spec.configure(options))
        target = self._model(runtime, _target_of(drafter, runtime))
        source: Model | AttachedDraft | AttachedHead | None = None
        if spec.needs == "model":
            source = self._model(runtime, drafter)
        elif spec.needs == "target":
            source = self._attach(runtime, drafter)
        elif spec.needs == "head":
            source = self._attach_head(runtime, drafter)
        mask = None if drafter != "pard" else ord("@") if runtime in TOYS else MASK
        tolerance = _TOLERANCE.get(name, _TOLERANCE.get(runtime, 0.0))
        is_rounded = ON_DEVICE and runtime == "llama.cpp"
        tolerance *= 40 if is_rounded else 1
        is_exact = runtime not in ("mlx", SHARED) and not is_rounded
        memory = self._open_memory(name, target.tokenizer) if spec.needs == "memory" else None
        return Subject(
            name, target, LoadedDrafter(DrafterPlan(spec, mask_token=mask), source), tolerance, is_exact, memory
        )

    def close(self) -> None:
        for each in reversed(self._models.values()):
            each.close()
        for memory in self._memories.values():
            memory.close()

    def _open_memory(self, name: str, tokenizer: Tokenizer) -> Memory:
        if name not in self._memories:
            memory = self._memories[name] = Memory(self._folder / f"memory of {name}", name, 2**20)
            memory.space("letters").add(LETTERS, 0, None)
            memory.space("").add(tokenizer.encode(TEXT, parse_special=False), 0, None)
        return self._memories[name]

    def _model(self, runtime: str, which: str) -> Model:
        key = runtime, which
        if key not in self._models:
            self._models[key] = _OPEN.get(runtime, _open_toy)(runtime, which, self._folder)
        found = self._models[key]
        assert not isinstance(found, AttachedDraft | AttachedHead)
        return found

    def _attach(self, runtime: str, method: str) -> AttachedDraft:
        key = runtime, method
        if key not in self._models:
            spec = parse(method)
            assert spec is not None
            self._models[key] = self._model(runtime, "target").make_self_draft(spec, folder=self._folder)
        found = self._models[key]
        assert isinstance(found, AttachedDraft)
        return found

    def _attach_head(self, runtime: str, kind: str) -> AttachedHead:
        key = runtime, kind
        if key not in self._models:
            path = self._make_head(runtime, kind)
            spec = read_head(path)
            assert spec is not None
            self._models[key] = self._model(runtime, _target_of(kind, runtime)).load_head(spec, path)
        found = self._models[key]
        assert isinstance(found, AttachedHead)
        return found

    def _make_head(self, runtime: str, kind: str) -> Path:
        """A head of random weights."""
        if _target_of(kind, runtime) == "mixture":
            return _mixture(runtime, self._folder)
        config = json.loads((PARD / "config.json").read_text())
        shape = TargetShape(config["hidden_size"], config["vocab_size"], (1, 1, 2))
        make = KINDS[kind]["mlx" if runtime == "mlx" else "llama.cpp"]
        return make(self._folder / (f"{kind} mlx" if runtime == "mlx" else f"{kind} {runtime}.gguf"), shape)


def _target_of(drafter: str, runtime: str) -> str:
    """The model that `drafter` drafts for. llama.cpp runs no MTP layers of the packaged one's architecture."""
    return "mixture" if drafter == "mtp" and runtime != "mlx" else "target"


def _mixture(runtime: str, folder: Path) -> Path:
    """A model with an MTP layer, made once."""
    path = folder / f"mixture {runtime}.gguf"
    if path.exists():
        return path
    return make_mixture(path, is_quantized=True)


def _open_toy(runtime: str, which: str, folder: Path) -> Model:
    """Target and draft are of one kind, so that recurrent drafts are run too. The whole text decides the next token."""
    rule = LetterModel(order=CONTEXT, noise=0.0 if which == "target" else 1.0)
    return ToyRuntimeModel(runtime.removeprefix("toy-"), rule, LoadOptions(context_size=CONTEXT))


def _open_llama(runtime: str, which: str, folder: Path) -> Model:
    """In the mode whose results do not depend on the number of rows, unless its context is shared."""
    paths = {"target": TARGET, "model": DRAFT, "pard": PARD / "model.gguf"}
    path = _mixture(runtime, folder) if which == "mixture" else paths[which]
    options = LoadOptions(context_size=CONTEXT, threads=1, mtp=which == "mixture")
    return load_llama(path, replace(options, caches=2) if runtime == SHARED else replace(options, exact=True))


def _open_mlx(runtime: str, which: str, folder: Path) -> Model:
    """The PARD model drafts for itself, as an ordinary model and by blocks: two layers of width 128."""
    return load_mlx(PARD, LoadOptions(context_size=CONTEXT))


_OPEN: dict[str, Callable[[str, str, Path], Model]] = {"llama.cpp": _open_llama, SHARED: _open_llama, "mlx": _open_mlx}


@contextmanager
def installed(folder: Path, entry_points: str) -> Iterator[None]:
    """Lines of entry points in a distribution that is found on sys.path while the context lasts."""
    information = folder / "example_drafters-1.0.dist-info"
    information.mkdir(parents=True)
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: example-drafters\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text(f"[{registry.GROUP}]\n{entry_points}\n")
    paths = [str(folder), str(PLUGIN)]
    sys.path[:0] = paths
    importlib.invalidate_caches()
    registry._installed.cache_clear()
    try:
        yield
    finally:
        for path in paths:
            sys.path.remove(path)
        registry._installed.cache_clear()

"""Which self-draft serves a model best here: tried on a text, within a time, and remembered."""

from __future__ import annotations

import importlib.resources
import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

from edgespec.backends import BackendName, Model
from edgespec.backends.attached_draft import SelfDraftModel, SelfDraftSpec, Skip, Unsupported, parse
from edgespec.controller.store import ProfileKey, calibration_folder, fingerprint_weights
from edgespec.core.protocols import CheckCancelled, Session
from edgespec.errors import BackendError, CacheError, DoesNotFit, EdgespecError
from edgespec.files import write_atomically
from edgespec.planner.draft_eval import DraftEval, Evaluator
from edgespec.text.chat_template import encode_prompt

EVALUATION_S = 10.0  # when a model is opened
_WORTH = 1.05  # times plain decoding, below which a draft of its own is not worth its memory
_NOTES = "choices.json"


@dataclass(frozen=True, slots=True)
class Choice:
    """What was found best for a request such as 'auto' or 'layerskip', and whether it promises to pay."""

    method: SelfDraftSpec
    pays: bool
    reason: str


class SelfDraftSearch:
    """Tries self-drafts of one target. The thread that uses the target uses this."""

    def __init__(
        self,
        target: Model,
        folder: Path,
        seconds: float,
        check: CheckCancelled,
        progress: Callable[[str, float], None],
    ) -> None:
        """`seconds` for the search of layers; `progress` hears of what is requantized, 0.0 to 1.0."""
        self._target = target
        self._progress = progress
        self._folder = folder
        self._until = perf_counter() + seconds
        self._check = check
        self.trials: dict[str, DraftEval] = {}
        self.rival: DraftEval | None = None

    def choose(self, methods: Sequence[SelfDraftSpec], rival: Model | None = None) -> Choice:
        """The one that promises the most; where a skip names no layers they are searched.

        It pays if it promises more than plain decoding, and than a draft model, the `rival`.

        Raises Unsupported where none can be made; Cancelled, BackendError, CacheError.
        """
        refusals: list[EdgespecError] = []
        with self._yardstick() as (yardstick, session):
            if rival is not None:
                self.rival = _tried(rival.open_session(self._check), yardstick)
            for method in methods:
                try:
                    if method.skip == Skip():
                        self._search(method, yardstick, session)
                    else:
                        self._try(method, yardstick, session)
                except (Unsupported, DoesNotFit) as refusal:
                    refusals.append(refusal)
        if not self.trials:
            raise refusals[0]
        name, trial = max(self.trials.items(), key=lambda each: (each[1].speedup, each[1].agreement - each[1].cost))
        best = parse(name)
        assert best is not None
        pays = trial.speedup >= _WORTH * (self.rival.speedup if self.rival else 1.0)
        return Choice(best, pays, f"{trial}; the best of {len(self.trials)} tried")

    def _search(self, method: SelfDraftSpec, yardstick: Evaluator, session: Session) -> None:
        """Exits first; then every layer but the first and last is left out alone, and they go in that order."""
        count = self._target.layer_count
        if count < 3:
            raise Unsupported(f"the model has {count} layers, too few to skip any.", hint="Use --draft ngram.")

        def tried(kept: Iterable[int]) -> DraftEval | None:
            """None where there is no time left."""
            layers = tuple(kept)
            skip = Skip(exit=len(layers)) if layers == tuple(range(len(layers))) else Skip(kept=layers)
            if perf_counter() >= self._until and self.trials:
                return None
            return self._try(SelfDraftSpec(skip, method.bits, method.planes, method.sparse), yardstick, session)

        for exit_after in dict.fromkeys(max(1, count * part // 12) for part in (4, 3, 6)):
            tried(range(exit_after))
        missed = {}
        for layer in sorted(range(1, count - 1), key=lambda each: abs(each - count / 2)):
            try:
                trial = tried(each for each in range(count) if each != layer)
            except Unsupported:  # no layer but the last can be left out
                return
            if trial is None:
                return
            missed[layer] = trial.agreement
        order = sorted(missed, key=missed.__getitem__, reverse=True)
        for n in range(2, len(order) + 1):
            if tried(each for each in range(count) if each not in order[:n]) is None:
                return

    def _try(self, method: SelfDraftSpec, yardstick: Evaluator, session: Session) -> DraftEval:
        if str(method) in self.trials:
            return self.trials[str(method)]
        told = partial(self._progress, str(method)) if method.bits is not None else lambda fraction: None
        draft = make_self_draft(self._target, method, self._folder, told, self._check)
        try:
            trial = _tried(draft.open_session(session, self._check), yardstick, slows=method.planes)
        finally:
            draft.close()
        self.trials[str(method)] = trial
        return trial

    @contextmanager
    def _yardstick(self) -> Iterator[tuple[Evaluator, Session]]:
        text = importlib.resources.files("edgespec").joinpath("assets/calibration.txt").read_text(encoding="utf-8")
        session = self._target.open_session(self._check)
        try:
            tokens = encode_prompt(self._target.tokenizer, text, parse_special=False)
            yield Evaluator(session, tokens, self._check), session
        finally:
            session.close()


def _tried(session: Session, yardstick: Evaluator, *, slows: bool = False) -> DraftEval:
    try:
        return yardstick.trial(session, slows=slows)
    finally:
        session.close()


def quick_methods(backend: BackendName) -> list[SelfDraftSpec]:
    """Those that cost next to nothing to try: what has to be written first is left to `edgespec draft build`."""
    return [SelfDraftSpec(Skip())] if backend == "llamacpp" else [SelfDraftSpec(Skip()), SelfDraftSpec(bits=0)]


def all_methods(backend: BackendName) -> list[SelfDraftSpec]:
    """Those that may pay on short contexts."""
    bits = [SelfDraftSpec(bits=0), SelfDraftSpec(bits=3), SelfDraftSpec(bits=2)]
    return (
        [SelfDraftSpec(Skip()), *bits]
        if backend == "llamacpp"
        else [SelfDraftSpec(Skip()), *bits, SelfDraftSpec(bits=0, planes=True)]
    )


def make_self_draft(
    target: Model, method: SelfDraftSpec, folder: Path, progress: Callable[[float], None], check: CheckCancelled
) -> SelfDraftModel:
    """`Model.self_draft`, with memory that runs out as an error in words."""
    try:
        return target.self_draft(method, folder=folder, progress=progress, check=check)
    except MemoryError as error:
        raise BackendError("there is no memory left for a self-draft.", hint="Use --draft ngram.") from error


class SelfDraftCache:
    """What is kept for a target's self-drafts: low-bit copies, and what was chosen."""

    def __init__(self, target: Path, name: str) -> None:
        """Raises CacheError where the target's files cannot be read."""
        self.folder = cache_folder() / fingerprint_weights(target)
        self._name = name

    def chosen(self, setting: ProfileKey, asked: str) -> Choice | None:
        """What was chosen under this setting, if anything was."""
        for note in self._notes():
            if note.get("setting") == asdict(setting) and note.get("asked") == asked:
                with suppress(KeyError, TypeError, AttributeError, EdgespecError):
                    method = parse(note["method"])
                    return Choice(method, bool(note["pays"]), str(note["reason"])) if method else None
        return None

    def remember(self, setting: ProfileKey, asked: str, choice: Choice) -> None:
        """A folder that cannot be written to costs the next run the trials, no more."""
        others = [n for n in self._notes() if (n.get("setting"), n.get("asked")) != (asdict(setting), asked)]
        found = {"method": str(choice.method), "pays": choice.pays, "reason": choice.reason}
        note = {"setting": asdict(setting), "asked": asked, **found}
        with suppress(OSError):
            self.folder.mkdir(parents=True, exist_ok=True)
            write_atomically(self.folder / _NOTES, json.dumps({"model": self._name, "choices": [note, *others]}))

    def _notes(self) -> list[dict[str, Any]]:
        notes: list[dict[str, Any]] = _read(self.folder).get("choices", [])
        return notes


@dataclass(frozen=True, slots=True)
class CachedSelfDraft:
    """What the cache holds for one model."""

    folder: Path
    model: str
    copies: tuple[Path, ...]
    choices: tuple[str, ...]

    @property
    def size(self) -> int:
        """Bytes."""
        return sum(copy.stat().st_size for copy in self.copies)


def list_cached_drafts() -> list[CachedSelfDraft]:
    """All of the cache."""
    found = []
    for folder in sorted(cache_folder().glob("*")) if cache_folder().is_dir() else ():
        notes = _read(folder)
        chosen = (f"{n.get('asked')}: {n.get('method')}, {n.get('reason')}" for n in notes.get("choices", ()))
        copies = tuple(sorted(folder.glob("*.gguf")))
        if copies or notes:
            found.append(CachedSelfDraft(folder, str(notes.get("model", folder.name)), copies, tuple(chosen)))
    return found


def remove_cached_draft(shelf: CachedSelfDraft) -> int:
    """Remove it all; returns bytes freed. Raises CacheError."""
    size = shelf.size
    try:
        shutil.rmtree(shelf.folder)
    except OSError as error:
        raise CacheError(f"cannot remove {shelf.folder}: {error.strerror}.", hint="Check its permissions.") from error
    return size


def cache_folder() -> Path:
    """The folder of all models' shelves."""
    return calibration_folder().with_name("drafts")


def _read(folder: Path) -> dict[str, Any]:
    try:
        found = json.loads((folder / _NOTES).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    notes = found.get("choices") if isinstance(found, dict) else None
    return found if isinstance(notes, list) and all(isinstance(note, dict) for note in notes) else {}

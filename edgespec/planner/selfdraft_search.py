"""Find the self-draft of a model that is fastest on this machine, and cache the choice."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

from edgespec.backends import BackendName, Model
from edgespec.backends.attached_draft import AttachedDraft, SelfDraftSpec, Unsupported, parse
from edgespec.controller.cost_model import Profile, choose_chain_length
from edgespec.controller.profiler import measure_drafter, measure_rows
from edgespec.controller.store import Setting, calibration_folder, load_entry, read_entries, save_entry
from edgespec.core.protocols import NO_DRAFT, CheckCancelled, Session
from edgespec.core.sampling import Ints
from edgespec.core.verify import read_prompt
from edgespec.drafters.sequential import ModelDraftSession, SequentialDrafter
from edgespec.errors import BackendError, DoesNotFit, EdgespecError, reading
from edgespec.files import lock_file, stat_files
from edgespec.formats.mlx_folder import fingerprint_weights
from edgespec.planner.head_probe import read_calibration, read_choices

# Measure the agreement and cost of a draft session on given texts.


_ROWS = 64  # compared positions
_PROFILE_S = 1.0
_PLAIN_STEPS = 8


@dataclass(frozen=True, slots=True)
class DraftEval:
    """The measurement of one draft.

    agreement  share of positions at which the draft's most probable token is the target's
    cost       time of a draft token, in plain steps
    length     the fastest chain length if each draft token is accepted with `agreement`; 0 if none pays
    speedup    of that chain over plain decoding
    """

    agreement: float
    cost: float
    length: int
    speedup: float

    def __str__(self) -> str:
        return f"{self.agreement:.0%} agreement, a draft token costs {self.cost:.2f} plain steps"


@dataclass(frozen=True, slots=True)
class Passage:
    """A text of which the choices after each token from position `start` on are compared."""

    text: Sequence[int]
    start: int

    @staticmethod
    def end_of(tokens: Sequence[int], context_size: int) -> Passage:
        """The last positions of a text. Raises ValueError for one of fewer than 8 tokens."""
        size = min(len(tokens), context_size)
        rows = min(_ROWS, size // 2)
        if rows < 4:
            raise ValueError("the text is too short")
        return Passage(tokens[:size], size - rows)


class Evaluator:
    """Compares drafts with a target on given texts. Agreement on texts by the target itself is mostly higher."""

    def __init__(self, target: Session, passages: Sequence[Passage], check: CheckCancelled) -> None:
        """Raises Cancelled, BackendError."""
        self._target = target
        self._passages = passages
        self._check = check
        self.profile = Profile(measure_rows(target, _PROFILE_S, check))
        self._choices = np.concatenate([self._argmax(target, each) for each in passages])

    def evaluate(self, draft: Session) -> DraftEval:
        """Compare `draft`, which may share the target's KV cache. Raises Cancelled, BackendError."""
        choices = []
        for each in self._passages:
            read_prompt(self._target, each.text[: each.start])
            choices.append(self._argmax(draft, each))
        agreed = float((np.concatenate(choices) == self._choices).mean())
        drafter = SequentialDrafter("draft", ModelDraftSession(draft, self._target.capabilities.vocab_size))
        last = self._passages[-1]
        cost = measure_drafter(drafter, last.text[: last.start + 1], self._check)
        plain_s = self._time_plain(last)  # at the same time as the draft: the machine may have become slower
        draft_s = cost.seconds(1) if cost is not None else float("inf")
        rows = {n: seconds * plain_s / self.profile.rows[1] for n, seconds in self.profile.rows.items()}
        length, speedup = choose_chain_length(rows, draft_s, agreed)
        return DraftEval(agreed, draft_s / plain_s, length, speedup)

    def _time_plain(self, passage: Passage) -> float:
        """Seconds of a plain step of the target, which has read what is before the compared positions."""
        times = []
        for _ in range(_PLAIN_STEPS):
            self._check()
            started = perf_counter()
            self._target.forward(passage.text[passage.start], NO_DRAFT).argmax()
            self._target.commit(())
            times.append(perf_counter() - started)
            self._target.rewind(passage.start)
        return median(times)

    def _argmax(self, session: Session, passage: Passage) -> Ints:
        """[rows] the most probable tokens after the compared ones."""
        read_prompt(session, passage.text[: passage.start])
        best = read_choices(session, passage.text, self._check)
        session.rewind(passage.start)
        return best


EVALUATION_S = 10.0  # of a search that nobody has set a time for
_MIN_SPEEDUP = 1.05  # a smaller speedup is not worth the memory
_CHOICES = "choices.json"
_UNFINISHED = "unfinished.json"
_MAX_DEATHS = 3


@dataclass(frozen=True, slots=True)
class Choice:
    """The best self-draft for a request such as 'auto' or 'layerskip', and whether it is expected to pay."""

    method: SelfDraftSpec
    pays: bool
    reason: str


@dataclass
class SelfDraftSearch:
    """Evaluates self-drafts of one target, on the thread that owns the target.

    `seconds` limit the layer search; `progress` gets a copy's name and the requantized part, 0.0 to 1.0.
    """

    target: Model
    folder: Path
    seconds: float
    check: CheckCancelled
    progress: Callable[[str, float], None]
    trials: dict[str, DraftEval] = field(default_factory=dict)
    rival: DraftEval | None = None

    def choose(self, methods: Sequence[SelfDraftSpec], rival: Model | None = None) -> Choice:
        """The method with the highest expected speedup. `kept` of () starts a search of layers.

        It pays if it is faster than plain decoding and than `rival`, a draft model. Raises Unsupported if the target
        supports no method; Cancelled, BackendError, CacheError.
        """
        refusals: list[EdgespecError] = []
        until = perf_counter() + self.seconds
        with closing(self.target.open_session(self.check)) as session:
            text = read_calibration(self.target.tokenizer)
            passage = Passage.end_of(text, self.target.context_size)
            evaluator = Evaluator(session, [passage], self.check)
            if rival is not None:
                with closing(rival.open_session(self.check)) as draft:
                    self.rival = evaluator.evaluate(draft)
            for method in methods:
                try:
                    if method.kept == ():
                        self._search(method, evaluator, session, until)
                    else:
                        self._evaluate_method(method, evaluator, session)
                except (Unsupported, DoesNotFit) as refusal:
                    refusals.append(refusal)
        if not self.trials:
            raise refusals[0]
        name, trial = max(self.trials.items(), key=lambda each: (each[1].speedup, each[1].agreement - each[1].cost))
        best = parse(name)
        assert best is not None
        pays = trial.speedup >= _MIN_SPEEDUP * (self.rival.speedup if self.rival else 1.0)
        return Choice(best, pays, f"{trial}; the best of {len(self.trials)} tried")

    def _search(self, method: SelfDraftSpec, evaluator: Evaluator, session: Session, until: float) -> None:
        """Try early exits, then drop one layer at a time, then drop the least important layers together."""
        count = self.target.layer_count
        if count < 3:
            raise Unsupported(f"the model has {count} layers, too few to skip any.", hint="Use --draft ngram.")

        def try_layers(kept: Iterable[int]) -> DraftEval | None:
            """Evaluates `kept`; None if the time is over."""
            layers = tuple(kept)
            if perf_counter() >= until and self.trials:
                return None
            first = range(len(layers))
            method_kept = replace(method, kept=first if layers == tuple(first) else layers)
            return self._evaluate_method(method_kept, evaluator, session)

        exits = {max(1, count * part // 12): None for part in (4, 3, 6)}
        refusals: list[Unsupported] = []
        for exit_after in exits:
            try:
                try_layers(range(exit_after))
            except Unsupported as refusal:  # perhaps for want of a layer of some kind
                refusals.append(refusal)
        if len(refusals) == len(exits):
            raise refusals[0]
        agreement = {}
        for layer in sorted(range(1, count - 1), key=lambda each: abs(each - count / 2)):
            try:
                trial = try_layers(each for each in range(count) if each != layer)
            except Unsupported:  # only the last layers can be dropped
                return
            if trial is None:
                return
            agreement[layer] = trial.agreement
        order = sorted(agreement, key=agreement.__getitem__, reverse=True)
        for n in range(2, len(order) + 1):
            try_layers(each for each in range(count) if each not in order[:n])

    def _evaluate_method(self, method: SelfDraftSpec, evaluator: Evaluator, session: Session) -> DraftEval:
        name = str(method)
        if name not in self.trials:
            progress = partial(self.progress, name) if method.bits is not None else lambda fraction: None
            source = make_self_draft(self.target, method, self.folder, progress, self.check)
            with closing(source), closing(source.open_session(session, self.check)) as draft:
                self.trials[name] = evaluator.evaluate(draft)
        return self.trials[name]


def quick_methods(backend: BackendName) -> list[SelfDraftSpec]:
    """The methods that need no low-bit copy on disk; `edgespec draft build` tries the others."""
    return [SelfDraftSpec(())] if backend == "llamacpp" else [SelfDraftSpec(()), SelfDraftSpec(bits=0)]


def all_methods(backend: BackendName) -> list[SelfDraftSpec]:
    """The methods that may pay on short contexts."""
    copies = [SelfDraftSpec(bits=bits) for bits in (0, 3, 2)]
    return list(dict.fromkeys([*quick_methods(backend), *copies]))


def make_self_draft(
    target: Model, method: SelfDraftSpec, folder: Path, progress: Callable[[float], None], check: CheckCancelled
) -> AttachedDraft:
    """`Model.make_self_draft` with MemoryError raised as BackendError."""
    try:
        return target.make_self_draft(method, folder=folder, progress=progress, check=check)
    except MemoryError as error:
        raise BackendError("there is not enough memory for a self-draft.", hint="Use --draft ngram.") from error


class SelfDraftCache:
    """The cache of a target's self-drafts: low-bit copies and choices."""

    def __init__(self, target: Path, name: str) -> None:
        """Raises CacheError if the target's files cannot be read."""
        self.folder = cache_folder() / fingerprint_weights(target)
        self._name = name

    def look_up(self, setting: Setting, request: str) -> Choice | None:
        """The cached choice for `request` under `setting`; None without one."""
        return load_entry(self.folder / _CHOICES, "choice", {**setting, "asked": request}, _read_choice)

    def remember(self, setting: Setting, request: str, choice: Choice) -> None:
        """Store a choice. Errors are ignored: without it, the next run evaluates again."""
        found = {"method": str(choice.method), "pays": choice.pays, "reason": choice.reason, "model": self._name}
        entry = {"setting": {**setting, "asked": request}, "choice": found}
        save_entry(self.folder / _CHOICES, entry, "choice")

    @contextmanager
    def trying(self, setting: Setting, request: str) -> Iterator[None]:
        """Raises Unsupported where three processes have ended in such a block: a runtime may crash in a trial. They may
        also have been killed, so the first two do not count.
        """
        path, key = self.folder / _UNFINISHED, {**setting, "asked": request}
        deaths = load_entry(path, "unfinished", key, lambda found: int(found["times"])) or 0
        if deaths >= _MAX_DEATHS:
            raise Unsupported(
                f"the process has ended {deaths} times during the search for a self-draft.",
                hint="`edgespec draft rm` lets it be tried again; --draft layerskip:2 is used without a search.",
            )
        with ExitStack() as held:
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                held.enter_context(lock_file(self.folder / f"{_UNFINISHED}.lock", wait=False))
            except BlockingIOError as error:
                hint = "Wait for it, or use --draft layerskip:2, which needs no search."
                raise Unsupported("another process searches for a self-draft of this model.", hint=hint) from error
            except OSError:  # the folder cannot be written, so nothing is counted
                pass
            save_entry(path, {"setting": key, "unfinished": {"times": deaths + 1}}, "unfinished")
            try:
                yield
            finally:
                save_entry(path, {"setting": key, "unfinished": {"times": 0}}, "unfinished")


def _read_choice(found: dict[str, Any]) -> Choice | None:
    method = parse(found["method"])
    return Choice(method, bool(found["pays"]), str(found["reason"])) if method else None


@dataclass(frozen=True, slots=True)
class CachedSelfDraft:
    """The cached copies and choices of one model."""

    folder: Path
    model: str
    copies: tuple[Path, ...]
    choices: tuple[str, ...]

    @property
    def size(self) -> int:
        return sum(found.st_size for found in stat_files(self.copies).values())


def list_cached_drafts() -> list[CachedSelfDraft]:
    found = []
    for folder in sorted(cache_folder().glob("*")):
        entries = read_entries(folder / _CHOICES, "choice")
        choices = [
            f"{each['setting'].get('asked')}: {each['choice'].get('method')}, {each['choice'].get('reason')}"
            + ("" if each["choice"].get("pays") else "; it is not expected to pay")
            for each in entries
        ]
        for each in read_entries(folder / _UNFINISHED, "unfinished"):
            if (times := each["unfinished"].get("times")) and each["setting"].get("asked"):
                choices.append(f"{each['setting']['asked']}: its search was cut off {times} times")
        copies = tuple(sorted(folder.glob("*.gguf")))
        if copies or choices:
            name = str(entries[0]["choice"].get("model")) if entries else folder.name
            found.append(CachedSelfDraft(folder, name, copies, tuple(choices)))
    return found


def remove_cached_draft(cached: CachedSelfDraft) -> int:
    """Remove the copies and choices of a model; returns the bytes freed. Raises CacheError."""
    size = cached.size
    with reading(cached.folder, "cannot be removed"):
        shutil.rmtree(cached.folder)
    return size


def cache_folder() -> Path:
    return calibration_folder().with_name("drafts")

"""Find the self-draft of a model that is fastest on this machine, and cache the choice."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import closing, nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import perf_counter

from edgespec.backends import BackendName, Model
from edgespec.backends.attached_draft import AttachedDraft, SelfDraftSpec, Unsupported, parse
from edgespec.core.protocols import Session
from edgespec.engine.draft_eval import DraftEval, Evaluator, Passage
from edgespec.engine.head_probe import read_calibration
from edgespec.engine.selfdraft_cache import Choice
from edgespec.errors import BackendError, DoesNotFit, EdgespecError
from edgespec.progress import loading

EVALUATION_S = 10.0  # seconds of a search for which the user has set no time
_MIN_SPEEDUP = 1.05  # a smaller speedup is not worth the memory


@dataclass
class SelfDraftSearch:
    """Evaluates self-drafts of one target, on the thread that owns the target.

    `seconds` limit the layer search.
    """

    target: Model
    folder: Path
    seconds: float
    trials: dict[str, DraftEval] = field(default_factory=dict)
    rival: DraftEval | None = None

    def choose(self, methods: Sequence[SelfDraftSpec], rival: Model | None = None) -> Choice:
        """The method with the highest expected speedup. `kept` of () starts a search of layers.

        It pays if it is faster than plain decoding and than `rival`, a draft model. Raises Unsupported if the target
        supports no method; Cancelled, BackendError, CacheError.
        """
        refusals: list[EdgespecError] = []
        until = perf_counter() + self.seconds
        with closing(self.target.open_session()) as session:
            text = read_calibration(self.target.tokenizer)
            passage = Passage.end_of(text, self.target.context_size)
            evaluator = Evaluator(session, [passage])
            if rival is not None:
                with closing(rival.open_session()) as draft:
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
        """Try early exits, leave out spans of middle layers, then one layer at a time, then the least important ones
        together (Zhang et al. 2023; Xia et al. 2024). The time of a deep model ends soon after the spans.
        """
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
        spans = [
            range((count - n + 1) // 2, (count + n + 1) // 2) for n in (count // 4, count // 3, count // 2) if n > 1
        ]
        for span in spans:
            with suppress(Unsupported):
                try_layers(each for each in range(count) if each not in span)
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
            with loading(name) if method.bits is not None else nullcontext():
                source = make_self_draft(self.target, method, self.folder)
            with closing(source), closing(source.open_session(session)) as draft:
                self.trials[name] = evaluator.evaluate(draft)
        return self.trials[name]


def quick_methods(backend: BackendName) -> list[SelfDraftSpec]:
    """The methods that need no low-bit copy on disk; `edgespec draft build` tries the others."""
    return [SelfDraftSpec(())] if backend == "llamacpp" else [SelfDraftSpec(()), SelfDraftSpec(bits=0)]


def all_methods(backend: BackendName) -> list[SelfDraftSpec]:
    """The methods that may pay on short contexts."""
    copies = [SelfDraftSpec(bits=bits) for bits in (0, 3, 2)]
    return list(dict.fromkeys([*quick_methods(backend), *copies]))


def make_self_draft(target: Model, method: SelfDraftSpec, folder: Path) -> AttachedDraft:
    """`Model.make_self_draft` with MemoryError raised as BackendError."""
    try:
        return target.make_self_draft(method, folder=folder)
    except MemoryError as error:
        raise BackendError("there is not enough memory for a self-draft.", hint="Use --draft ngram.") from error

"""The self-draft of a model: the requested one, or the one that a search in idle time has found to pay."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from edgespec.backends import Model, open_model, require
from edgespec.backends.attached_draft import AttachedHead, SelfDraftSpec, Skip, Unsupported
from edgespec.backends.ranks import count_ranks
from edgespec.controller.store import ProfileKey
from edgespec.core.protocols import CheckCancelled, Session
from edgespec.core.sampling import SamplingParams
from edgespec.engine.drafting import Speculation
from edgespec.engine.engine import Engine
from edgespec.engine.events import Finished, Prompt, Request
from edgespec.errors import (
    Cancelled,
    ContextOverflow,
    DoesNotFit,
    DraftRefused,
    EdgespecError,
    InvalidRequest,
    reason_of,
)
from edgespec.formats.heads import HeadSpec
from edgespec.hub.hub import Hub
from edgespec.planner.draft_finder import AUTO, PlannedDrafter
from edgespec.planner.heads import HeadProbe, ProbeResult, ProbeStore, describe_change
from edgespec.planner.plan import LoadConfig, Plan, Reporter, fetch, plan
from edgespec.planner.selfdraft_search import (
    EVALUATION_S,
    DraftEval,
    Evaluator,
    Passage,
    SelfDraftCache,
    SelfDraftSearch,
    make_self_draft,
    quick_methods,
)
from edgespec.registry.schema import load_registry
from edgespec.registry.tokenizer_compat import find_tokenizer_mismatch
from edgespec.service.loaded_model import LoadedModel, apply_settings, choose_settings


def choose_self_draft(
    config: LoadConfig, planned: Plan, target: Model, target_path: Path, key: ProfileKey,
    reporter: Reporter, check: CheckCancelled,
) -> SelfDraftSpec | None:  # fmt: skip
    """The self-draft to use; None for none.

    The layers of a requested one are searched and remembered under `key`; 'auto' takes what `search_when_idle` has
    remembered. Raises Unsupported for a requested method that the model has not, BackendError, CacheError, Cancelled.
    """
    requested = planned.self_draft
    if requested is not None and requested.skip != Skip():
        return requested
    cache = SelfDraftCache(target_path, planned.name)
    if requested is None:
        choice = cache.look_up(key, AUTO) if _is_open(config) else None
        return choice.method if choice is not None and choice.pays else None
    choice = cache.look_up(key, str(requested))
    if choice is None:
        reporter.notice(
            f"Searching the layers of {requested}, for about {EVALUATION_S:.0f} seconds; this is done once."
        )
        search = SelfDraftSearch(target, cache.folder, EVALUATION_S, check, reporter.loading)
        choice = search.choose([requested])
        cache.remember(key, str(requested), choice)
    reporter.notice(f"Drafting by {choice.method}: {choice.reason}.")
    return choice.method


def search_when_idle(loaded: LoadedModel, check: CheckCancelled) -> None:
    """Searches for a self-draft that pays and remembers the result, for later loads under 'auto'.

    Does nothing where a draft model is loaded, `edgespec draft build` compares those, or where the result is known.
    Raises BackendError, CacheError, Cancelled.
    """
    planned, target = loaded.planned, loaded.engine.target
    if planned is None or planned.models or planned.options.exact or not _is_open(loaded.config):
        return
    key = ProfileKey.current(planned.backend, apply_settings(loaded.settings, planned).options)
    cache = SelfDraftCache(loaded.target_path, planned.name)
    if cache.look_up(key, AUTO) is None:
        search = SelfDraftSearch(target, cache.folder, EVALUATION_S, check, lambda name, fraction: None)
        try:
            cache.remember(key, AUTO, search.choose(quick_methods(planned.backend)))
        except (Unsupported, DoesNotFit):
            return


def _is_open(config: LoadConfig) -> bool:
    """Returns whether a self-draft may be chosen: a model on several ranks has none."""
    return config.draft == AUTO and config.draft_max != 0 and count_ranks() == 1


# Trained heads are probed at their first load; later loads read them as the probe has found.


def load_head(
    target: Model, drafter: PlannedDrafter, paths: tuple[Path, Path], planned: Plan, draft: str,
    reporter: Reporter, check: CheckCancelled,
) -> AttachedHead | None:  # fmt: skip
    """Attach the head of `drafter` in the reading that a probe finds, or has found, to agree best with `target`.

    `paths` are the target's and the head's, `draft` is what the user asked for: a head that 'auto' has found and that
    cannot be used is left out, with a notice, and None returned. A probe that fails is told and changes nothing.
    Raises DraftRefused for a head that agrees less than lookups, Cancelled, and what `Model.load_head` raises.
    """
    spec, label = drafter.head, drafter.label
    assert spec is not None
    try:
        result, problem = _find_reading(target, spec, paths, planned, reporter, check)
        if result is not None and result.is_useless:
            raise DraftRefused(describe_useless(label, result), hint="Use --draft ngram, or a head for this model.")
        head = target.load_head(
            result.chosen.spec if result else spec,
            paths[1],
            progress=lambda fraction: reporter.loading(paths[1].name, fraction),
            check=check,
        )
        _adjust(head, target, check)
    except EdgespecError as refusal:
        if draft != AUTO:
            raise
        reporter.notice(f"Drafting without {label}: {refusal.message}")
        return None
    if drafter.found:
        reporter.notice(drafter.found)
    if result is None:
        reporter.notice(f"The head {label} is read as its file says, since it could not be probed: {problem}.")
    elif result.is_corrected:
        change = describe_change(spec, result.chosen.spec)
        reporter.notice(f"The head's {change}: {describe_agreement(result)}.")
    return head


def _adjust(head: AttachedHead, target: Model, check: CheckCancelled) -> None:
    """Closes the head where it raises."""
    try:
        head.adjust(target.open_session, check)
    except BaseException:
        head.close()
        raise


def probe_head(
    config: LoadConfig, n_tokens: int, reporter: Reporter, check: CheckCancelled
) -> tuple[HeadSpec, ProbeResult]:
    """What the head's file says, and what a new probe finds over `n_tokens` of text; the result is stored.

    Raises InvalidRequest where `config` does not name one head, and whatever a load raises.
    """
    hub = Hub.from_environment()
    planned = plan(config, load_registry(), hub, reporter)
    heads = [each for each in planned.drafters if each.head is not None and each.model is not None]
    if len(heads) != 1:
        found = "no trained head" if not heads else "more than one trained head"
        raise InvalidRequest(f"--draft {config.draft} names {found}.", hint="Name one: --draft HEAD.")
    (drafter,) = heads
    spec, model = drafter.head, drafter.model
    assert spec is not None
    assert model is not None
    require(planned.backend)
    target_path = fetch(planned.target, hub, reporter, check)
    path = fetch(model.source, hub, reporter, check)
    with ExitStack() as undo:
        target = open_model(
            planned.backend,
            target_path,
            planned.options,
            progress=lambda fraction: reporter.loading(target_path.name, fraction),
            check=check,
        )
        undo.callback(target.close)
        result = HeadProbe(target, path, planned.backend, check, reporter.loading, n_tokens).run(spec)
    ProbeStore(target_path, path).save(planned.backend, spec, result)
    return spec, result


def describe_agreement(result: ProbeResult) -> str:
    """The shares of right first choices of the reading that was chosen, and of the stated one."""
    found = "agreement {:.0%} and {:.0%} at depths 1 and 2".format(*result.chosen.agreement)
    if result.stated is None:
        return f"{found}, and as the file says it cannot run"
    return f"{found} instead of " + "{:.0%} and {:.0%}".format(*result.stated.agreement)


def describe_useless(label: str, result: ProbeResult) -> str:
    """The reason for which a head is refused."""
    head, lookups = result.own
    return (
        f"{label} agrees less with this target than lookups do: its first choice is right after {head:.0%} of the "
        f"target's own choices, and that of lookups after {lookups:.0%}."
    )


def _find_reading(
    target: Model, spec: HeadSpec, paths: tuple[Path, Path], planned: Plan, reporter: Reporter, check: CheckCancelled
) -> tuple[ProbeResult | None, str]:
    """(what is stored, or is found now and stored; else None and why)"""
    store = ProbeStore(*paths)
    result = store.load(planned.backend, spec)
    if result is not None:
        return result, ""
    try:
        result = HeadProbe(target, paths[1], planned.backend, check, reporter.loading).run(spec)
    except (Cancelled, Unsupported, DraftRefused):  # the last two where no reading can be run
        raise
    except Exception as error:  # noqa: BLE001 - whatever a runtime raises, the load goes on
        return None, reason_of(error)
    store.save(planned.backend, spec, result)
    return result, ""


# Compare drafts of one target on its own answers: which is the fastest here, and why.


_MIN_ANSWER = 8  # tokens


@dataclass(frozen=True, slots=True)
class Compared:
    """One draft: its measurement and its memory in bytes, or the reason why it cannot draft for the target."""

    draft: str
    trial: DraftEval | None = None
    memory: int | None = None
    refusal: str | None = None


class Comparison:
    """Measures drafts of the target that `config` names, on the thread that uses models.

    name     what the user calls the target
    tokens   how many of its own choices the drafts are compared with
    answers  the answers that these belong to
    """

    def __init__(self, config: LoadConfig, reporter: Reporter, check: CheckCancelled) -> None:
        """Raises whatever a load of the target raises."""
        self._config = config
        self._reporter = reporter
        self._check = check
        self._hub = Hub.from_environment()
        self._open = ExitStack()
        self._planned = self._plan("none")
        self._path = fetch(self._planned.target, self._hub, reporter, check)
        require(self._planned.backend)
        self._target = self._load(self._path)
        self._open.callback(self._target.close)
        settings = choose_settings(self._target, self._path, self._planned, None, check)
        self._planned = apply_settings(settings, self._planned)
        self.name = self._planned.name
        self.tokens = self.answers = 0

    def compare(self, drafts: Sequence[str], prompts: Sequence[Prompt], max_tokens: int) -> Iterator[Compared]:
        """Measure each of `drafts`, as --draft takes them, on greedy answers of the target to `prompts`.

        Raises InvalidRequest where no prompt gets an answer, Cancelled, BackendError.
        """
        passages = list(self._answer(prompts, max_tokens))
        if not passages:
            raise InvalidRequest("no prompt fits in the context.", hint="Use a larger --ctx.")
        self.answers, self.tokens = len(passages), sum(len(each.text) - each.start for each in passages)
        session = self._target.open_session(self._check)
        try:
            evaluator = Evaluator(session, passages, self._check)
            for draft in drafts:
                self._check()
                try:
                    with self._open_draft(draft, session) as (opened, memory):
                        yield Compared(draft, evaluator.evaluate(opened), memory)
                except EdgespecError as refusal:
                    yield Compared(draft, refusal=refusal.message)
        finally:
            session.close()

    def close(self) -> None:
        self._open.close()

    def _answer(self, prompts: Sequence[Prompt], max_tokens: int) -> Iterator[Passage]:
        """The answers, without those whose prompt does not fit and those of a few tokens."""
        engine = Engine(self._target, (), Speculation())
        try:
            for prompt in prompts:
                with suppress(ContextOverflow):
                    before = engine.encode(prompt)
                    request = Request(prompt, SamplingParams(temperature=0), max_tokens)
                    for event in engine.stream(request, self._check):
                        if isinstance(event, Finished) and len(event.tokens) >= _MIN_ANSWER:
                            yield Passage([*before, *event.tokens[:-1]], len(before) - 1)
        finally:
            engine.release_draft()

    @contextmanager
    def _open_draft(self, draft: str, target: Session) -> Iterator[tuple[Session, int]]:
        """A session that drafts for `target`, and the bytes that it takes. Raises EdgespecError, Cancelled."""
        planned = self._plan(draft)
        if planned.self_draft is not None:
            with self._open_self_draft(planned.self_draft, target) as found:
                yield found
            return
        (drafter,) = planned.drafters if len(planned.drafters) == 1 else (None,)
        if drafter is None or drafter.model is None or drafter.spec.name != "model":
            message = "neither a draft model nor a self-draft; `edgespec bench` measures it."
            raise InvalidRequest(message, hint="Name a draft model.")
        with ExitStack() as undo:
            model = self._load(fetch(drafter.model.source, self._hub, self._reporter, self._check))
            undo.callback(model.close)
            if reason := find_tokenizer_mismatch(self._target.tokenizer, model.tokenizer):
                raise DraftRefused(f"this draft does not fit this target: {reason}.", hint="Use another draft.")
            session = model.open_session(self._check)
            undo.callback(session.close)
            yield session, planned.fit.draft.total if planned.fit.draft is not None else 0

    @contextmanager
    def _open_self_draft(self, method: SelfDraftSpec, target: Session) -> Iterator[tuple[Session, int]]:
        if method.skip == Skip():
            message = "the layers are not named: layerskip:K; `edgespec draft build` searches for the best ones."
            raise InvalidRequest(message, hint="Use layerskip:K.")
        folder, progress = SelfDraftCache(self._path, self.name).folder, partial(self._reporter.loading, str(method))
        attached = make_self_draft(self._target, method, folder, progress, self._check)
        with ExitStack() as undo:
            undo.callback(attached.close)
            session = attached.open_session(target, self._check)
            undo.callback(session.close)
            yield session, attached.extra_bytes

    def _plan(self, draft: str) -> Plan:
        return plan(replace(self._config, draft=draft), load_registry(), self._hub, self._reporter)

    def _load(self, path: Path) -> Model:
        progress = partial(self._reporter.loading, path.name)
        planned = self._planned.alone
        return open_model(planned.backend, path, planned.options, progress=progress, check=self._check)

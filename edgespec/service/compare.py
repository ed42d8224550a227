"""Measures drafts without an engine: compares them on a target's answers, searches self-drafts, probes heads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace

from edgespec.backends.attached_draft import AttachedDraft, SelfDraftSpec, Skip
from edgespec.controller.store import ProfileKey
from edgespec.core.protocols import CheckCancelled, Session
from edgespec.core.sampling import SamplingParams
from edgespec.drafters import SELF
from edgespec.engine.drafting import Speculation
from edgespec.engine.engine import Engine
from edgespec.engine.events import Finished, Prompt, Request
from edgespec.errors import ContextOverflow, DraftRefused, EdgespecError, InvalidRequest
from edgespec.formats.heads import HeadSpec
from edgespec.planner.head_probe import HeadProbe, ProbeResult, ProbeStore
from edgespec.planner.plan import LoadConfig, Reporter
from edgespec.planner.selfdraft_search import (
    Choice,
    DraftEval,
    Evaluator,
    Passage,
    SelfDraftCache,
    SelfDraftSearch,
    all_methods,
)
from edgespec.registry.tokenizer_compat import find_tokenizer_mismatch
from edgespec.service.load import Loader


def probe_head(
    config: LoadConfig, n_tokens: int, reporter: Reporter, check: CheckCancelled
) -> tuple[HeadSpec, ProbeResult]:
    """What the head's file says, and what a new probe finds over `n_tokens` of text; the result is stored.

    Raises InvalidRequest where `config` does not name one head, and whatever a load raises.
    """
    loader = Loader(reporter, check)
    planned = loader.plan(config)
    heads = [each for each in planned.drafters if each.head is not None and each.model is not None]
    if len(heads) != 1:
        found = "no trained head" if not heads else "more than one trained head"
        raise InvalidRequest(f"--draft {config.draft} names {found}.", hint="Name one: --draft HEAD.")
    (drafter,) = heads
    spec, model = drafter.head, drafter.model
    assert spec is not None
    assert model is not None
    path = loader.fetch(model.source)
    with loader.open_target(planned) as (target, target_path, planned):
        result = HeadProbe(target, path, planned.backend, check, reporter.loading, n_tokens).run(spec)
    ProbeStore(target_path, path).save(planned.backend, spec, result)
    return spec, result


def search_self_draft(
    loader: Loader, config: LoadConfig, methods: Sequence[SelfDraftSpec], seconds: float
) -> tuple[SelfDraftSearch, Choice]:
    """Evaluate `methods` (all that may pay, if empty) and the paired draft model; remember the best.

    The choice is stored under `auto`, or under the requested method. `seconds` limits the layer search.
    """
    with loader.open_target(loader.plan(config)) as (target, path, planned), ExitStack() as undo:
        rival = None
        for drafter in planned.drafters:
            if drafter.spec.name == "model" and drafter.model is not None:
                rival = loader.load_weights(loader.fetch(drafter.model.source), planned.alone)
                undo.callback(rival.close)
        cache = SelfDraftCache(path, planned.name)
        search = SelfDraftSearch(target, cache.folder, seconds, loader.check, loader.reporter.loading)
        choice = search.choose(methods or all_methods(planned.backend), rival)
    draft = str(methods[0]) if len(methods) == 1 else "auto"
    cache.remember(ProfileKey.current(planned.backend, planned.options), draft, choice)
    return search, choice


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
        self._loader = Loader(reporter, check)
        self._check = check
        self._open = ExitStack()
        planned = self._loader.plan(replace(config, draft="none"))
        self._target, self._path, self._planned = self._open.enter_context(self._loader.open_target(planned))
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
        loader, planned = self._loader, self._loader.plan(replace(self._config, draft=draft))
        (drafter,) = planned.drafters if len(planned.drafters) == 1 else (None,)
        if drafter is None or drafter.spec.name not in ("model", SELF):
            message = "neither a draft model nor a self-draft; `edgespec bench` measures it."
            raise InvalidRequest(message, hint="Name a draft model.")
        if drafter.self_draft is not None and drafter.self_draft.skip == Skip():
            message = "the layers are not named: layerskip:K; `edgespec draft build` searches for the best ones."
            raise InvalidRequest(message, hint="Use layerskip:K.")
        path = loader.fetch(drafter.model.source) if drafter.model is not None else None
        with ExitStack() as undo:
            source = loader.load_source(self._target, self._path, drafter, path, self._planned)
            undo.callback(source.close)
            if isinstance(source, AttachedDraft):
                session, size = source.open_session(target, self._check), source.extra_bytes
            elif reason := find_tokenizer_mismatch(self._target.tokenizer, source.tokenizer):
                raise DraftRefused(f"this draft does not fit this target: {reason}.", hint="Use another draft.")
            else:
                session = source.open_session(self._check)
                size = planned.fit.draft.total if planned.fit.draft is not None else 0
            undo.callback(session.close)
            yield session, size

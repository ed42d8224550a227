"""Compare drafts of one target on its own answers: which is the fastest here, and why."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from edgespec.backends import Model, open_model, require
from edgespec.backends.attached_draft import SelfDraftSpec, Skip
from edgespec.core.protocols import CheckCancelled, Session
from edgespec.core.sampling import SamplingParams
from edgespec.engine.drafting import Speculation
from edgespec.engine.engine import Engine
from edgespec.engine.events import Finished, Prompt, Request
from edgespec.errors import ContextOverflow, DraftRefused, EdgespecError, InvalidRequest
from edgespec.hub.hub import Hub
from edgespec.planner.draft_eval import DraftEval, Evaluator, Passage
from edgespec.planner.plan import LoadConfig, Plan, Reporter, fetch, plan
from edgespec.planner.selfdraft_search import SelfDraftCache, make_self_draft
from edgespec.registry.schema import load_registry
from edgespec.registry.tokenizer_compat import find_tokenizer_mismatch
from edgespec.service.settings import apply_settings, choose_settings

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

"""Measures drafts without an engine: compares them on a target's answers, and searches self-drafts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from edgespec.autopilot.speculation import Speculation
from edgespec.autopilot.store import current_setting
from edgespec.backends import Model
from edgespec.backends.attached_draft import AttachedDraft, SelfDraftSpec
from edgespec.cancel import check_cancelled
from edgespec.core.protocols import Session
from edgespec.core.sampling import SamplingParams
from edgespec.drafters.registry import SELF
from edgespec.engine.draft_eval import DraftEval, Evaluator, Passage
from edgespec.engine.engine import Engine
from edgespec.engine.events import Finished, Prompt, Request
from edgespec.engine.load_drafter import load_drafter, load_weights
from edgespec.engine.open import Loader
from edgespec.engine.selfdraft_cache import Choice, SelfDraftCache
from edgespec.engine.selfdraft_search import SelfDraftSearch, all_methods
from edgespec.errors import ContextOverflow, DraftRefused, EdgespecError, InvalidRequest, UnknownModel
from edgespec.models.load_config import LoadConfig
from edgespec.models.plan import Plan
from edgespec.models.resolve import fetch_source
from edgespec.models.tokenizer_compat import find_tokenizer_mismatch


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
                rival = load_weights(fetch_source(drafter.model.source, loader.hub), planned.alone)
                undo.callback(rival.close)
        cache = SelfDraftCache(path, planned.name)
        search = SelfDraftSearch(target, cache.folder, seconds)
        choice = search.choose(methods or all_methods(planned.backend), rival)
    draft = str(methods[0]) if len(methods) == 1 else "auto"
    cache.remember(current_setting(planned.backend, planned.options), draft, choice)
    return search, choice


_MIN_ANSWER = 8  # tokens


@dataclass(frozen=True, slots=True)
class Compared:
    """One draft: its measurement and its memory in bytes, or the reason why it cannot draft for the target."""

    draft: str
    trial: DraftEval | None = None
    memory: int | None = None
    refusal: str | None = None


@dataclass(frozen=True, slots=True)
class Answers:
    """What drafts are compared on: `tokens` that the target `name` has chosen in its `answers`."""

    name: str
    tokens: int
    answers: int


def compare_drafts(
    config: LoadConfig, drafts: Sequence[str], prompts: Sequence[Prompt], max_tokens: int
) -> Iterator[Answers | Compared]:
    """Measure each of `drafts`, as --draft takes them, on greedy answers to `prompts` of the target of `config`.

    Yields the Answers first. Raises UnknownModel, InvalidRequest for a draft that is mistyped, and DraftRefused if
    all are refused, before the target answers; InvalidRequest if no prompt gets an answer, and whatever a load of
    the target raises.
    """
    loader = Loader()
    plans = {draft: _plan_draft(loader, replace(config, draft=draft)) for draft in drafts}
    refused = {draft: each.message for draft, each in plans.items() if isinstance(each, EdgespecError)}
    if len(refused) == len(plans):
        reasons = "; ".join(f"{draft} is refused: {reason.removesuffix('.')}" for draft, reason in refused.items())
        raise DraftRefused(
            f"there is nothing to compare; {reasons}.", hint="Name a draft model, or a self-draft such as layerskip:8."
        )
    with loader.open_target(loader.plan(replace(config, draft="none"))) as (target, path, planned):
        passages = list(_answer(target, prompts, max_tokens))
        if not passages:
            raise InvalidRequest("no prompt fits in the context.", hint="Use a larger --ctx.")
        yield Answers(planned.name, sum(len(each.text) - each.start for each in passages), len(passages))
        with closing(target.open_session()) as session:
            evaluator = Evaluator(session, passages)
            for draft in drafts:
                check_cancelled()
                try:
                    if isinstance(asked := plans[draft], EdgespecError):
                        raise asked
                    with _open_draft(loader, asked, target, path, planned, session) as (opened, memory):
                        yield Compared(draft, evaluator.evaluate(opened), memory)
                except EdgespecError as refusal:
                    yield Compared(draft, refusal=refusal.message)


def _plan_draft(loader: Loader, config: LoadConfig) -> Plan | EdgespecError:
    """The plan of a draft, or why it is refused. Raises UnknownModel, InvalidRequest for one that is mistyped."""
    try:
        planned = loader.plan(config)
    except (UnknownModel, InvalidRequest):
        raise
    except EdgespecError as refusal:
        return refusal
    (drafter,) = planned.drafters if len(planned.drafters) == 1 else (None,)
    if drafter is None or drafter.spec.name not in ("model", SELF):
        message = "neither a draft model nor a self-draft; `edgespec bench` measures it."
        return InvalidRequest(message, hint="Name a draft model.")
    if drafter.self_draft is not None and drafter.self_draft.kept == ():
        message = "the layers are not named: layerskip:K; `edgespec draft build` searches for the best ones."
        return InvalidRequest(message, hint="Use layerskip:K.")
    return planned


def _answer(target: Model, prompts: Sequence[Prompt], max_tokens: int) -> Iterator[Passage]:
    """The answers, without those whose prompt does not fit and those of a few tokens."""
    engine = Engine(target, (), Speculation())
    try:
        for prompt in prompts:
            with suppress(ContextOverflow):
                before = engine.encode(prompt)
                request = Request(prompt, SamplingParams(temperature=0), max_tokens)
                for event in engine.stream(request):
                    if isinstance(event, Finished) and len(event.tokens) >= _MIN_ANSWER:
                        yield Passage([*before, *event.tokens[:-1]], len(before) - 1)
    finally:
        engine.release_draft()


@contextmanager
def _open_draft(
    loader: Loader, asked: Plan, target: Model, path: Path, planned: Plan, session: Session
) -> Iterator[tuple[Session, int]]:
    """A session of the one draft of `asked` for the target's `session`, and the bytes that it takes.

    Raises EdgespecError, Cancelled.
    """
    (drafter,) = asked.drafters
    found = fetch_source(drafter.model.source, loader.hub) if drafter.model is not None else None
    with ExitStack() as undo:
        loaded = load_drafter(drafter, found, target, path, planned)
        undo.callback(loaded.close)
        source: Any = loaded.source
        if isinstance(source, AttachedDraft):
            opened, size = source.open_session(session), source.extra_bytes
        elif reason := find_tokenizer_mismatch(target.tokenizer, source.tokenizer):
            raise DraftRefused(f"this draft does not fit this target: {reason}.", hint="Use another draft.")
        else:
            opened = source.open_session()
            size = asked.fit.draft.total if asked.fit.draft is not None else 0
        undo.callback(opened.close)
        yield opened, size

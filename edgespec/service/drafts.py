"""The self-draft of a model: the requested one, or the one that a search in idle time has found to pay."""

from __future__ import annotations

from pathlib import Path

from edgespec.backends import Model
from edgespec.backends.attached_draft import AttachedHead, SelfDraftSpec, Skip, Unsupported
from edgespec.backends.ranks import count_ranks
from edgespec.controller.store import ProfileKey
from edgespec.core.protocols import CheckCancelled
from edgespec.errors import (
    Cancelled,
    DoesNotFit,
    DraftRefused,
    EdgespecError,
    reason_of,
)
from edgespec.formats.heads import HeadSpec
from edgespec.planner.draft_finder import AUTO, PlannedDrafter
from edgespec.planner.head_probe import HeadProbe, ProbeResult, ProbeStore, describe_change
from edgespec.planner.plan import LoadConfig, Plan, Reporter
from edgespec.planner.selfdraft_search import (
    EVALUATION_S,
    SelfDraftCache,
    SelfDraftSearch,
    quick_methods,
)
from edgespec.service.loaded_model import LoadedModel, apply_settings


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

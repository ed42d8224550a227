"""Trained heads are probed at their first load; later loads read them as the probe has found."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from edgespec.backends import Model, open_model, require
from edgespec.backends.attached_draft import AttachedHead, Unsupported
from edgespec.core.protocols import CheckCancelled
from edgespec.errors import Cancelled, DraftRefused, EdgespecError, InvalidRequest, reason_of
from edgespec.formats.heads import HeadSpec
from edgespec.hub.hub import Hub
from edgespec.planner.draft_request import AUTO
from edgespec.planner.head_probe import HeadProbe, ProbeResult
from edgespec.planner.head_readings import describe_change
from edgespec.planner.plan import LoadConfig, Plan, PlannedDrafter, Reporter, fetch, plan
from edgespec.planner.probe_store import ProbeStore
from edgespec.registry.schema import load_registry


def attach_head(
    target: Model, drafter: PlannedDrafter, paths: tuple[Path, Path], planned: Plan, draft: str,
    reporter: Reporter, check: CheckCancelled,
) -> AttachedHead | None:  # fmt: skip
    """Attach the head of `drafter` in the reading that a probe finds, or has found, to agree best with `target`.

    `paths` are the target's and the head's, `draft` is what the user asked for: a head that 'auto' has found and that
    cannot be used is left out, with a notice, and None returned. A probe that fails is told and changes nothing.
    Raises DraftRefused for a head that agrees less than lookups, Cancelled, and what `Model.attach_head` raises.
    """
    spec, label = drafter.head, drafter.label
    assert spec is not None
    try:
        result, problem = _find_reading(target, spec, paths, planned, reporter, check)
        if result is not None and result.is_useless:
            raise DraftRefused(describe_useless(label, result), hint="Use --draft ngram, or a head for this model.")
        head = target.attach_head(
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

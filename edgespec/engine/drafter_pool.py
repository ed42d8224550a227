"""The drafters of an engine: loaded once, opened for each slot, dropped where they fail."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, cast, get_args

from edgespec.backends import Model
from edgespec.backends.attached_draft import AttachedDraft
from edgespec.controller.cost_model import CostModel
from edgespec.core.drafter import Confidence, Drafter
from edgespec.core.protocols import CheckCancelled
from edgespec.drafters import drafter_specs
from edgespec.engine.drafting import LoadedDrafter
from edgespec.engine.session_pool import Slot
from edgespec.errors import BackendError, Cancelled, DraftRefused, reason_of
from edgespec.registry.tokenizer_compat import find_tokenizer_mismatch, hash_vocabulary

if TYPE_CHECKING:
    from edgespec.drafters.remote.draft import RemoteDraft


class DrafterPool:
    """The loaded drafters by name. Their owner closes them."""

    def __init__(self, loaded: Sequence[LoadedDrafter], target: Model) -> None:
        """Raises DraftRefused where a draft's vocabulary is not the target's."""
        for each in loaded:
            if each.spec.needs == "server":
                _refuse_other_tokenizer(cast("RemoteDraft", each.source), target)
            elif each.spec.needs == "model" and each.source is not None:
                reason = find_tokenizer_mismatch(target.tokenizer, cast(Model, each.source).tokenizer)
                if reason:
                    raise DraftRefused(
                        f"this draft does not fit this target: {reason}.", hint="Use --draft ngram, or another."
                    )
        self.loaded = {each.spec.name: each for each in loaded}
        self.saved: dict[str, bytes] = {}  # see Slot
        self._vocab_size = target.tokenizer.vocab_size
        self._refused: set[str] = set()  # drafters that cannot be opened
        self._told: set[str] = set()  # drafters that the user knows to have failed
        self._priced: set[str] = set()  # drafters that take no time, or whose measurement was tried
        self._notices: list[str] = []

    @property
    def reads_text(self) -> bool:
        """Whether a drafter has a session of its own."""
        return any(each.source is not None for each in self.loaded.values())

    def open_missing(self, slot: Slot, check: CheckCancelled, *, is_new: bool = False) -> None:
        """Open the drafters that `slot` does not have. Raises Cancelled.

        Raises BackendError where there is no memory for the draft of a slot that `is_new`. Another slot goes on without
        the drafter, until the next answer.
        """
        for name, loaded in self.loaded.items():
            if name in slot.drafters or name in self._refused:
                continue
            try:
                saved = slot.saved.get(name)
                drafter = loaded.open(slot.target, self._vocab_size, saved, check, slot.memory)
                if reason := _find_fault(drafter, name):
                    drafter.close()
                    raise ValueError(reason)
                slot.drafters[name] = drafter
                if drafter.is_free:
                    self._priced.add(name)
            except Cancelled:
                raise
            except Exception as error:  # somebody else's drafter
                if not isinstance(error, BackendError):
                    self._refused.add(name)
                elif is_new and loaded.source is not None:
                    raise
                self._tell(name, f"cannot be used: {reason_of(error)}.")

    def attached(self, names: Iterable[str]) -> dict[str, AttachedDraft]:
        """Those of `names` that share the target's cache, so that their time depends on what it holds."""
        sources = {name: self.loaded[name].source for name in names}
        return {name: source for name, source in sources.items() if isinstance(source, AttachedDraft)}

    def take_unpriced(self, names: Sequence[str], costs: CostModel) -> bool:
        """Whether one of `names` has no known cost; each is returned once."""
        unpriced = {name for name in names if not costs.has_cost(name)} - self._priced
        self._priced |= unpriced
        return bool(unpriced)

    def require(self, names: Sequence[str]) -> None:
        """Raise DraftRefused for a drafter that is not loaded; those that need nothing are added."""
        specs = drafter_specs()
        for name in names:
            if name not in self.loaded and name in specs and specs[name].needs in ("nothing", "memory"):
                self.loaded[name] = LoadedDrafter(specs[name], name)
            elif name not in self.loaded:
                raise DraftRefused(
                    f"the drafter '{name}' is not loaded.", hint="Start with --draft, or use the n-gram draft."
                )

    def select(self, slot: Slot, names: Sequence[str]) -> list[Drafter]:
        """The drafters of `slot` by name, without those that cannot be opened, or have no memory. Raises Cancelled."""
        self.open_missing(slot, slot.check)
        has_memory = slot.memory.space is not None
        useful = [name for name in names if has_memory or self.loaded[name].spec.needs != "memory"]
        return [slot.drafters[name] for name in useful if name in slot.drafters]

    def drop(self, slot: Slot, failures: Mapping[str, str]) -> None:
        """Close drafters of `slot` that have failed; the next generation opens them anew."""
        for name, reason in failures.items():
            slot.close_drafter(name, has_failed=True)
            self._tell(name, f"failed and was left out: {reason}")

    def take_notices(self) -> list[str]:
        """Sentences for the user that were not taken yet; one for each drafter."""
        notices, self._notices = self._notices, []
        for each in self.loaded.values():
            if each.spec.needs == "server":
                notices += cast("RemoteDraft", each.source).take_notices()
        return notices

    def close(self) -> None:
        """Free what was loaded, after the slots."""
        for each in self.loaded.values():
            if each.source is not None:
                each.source.close()
        self.loaded = {}

    def _tell(self, name: str, text: str) -> None:
        if name not in self._told:
            self._told.add(name)
            self._notices.append(f"The drafter {name} {text}")


def _refuse_other_tokenizer(draft: RemoteDraft, target: Model) -> None:
    """Raise DraftRefused unless the draft on another machine has the target's tokenizer."""
    if draft.description.tokenizer != hash_vocabulary(target.tokenizer):
        raise DraftRefused(
            f"the tokenizer of {draft.description.model} at {draft.address} is not the target's.",
            hint="Serve a draft of the target's family there, or use --draft ngram.",
        )


def _find_fault(drafter: Drafter, name: str) -> str | None:
    """What is wrong with what a drafter says of itself; None if nothing is."""
    if drafter.name != name:  # what is learned of it is stored by this name
        return f"it calls itself '{drafter.name}'"
    if drafter.confidence not in get_args(Confidence):
        return f"its confidence is {drafter.confidence!r}, neither 'probability' nor 'length'"
    if not isinstance(drafter.block_size, int) or drafter.block_size < 1:
        return f"its block size is {drafter.block_size!r}, not a number of tokens"
    return None

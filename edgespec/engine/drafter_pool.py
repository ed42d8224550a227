"""The drafters of an engine, opened for each slot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast, get_args

from edgespec.backends import Model
from edgespec.core.drafter import Confidence, Drafter
from edgespec.engine.loaded_drafter import LoadedDrafter
from edgespec.engine.slots import Slot
from edgespec.errors import STOPS, BackendError, DraftRefused, reason_of
from edgespec.models.tokenizer_compat import find_tokenizer_mismatch


class DrafterPool:
    """The loaded drafters by name. Their owner closes them."""

    def __init__(self, loaded: Sequence[LoadedDrafter], target: Model) -> None:
        """Raises DraftRefused if a draft's vocabulary is not the target's."""
        for each in loaded:
            if each.spec.needs != "model" or each.source is None:
                continue
            if reason := find_tokenizer_mismatch(target.tokenizer, cast(Model, each.source).tokenizer):
                raise DraftRefused(
                    f"this draft does not fit this target: {reason}.", hint="Draft by ngram, or another."
                )
        self.loaded = {each.spec.name: each for each in loaded}
        self._vocab_size = target.tokenizer.vocab_size
        self._refused: set[str] = set()  # drafters that cannot be opened
        self._warned: set[str] = set()  # drafters that the user knows to have failed
        self._notices: list[str] = []

    def open_missing(self, slot: Slot, *, is_new: bool = False) -> None:
        """Open the drafters that `slot` does not have. Raises Cancelled.

        Raises BackendError if there is no memory for the draft of a slot that `is_new`. Another slot goes on without
        the drafter, until the next answer.
        """
        for name, loaded in self.loaded.items():
            if name in slot.drafters or name in self._refused:
                continue
            try:
                drafter = loaded.open(slot.target, self._vocab_size, slot.memory)
                if reason := _find_fault(drafter, name):
                    drafter.close()
                    raise ValueError(reason)
                slot.drafters[name] = drafter
            except STOPS:
                raise
            except BaseException as error:  # somebody else's drafter
                if not isinstance(error, BackendError):
                    self._refused.add(name)
                elif is_new and loaded.source is not None:
                    raise
                self._warn_once(name, f"cannot be used: {reason_of(error)}.")

    def require(self, names: Sequence[str]) -> None:
        """Raises DraftRefused for one of `names` that is not loaded."""
        if missing := [name for name in names if name not in self.loaded]:
            raise DraftRefused(f"the drafter '{missing[0]}' is not loaded.", hint="Name it in --draft.")

    def select(self, slot: Slot, names: Sequence[str]) -> list[Drafter]:
        """The drafters of `slot` by name, without those that cannot be opened, or have no memory. Raises Cancelled."""
        self.open_missing(slot)
        has_memory = slot.memory.space is not None
        useful = [name for name in names if has_memory or self.loaded[name].spec.needs != "memory"]
        return [slot.drafters[name] for name in useful if name in slot.drafters]

    def drop(self, slot: Slot, failures: Mapping[str, str]) -> None:
        """Close drafters of `slot` that have failed; the next generation opens them anew."""
        for name, reason in failures.items():
            slot.close_drafter(name)
            self._warn_once(name, f"failed and was left out: {reason}")

    def take_notices(self) -> list[str]:
        """Sentences for the user that were not taken yet; one for each drafter."""
        notices, self._notices = self._notices, []
        return notices

    def close(self) -> None:
        """Free what was loaded, after the slots."""
        for each in self.loaded.values():
            each.close()
        self.loaded = {}

    def _warn_once(self, name: str, text: str) -> None:
        if name not in self._warned:
            self._warned.add(name)
            self._notices.append(f"The drafter {name} {text}")


def _find_fault(drafter: Drafter, name: str) -> str | None:
    """What is wrong with the attributes of a drafter; None if nothing is."""
    is_sound = drafter.confidence in get_args(Confidence) and isinstance(drafter.block_size, int)
    if drafter.name == name and is_sound and drafter.block_size > 0:  # what is learned of it is stored by its name
        return None
    return (
        f"its name is {drafter.name!r}, its confidence is {drafter.confidence!r} and its block size is "
        f"{drafter.block_size!r}; they must be '{name}', 'probability' or 'length', and a number of tokens"
    )

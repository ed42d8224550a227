"""Whether the user has allowed to train drafts on their texts, remembered in the folder of the adapted drafts."""

from __future__ import annotations

from pathlib import Path

from edgespec.errors import CacheError, reason_of

_CONSENT = "may-train"


def may_train(folder: Path) -> bool:
    """Whether the user has allowed to train on their texts; `folder` is that of the adapted drafts."""
    return (folder / _CONSENT).exists()


def allow_training(folder: Path) -> None:
    """Remember that the user allows it. Raises CacheError."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        (folder / _CONSENT).touch(mode=0o600)
    except OSError as error:
        raise CacheError(f"{folder} cannot be written: {reason_of(error)}.", hint="Check its permissions.") from error


def forbid_training(folder: Path) -> None:
    """Ask again before the next training. Raises CacheError."""
    try:
        (folder / _CONSENT).unlink(missing_ok=True)
    except OSError as error:
        raise CacheError(f"{folder} cannot be written: {reason_of(error)}.", hint="Check its permissions.") from error

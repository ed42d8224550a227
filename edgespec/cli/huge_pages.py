"""What `edgespec doctor` says about huge pages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage")


def describe_huge_pages(folder: Path) -> dict[str, Any] | None:
    """How the kernel gives huge pages, by the files of `folder`; None where it has none."""
    from edgespec.backends.huge_pages import are_granted, is_set_by_user, read_mode, read_page_bytes

    mode = read_mode(folder)
    if mode is None:
        return None
    return {
        "mode": mode,
        "page_bytes": read_page_bytes(folder),
        "granted": mode != "never" and are_granted(),
        "set_by_user": is_set_by_user(),
    }


def find_huge_page_problems(huge_pages: dict[str, Any] | None) -> list[dict[str, str]]:
    """What keeps weights out of huge pages, unless the user has decided about them."""
    if huge_pages is None or huge_pages["granted"] or huge_pages["set_by_user"]:
        return []
    if huge_pages["mode"] == "never":
        problem = "huge pages are off, so models whose weights are repacked or read, not mapped, decode more slowly"
        return [{"problem": problem, "fix": f"echo madvise | sudo tee {HUGE_PAGES / 'enabled'}"}]
    problem = "the kernel gives this process no huge pages: its memory is fragmented, or they are off for the process"
    return [{"problem": problem, "fix": "echo 1 | sudo tee /proc/sys/vm/compact_memory"}]


def say_huge_pages(huge_pages: dict[str, Any]) -> str:
    from edgespec.units import gib

    if huge_pages["set_by_user"]:
        return f"{huge_pages['mode']}, left to GLIBC_TUNABLES"
    if not huge_pages["granted"]:
        return f"{huge_pages['mode']}, not used"
    return f"{huge_pages['mode']}, {gib(huge_pages['page_bytes'])} each"

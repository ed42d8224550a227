"""What models.toml says about a model for whoever chooses one: size, licence and tasks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

Task = Literal["chat", "code", "reasoning"]
TASKS: tuple[Task, ...] = get_args(Task)
ABOUT_KEYS = ("parameters", "active", "license", "tasks")


@dataclass(frozen=True, slots=True)
class About:
    """None or empty where nothing is stated.

    parameters  of the target, in billions
    active      those of them that one token uses, in a mixture of experts
    license     of the weights, as people call it
    tasks       what the model is known for
    """

    parameters: float | None = None
    active: float | None = None
    license: str | None = None
    tasks: tuple[Task, ...] = ()


def find_about_error(table: Mapping[str, object]) -> str | None:
    """What is wrong with the keys of `ABOUT_KEYS` in a table of models.toml; None for nothing."""
    for key in ("parameters", "active"):
        number = table.get(key)
        if number is not None and (isinstance(number, bool) or not isinstance(number, int | float) or number <= 0):
            return f"{key} is not a positive number of billions"
    if not isinstance(table.get("license", ""), str):
        return "license is not text"
    tasks = table.get("tasks", [])
    if not isinstance(tasks, list) or any(task not in TASKS for task in tasks):
        return f"tasks is not a list of {', '.join(TASKS)}"
    return None


def read_about(table: Mapping[str, object]) -> About:
    """From a table that has no error."""
    stated = {key: table[key] for key in ABOUT_KEYS if key in table}
    tasks = stated.pop("tasks", ())
    assert isinstance(tasks, list | tuple)
    return About(**stated, tasks=tuple(tasks))  # type: ignore[arg-type]

"""The user's models.toml over the shipped one, key by key."""

from __future__ import annotations

from edgespec.registry.originals import drop_stale_originals

Table = dict[str, object]


def merge_tables(base: dict[str, Table], over: dict[str, Table]) -> dict[str, Table]:
    """The tables of both by alias; what was stated for a model that `over` replaces is dropped."""
    merged = {alias: dict(table) for alias, table in base.items()}
    for alias, table in over.items():
        entry = merged[alias] = drop_stale_originals(merged.get(alias, {}), table)
        for key, value in table.items():
            old = entry.get(key)
            if not isinstance(value, dict) or not isinstance(old, dict):
                entry[key] = value
                continue
            stale = {"acceptance"} if {"target", "draft"} & value.keys() else set()  # measured for another pair
            stale |= {"pard_token"} if "pard" in value else set()  # of another model
            stale |= {"head_kind", "head_verified"} if "head" in value else set()  # of another head
            entry[key] = {**{name: kept for name, kept in old.items() if name not in stale}, **value}
    return merged

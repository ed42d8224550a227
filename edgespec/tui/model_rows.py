"""The rows of the list of models: recommendations in their order, then other downloads, models that were opened by
path, and other programs' models.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from edgespec.backends import FileBackend, prefers_mlx
from edgespec.backends.devices import host_memory
from edgespec.core.protocols import CheckCancelled
from edgespec.hub.hub import Hub
from edgespec.planner.candidates import Query
from edgespec.planner.catalogue import Entry, build_catalogue
from edgespec.planner.recommend import (
    Recommendation,
    Recommendations,
    Recommender,
    format_download,
    format_drafted,
    format_plain,
)
from edgespec.registry.schema import EMBEDDED_ALIAS, load_registry
from edgespec.service.client import EngineClient
from edgespec.tui.settings import Settings
from edgespec.units import gib

_SMALL = 4.0  # billions of parameters, at most
_FITS = {"does not fit": "no", None: ""}


@dataclass(frozen=True, slots=True)
class Row:
    """`opens` is the value for `--model`; `missing` are bytes to download, None where nothing says how many.
    `parameters` are in billions.
    """

    opens: str
    name: str
    size: str
    fit: str
    plain: str
    drafted: str
    quality: str
    license: str
    description: str
    missing: int | None = 0
    parameters: float | None = None

    @property
    def cells(self) -> tuple[str, ...]:
        """In the order of the columns."""
        return self.size, self.fit, self.plain, self.drafted, self.quality, self.license, self.description


def list_rows(client: EngineClient, *, is_idle: bool, check: CheckCancelled) -> Iterator[tuple[list[Row], str]]:
    """Rows with what to say of them: first of the registry alone, then with the sizes and headers at the hub.

    With an idle engine this machine is measured, unless that was done before. Raises EdgespecError, Cancelled.
    """
    backend: FileBackend = "mlx" if prefers_mlx() else "llamacpp"
    memory = host_memory(client.devices().result())
    registry, hub = load_registry(), Hub.from_environment()
    opened = [Path(line) for line in Settings().read("paths").splitlines()]
    entries = build_catalogue(registry, hub, backend, memory, opened=opened)
    others = [_from_entry(each) for each in entries if each.origin != "alias"]
    for each, measure in ((replace(hub, offline=True), False), (hub, is_idle)):
        recommender = Recommender(registry, each, backend, memory, check=check)
        found = recommender.recommend(Query(), measure=measure)
        notice = found.notices[0] if hub.offline and found.notices else ""
        yield [*(_from_recommendation(model) for model in found.models), *others], notice


def search_rows(client: EngineClient, text: str, *, check: CheckCancelled) -> tuple[list[Row], str]:
    """The repositories of the hub that match `text`. Raises EdgespecError, Cancelled."""
    backend: FileBackend = "mlx" if prefers_mlx() else "llamacpp"
    memory = host_memory(client.devices().result())
    recommender = Recommender(load_registry(), Hub.from_environment(), backend, memory, check=check)
    found: Recommendations = recommender.recommend(Query(text), measure=False)
    rows = [_from_recommendation(each) for each in found.models if each.candidate.downloads is not None]
    return rows, found.notices[0] if found.notices else f"Found at the hub: {len(rows)}."


def filter_rows(rows: Iterable[Row], text: str) -> list[Row]:
    """The rows whose name or description contains every word of `text`, ignoring case."""
    words = text.casefold().split()
    return [each for each in rows if all(word in f"{each.name} {each.description}".casefold() for word in words)]


def select_small(rows: Iterable[Row]) -> list[Row]:
    """The rows of small models, the smallest first, and last the embedded pair, which only completes code."""
    small = [each for each in rows if each.parameters is not None and each.parameters <= _SMALL]
    return sorted(small, key=lambda each: (each.opens == EMBEDDED_ALIAS, each.parameters))


def _from_recommendation(model: Recommendation) -> Row:
    candidate = model.candidate
    return Row(
        candidate.name,
        candidate.name,
        format_download(model),
        _FITS.get(model.fit, model.fit or ""),
        format_plain(model),
        format_drafted(model),
        model.quality,
        candidate.about.license or "?",
        candidate.description,
        model.missing,
        model.parameters,
    )


def _from_entry(entry: Entry) -> Row:
    described = {"cache": "downloaded", "opened": "opened before", "elsewhere": "from another program"}[entry.origin]
    draft = "draft model" if entry.draft else "n-grams"
    size = "" if entry.target.size is None else gib(entry.target.size)
    return Row(entry.opens, entry.name, size, _FITS.get(entry.fit, entry.fit or ""), "", draft, "", "", described)

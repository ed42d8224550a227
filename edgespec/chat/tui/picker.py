"""The list of models: what suits this machine first, and a search of the hub."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import ClassVar, TypeVar

from rich.text import Text
from textual import on, work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.css.query import NoMatches
from textual.screen import ModalScreen
from textual.widgets import DataTable, Input, Static

from edgespec.backends import FileBackend, prefers_mlx
from edgespec.cancel import iterate
from edgespec.chat import SearchHit, Store
from edgespec.chat.tui.progress import describe_error
from edgespec.chat.tui.settings import read_setting
from edgespec.client.client import EngineClient
from edgespec.errors import Cancelled, EdgespecError, UnknownModel
from edgespec.machines.memory import host_memory
from edgespec.models.catalogue import Candidate, Catalogue, Query, format_download, format_drafted, format_plain
from edgespec.models.hub import Hub
from edgespec.models.references import HubFile, HubQuant, HubRepo, parse_reference
from edgespec.models.registry import EMBEDDED_ALIAS, load_registry
from edgespec.units import gib

_SMALL = 4.0  # billions of parameters, at most
_FITS = {"does not fit": "no", None: ""}


@dataclass(frozen=True, slots=True)
class Row:
    """A model.

    opens       the value for `--model`
    cells       of the columns after the name: size, fit, speed, drafted, quality, license, description
    missing     bytes to download; None if nothing says how many
    parameters  in billions
    """

    opens: str
    name: str
    cells: tuple[str, ...]
    missing: int | None = 0
    parameters: float | None = None

    @property
    def license(self) -> str:
        return self.cells[-2]

    @property
    def description(self) -> str:
        return self.cells[-1]


def list_rows(client: EngineClient, *, is_idle: bool, text: str = "") -> Iterator[tuple[list[Row], str]]:
    """Yield rows, and a notice about them: first from the registry alone, then with the sizes and headers at the hub.
    Recommendations come in their order, then other downloads, models that were opened by path, and other programs'.

    With `text`, the repositories of the hub that match it are yielded instead, once. With an idle engine this machine
    is measured, unless that was done before. Raises EdgespecError, Cancelled.
    """
    backend: FileBackend = "mlx" if prefers_mlx() else "llamacpp"
    memory = host_memory(client.devices().result())
    registry, hub = load_registry(), Hub.from_environment()
    if text:
        found = Catalogue(registry, hub, backend, memory).recommend(Query(text), measure=False)
        rows = [_from_recommendation(each) for each in found.models if each.origin == "hub"]
        yield rows, found.notices[0] if found.notices else f"Found at the hub: {len(rows)}."
        return
    opened = [Path(line) for line in read_setting("paths").splitlines()]
    local = Catalogue(registry, hub, backend, memory).list_local(opened)
    others = [_from_local(each) for each in local if each.origin != "alias"]
    for each, measure in ((replace(hub, offline=True), False), (hub, is_idle)):
        found = Catalogue(registry, each, backend, memory).recommend(Query(), measure=measure)
        notice = found.notices[0] if hub.offline and found.notices else ""
        yield [*(_from_recommendation(model) for model in found.models), *others], notice


def filter_rows(rows: Iterable[Row], text: str) -> list[Row]:
    """The rows whose name or description contains every word of `text`, ignoring case."""
    words = text.casefold().split()
    return [each for each in rows if all(word in f"{each.name} {each.description}".casefold() for word in words)]


def _from_recommendation(model: Candidate) -> Row:
    fit, licensed = _FITS.get(model.fit, model.fit or ""), model.about.license or "?"
    speeds = format_plain(model), format_drafted(model), model.quality
    cells = (format_download(model), fit, *speeds, licensed, model.description)
    return Row(model.name, model.name, cells, model.missing, model.parameters)


def _from_local(model: Candidate) -> Row:
    described = {"cache": "downloaded", "opened": "opened before", "elsewhere": "from another program"}[model.origin]
    size = "" if model.target.size is None else gib(model.target.size)
    return Row(model.opens, model.name, (size, _FITS.get(model.fit, model.fit or ""), "", "", "", "", described))


T = TypeVar("T")


class FilterList(ModalScreen[T | None]):
    """A list with a filter above it and a status line below it, dismissed with the choice, or None."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "dismiss", "Back"),
        Binding("down", "focus_table", "List", show=False),
    ]
    COLUMNS: ClassVar[tuple[tuple[str, int | None], ...]]
    PLACEHOLDER = ""

    def __init__(self, text: str, said: str) -> None:
        """`text` is the first filter, `said` the first status."""
        super().__init__()
        self._text = text
        self._said = said
        self._asked = ""

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog"):
            yield Input(self._text, placeholder=self.PLACEHOLDER, id="filter")
            table: DataTable[str | Text] = DataTable(cursor_type="row", zebra_stripes=True)
            for name, width in self.COLUMNS:
                table.add_column(name, width=width)
            yield table
            yield from self.compose_details()
            yield Static(self._said, id="status", markup=False)

    def compose_details(self) -> ComposeResult:
        """What is between the list and the status line."""
        return ()

    def fill(self) -> None:
        """Show the rows that match the filter; a row's key identifies what it stands for."""
        raise NotImplementedError

    def choose(self) -> None:
        """Dismiss the screen with the selected row, if there is one."""
        raise NotImplementedError

    def selected_key(self) -> str | None:
        """The key of the row under the cursor; None if the table is empty."""
        table = self.query_one(DataTable)
        return table.coordinate_to_cell_key(table.cursor_coordinate).row_key.value if table.row_count else None

    def set_status(self, text: str, asked: str = "") -> None:
        """Show `text` below the list. If it is a question, `asked` is the key that it is about."""
        self._asked = asked
        self.query_one("#status", Static).update(Text(text))

    def confirm(self, key: str, question: str) -> bool:
        """Whether the question about `key` is on the screen; else ask it."""
        is_confirmed = self._asked == key
        if not is_confirmed:
            self.set_status(question, key)
        return is_confirmed

    @on(Input.Changed)
    def _filter(self) -> None:
        self.fill()

    @on(Input.Submitted)
    @on(DataTable.RowSelected)
    def _submit(self) -> None:
        self.choose()

    def action_focus_table(self) -> None:
        self.query_one(DataTable).focus()


_KEYS = "Enter opens · type to filter · Ctrl+S searches the hub · Esc closes"
_FIRST_KEYS = "Enter downloads the model and opens it · type to see larger ones · Ctrl+S searches the hub · Esc closes"


@dataclass(frozen=True, slots=True)
class Pick:
    """A model reference, as `--model` takes it, and whether it is to be downloaded first."""

    model: str
    download: bool


class Picker(FilterList[Pick]):
    """Dismissed with the model to open, or None."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("ctrl+s", "search", "Search the hub", priority=True),
    ]
    PLACEHOLDER = "Filter models, or type any reference"
    COLUMNS = (
        ("model", 22), ("download", 9), ("fit", 5), ("tok/s", 6), ("drafted", 11), ("quality", 8), ("license", 12),
        ("description", None),
    )  # fmt: skip

    def __init__(self, client: EngineClient, *, is_idle: bool, is_first: bool = False) -> None:
        """Lists models, and measures this machine if the engine `is_idle`. `is_first`: the user chooses a first
        model, from small ones until something is typed, and Enter downloads it at once.
        """
        super().__init__("", "Listing the models on this machine …")
        self._is_first = is_first
        self._client = client
        self._is_idle = is_idle
        self._rows: list[Row] = []
        self._found: list[Row] = []  # at the hub
        self._notice = ""

    def compose_details(self) -> ComposeResult:
        yield Static("", id="about", markup=False)

    def on_mount(self) -> None:
        self._list("")

    @work
    async def _list(self, text: str) -> None:
        """Show rows as they are found, at the hub if there is a `text` to search."""
        found = iterate(list_rows(self._client, is_idle=self._is_idle, text=text), self._check)
        try:
            while (listed := await asyncio.to_thread(next, found, None)) is not None:
                rows, self._notice = listed
                if text:
                    self._found = rows
                else:
                    self._rows = rows
                self.fill()
        except (Cancelled, NoMatches):  # the screen is closing
            return
        except Exception as error:  # noqa: BLE001 - an internal error must not end the conversation
            self.set_status(describe_error(error))

    def action_search(self) -> None:
        """Add the repositories of the hub that match the filter."""
        text = self.query_one(Input).value.strip()
        if not text:
            self.set_status("Type what to search at the hub, such as: qwen 8b")
            return
        self.set_status(f"Searching the hub for {text} …")
        self._list(text)

    def _check(self) -> None:
        if not self.is_attached:
            raise Cancelled

    def choose(self) -> None:
        """Open the selected model; ask first if it has to be downloaded."""
        name = self.selected_key() or self.query_one(Input).value.strip()
        if not name:
            return
        row = self._find_row(name)
        missing = row.missing if row is not None else _find_missing(name)
        is_wanted = missing == 0 or (self._is_first and row is not None)
        if is_wanted or self.confirm(name, _describe_download(name, missing, row)):
            self.dismiss(Pick(name, download=missing != 0))

    @on(DataTable.RowHighlighted)
    def _show_about(self, message: DataTable.RowHighlighted) -> None:
        """Show in full what the columns cut off."""
        row = self._find_row(message.row_key.value)
        parts = (row.name, row.license and f"license {row.license}", row.description) if row is not None else ()
        self.query_one("#about", Static).update(Text(" · ".join(each for each in parts if each)))

    def _find_row(self, opens: str | None) -> Row | None:
        return next((each for each in (*self._rows, *self._found) if each.opens == opens), None)

    def fill(self) -> None:
        table, text = self.query_one(DataTable), self.query_one(Input).value
        selected = self.selected_key()
        table.clear()
        self.query_one("#about", Static).update("")
        listed = {each.opens for each in self._rows}
        is_small = self._is_first and not text
        every = [*self._rows, *(each for each in self._found if each.opens not in listed)]
        rows = filter_rows(every, text)
        if is_small:  # the smallest first, and last the embedded pair, which only completes code
            rows = [each for each in self._rows if each.parameters is not None and each.parameters <= _SMALL]
            rows.sort(key=lambda each: (each.opens == EMBEDDED_ALIAS, each.parameters))
        for row in rows:
            name = Text(row.name, overflow="ellipsis", no_wrap=True)
            table.add_row(name, *(Text(cell, no_wrap=True) for cell in row.cells), key=row.opens)
        if selected in (keys := [row.opens for row in rows]):
            table.move_cursor(row=keys.index(selected))
        nothing = "No match; Ctrl+S searches the hub, Enter opens it as a reference, such as user/repo:Q4_K_M."
        self.set_status(
            " · ".join(filter(None, [_FIRST_KEYS if is_small else _KEYS, self._notice])) if rows else nothing
        )


def _find_missing(name: str) -> int | None:
    """Bytes to download for a reference: 0 if it needs no download, None if only the hub knows its size."""
    with suppress(UnknownModel):
        reference = parse_reference(name)
        if isinstance(reference, HubRepo | HubQuant | HubFile):
            return 0 if Hub.from_environment().find_cached(reference) is not None else None
    return 0


def _describe_download(name: str, missing: int | None, row: Row | None) -> str:
    hub = Hub.from_environment()
    place = next(each for each in (hub.cache_dir, *hub.cache_dir.parents) if each.exists())
    size = "its size is not known yet" if missing is None else f"{gib(missing)}, with what drafts for it"
    licensed = f", license {row.license}" if row is not None and row.license not in ("", "?") else ""
    free = gib(shutil.disk_usage(place).free)
    keys = "Enter again downloads it; the chat can be used meanwhile"
    return f"Download {name}? {size}{licensed}, to {hub.cache_dir}\n{free} free · {keys}"


_HISTORY_KEYS = "Enter resumes · type to search · Ctrl+X deletes · Esc closes"


class History(FilterList[int]):
    """The stored conversations. Dismissed with the id of the one to resume, or None."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("ctrl+x", "delete", "Delete", priority=True),
    ]
    PLACEHOLDER = "Search all conversations"
    COLUMNS = (("changed", 16), ("model", 18), ("conversation", None))

    def __init__(self, store: Store, current_id: int | None, text: str = "") -> None:
        """`current_id`: the conversation on the screen, which cannot be deleted. `text`: the first search."""
        super().__init__(text, _HISTORY_KEYS)
        self._store = store
        self._current_id = current_id

    def on_mount(self) -> None:
        self.fill()

    def action_delete(self) -> None:
        key = self.selected_key()
        if key is not None and int(key) == self._current_id:
            self.set_status("The conversation on the screen cannot be deleted; /new starts another one.")
        elif key is not None and self.confirm(key, "Press Ctrl+X again to delete it for good."):
            try:
                self._store.remove(self._store.resume(int(key)))
            except EdgespecError as error:
                self.set_status(describe_error(error))
                return
            self.fill()
            self.set_status("Deleted.")

    def choose(self) -> None:
        key = self.selected_key()
        if key is not None:
            self.dismiss(int(key))

    def fill(self) -> None:
        query = self.query_one(Input).value
        try:
            recent = [] if query.strip() else self._store.recent()
            hits = [SearchHit(each, None, "") for each in recent] or self._store.search(query)
        except EdgespecError as error:
            self.set_status(describe_error(error))
            return
        table = self.query_one(DataTable)
        table.clear()
        for hit in hits:
            conversation = hit.conversation
            changed = datetime.fromtimestamp(conversation.changed).strftime("%Y-%m-%d %H:%M")
            title = Text(conversation.title)
            if hit.snippet not in ("", conversation.title):
                title.append(f"  {hit.snippet}", "dim")
            model = Text(conversation.model, overflow="ellipsis", no_wrap=True)
            table.add_row(changed, model, title, key=str(conversation.id))
        self.set_status(
            _HISTORY_KEYS if hits else "Nothing found." if query.strip() else "No conversation is stored yet."
        )

"""The list of models: what suits this machine first, and a search of the hub."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from rich.text import Text
from textual import on, work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical, VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import DataTable, Input, Static

from edgespec.backends import FileBackend, prefers_mlx
from edgespec.backends.devices import host_memory
from edgespec.conversations import Conversation, Store
from edgespec.core.protocols import CheckCancelled
from edgespec.errors import Cancelled, EdgespecError, UnknownModel
from edgespec.hub.cache import HubFile, HubQuant, HubRepo, parse_reference
from edgespec.hub.hub import Hub
from edgespec.planner.catalogue import CatalogueEntry, Query, build_catalogue
from edgespec.planner.plan import LoadConfig, Reporter
from edgespec.planner.recommend import (
    Recommendation,
    Recommendations,
    Recommender,
    format_download,
    format_drafted,
    format_plain,
)
from edgespec.registry.schema import EMBEDDED_ALIAS, load_registry
from edgespec.service.client import EngineClient, Stream
from edgespec.tui.messages import Toast
from edgespec.tui.settings import Settings
from edgespec.units import gib

# The rows of the list of models: recommendations in their order, then other downloads, models that were opened by
# path, and other programs' models.


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


def _from_entry(entry: CatalogueEntry) -> Row:
    described = {"cache": "downloaded", "opened": "opened before", "elsewhere": "from another program"}[entry.origin]
    draft = "draft model" if entry.draft else "n-grams"
    size = "" if entry.target.size is None else gib(entry.target.size)
    return Row(entry.opens, entry.name, size, _FITS.get(entry.fit, entry.fit or ""), "", draft, "", "", described)


# A list with a filter above it and a status line below it.


T = TypeVar("T")


class FilterList(ModalScreen[T | None]):
    """Dismissed with the choice, or None. A subclass composes an Input, a DataTable and a Static of the id `status`."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "close", "Back"),
        Binding("down", "focus_table", "List", show=False),
    ]

    def fill(self) -> None:
        """Show the rows that match the filter; a row's key identifies what it stands for."""
        raise NotImplementedError

    def choose(self) -> None:
        """Dismiss the screen with the selected row, if there is one."""
        raise NotImplementedError

    def selected_key(self) -> str | None:
        """The key of the row under the cursor; None where the table is empty."""
        table = self.query_one(DataTable)
        return table.coordinate_to_cell_key(table.cursor_coordinate).row_key.value if table.row_count else None

    def say(self, text: str) -> None:
        """Show `text` in the status line."""
        self.query_one("#status", Static).update(Text(text))

    @on(Input.Changed)
    def _filter(self) -> None:
        self.fill()

    @on(Input.Submitted)
    @on(DataTable.RowSelected)
    def _submit(self) -> None:
        self.choose()

    def action_focus_table(self) -> None:
        self.query_one(DataTable).focus()

    def action_close(self) -> None:
        self.dismiss(None)


# A question that Enter answers with yes, and Esc with no.


class Confirm(ModalScreen[bool]):
    """Dismissed with the answer."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter,y", "answer(True)", "Yes"),
        Binding("escape,n", "answer(False)", "No"),
    ]

    def __init__(self, question: str, facts: str) -> None:
        """`facts` are lines below the question."""
        super().__init__()
        self._question = question
        self._facts = facts

    def compose(self) -> ComposeResult:
        with Vertical(id="confirm"):
            yield Static(self._question, id="confirm-question", markup=False)
            yield Static(self._facts, markup=False)
            yield Static("Enter yes · Esc no", id="confirm-keys", markup=False)

    def action_answer(self, answer: bool) -> None:
        self.dismiss(answer)


_KEYS = "Enter opens · type to filter · Ctrl+S searches the hub · Ctrl+F measures one · Esc closes"
_FIRST_KEYS = "Enter downloads the model and opens it · type to see larger ones · Ctrl+S searches the hub · Esc closes"
_COLUMNS = (("model", 22), ("download", 9), ("fit", 5), ("tok/s", 6), ("drafted", 11), ("quality", 8), ("license", 12))


@dataclass(frozen=True, slots=True)
class Pick:
    """A model reference, as `--model` takes it, and whether it is to be downloaded first."""

    model: str
    download: bool


class Picker(FilterList[Pick]):
    """Dismissed with the model to open, or None."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("ctrl+f", "estimate", "Estimate", priority=True),
        Binding("ctrl+s", "search", "Search the hub", priority=True),
    ]

    def __init__(
        self, client: EngineClient, request: LoadConfig, reporter: Reporter, *, is_idle: bool, is_first: bool = False
    ) -> None:
        """`request`: the load options for an estimate, which needs an engine that is idle. `is_first`: the user
        chooses a first model, from small ones until something is typed, and Enter downloads it at once.
        """
        super().__init__()
        self._is_first = is_first
        self._client = client
        self._request = request
        self._reporter = reporter
        self._is_idle = is_idle
        self._rows: list[Row] = []
        self._found: list[Row] = []  # at the hub
        self._notice = ""
        self._job: Stream[str] | None = None

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog"):
            yield Input(placeholder="Filter models, or type any reference", id="filter")
            table: DataTable[str | Text] = DataTable(cursor_type="row", zebra_stripes=True)
            for name, width in _COLUMNS:
                table.add_column(name, width=width)
            table.add_column("description")
            yield table
            with VerticalScroll(id="report"):
                yield Static("", id="report-text", markup=False)
            yield Static("", id="about", markup=False)
            yield Static("Listing the models on this machine …", id="status", markup=False)

    def on_mount(self) -> None:
        self.query_one("#report").display = False
        self._load()

    @work(thread=True)
    def _load(self) -> None:
        try:
            for rows, notice in list_rows(self._client, is_idle=self._is_idle, check=self._check):
                self._call_in_app(self._show, rows, notice)
        except Cancelled:
            return
        except Exception as error:  # noqa: BLE001 - Toast separates expected errors from bugs
            self._call_in_app(self.say, str(Toast.from_error(error)))

    def action_search(self) -> None:
        """Add the repositories of the hub that match the filter."""
        text = self.query_one(Input).value.strip()
        if not text:
            self.say("Type what to search at the hub, such as: qwen 8b")
            return
        self.say(f"Searching the hub for {text} …")
        self._search(text)

    @work(thread=True, exclusive=True, group="search")
    def _search(self, text: str) -> None:
        try:
            rows, notice = search_rows(self._client, text, check=self._check)
        except Cancelled:
            return
        except Exception as error:  # noqa: BLE001 - as above
            self._call_in_app(self.say, str(Toast.from_error(error)))
            return
        self._call_in_app(self._add, rows, notice)

    def _check(self) -> None:
        if not self.is_attached:
            raise Cancelled

    def _show(self, rows: list[Row], notice: str) -> None:
        self._rows, self._notice = rows, notice
        self.fill()

    def _add(self, rows: list[Row], notice: str) -> None:
        self._found = rows
        self.fill()
        self.say(notice)

    def action_close(self) -> None:
        if self._job is not None:
            self._job.cancel()
        super().action_close()

    def action_estimate(self) -> None:
        """Show the plan of the selected model, with measured speeds."""
        name = self.selected_key()
        if name is None or self._job is not None:
            return
        if not self._is_idle:
            self.say("Speeds cannot be measured during an answer; Esc stops it.")
            return
        self.say(f"Measuring a few layers of {name} on this machine …")
        self._estimate(name)

    @work(exclusive=False)
    async def _estimate(self, name: str) -> None:
        self._job = self._client.plan(replace(self._request, model=name, force=True), self._reporter)
        status = _KEYS
        try:
            async for text in self._job:
                if self.is_attached:
                    self._show_report(text)
        except Cancelled:
            return
        except Exception as error:  # noqa: BLE001 - as above
            status = str(Toast.from_error(error))
        finally:
            self._job = None
        if self.is_attached:
            self.say(status)

    def _call_in_app(self, show: Callable[..., None], *values: Any) -> None:
        """Call `show` on the app's thread, unless this screen is closed."""
        with suppress(RuntimeError):
            if self.is_attached:
                self.app.call_from_thread(show, *values)

    def _show_report(self, text: str) -> None:
        self.query_one("#report").display = True
        self.query_one("#report-text", Static).update(Text(text))

    def choose(self) -> None:
        """Open the selected model; ask first where it has to be downloaded."""
        name = self.selected_key() or self.query_one(Input).value.strip()
        if not name:
            return
        row = self._find_row(name)
        missing = row.missing if row is not None else _find_missing(name)
        if missing == 0 or (self._is_first and row is not None):
            self.dismiss(Pick(name, download=missing != 0))
            return

        def answer(yes: bool | None) -> None:
            if yes:
                self.dismiss(Pick(name, download=True))

        self.app.push_screen(Confirm(f"Download {name}?", _describe_download(missing, row)), answer)

    @on(DataTable.RowHighlighted)
    def _show_about(self, message: DataTable.RowHighlighted) -> None:
        """What the columns cut off."""
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
        rows = select_small(self._rows) if is_small else filter_rows(every, text)
        for row in rows:
            name = Text(row.name, overflow="ellipsis", no_wrap=True)
            table.add_row(name, *(Text(cell, no_wrap=True) for cell in row.cells), key=row.opens)
        if selected in (keys := [row.opens for row in rows]):
            table.move_cursor(row=keys.index(selected))
        nothing = "No match; Ctrl+S searches the hub, Enter opens it as a reference, such as user/repo:Q4_K_M."
        self.say(" · ".join(filter(None, [_FIRST_KEYS if is_small else _KEYS, self._notice])) if rows else nothing)


def _find_missing(name: str) -> int | None:
    """0 for a reference that needs no download; None for one whose size the hub knows."""
    with suppress(UnknownModel):
        reference = parse_reference(name)
        if isinstance(reference, HubRepo | HubQuant | HubFile):
            return 0 if Hub.from_environment().find_cached(reference) is not None else None
    return 0


def _describe_download(missing: int | None, row: Row | None) -> str:
    hub = Hub.from_environment()
    place = hub.cache_dir
    while not place.exists() and place != place.parent:
        place = place.parent
    size = "its size is not known yet" if missing is None else f"{gib(missing)}, with what drafts for it"
    licensed = f", license {row.license}" if row is not None and row.license not in ("", "?") else ""
    free = gib(shutil.disk_usage(place).free)
    return f"{size}{licensed}\nto {hub.cache_dir}, {free} free\n\nThe chat can be used meanwhile; Esc stops."


# The stored conversations: list, search, resume, delete.


_HISTORY_KEYS = "Enter resumes · type to search · Ctrl+X deletes · Esc closes"


class History(FilterList[int]):
    """Dismissed with the id of the conversation to resume, or None."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("ctrl+x", "delete", "Delete", priority=True),
    ]

    def __init__(self, store: Store, current_id: int | None, text: str = "") -> None:
        """`current_id`: the conversation on the screen, which cannot be deleted. `text`: the first search."""
        super().__init__()
        self._store = store
        self._current_id = current_id
        self._text = text
        self._confirm_id: int | None = None  # deleted if the key is pressed again

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog"):
            yield Input(self._text, placeholder="Search all conversations", id="filter")
            table: DataTable[str | Text] = DataTable(cursor_type="row", zebra_stripes=True)
            table.add_column("changed", width=16)
            table.add_column("model", width=18)
            table.add_column("conversation")
            yield table
            yield Static(_HISTORY_KEYS, id="status", markup=False)

    def on_mount(self) -> None:
        self.fill()

    def action_delete(self) -> None:
        key = self.selected_key()
        if key is None:
            return
        id = int(key)
        if id == self._current_id:
            self.say("The conversation on the screen cannot be deleted; /new starts another one.")
        elif id != self._confirm_id:
            self._confirm_id = id
            self.say("Press Ctrl+X again to delete it for good.")
        else:
            try:
                self._store.remove(self._store.resume(id))
            except EdgespecError as error:
                self.say(str(Toast.from_error(error)))
                return
            self.fill()
            self.say("Deleted.")

    def choose(self) -> None:
        key = self.selected_key()
        if key is not None:
            self.dismiss(int(key))

    def fill(self) -> None:
        self._confirm_id = None
        query = self.query_one(Input).value
        rows: list[tuple[Conversation, str]]
        try:
            if query.strip():
                rows = [(found.conversation, found.snippet) for found in self._store.search(query)]
            else:
                rows = [(conversation, "") for conversation in self._store.recent()]
        except EdgespecError as error:
            self.say(str(Toast.from_error(error)))
            return
        table = self.query_one(DataTable)
        table.clear()
        for conversation, snippet in rows:
            changed = datetime.fromtimestamp(conversation.changed).strftime("%Y-%m-%d %H:%M")
            title = Text(conversation.title)
            if snippet and snippet != conversation.title:
                title.append(f"  {snippet}", "dim")
            model = Text(conversation.model, overflow="ellipsis", no_wrap=True)
            table.add_row(changed, model, title, key=str(conversation.id))
        self.say(_HISTORY_KEYS if rows else "Nothing found." if query.strip() else "No conversation is stored yet.")

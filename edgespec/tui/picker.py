"""The list of models: what suits this machine first, and a search of the hub."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from rich.text import Text
from textual import on, work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical, VerticalScroll
from textual.widgets import DataTable, Input, Static

from edgespec.errors import Cancelled, UnknownModel
from edgespec.hub.hub import Hub
from edgespec.hub.reference import HubFile, HubQuant, HubRepo, parse_reference
from edgespec.planner.plan import LoadConfig, Reporter
from edgespec.service.client import EngineClient
from edgespec.service.stream import Stream
from edgespec.tui.confirm import Confirm
from edgespec.tui.filter_list import FilterList
from edgespec.tui.messages import Toast
from edgespec.tui.model_rows import Row, filter_rows, list_rows, search_rows, select_small
from edgespec.units import gib

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

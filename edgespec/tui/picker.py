"""The models to choose from: aliases, downloads, and what other programs left on this machine."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import ClassVar, TypeVar

from rich.text import Text
from textual import work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical, VerticalScroll
from textual.widgets import DataTable, Input, Static

from edgespec.backends import FileBackend, prefers_mlx
from edgespec.backends.devices import host_memory
from edgespec.errors import Cancelled
from edgespec.hub.hub import Hub
from edgespec.planner.catalogue import Entry, catalogue, matching
from edgespec.planner.plan import LoadConfig, Reporter
from edgespec.registry.schema import load_registry
from edgespec.service.client import EngineClient
from edgespec.service.worker import Job
from edgespec.tui.filter_list import FilterList
from edgespec.tui.messages import toast_of
from edgespec.units import gib

T = TypeVar("T")

_KEYS = "Enter opens · type to filter · Ctrl+F foretells · Esc goes back"


class Picker(FilterList[str]):
    """Ends with what `--model` takes, or None."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("ctrl+f", "foretell", "Foretell", priority=True),
    ]

    def __init__(self, client: EngineClient, request: LoadConfig, reporter: Reporter, *, is_idle: bool) -> None:
        """`request`: how the chosen model would be opened. Speeds are measured only while nothing is generated."""
        super().__init__()
        self._client = client
        self._request = request
        self._reporter = reporter
        self._is_idle = is_idle
        self._entries: list[Entry] = []
        self._job: Job[str] | None = None

    def compose(self) -> ComposeResult:
        with Vertical(classes="window"):
            yield Input(placeholder="Filter models, or type any reference", id="wanted")
            table: DataTable[str | Text] = DataTable(cursor_type="row", zebra_stripes=True)
            table.add_column("model", width=28)
            table.add_column("size", width=8)
            table.add_column("here", width=4)
            table.add_column("memory", width=12)
            table.add_column("what it is")
            table.add_column("draft model")
            yield table
            with VerticalScroll(id="outlook"):
                yield Static("", id="outlook-text", markup=False)
            yield Static("Looking at the models on this machine …", id="told", markup=False)

    def on_mount(self) -> None:
        self.query_one("#outlook").display = False
        self._look()

    @work(thread=True)
    def _look(self) -> None:
        try:
            backend: FileBackend = "mlx" if prefers_mlx() else "llamacpp"
            entries = catalogue(load_registry(), Hub.from_environment(), backend, host_memory(self._client.devices()))
        except Exception as error:  # noqa: BLE001 - told_of tells apart what the user can do and what is a bug
            self._tell(self.say, str(toast_of(error)))
            return
        self._tell(self._found, entries)

    def _found(self, entries: list[Entry]) -> None:
        self._entries = entries
        self.fill()

    def action_leave(self) -> None:
        if self._job is not None:
            self._job.cancel()
        super().action_leave()

    def action_foretell(self) -> None:
        name = self.selected()
        if name is None or self._job is not None:
            return
        if not self._is_idle:
            self.say("An answer is under way; Esc stops it, then speeds can be measured.")
            return
        self.say(f"Measuring a few blocks of {name} on this machine …")
        self._foretell(name)

    @work(thread=True)
    def _foretell(self, name: str) -> None:
        self._job = self._client.outlook(replace(self._request, model=name, force=True), self._reporter)
        told = _KEYS
        try:
            for text in self._job:
                self._tell(self._show_outlook, text)
        except Cancelled:
            return
        except Exception as error:  # noqa: BLE001 - as above
            told = str(toast_of(error))
        finally:
            self._job = None
        self._tell(self.say, told)

    def _tell(self, show: Callable[[T], None], what: T) -> None:
        """`show(what)` on the app's thread, unless the screen has been left."""
        with suppress(RuntimeError):
            if self.is_attached:
                self.app.call_from_thread(show, what)

    def _show_outlook(self, text: str) -> None:
        self.query_one("#outlook").display = True
        self.query_one("#outlook-text", Static).update(Text(text))

    def choose(self) -> None:
        name = self.selected() or self.query_one(Input).value.strip()
        if name:
            self.dismiss(name)

    def fill(self) -> None:
        table = self.query_one(DataTable)
        table.clear()
        shown = matching(self._entries, self.query_one(Input).value)
        for entry in shown:
            size = "-" if entry.target.size is None else gib(entry.target.size)
            table.add_row(
                Text(entry.name, overflow="ellipsis", no_wrap=True),
                size,
                "yes" if entry.here else "",
                entry.fit or "",
                entry.description or {"cache": "downloaded", "elsewhere": "of another program"}.get(entry.origin, ""),
                str(entry.draft.reference) if entry.draft else "",
                key=entry.opens,
            )
        self.say(_KEYS if shown else "None of these; Enter tries it as a reference, such as user/repo:Q4_K_M.")

"""The list of models: aliases, downloads, and models of other programs on this machine."""

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
from edgespec.planner.catalogue import Entry, build_catalogue, filter_entries
from edgespec.planner.plan import LoadConfig, Reporter
from edgespec.registry.schema import load_registry
from edgespec.service.client import EngineClient
from edgespec.service.stream import Stream
from edgespec.tui.filter_list import FilterList
from edgespec.tui.messages import Toast
from edgespec.units import gib

T = TypeVar("T")

_KEYS = "Enter opens · type to filter · Ctrl+F estimates speed · Esc closes"


class Picker(FilterList[str]):
    """Dismissed with a model reference, as `--model` takes it, or None."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("ctrl+f", "estimate", "Estimate", priority=True),
    ]

    def __init__(self, client: EngineClient, request: LoadConfig, reporter: Reporter, *, is_idle: bool) -> None:
        """`request`: the load options for an estimate, which needs an engine that is idle."""
        super().__init__()
        self._client = client
        self._request = request
        self._reporter = reporter
        self._is_idle = is_idle
        self._entries: list[Entry] = []
        self._job: Stream[str] | None = None

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog"):
            yield Input(placeholder="Filter models, or type any reference", id="filter")
            table: DataTable[str | Text] = DataTable(cursor_type="row", zebra_stripes=True)
            table.add_column("model", width=28)
            table.add_column("size", width=8)
            table.add_column("here", width=4)
            table.add_column("memory", width=12)
            table.add_column("description")
            table.add_column("draft model")
            yield table
            with VerticalScroll(id="report"):
                yield Static("", id="report-text", markup=False)
            yield Static("Listing the models on this machine …", id="status", markup=False)

    def on_mount(self) -> None:
        self.query_one("#report").display = False
        self._load_entries()

    @work(thread=True)
    def _load_entries(self) -> None:
        try:
            backend: FileBackend = "mlx" if prefers_mlx() else "llamacpp"
            memory = host_memory(self._client.devices().result())
            entries = build_catalogue(load_registry(), Hub.from_environment(), backend, memory)
        except Exception as error:  # noqa: BLE001 - Toast separates expected errors from bugs
            self._call_in_app(self.say, str(Toast.from_error(error)))
            return
        self._call_in_app(self._show_entries, entries)

    def _show_entries(self, entries: list[Entry]) -> None:
        self._entries = entries
        self.fill()

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

    def _call_in_app(self, show: Callable[[T], None], value: T) -> None:
        """Call `show(value)` on the app's thread, unless this screen is closed."""
        with suppress(RuntimeError):
            if self.is_attached:
                self.app.call_from_thread(show, value)

    def _show_report(self, text: str) -> None:
        self.query_one("#report").display = True
        self.query_one("#report-text", Static).update(Text(text))

    def choose(self) -> None:
        name = self.selected_key() or self.query_one(Input).value.strip()
        if name:
            self.dismiss(name)

    def fill(self) -> None:
        table = self.query_one(DataTable)
        table.clear()
        entries = filter_entries(self._entries, self.query_one(Input).value)
        for entry in entries:
            size = "-" if entry.target.size is None else gib(entry.target.size)
            table.add_row(
                Text(entry.name, overflow="ellipsis", no_wrap=True),
                size,
                "yes" if entry.here else "",
                entry.fit or "",
                entry.description or {"cache": "downloaded", "elsewhere": "from another program"}.get(entry.origin, ""),
                str(entry.draft.reference) if entry.draft else "",
                key=entry.opens,
            )
        self.say(_KEYS if entries else "No match; Enter opens it as a reference, such as user/repo:Q4_K_M.")

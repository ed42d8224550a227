"""Choosing a model: the shipped aliases, a downloaded file of another program, and what plan says of one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from time import sleep

import pytest
from textual.pilot import Pilot
from textual.widgets import DataTable, Input, Static

from edgespec.core.protocols import CheckCancelled
from edgespec.errors import Cancelled
from edgespec.planner.plan import LoadConfig
from edgespec.registry.schema import load_registry
from edgespec.tui.app import ChatApp
from edgespec.tui.picker import Picker
from edgespec.tui.prompt import Prompt
from edgespec.units import gib
from tests.hub.stores import put
from tests.models import DRAFT, TARGET
from tests.tui.screens import Script, errors, in_loop, opened, seen, toasts, until, within

OTHER = "llama.cpp: draft"


@pytest.fixture(autouse=True)
def other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model of another program; there are no others."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path / "ollama"))
    monkeypatch.setenv("LLAMA_CACHE", str(tmp_path / "llama.cpp"))
    return put(DRAFT, tmp_path / "llama.cpp" / "draft.gguf")


async def pick(app: ChatApp, pilot: Pilot[None]) -> Picker:
    """Open the list and wait until it is filled."""
    await pilot.press("ctrl+g")
    picker = app.screen
    assert isinstance(picker, Picker)
    await until(lambda: picker.query(DataTable) and picker.query_one(DataTable).row_count)
    return picker


def names(picker: Picker) -> list[str]:
    table = picker.query_one(DataTable)
    return [str(table.get_row_at(row)[0]) for row in range(table.row_count)]


def read_status(picker: Picker) -> str:
    return str(picker.query_one("#status", Static).visual)


@in_loop
async def test_what_is_listed(other: Path) -> None:
    async with opened((200, 60)) as (app, pilot):
        picker = await pick(app, pilot)
        assert names(picker) == [*load_registry().entries, OTHER]
        table = picker.query_one(DataTable)
        embedded, last = table.get_row_at(0), table.get_row_at(table.row_count - 1)
        assert [str(cell) for cell in embedded[1:4]] == [
            gib(TARGET.stat().st_size),
            "yes",
            "fits",
        ] and "Embedded" in str(embedded[4])
        assert "draft" in str(embedded[5])
        assert [str(cell) for cell in last[2:]] == ["yes", "fits", "from another program", ""]
        absent = table.get_row_at(names(picker).index("llama-70b-q4"))
        assert [str(cell) for cell in absent[1:4]] == ["-", "", ""]
        assert "Enter opens" in read_status(picker) and "Ctrl+F estimates speed" in read_status(picker)


@in_loop
async def test_typing_filters_and_enter_opens(other: Path) -> None:
    async with opened() as (app, pilot):
        app.request = LoadConfig(draft_max=0)  # nothing is tried or measured
        picker = await pick(app, pilot)
        await pilot.press(*"LLAMA.cpp")
        await until(lambda: names(picker) == [OTHER])
        await pilot.press(*["backspace"] * 9)
        await until(lambda: len(names(picker)) > 5)
        await pilot.press(*"cpp dra", "enter")
        await until(lambda: app.request.model == str(other) and app.activity.job is None, seconds=60)
        assert app.client.model_info is not None and within(app).target_path == other
        assert app.request.model == str(other) and within(app).info.backend == "llamacpp"


@in_loop
async def test_the_arrow_goes_into_the_list() -> None:
    async with opened() as (app, pilot):
        picker = await pick(app, pilot)
        await pilot.press("down", "down", "up")
        assert picker.query_one(DataTable).has_focus and picker.query_one(DataTable).cursor_row == 0
        await pilot.press("down")
        assert picker.selected_key() == names(picker)[1]


@in_loop
async def test_esc_goes_back_and_nothing_changes() -> None:
    async with opened() as (app, pilot):
        before, request = app.client.model_info, app.request
        await pick(app, pilot)
        await pilot.press("escape")
        await pilot.pause()
        assert len(app.screen_stack) == 1 and app.query_one(Prompt).has_focus
        assert app.client.model_info == before and app.request is request and app.activity.job is None


@in_loop
async def test_a_reference_that_is_not_listed_is_tried() -> None:
    async with opened() as (app, pilot):
        picker = await pick(app, pilot)
        await pilot.press(*"./nowhere.gguf")
        await until(lambda: not names(picker))
        assert "Enter opens it as a reference" in read_status(picker)
        await pilot.press("enter")
        await until(lambda: errors(app))
        assert "nowhere.gguf" in errors(app)[-1]
        await until(lambda: app.activity.job is None)
        await app.run_command("model tree")
        await until(lambda: app.activity.job is None)
        assert app.client.model_info is not None and app.is_running


@in_loop
async def test_what_plan_says_of_a_model(other: Path) -> None:
    """First without speeds, then with them."""
    async with opened((120, 40)) as (app, pilot):
        app.request = LoadConfig()
        picker = await pick(app, pilot)
        picker.query_one(Input).value = OTHER
        await until(lambda: names(picker) == [OTHER])
        await pilot.press("ctrl+f")
        report = picker.query_one("#report-text", Static)
        await until(lambda: "tokens/s" in str(report.visual) or picker._job is None, seconds=120)
        assert "tokens/s" in str(report.visual), (read_status(picker), str(report.visual))
        await until(lambda: "Enter opens" in read_status(picker))
        text = str(report.visual)
        assert "on llamacpp, drafted by ngram" in text and "weights" in text and "fits: needs" in text
        assert "plain decoding:" in text and "a forward of n rows" in text
        shown = await seen(app, pilot)
        assert "fits: needs" in shown and "plain decoding:" in shown, "it is on the screen"
        assert app.client.model_info is not None and picker._job is None


@in_loop
async def test_nothing_is_measured_while_an_answer_comes(script: Script) -> None:
    script.generations, script.holds = [[]], True
    async with opened() as (app, pilot):
        await app.ask("go")
        picker = await pick(app, pilot)
        await pilot.press("ctrl+f")
        await pilot.pause()
        assert read_status(picker) == "Speeds cannot be measured during an answer; Esc stops it."
        assert picker._job is None and not picker.query_one("#report").display
        await pilot.press("enter")
        await until(lambda: any("engine is busy" in each for each in toasts(app)))


@in_loop
async def test_leaving_ends_a_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[str] = []

    def endless(_request: object, _registry: object, _hub: object, _reporter: object, check: CheckCancelled):
        def work() -> Iterator[str]:
            yield "facts without speeds"
            try:
                while True:
                    check()
                    sleep(0.01)
            except Cancelled:
                ended.append("cancelled")
                raise

        return work()

    monkeypatch.setattr("edgespec.service.local.report_plan", endless)
    async with opened() as (app, pilot):
        picker = await pick(app, pilot)
        await pilot.press("ctrl+f")
        await until(lambda: "facts" in str(picker.query_one("#report-text", Static).visual))
        assert "Measuring" in read_status(picker)
        await pilot.press("escape")
        await until(lambda: ended == ["cancelled"])
        await pilot.pause()
        assert len(app.screen_stack) == 1 and app.is_running and not errors(app)


@in_loop
async def test_a_model_of_which_nothing_can_be_said(tmp_path: Path) -> None:
    async with opened() as (app, pilot):
        picker = await pick(app, pilot)
        picker.query_one(Input).value = "llama-8b-q4"
        await until(lambda: names(picker) == ["llama-8b-q4"])
        app.request = LoadConfig()
        await pilot.press("ctrl+f")
        await until(
            lambda: "Measuring" not in read_status(picker) and "Enter opens" not in read_status(picker), seconds=30
        )
        assert "HF_HUB_OFFLINE" in read_status(picker) or "offline" in read_status(picker).casefold(), read_status(
            picker
        )
        assert app.screen is picker

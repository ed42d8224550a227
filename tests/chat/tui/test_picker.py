"""Choosing a model: the shipped aliases, a downloaded file of another program, and what plan says of one."""

from __future__ import annotations

from pathlib import Path

import pytest
from textual.pilot import Pilot
from textual.widgets import DataTable, Input, Static

from edgespec.chat.tui.app import ChatApp
from edgespec.chat.tui.picker import Picker, Row, filter_rows
from edgespec.chat.tui.progress import Downloads
from edgespec.chat.tui.prompt import Prompt
from edgespec.models.load_config import LoadConfig
from edgespec.models.registry import load_registry
from edgespec.models.speed import COMMON, MachineSpeed, save_speed
from edgespec.units import gib
from tests.chat.tui.driving import in_loop, make_app, until
from tests.chat.tui.screens import Script, errors, opened, seen, within
from tests.gguf_models import DRAFT, TARGET
from tests.models.hubserver import HubServer
from tests.models.hubstate import Fault
from tests.models.stores import put

OTHER = "llama.cpp: draft"


@pytest.fixture(autouse=True)
def other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model of another program; there are no others."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path / "ollama"))
    monkeypatch.setenv("LLAMA_CACHE", str(tmp_path / "llama.cpp"))
    types = COMMON | {"MXFP4"}  # all of the registry's, so that nothing is measured
    save_speed(MachineSpeed({kind: {1: 1e-10, 2: 1.1e-10} for kind in types}))
    return put(DRAFT, tmp_path / "llama.cpp" / "draft.gguf")


async def pick(app: ChatApp, pilot: Pilot[None]) -> Picker:
    """Open the list and wait until it is filled for the last time, which also changes the status."""
    await pilot.press("ctrl+g")
    picker = app.screen
    assert isinstance(picker, Picker)
    await until(lambda: picker.query(DataTable) and picker.query_one(DataTable).row_count)
    await until(lambda: not any(worker.node is picker and worker.is_running for worker in app.workers))
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
        assert sorted(names(picker)[:-1]) == sorted(load_registry().entries) and names(picker)[-1] == OTHER
        table = picker.query_one(DataTable)
        embedded = table.get_row_at(names(picker).index("python-6m"))
        last = table.get_row_at(table.row_count - 1)
        assert [str(cell) for cell in embedded[1:3]] == ["here", "fits"] and "Completes Python" in str(embedded[7])
        assert 900 < float(str(embedded[3]).replace(",", "")) < 1100 and str(embedded[4]).startswith("9")
        assert [str(cell) for cell in embedded[5:7]] == ["toy", "MIT"]
        size = gib(other.stat().st_size)
        assert [str(cell) for cell in last[1:]] == [size, "fits", "", "", "", "", "from another program"]
        absent = table.get_row_at(names(picker).index("llama-70b-q4"))
        assert str(absent[1]) == "~40.6 GiB" and str(absent[6]) == "Llama 3.3"
        assert "Enter opens" in read_status(picker) and "Ctrl+S searches the hub" in read_status(picker)
        assert "Offline mode is on." in read_status(picker)


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
async def test_esc_goes_back_and_nothing_changes() -> None:
    async with opened() as (app, pilot):
        before, request = app.client.model_info, app.request
        picker = await pick(app, pilot)
        await pilot.press("down", "down")
        assert picker.query_one(DataTable).has_focus and picker.selected_key() == names(picker)[1]
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
async def test_a_model_is_opened_once_the_answer_has_ended(script: Script) -> None:
    script.generations, script.holds = [[]], True
    async with opened() as (app, pilot):
        await app.ask("go")
        picker = await pick(app, pilot)
        picker.query_one(Input).value = "python-6m"
        await until(lambda: names(picker) == ["python-6m"])
        await pilot.press("enter")
        await until(lambda: app.queued == ["/model python-6m"])


@in_loop
async def test_a_model_of_the_hub_is_found_downloaded_and_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The chat goes on meanwhile; Esc stops the download, and the next one goes on where it stopped."""
    repo, file = "me/python-GGUF", "python-Q8_0.gguf"
    size = put(TARGET, tmp_path / "served" / repo / file).stat().st_size
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)  # read from the environment on import
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    with HubServer(tmp_path / "served") as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        server.fault(repo, file, Fault("stall", at=size // 2))
        async with opened((120, 30)) as (app, pilot):
            app.request = LoadConfig(draft_max=0)
            downloads = app.query_one(Downloads)
            picker = await pick(app, pilot)
            await pilot.press(*"python-gguf", "ctrl+s")
            await until(lambda: names(picker) == [repo])
            await pilot.press("enter")
            shown = await seen(app, pilot)
            assert f"Download {repo}?" in shown and gib(size) in shown and "free" in shown
            await pilot.press("enter")
            await until(lambda: f"of {gib(size)}" in str(downloads.visual))
            assert len(app.screen_stack) == 1 and app.activity.job is None and app.query_one(Prompt).has_focus
            assert app.client.model_info is not None and app.client.model_info.name == "tree"
            await pilot.press("escape")
            server.fault(repo, file, None)
            server.state.released.set()
            await until(lambda: not downloads.display)
            picker = await pick(app, pilot)
            picker.query_one(Input).value = f"{repo}:Q8_0"
            await until(lambda: not names(picker))
            await pilot.press("enter")
            assert "its size is not known yet" in await seen(app, pilot)
            await pilot.press("enter")
            await until(lambda: app.request.model == f"{repo}:Q8_0", seconds=60)
            assert not downloads.display and within(app).target_path.name == file
        content = [each for each in server.log if each.method == "GET" and each.path.endswith(file)]
        assert content[-1].range and not content[-1].range.startswith("bytes=0-"), "it goes on where it stopped"


@in_loop
async def test_a_first_model_is_chosen_among_small_ones_and_downloaded_by_one_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repo, file = "me/python-GGUF", "python-Q8_0.gguf"
    size = put(TARGET, tmp_path / "served" / repo / file).stat().st_size
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "models.toml").write_text(
        f'[tiny]\nparameters = 0.001\ntasks = ["chat"]\n[tiny.gguf]\ntarget = "hf:{repo}/{file}"\n'
    )
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)  # read from the environment on import
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    with HubServer(tmp_path / "served") as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        async with opened((120, 30), app=make_app(LoadConfig(draft_max=0), is_choosing=True)) as (app, pilot):
            picker = app.screen
            assert isinstance(picker, Picker) and app.client.model_info is None
            await until(lambda: not any(worker.node is picker and worker.is_running for worker in app.workers))
            sizes = {name: each.about.parameters or 99 for name, each in load_registry().entries.items()}
            small = sorted((name for name in sizes if sizes[name] <= 4), key=lambda name: sizes[name])
            small.remove("python-6m")
            assert names(picker) == [*small, "python-6m"] and small[:2] == ["tiny", "smollm2-135m"]
            assert str(picker.query_one(DataTable).get_row_at(0)[1]) == gib(size)
            assert read_status(picker).startswith("Enter downloads the model and opens it")
            await pilot.press(*"tiny")
            await until(lambda: names(picker)[0] == "tiny")
            await pilot.press("enter")
            await until(lambda: app.request.model == "tiny", seconds=60)
            assert within(app).target_path.name == file
            await until(lambda: app.activity.job is None)
            picker = await pick(app, pilot)
            assert len(names(picker)) > len(small) + 1


@in_loop
async def test_a_model_opened_by_path_is_listed_by_its_name(tmp_path: Path) -> None:
    path = put(TARGET, tmp_path / "elsewhere" / "mine.gguf")
    async with opened((200, 60), app=make_app(LoadConfig(str(path), draft_max=0))) as (app, pilot):
        picker = await pick(app, pilot)
        row = picker.query_one(DataTable).get_row_at(names(picker).index("mine.gguf"))
        assert str(row[-1]) == "opened before"
        await pilot.press(*"mine.g", "enter")
        await until(lambda: app.activity.job is not None or len(app.screen_stack) == 1)
        await until(lambda: app.activity.job is None)
        assert app.request.model == str(path)


@in_loop
async def test_a_download_is_asked_for_first_and_may_fail() -> None:
    async with opened() as (app, pilot):
        picker = await pick(app, pilot)
        picker.query_one(Input).value = "llama-70b-q4"
        await until(lambda: names(picker) == ["llama-70b-q4"])
        await pilot.press("enter")
        shown = await seen(app, pilot)
        assert "Download llama-70b-q4?" in shown and "40.6 GiB" in shown and "Llama 3.3" in shown
        picker.query_one(Input).value = "llama-70b"
        await until(lambda: "Enter opens" in read_status(picker))
        await pilot.press("enter")
        assert app.screen is picker
        await pilot.press("enter")
        downloads = app.query_one(Downloads)
        await until(lambda: not downloads.display)
        assert len(app.screen_stack) == 1 and app.activity.job is None
        await until(lambda: any("offline" in str(each.message) for each in app._notifications))


def test_typed_words_find_rows() -> None:
    described = {"python-6m": "Embedded pair", "qwen-x": "Großes Modell, 4-bit", "llama-x": ""}
    rows = [Row(name, name, ("", text)) for name, text in described.items()]
    texts = ("", "  ", "-x", "QWEN", "4-bit", "modell QWEN", "grosses", "qwen llama", "embedded pair")
    found = {text: [row.name for row in filter_rows(rows, text)] for text in texts}
    every = [*described]
    assert found == {"": every, "  ": every, "-x": every[1:], "QWEN": ["qwen-x"], "4-bit": ["qwen-x"],
                     "modell QWEN": ["qwen-x"], "grosses": ["qwen-x"], "qwen llama": [],
                     "embedded pair": ["python-6m"]}  # fmt: skip

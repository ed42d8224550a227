"""What is kept between two starts of the chat, by one program and by two at once."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from edgespec.chat.tui.clipboard import copy_with_program
from edgespec.chat.tui.commands import complete
from edgespec.chat.tui.settings import (
    MAX_PROMPTS,
    PromptHistory,
    find_first_model,
    read_last_model,
    read_setting,
    write_setting,
)
from edgespec.errors import CacheError
from tests.chat.tui.driving import driving, in_loop
from tests.gguf_models import TARGET


def test_prompts_of_two_programs(tmp_path: Path) -> None:
    path = tmp_path / "data" / "prompts.jsonl"
    one, two = PromptHistory(path), PromptHistory(path)
    for n in range(5):
        one.add(f"one {n}\nmore")
        two.add(f"two {n} 漢")
        two.add(f"two {n} 漢")
    expected = [text for n in range(5) for text in (f"one {n}\nmore", f"two {n} 漢")]
    assert PromptHistory(path).texts == expected
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with path.open("a") as file:
        file.write("half a li")
    assert PromptHistory(path).texts == expected


def test_a_long_history_loses_its_older_half(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgespec.chat.tui.settings._MAX_BYTES", 20_000)
    path = tmp_path / "prompts.jsonl"
    history = PromptHistory(path)
    for n in range(2 * MAX_PROMPTS):
        history.add(f"a prompt with the number {n}")
    PromptHistory(path).add("last")
    texts = PromptHistory(path).texts
    assert len(texts) <= MAX_PROMPTS and texts[-2:] == [f"a prompt with the number {2 * MAX_PROMPTS - 1}", "last"]
    assert path.stat().st_size < 40_000 and stat.S_IMODE(path.stat().st_mode) == 0o600


def test_settings_and_damaged_ones(data: Path) -> None:
    assert read_setting("theme") == ""
    for theme in ("nord", "gruvbox"):
        write_setting("theme", theme)
    assert read_setting("theme") == "gruvbox"
    (data / "settings" / "theme").write_bytes(b"\xff\xfe")
    assert read_setting("theme") == ""
    (data / "settings" / "theme").unlink()
    (data / "settings").rmdir()
    (data / "settings").touch()
    with pytest.raises(CacheError):
        write_setting("theme", "nord")


@in_loop
async def test_a_second_start_has_the_theme_the_view_and_the_prompts(data: Path) -> None:
    async with driving() as chat:
        chat.app.theme = "nord"
        await chat.send("/spec")
        await chat.press("ctrl+o", "ctrl+t")
    (data / "settings" / "reasoning").write_bytes(b"\xff")
    async with driving() as chat:
        assert chat.app.theme == "nord" and chat.app._shows_token_colors
        await chat.press("up")
        assert chat.prompt.text == "/spec"
    assert not (data / "settings" / "model").exists(), "the toy is no model that a user has chosen"


def test_the_last_model_is_opened_again_if_it_is_here(tmp_path: Path) -> None:
    assert read_last_model() is None
    for name, is_here in ((str(TARGET), True), (str(tmp_path / "gone.gguf"), False), ("llama-8b-q4", False)):
        write_setting("model", name)
        assert read_last_model() == (name if is_here else None)


def test_a_chat_opens_what_is_named_else_the_last_model_else_one_that_is_installed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("EDGESPEC_MODEL")
    assert find_first_model() == "smollm2-135m"
    with monkeypatch.context() as patched:
        patched.setattr("edgespec.models.registry.find_packaged", lambda reference: None)  # it is not installed
        assert find_first_model() is None
    write_setting("model", str(TARGET))
    assert find_first_model() == str(TARGET)
    monkeypatch.setenv("EDGESPEC_MODEL", "python-6m")
    assert find_first_model() == "python-6m"


def test_copying_by_a_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first program that succeeds has the text; over SSH none is started."""
    for name, script in (
        ("wl-copy", "exit 1"),
        ("xclip", f'/bin/cat > {tmp_path}/copied; echo "$@" > {tmp_path}/with'),
    ):
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in ("SSH_CONNECTION", "SSH_TTY"):
        monkeypatch.delenv(name, raising=False)
    copy_with_program("a\n漢")
    assert (tmp_path / "copied").read_text() == "a\n漢"
    assert (tmp_path / "with").read_text() == "-selection clipboard\n"
    monkeypatch.setenv("SSH_TTY", "/dev/pts/1")
    copy_with_program("b")
    assert (tmp_path / "copied").read_text() == "a\n漢"
    monkeypatch.delenv("SSH_TTY")
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    copy_with_program("b")


def test_completion_of_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lines(line: str) -> list[str]:
        return [each.line for each in complete(line)]

    (tmp_path / "notes.md").touch()
    (tmp_path / ".hidden").touch()
    (tmp_path / "nested").mkdir()
    monkeypatch.chdir(tmp_path)
    assert lines("/und") == ["/undo"] and lines("/undo") == [] and lines("/quit") == ["/exit"]
    assert lines("/nothing n") == []
    assert lines("/draft ngram+ngr") == [] and lines("/draft ngram+mod") == ["/draft ngram+model"]
    assert lines("/set max") == ["/set max_tokens "] and lines("/spec o") == ["/spec on", "/spec off"]
    assert lines("/model python") == ["/model python-6m"]
    assert lines("/attach n") == ["/attach nested/", "/attach notes.md"] and lines("/import .h") == ["/import .hidden"]
    assert lines(f"/attach {tmp_path}{os.sep}no") == [f"/attach {tmp_path}{os.sep}notes.md"]
    assert lines("/attach missing/x") == [] and lines("//") == []

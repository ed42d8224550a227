"""The layout of the chat, its view options, and what it keeps of them for the next start."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from rich.text import Text
from textual import on
from textual.app import App, ComposeResult
from textual.containers import Horizontal, Vertical
from textual.events import Key, Paste, Resize
from textual.notifications import SeverityLevel
from textual.theme import Theme
from textual.widgets import Footer, OptionList, Static

from edgespec.errors import CacheError, EdgespecError
from edgespec.tui.messages import Toast
from edgespec.tui.opening import Opening
from edgespec.tui.panel import Panel, StatusLine
from edgespec.tui.progress import Downloads, Progress
from edgespec.tui.prompt import Completion, Popup, Prompt, sanitize
from edgespec.tui.settings import PromptHistory, Settings
from edgespec.tui.transcript import Transcript
from edgespec.tui.turns import Notice

# The messages and commands that wait until the running job has ended.


_MAX_LINES = 4


class Queued(Static):
    """A line for each, the next one first; hidden while none waits."""

    def __init__(self) -> None:
        super().__init__("", id="queued", markup=False)
        self.display = False

    def show(self, texts: Sequence[str]) -> None:
        self.display = bool(texts)
        shown = [f"queued: {' '.join(sanitize(text).split())}" for text in texts[:_MAX_LINES]]
        if len(texts) > _MAX_LINES:
            shown[-1] = f"queued: {len(texts) - _MAX_LINES + 1} more"
        text = Text("\n".join(shown), no_wrap=True, overflow="ellipsis")
        self.update(text.append("\nUp takes the last one back", "dim") if texts else text)


# The programs that copy a text where the terminal cannot.


_TIMEOUT_S = 2.0


def find_copier(environment: Mapping[str, str]) -> list[str] | None:
    """The command that copies its standard input to the clipboard of this desktop.

    None without a desktop, and over SSH, where the clipboard is on another machine: there the terminal copies (OSC 52).
    """
    if "SSH_CONNECTION" in environment or "SSH_TTY" in environment:
        return None
    candidates = [
        ("pbcopy", sys.platform == "darwin", ()),
        ("wl-copy", "WAYLAND_DISPLAY" in environment, ()),
        ("xclip", "DISPLAY" in environment, ("-selection", "clipboard")),
    ]
    for name, is_usable, arguments in candidates:
        if is_usable and (path := shutil.which(name, path=environment.get("PATH"))):
            return [path, *arguments]
    return None


def copy_with(command: list[str], text: str) -> None:
    """Run a command of `find_copier`. A failure has no effect: the terminal has been asked too."""
    with suppress(OSError, subprocess.SubprocessError):
        subprocess.run(
            command,
            input=text.encode(errors="replace"),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=_TIMEOUT_S,
            check=False,
        )


# A theme in addition to those of Textual.


HIGH_CONTRAST = Theme(
    name="high-contrast",
    primary="#ffff00",
    secondary="#00ffff",
    accent="#00ffff",
    foreground="#ffffff",
    background="#000000",
    surface="#000000",
    panel="#000000",
    boost="#1a1a1a",
    success="#00ff00",
    warning="#ffff00",
    error="#ff6060",
    dark=True,
    variables={"text-muted": "#ffffff", "footer-key-foreground": "#ffff00", "border": "#ffffff"},
)


_MIN_PANEL_COLUMNS = 100  # narrower screens show the status line instead of the panel
_MIN_NOTICE_S = 4.0
_READ_PER_S = 15  # characters


class Window(App[None]):
    """The conversation, the prompt and the instruments."""

    CSS_PATH = Path(__file__).with_name("style.tcss")
    TITLE = "edgespec"

    def __init__(self) -> None:
        super().__init__()
        self.register_theme(HIGH_CONTRAST)
        self._settings = Settings()
        self._history = PromptHistory()
        self._is_reasoning_folded = self._settings.read("reasoning") != "unfolded"
        self._shows_token_colors = self._settings.read("colors") == "on"

    def compose(self) -> ComposeResult:
        with Horizontal(id="body"):
            with Vertical(id="conversation"):
                with Vertical(id="pane"):
                    yield Transcript()
                    yield Opening()
                yield Progress()
                yield Downloads()
                popup = Popup()
                yield popup
                yield Queued()
                yield Prompt(self._history.texts, popup, self.complete, self.take_back)
            yield Panel()
        yield StatusLine()
        yield Footer(compact=True, show_command_palette=False)

    async def on_mount(self) -> None:
        self.query_one(Prompt).focus()
        self.app_resume_signal.subscribe(self, lambda _: self.refresh(layout=True))  # the terminal was cleared
        theme = self._settings.read("theme")
        if theme in self.available_themes and "TEXTUAL_THEME" not in os.environ:
            self.theme = theme
        for notice in (self._settings.notice, self._history.notice):
            if notice is not None:
                await self.show_notice(notice, "error")

    @property
    def is_incognito(self) -> bool:
        """Whether nothing of what is typed is kept."""
        return False

    def complete(self, line: str) -> Sequence[Completion]:
        """How a command that is being typed can go on."""
        return ()

    def take_back(self) -> str | None:
        """What waits to be sent and was written last, which is not sent then."""
        return None

    def remember(self, name: str, text: str) -> None:
        """Keep a setting for the next start."""
        if self._settings.read(name) != text:
            self._try_to_keep(partial(self._settings.write, name, text))

    @on(Prompt.Submitted)
    def _keep_prompt(self, message: Prompt.Submitted) -> None:
        if not self.is_incognito:
            self._try_to_keep(partial(self._history.add, message.text))

    def _try_to_keep(self, write: Callable[[], None]) -> None:
        try:
            write()
        except CacheError as error:
            self.notify(str(Toast.from_error(error)), severity="error", markup=False)

    def watch_theme(self, theme: str) -> None:
        if self.is_running:
            self.remember("theme", theme)

    # Keys and pasted text that no widget takes.

    def on_key(self, event: Key) -> None:
        if event.character is not None and event.is_printable:
            self._type(event.character)

    def on_paste(self, event: Paste) -> None:
        self._type(event.text)

    def _type(self, text: str) -> None:
        """Write into the prompt, wherever the focus is; the windows in front have fields of their own."""
        if len(self.screen_stack) == 1:
            prompt = self.query_one(Prompt)
            prompt.focus()
            prompt.insert(text)

    @on(OptionList.OptionSelected, "#popup")
    def _accept_completion(self, message: OptionList.OptionSelected) -> None:
        self.query_one(Prompt).accept(self.query_one(Popup).completions[message.option_index])

    def action_page(self, direction: int) -> None:
        """Scroll the conversation by a page; up if `direction` is negative."""
        transcript = self.query_one(Transcript)
        (transcript.action_page_up if direction < 0 else transcript.action_page_down)()

    def copy_to_clipboard(self, text: str) -> None:
        """Copy by the terminal (OSC 52), and by a program of the desktop where there is one."""
        super().copy_to_clipboard(text)
        if self._driver is not None and not self._driver.is_headless and (command := find_copier(os.environ)):
            self.run_worker(partial(copy_with, command, text), thread=True)

    # Notices.

    async def show_notice(self, text: str, kind: str = "note") -> None:
        """Show a notice in a corner of the screen for as long as it takes to read; `kind` is "note" or "error"."""
        severity: SeverityLevel = "error" if kind == "error" else "information"
        seconds = max(_MIN_NOTICE_S, len(text) / _READ_PER_S)
        self.notify(sanitize(_capitalize(text)), severity=severity, timeout=seconds, markup=False)

    async def show_error(self, error: EdgespecError) -> None:
        await self.show_notice(str(Toast.from_error(error)), "error")

    async def add_notice(self, text: str, kind: str = "note") -> None:
        """Add a notice that stays to the conversation, such as what ended an answer."""
        self.query_one(Transcript).add(Notice(_capitalize(text), kind))

    # View options.

    def action_fold(self) -> None:
        self._is_reasoning_folded = not self._is_reasoning_folded
        self.remember("reasoning", "folded" if self._is_reasoning_folded else "unfolded")
        self.apply_view_options()

    def action_token_colors(self) -> None:
        self._shows_token_colors = not self._shows_token_colors
        self.remember("colors", "on" if self._shows_token_colors else "off")
        self.apply_view_options()

    def apply_view_options(self) -> None:
        """Fold the reasoning and color the tokens of every answer as the user has chosen."""
        self.query_one(Transcript).set_view(is_folded=self._is_reasoning_folded, shows_origins=self._shows_token_colors)

    def on_resize(self, event: Resize) -> None:
        self.screen_stack[0].set_class(event.size.width < _MIN_PANEL_COLUMNS, "narrow")


def _capitalize(text: str) -> str:
    """With a capital letter, unless the first word is a name such as python-6m."""
    return text[:1].upper() + text[1:] if text.split(" ", 1)[0].rstrip(":,").isalpha() else text

"""The layout of the chat, its view options, and what it keeps of them for the next start."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from rich.text import Text
from textual import on
from textual.app import App, ComposeResult
from textual.containers import Horizontal, Vertical
from textual.driver import Driver
from textual.drivers.linux_driver import LinuxDriver
from textual.events import Key, Paste
from textual.notifications import SeverityLevel
from textual.theme import Theme
from textual.widgets import Footer, OptionList, Static
from textual.worker import WorkerFailed

from edgespec.chat.tui.clipboard import copy_with_program
from edgespec.chat.tui.opening import Opening
from edgespec.chat.tui.panel import Panel, StatusLine
from edgespec.chat.tui.progress import Downloads, Progress, Toast, describe_error
from edgespec.chat.tui.prompt import Completion, Popup, Prompt, sanitize
from edgespec.chat.tui.settings import PromptHistory, read_setting, write_setting
from edgespec.chat.tui.terminal import Terminal
from edgespec.chat.tui.transcript import Notice, Transcript
from edgespec.errors import CacheError, EdgespecError

_MAX_LINES = 3


class Queued(Static):
    """A line for each message and command that waits for the running job; hidden while none waits."""

    def __init__(self) -> None:
        super().__init__("", id="queued", markup=False)
        self.display = False

    def show(self, texts: Sequence[str]) -> None:
        self.display = bool(texts)
        lines = [f"queued: {' '.join(sanitize(text).split())}" for text in texts[:_MAX_LINES]]
        text = Text("\n".join(lines), no_wrap=True, overflow="ellipsis")
        self.update(text.append(f"\n{len(texts)} queued · Up takes the last one back", "dim"))


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
_MIN_NOTICE_S = 4.0
_READ_PER_S = 15  # characters


class Window(App[None]):
    """The conversation, the prompt and the instruments. `failure` is the internal error that has ended the app."""

    CSS_PATH = Path(__file__).with_name("style.tcss")
    TITLE = "edgespec"
    # A narrow screen has no room for the panel.
    HORIZONTAL_BREAKPOINTS = [(0, "narrow"), (100, "wide")]  # noqa: RUF012 - declared so by Textual

    def __init__(self) -> None:
        super().__init__()
        self.failure: Exception | None = None
        self.is_disk_told = False  # that the data folder cannot be written, of which one notice is enough
        self.register_theme(HIGH_CONTRAST)
        self._history = PromptHistory()
        self._is_reasoning_folded = read_setting("reasoning") != "unfolded"
        self._shows_token_colors = read_setting("colors") == "on"

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
        theme = read_setting("theme")
        if theme in self.available_themes and "TEXTUAL_THEME" not in os.environ:
            self.theme = theme

    def get_driver_class(self) -> type[Driver]:
        found = super().get_driver_class()
        return Terminal if found is LinuxDriver else found

    # Internal errors: the command that has run the app tells them. Textual would print a traceback and end with 0.

    def _handle_exception(self, error: Exception) -> None:
        """End the app; what was typed and not sent is kept among the earlier messages."""
        if self.failure is None:
            self.failure = error.error if isinstance(error, WorkerFailed) else error  # type: ignore[assignment]
            unsent = [each.text for screen in self.screen_stack for each in screen.query(Prompt) if each.text.strip()]
            for text in unsent if not self.is_incognito else ():
                self._try_to_keep(partial(self._history.add, text))
        super()._handle_exception(error)

    def _fatal_error(self) -> None:
        self._close_messages_no_wait()

    @property
    def is_incognito(self) -> bool:
        """Whether nothing of what is typed is kept."""
        return False

    def complete(self, line: str) -> Sequence[Completion]:
        """How a command that is being typed can go on."""
        return ()

    def take_back(self) -> str | None:
        """Take the text that was queued last out of the queue, and return it; None if the queue is empty."""
        return None

    def remember(self, name: str, text: str) -> None:
        """Keep a setting for the next start."""
        if read_setting(name) != text:
            self._try_to_keep(partial(write_setting, name, text))

    @on(Prompt.Submitted)
    def _keep_prompt(self, message: Prompt.Submitted) -> None:
        if not self.is_incognito:
            self._try_to_keep(partial(self._history.add, message.text))

    def _try_to_keep(self, write: Callable[[], None]) -> None:
        try:
            write()
        except CacheError as error:
            if not self.is_disk_told:
                self.notify(describe_error(error), severity="error", markup=False)
            self.is_disk_told = True

    def watch_theme(self, theme: str) -> None:
        if self.is_running:
            self.remember("theme", theme)

    # Keys and pasted text that no widget takes.

    def on_key(self, event: Key) -> None:
        if event.character is not None and event.is_printable:
            self._type(event.character)
        elif event.key == "enter" and len(self.screen_stack) == 1:
            prompt = self.query_one(Prompt)
            if self.focused in (None, prompt):  # it was pressed before the prompt had the focus
                prompt.submit()

    def on_paste(self, event: Paste) -> None:
        self._type(event.text)

    def _type(self, text: str) -> None:
        """Write into the prompt, wherever the focus is, unless another window is in front."""
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
        """Copy by the terminal (OSC 52), and by a program of the desktop if there is one."""
        super().copy_to_clipboard(text)
        if not self.is_headless:
            self.run_worker(partial(copy_with_program, text), thread=True)

    # Notices.

    async def show_notice(self, text: str, kind: str = "note") -> None:
        """Show a notice in a corner of the screen for as long as it takes to read; `kind` is "note" or "error"."""
        severity: SeverityLevel = "error" if kind == "error" else "information"
        seconds = max(_MIN_NOTICE_S, len(text) / _READ_PER_S)
        self.notify(sanitize(capitalize(text)), severity=severity, timeout=seconds, markup=False)

    async def show_error(self, error: EdgespecError) -> None:
        await self.show_notice(describe_error(error), "error")

    @on(Toast)
    async def _show_toast(self, message: Toast) -> None:
        await (self.add_notice if message.stays else self.show_notice)(message.text, message.kind)

    async def add_notice(self, text: str, kind: str = "note") -> None:
        """Add a notice that stays to the conversation, such as what ended an answer."""
        self.query_one(Transcript).add(Notice(capitalize(text), kind))

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


def capitalize(text: str) -> str:
    """Capitalize a sentence, unless its first word is a name such as python-6m."""
    return text[:1].upper() + text[1:] if text.split(" ", 1)[0].rstrip(":,").isalpha() else text

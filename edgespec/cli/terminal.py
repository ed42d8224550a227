"""What the command line shows while it works: progress of downloads and loading, notices, a line of statistics."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from edgespec.core.metrics import Metrics


class TerminalReporter:
    """A Reporter that draws progress bars on stderr where that is a terminal."""

    def __init__(self) -> None:
        self._bar: Any = None
        self._bar_name = ""

    def notice(self, text: str) -> None:
        self._end_bar()
        click.echo(f"note: {text}", err=True)

    def download(self, name: str, done: int, total: int) -> None:
        self._draw(name, done, total)

    def loading(self, name: str, fraction: float) -> None:
        self._draw(f"loading {name}", round(fraction * 1000), 1000)

    def _draw(self, name: str, done: int, total: int) -> None:
        if sys.stderr is None or not sys.stderr.isatty():
            return
        if name != self._bar_name:
            self._end_bar()
            self._bar_name = name
            self._bar = click.progressbar(length=max(total, 1), label=name, file=sys.stderr, show_pos=False)
        if self._bar is None:
            return
        self._bar.update(done - self._bar.pos)
        if done >= total:
            self._end_bar()

    def _end_bar(self) -> None:
        if self._bar is not None:
            self._bar.render_finish()
            self._bar = None


def echo_native_log() -> None:
    """Show the runtime's own log on stderr from now on."""
    from edgespec.backends.llamacpp.library import library

    library().log.echo = True


def summary(metrics: Metrics, draft: str, reason: str) -> str:
    """One line: tokens, speed, what speculation gained, latency."""
    parts = [f"{metrics.emitted_tokens} tokens ({reason})"]
    if metrics.tokens_per_second is not None:
        parts.append(f"{metrics.tokens_per_second:.1f} tok/s")
    if metrics.acceptance_rate is not None and metrics.tau is not None:
        parts.append(
            f"draft {draft}: {metrics.accepted_tokens} of {metrics.drafted_tokens} accepted"
            f" ({metrics.acceptance_rate:.0%}), tau {metrics.tau:.2f}"
        )
    else:
        parts.append(f"draft {draft}: nothing drafted" if draft != "none" else "plain decoding")
    if metrics.ttft_s is not None:
        parts.append(f"first token after {metrics.ttft_s * 1000:.0f} ms")
    return ", ".join(parts)


def report_bug(error: Exception) -> None:
    """What the user sees of a fault of ours: a sentence, and the file that the traceback went to."""
    import tempfile
    import traceback

    with tempfile.NamedTemporaryFile("w", prefix="edgespec-", suffix=".log", delete=False, encoding="utf-8") as file:
        traceback.print_exception(error, file=file)
    click.echo(f"error: Internal error: {type(error).__name__}: {error}.", err=True)
    click.echo(f"hint: Please report it, with {file.name}.", err=True)

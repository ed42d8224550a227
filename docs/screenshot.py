"""Take the picture of the chat in the README: the real app, with an answer of the demo model.

    uv run python docs/screenshot.py docs/chat.png

Chromium turns the exported SVG into a PNG. The picture shows the speed of this machine: run it while nothing else runs.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from edgespec.chat import Store
from edgespec.chat.state import Chat
from edgespec.chat.tui.app import ChatApp
from edgespec.client.client import require_model
from edgespec.client.process import EngineProcess
from edgespec.core.sampling import SamplingParams
from edgespec.models.load_config import LoadConfig

PROMPT = "Write a Python function that adds two numbers, then one that subtracts, multiplies and divides them."
CELLS = (118, 36)
PIXELS = (1200, 760)


async def export_svg(folder: Path) -> str:
    """The screen after an answer, with the tokens colored by drafter; an answer before it warms the model up.

    The conversations and settings are in `folder`.
    """
    os.environ["EDGESPEC_DATA_DIR"] = str(folder)
    chat = Chat(None, SamplingParams(temperature=0), 256, 1, ())
    store, client = Store.open(folder / "conversations.db"), EngineProcess()
    app = ChatApp(LoadConfig(), chat, store, client, sampling=lambda _: chat.sampling)
    app.animation_level = "none"
    async with app.run_test(size=CELLS) as pilot:

        async def wait() -> None:
            while app.activity.job is not None:
                await pilot.pause(0.1)
            require_model(app.client)

        await wait()
        await app.ask(PROMPT)
        await wait()
        await app.run_command("new")
        await app.action_clear_screen()
        await app.ask(PROMPT)
        await wait()
        await pilot.press("ctrl+o")
        await pilot.pause(0.5)
        return app.export_screenshot(title="edgespec chat")


def render_png(svg: str, path: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "chat.html"
        page.write_text(f"<style>body{{margin:0}}svg{{width:100vw;height:100vh}}</style>{svg}", encoding="utf-8")
        size = ",".join(map(str, PIXELS))
        options = ["--headless", "--hide-scrollbars", "--default-background-color=00000000", f"--window-size={size}"]
        if os.geteuid() == 0:
            options.append("--no-sandbox")  # Chromium does not start as root with a sandbox
        subprocess.run(["chromium", *options, f"--screenshot={path}", page.as_uri()], check=True, capture_output=True)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as data:
        picture = asyncio.run(export_svg(Path(data)))
    render_png(picture, Path(sys.argv[1]).absolute())

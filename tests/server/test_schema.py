"""Requests that schemathesis generates from the OpenAPI document: every response is one that it documents."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.server.serving import Server


def test_what_the_document_allows(small: Server, tmp_path: Path) -> None:
    document = small.get("/openapi.json").json()
    assert document["openapi"].startswith("3.1") and "/v1/chat/completions" in document["paths"]
    program = Path(sys.executable).parent / "schemathesis"
    checks = "not_a_server_error,status_code_conformance,content_type_conformance"
    done = subprocess.run(
        [str(program), "run", f"{small.url}/openapi.json", "--include-path-regex", "^/v1/(chat|comp|resp|mess)",
         "--max-examples", "12", "--seed", "1", "--phases", "examples,fuzzing", "--checks", checks,
         "--suppress-health-check", "all", "--no-color"],
        capture_output=True, text=True, cwd=tmp_path, timeout=300, env={**os.environ, "COLUMNS": "150"}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
    assert small.ask("tree", max_tokens=3).status_code == 200

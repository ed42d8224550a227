"""The hub server as a process of its own, the way tests of other layers run it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from urllib.request import Request, urlopen

import pytest

from edgespec.errors import HubError
from edgespec.hub.cache import HubFile
from edgespec.hub.hub import Hub
from tests.formats.ggufs import REPOSITORY
from tests.hub.test_download import FILE, REPO, serve


def test_it_serves_logs_and_takes_faults(root: Path, tmp_path: Path) -> None:
    serve(root)
    command = [sys.executable, "-m", "tests.hub.hubserver", str(root), "0"]
    with subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            url = process.stdout.readline().strip()
            hub = Hub(url, tmp_path / "cache")
            model = hub.resolve(HubFile(REPO, FILE))
            order = {"repo": REPO, "path": FILE, "fault": {"kind": "status", "code": 403, "error_code": "GatedRepo"}}
            _post(url, order)
            with pytest.raises(HubError, match="gated"):
                hub.fetch(model)
            _post(url, order | {"fault": None})
            assert hub.fetch(model).is_file()
            with urlopen(f"{url}/_log") as response:
                log = json.load(response)
            assert [entry[3] for entry in log if entry[0] == "GET" and "/resolve/" in entry[1]] == [206]
        finally:
            process.terminate()


def _post(url: str, order: object) -> None:
    with urlopen(Request(f"{url}/_control", data=json.dumps(order).encode(), method="POST")) as response:
        assert response.status == 200

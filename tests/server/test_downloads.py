"""Models of the hub, which are downloaded when they are loaded."""

from __future__ import annotations

from pathlib import Path

from tests.gguf_models import TARGET
from tests.models.hubserver import HubServer
from tests.server.serving import PROMPT, serving

REPO, FILE = "me/python-GGUF", "python-Q8_0.gguf"


def test_the_first_load_downloads_a_model(tmp_path: Path) -> None:
    (tmp_path / "hub" / REPO).mkdir(parents=True)
    (tmp_path / "hub" / REPO / FILE).write_bytes(TARGET.read_bytes())
    model = f"coder=hf:{REPO}/{FILE}"
    options = ("--draft", "none", "--threads", "1", "--ctx", "128")
    with (
        HubServer(tmp_path / "hub") as hub,
        serving(tmp_path, model, *options, HF_ENDPOINT=hub.url, HF_HUB_OFFLINE="0") as server,
    ):
        assert not hub.downloads(FILE)
        assert server.ask("coder", PROMPT, max_tokens=3).json()["usage"]["completion_tokens"] == 3
        n_downloads = len(hub.downloads(FILE))
        assert n_downloads
        assert server.post("/models/unload", json={"model": "coder"}).status_code == 200
        assert server.ask("coder", PROMPT, max_tokens=3).status_code == 200
        assert len(hub.downloads(FILE)) == n_downloads, "what is here is not downloaded again"

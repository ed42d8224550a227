"""/metrics as Prometheus reads it: the format, the names, and what is counted."""

from __future__ import annotations

from pathlib import Path
from time import monotonic

import pytest
from prometheus_client.parser import text_string_to_metric_families

from edgespec.autopilot.acceptance_record import AcceptanceRecord
from edgespec.core.metrics import Meter
from edgespec.engine.events import Finished
from edgespec.machines.memory import DeviceMemory
from edgespec.server.metrics import ServerMetrics
from tests.command import run_command
from tests.gguf_models import ASSETS
from tests.server.serving import PROMPT, Server, serving

Labels = tuple[tuple[str, str], ...]


def read(server: Server) -> dict[str, dict[Labels, float]]:
    """The values by name and labels. The names follow Prometheus' conventions."""
    response = server.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=")
    values: dict[str, dict[Labels, float]] = {}
    for family in text_string_to_metric_families(response.text):
        assert family.name.startswith("edgespec_") and family.documentation.endswith("."), family
        assert family.type != "unknown" and "_ms" not in family.name, family
        for sample in family.samples:
            if family.type == "counter":
                assert sample.name.endswith(("_total", "_created")), sample
            labels = tuple(sorted(sample.labels.items()))
            assert labels not in values.setdefault(sample.name, {}), "a series twice"
            values[sample.name][labels] = sample.value
    return values


def total(values: dict[str, dict[Labels, float]], name: str, **labels: str) -> float:
    return sum(value for each, value in values.get(name, {}).items() if labels.items() <= dict(each).items())


def test_what_is_counted(small: Server) -> None:
    before = read(small)
    assert small.ask("tree", max_tokens=5).status_code == 200
    assert small.ask("tree", max_tokens=1).status_code == 200
    assert small.ask("tree", max_tokens=-5).status_code == 400
    assert small.ask("tree", "x" * 999, max_tokens=5).status_code == 400
    assert small.get("/v1/nothing").status_code == 404
    after = read(small)

    def grown(name: str, **labels: str) -> float:
        return total(after, name, **labels) - total(before, name, **labels)

    assert total(after, "edgespec_opens_total", model="tree") >= 1, "tests share the server"
    assert grown("edgespec_emitted_tokens_total", model="tree") == 6
    assert grown("edgespec_cached_tokens_total", model="tree") >= len(PROMPT) - 1
    assert grown("edgespec_time_to_first_token_seconds_count", model="tree") == 2
    assert grown("edgespec_time_per_output_token_seconds_count", model="tree") == 1, "one token has no time between"
    assert grown("edgespec_time_per_output_token_seconds_sum", model="tree") > 0
    assert grown("edgespec_answer_seconds_count", model="tree") == 2
    assert grown("edgespec_failures_total", kind="invalid") == 2
    assert grown("edgespec_failures_total", kind="not_found") == 1
    assert total(after, "edgespec_failed_opens_total", model="tree") == 0, "series of a model begin at zero"
    props = small.get("/props").json()
    state = props["models"][0]
    assert props["recent"][0]["tokens"] == 1
    assert (state["answers_at_once"], state["shares_forwards"], state["why_not"]) == (4, True, None)


def test_failed_opens_and_embeddings(tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(ASSETS.joinpath("target.gguf").read_bytes())
    models = ("broken=./broken.gguf", "embedded=python-6m", "far=nobody/nothing-GGUF:Q4_0")
    arguments = (*models, "--threads", "1", "--ctx", "128", "--draft", "ngram", "--preload", "far")
    with serving(tmp_path, *arguments, HF_HUB_OFFLINE="1") as server:
        broken.write_bytes(b"GGUF, but no more")  # which was sound at the start
        end = monotonic() + 20
        while (health := server.get("/health")).status_code != 200:
            assert monotonic() < end
        assert health.json()["loaded_models"] == 0, "a preload that fails does not stop the server"
        refused = server.ask("broken", max_tokens=1)
        assert refused.status_code >= 400
        assert "broken.gguf" in refused.text and str(tmp_path) not in refused.text, "folders are for the log alone"
        texts = {"model": "embedded", "input": ["one text", "another"]}
        tokens = server.post("/v1/embeddings", json=texts).json()["usage"]["prompt_tokens"]
        values = read(server)
        sizes = server.model("embedded")["estimated_bytes"]
        assert 0 < sizes["weights"] < 2**25 and sizes["slot"] == sizes["kv"] // 4 > 0 == sizes["draft"]
        told = run_command(["ps", "--url", server.url], {}, tmp_path).stdout
        assert sizes["context_8192"] == sizes["kv"] * 8192 // 128
        assert "one more slot, of 128 tokens, takes" in told and ", and 8,192 tokens more of context " in told
        resident, needed = (
            total(values, "edgespec_memory_bytes", model="embedded", part=part) for part in ("resident", "estimated")
        )
        assert resident > 2**25 and needed == sum(
            sizes[part] for part in ("weights", "kv", "scratch", "draft", "trees")
        )
    assert any("far: not loaded: " in line for line in server.log), server.log
    for model in ("broken", "far"):
        assert total(values, "edgespec_failed_opens_total", model=model) == 1
    assert total(values, "edgespec_failures_total", model="broken") == 1
    assert total(values, "edgespec_opens_total", model="broken") == 0 < total(values, "edgespec_opens_total")
    assert total(values, "edgespec_embeddings_total", model="embedded") == 2
    assert total(values, "edgespec_embedded_tokens_total", model="embedded") == tokens > 2


def test_the_acceptance_of_each_drafter_and_its_drift() -> None:
    """Whether the autopilot asks a drafter depends on times, so the answer is given."""
    metrics = ServerMetrics()
    record = AcceptanceRecord(answers=1, accepted=6, tested=8, recent=0.75).add(2, 8)
    metrics.add("tree", Finished("stop", (1, 2), 0, Meter(1, 0.0).metrics(), records={"model": record}), 1.0)
    text = metrics.format_prometheus({}, {}, [DeviceMemory("Vulkan0", 3, 8)], {}).decode()
    values = {each.name: each.samples for each in text_string_to_metric_families(text)}
    (share,), (drift,) = (values[f"edgespec_draft_acceptance_{name}"] for name in ("ratio", "drift"))
    assert share.labels == drift.labels == {"model": "tree", "drafter": "model"}
    assert (share.value, drift.value) == (0.5, pytest.approx(0.8 * 0.75 + 0.2 * 0.25 - 0.5))
    (free,), (whole,) = values["edgespec_device_free_bytes"], values["edgespec_device_bytes"]
    assert (free.labels, free.value, whole.value) == ({"device": "Vulkan0"}, 3, 8)
    assert metrics.records == {"tree": {"model": record}}

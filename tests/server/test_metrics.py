"""/metrics as Prometheus reads it: the format, the names, and what is counted."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from time import monotonic

import pytest
from prometheus_client.parser import text_string_to_metric_families

from edgespec.controller.acceptance import AcceptanceRecord
from edgespec.core.metrics import Meter
from edgespec.engine.events import Finished
from edgespec.server.metrics import ServerMetrics
from tests.server.serving import ENDLESS, PROMPT, TOY, Server, serving
from tests.server.test_load import raw

Labels = tuple[tuple[str, str], ...]


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One whose counts are those of this file's requests."""
    with serving(tmp_path_factory.mktemp("toy"), *TOY) as server:
        yield server


def read(server: Server) -> dict[str, dict[Labels, float]]:
    """The values by name and labels. The names follow Prometheus' conventions, and histograms are consistent."""
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
    for name, series in values.items():
        if name.endswith("_bucket"):
            check_buckets(values, name.removesuffix("_bucket"), series)
    return values


def check_buckets(values: dict[str, dict[Labels, float]], name: str, series: dict[Labels, float]) -> None:
    assert name.endswith("_seconds")
    by_labels: dict[Labels, list[tuple[float, float]]] = {}
    for labels, count in series.items():
        rest = tuple(each for each in labels if each[0] != "le")
        by_labels.setdefault(rest, []).append((float(dict(labels)["le"]), count))
    for rest, buckets in by_labels.items():
        assert all(one[0] < two[0] and one[1] <= two[1] for one, two in pairwise(buckets))
        assert buckets[-1] == (float("inf"), values[f"{name}_count"][rest])


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


def test_clients_that_leave(toy: Server) -> None:
    for stream in (True, False):
        caller = raw(toy, {**ENDLESS, "stream": stream})
        toy.until("tree", answering=1)
        caller.close()
        toy.until("tree", is_busy=False)
    end = monotonic() + 20
    while total(read(toy), "edgespec_failures_total", model="tree", kind="client_left") != 2:
        assert monotonic() < end


def test_failed_opens_and_embeddings(tmp_path: Path) -> None:
    (tmp_path / "broken.gguf").write_bytes(b"GGUF, but no more")
    with serving(tmp_path, "broken=./broken.gguf", "embedded=python-6m", "--threads", "1", "--ctx", "128") as server:
        assert server.ask("broken", max_tokens=1).status_code >= 400
        texts = {"model": "embedded", "input": ["one text", "another"]}
        tokens = server.post("/v1/embeddings", json=texts).json()["usage"]["prompt_tokens"]
        values = read(server)
    assert total(values, "edgespec_failed_opens_total", model="broken") == 1
    assert total(values, "edgespec_failures_total", model="broken") == 1
    assert total(values, "edgespec_opens_total", model="broken") == 0 < total(values, "edgespec_opens_total")
    assert total(values, "edgespec_embeddings_total", model="embedded") == 2
    assert total(values, "edgespec_embedded_tokens_total", model="embedded") == tokens > 2


def test_the_acceptance_of_each_drafter_and_its_drift() -> None:
    """Whether the autopilot asks a drafter depends on times, so the answer is given."""
    metrics = ServerMetrics()
    record = AcceptanceRecord(answers=1, accepted=6, tested=8, recent=0.75).add(2, 8)
    metrics.add("tree", Finished("stop", (1, 2), 0, Meter(1, 0.0).metrics(), records={"model": record}), 1.0)
    text = metrics.format_prometheus({}, {}).decode()
    values = {each.name: each.samples for each in text_string_to_metric_families(text)}
    (share,), (drift,) = (values[f"edgespec_draft_acceptance_{name}"] for name in ("ratio", "drift"))
    assert share.labels == drift.labels == {"model": "tree", "drafter": "model"}
    assert (share.value, drift.value) == (0.5, pytest.approx(0.8 * 0.75 + 0.2 * 0.25 - 0.5))
    assert metrics.records("tree") == {"model": record} and metrics.records("other") == {}

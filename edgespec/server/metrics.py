"""ServerMetrics: counters for /metrics, the last answers for the status page, and the log. They hold no text."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from edgespec.autopilot.acceptance_record import AcceptanceRecord
from edgespec.client.death import Death
from edgespec.engine.events import Finished
from edgespec.machines.memory import DeviceMemory
from edgespec.server.record import RequestContext
from edgespec.units import gib

_MAX_RECENT = 50
_OF_ANSWERS = {  # fields of Metrics, which are also the names of the counters
    "prompt_tokens": "Prompt tokens.",
    "cached_tokens": "Prompt tokens that were in the KV cache.",
    "emitted_tokens": "Generated tokens.",
    "reasoning_tokens": "Generated tokens of the reasoning.",
    "drafted_tokens": "Drafted tokens.",
    "accepted_tokens": "Drafted tokens that were accepted.",
    "target_forwards": "Decode forwards of the target model.",
}
_OF_MODELS = {
    **_OF_ANSWERS,
    "opens": "Models loaded.",
    "failed_opens": "Models that could not be loaded.",
    "embeddings": "Texts embedded.",
    "embedded_tokens": "Tokens of the texts embedded.",
    "reread_tokens": "Prompt tokens that were read again although an earlier text had them.",
}
_COUNTERS = {  # name -> its text, its labels
    "answers": ("Finished answers.", ("model", "ending")),
    "engine_deaths": ("Engine processes that ended unasked.", ("model", "cause")),
    "requests": ("Responses by key and status.", ("key", "status")),
    "key_tokens": ("Tokens by key, read and written.", ("key", "kind")),
    "failures": ("Requests that failed, also amid a stream.", ("model", "kind")),
}
_GAUGES = {
    "waiting_requests": ("Requests in the queue.", ("model",)),
    "remote_up": ("Whether the server of a remote model can be reached.", ("model",)),
    "device_bytes": ("Memory of an accelerator.", ("device",)),
    "device_free_bytes": ("Free memory of an accelerator.", ("device",)),
    "memory_bytes": ("Memory of a loaded model: resident, with that of the server, and estimated.", ("model", "part")),
    "silent_seconds": ("Silence of the engine process.", ("model",)),
    "draft_acceptance_ratio": (
        "Share of a drafter's tokens that are accepted, over all answers.",
        ("model", "drafter"),
    ),
    "draft_acceptance_drift": (
        "The same of the last answers, less that of all: below zero the draft has become worse.",
        ("model", "drafter"),
    ),
}
_HISTOGRAMS = {  # name -> its text, its buckets in seconds
    "answer_seconds": ("Duration of an answer.", (0.1, 0.3, 1, 3, 10, 30, 100, 300)),
    "time_to_first_token_seconds": (
        "Time to the first token, without the time in the queue.",
        (0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100),
    ),
    "time_per_output_token_seconds": (
        "Mean time of a token of an answer, the first one excluded.",
        (0.0003, 0.001, 0.003, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.3, 1),
    ),
}
_LOG = logging.getLogger("edgespec.server")


class ServerMetrics:
    """Counters and the last answers, on the event loop. As a Reporter it also logs the progress of loading a model.

    records  the acceptance of each drafter, by the names of model and drafter, as of the model's last answer
    """

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._recent: deque[dict[str, Any]] = deque(maxlen=_MAX_RECENT)
        self.records: dict[str, Mapping[str, AcceptanceRecord]] = {}
        options: Any = {"namespace": "edgespec", "registry": self._registry}
        self._metrics: dict[str, Any] = {
            **{name: Counter(name, text, ["model"], **options) for name, text in _OF_MODELS.items()},
            **{name: Counter(name, text, labels, **options) for name, (text, labels) in _COUNTERS.items()},
            **{name: Gauge(name, text, labels, **options) for name, (text, labels) in _GAUGES.items()},
            **{
                name: Histogram(name, text, ["model"], buckets=buckets, **options)
                for name, (text, buckets) in _HISTOGRAMS.items()
            },
        }

    def count_request(self, context: RequestContext, failure: str) -> None:
        """Count a request that has ended. `failure`: its kind; "" if it has not failed."""
        key = context.caller.name
        self.metric("requests", key, str(context.status)).inc()
        self.metric("key_tokens", key, "prompt").inc(context.prompt_tokens)
        self.metric("key_tokens", key, "generated").inc(context.tokens)
        if failure:
            self.metric("failures", context.model, failure).inc()

    def add(self, model: str, finished: Finished, seconds: float) -> None:
        """Count a finished answer that took `seconds`."""
        m = finished.metrics
        self.metric("answers", model, finished.reason).inc()
        for name in _OF_ANSWERS:
            self.metric(name, model).inc(getattr(m, name))
        self.metric("reread_tokens", model).inc(finished.loss.tokens if finished.loss is not None else 0)
        times = {
            "answer_seconds": seconds,
            "time_to_first_token_seconds": m.ttft_s,
            "time_per_output_token_seconds": m.tpot_s,
        }
        for name, value in times.items():
            if value is not None:
                self.metric(name, model).observe(value)
        call = {
            "at": time.time(),  # since the epoch
            "model": model,
            "prompt_tokens": m.prompt_tokens,
            "cached_tokens": m.cached_tokens,
            "read_again": None if finished.loss is None else finished.loss.reason,
            "tokens": m.emitted_tokens,
            "tokens_per_second": m.tokens_per_second,
            "speedup": m.speedup,
            "acceptance": m.acceptance_rate,
            "tau": m.tau,
            "ttft": m.ttft_s,
            "tpot": m.tpot_s,
            "step_p99": m.step_p99_s,
            "seconds": seconds,
            "ending": finished.reason,
        }
        for name, record in finished.records.items():
            self.metric("draft_acceptance_ratio", model, name).set(record.share)
            self.metric("draft_acceptance_drift", model, name).set(record.recent - record.share)
        self._recent.append(call)
        self.records[model] = finished.records

    def note_death(self, model: str, death: Death) -> None:
        """Log the end of an engine process, and count it unless someone asked for it."""
        if death.is_asked:
            _LOG.info("%s: %s", model, death.reason)
            return
        self.metric("engine_deaths", model, death.cause).inc()
        kept = f" (its output is in {death.log})" if death.log is not None else ""
        _LOG.warning("%s: %s%s", model, death.reason, kept)

    def recent(self) -> list[dict[str, Any]]:
        """The last answers, newest first, in the keys of /props; times in seconds."""
        return list(reversed(self._recent))

    def format_prometheus(
        self,
        waiting: dict[str, int],
        silent_s: dict[str, float],
        devices: Sequence[DeviceMemory],
        memory: Mapping[str, Mapping[str, int]],
    ) -> bytes:
        """All metrics in Prometheus' text format, with the length of each model's queue, its engine's silence, and the
        bytes of its memory by part.
        """
        for device in devices:
            self.metric("device_bytes", device.name).set(device.total)
            self.metric("device_free_bytes", device.name).set(device.free)
        for model, count in waiting.items():
            self.metric("waiting_requests", model).set(count)
            for name in (*_OF_MODELS, *_HISTOGRAMS):
                self.metric(name, model)  # which begins at zero, so that the first increase counts in rates
        self._metrics["memory_bytes"].clear()  # of models that were unloaded
        for model, parts in memory.items():
            for part, n_bytes in parts.items():
                self.metric("memory_bytes", model, part).set(n_bytes)
        for model, seconds in silent_s.items():
            self.metric("silent_seconds", model).set(seconds)
        return generate_latest(self._registry)

    def metric(self, name: str, *labels: str) -> Any:
        """The counter, gauge or histogram of that name for these values of its labels."""
        return self._metrics[name].labels(*labels)

    def notice(self, text: str) -> None:
        _LOG.info("%s", text)

    def download(self, name: str, done: int, total: int) -> None:
        _LOG.debug("downloading %s: %s of %s", name, gib(done), gib(total))

    def loading(self, name: str, fraction: float) -> None:
        _LOG.debug("loading %s: %.0f%%", name, fraction * 100)

"""ServerMetrics: counters for /metrics, the last answers for the status page, and the log. They hold no text."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from edgespec.controller.acceptance import AcceptanceRecord
from edgespec.engine.events import Finished
from edgespec.service.link import Death
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
    "opens": "Models loaded.",
    "failed_opens": "Models that could not be loaded.",
    "embeddings": "Texts embedded.",
    "embedded_tokens": "Tokens of the texts embedded.",
}
_OF_DRAFTERS = {
    "ratio": "Share of a drafter's tokens that are accepted, over all answers.",
    "drift": "The same of the last answers, less that of all: below zero the draft has become worse.",
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


@dataclass(frozen=True, slots=True)
class Call:
    """One finished answer; times in seconds, `at` since the epoch."""

    at: float
    model: str
    prompt_tokens: int
    tokens: int
    tokens_per_second: float | None
    times_plain: float | None
    acceptance: float | None
    tau: float | None
    ttft: float | None
    tpot: float | None
    step_p99: float | None
    seconds: float
    ending: str


class ServerMetrics:
    """Counters and the last answers. As a Reporter it also logs the progress of loading a model."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._lock = threading.Lock()
        self._recent: deque[Call] = deque(maxlen=_MAX_RECENT)
        self._records: dict[str, Mapping[str, AcceptanceRecord]] = {}
        options: Any = {"namespace": "edgespec", "registry": self._registry}
        self._answers = Counter("answers", "Finished answers.", ["model", "ending"], **options)
        self._deaths = Counter("engine_deaths", "Engine processes that ended unasked.", ["model", "cause"], **options)
        self._counters = {
            name: Counter(name, text, ["model"], **options) for name, text in (_OF_ANSWERS | _OF_MODELS).items()
        }
        self._histograms = {
            name: Histogram(name, text, ["model"], buckets=buckets, **options)
            for name, (text, buckets) in _HISTOGRAMS.items()
        }
        labels = ["model", "drafter"]
        self._drafters = {
            name: Gauge(f"draft_acceptance_{name}", text, labels, **options) for name, text in _OF_DRAFTERS.items()
        }
        self._waiting = Gauge("waiting_requests", "Requests in the queue.", ["model"], **options)
        self._remotes = Gauge("remote_up", "Whether the server of a remote model can be reached.", ["model"], **options)
        self._silent = Gauge("silent_seconds", "Silence of the engine process.", ["model"], **options)

    @property
    def registry(self) -> CollectorRegistry:
        """The registry of /metrics."""
        return self._registry

    def add(self, model: str, finished: Finished, seconds: float) -> None:
        """Count a finished answer that took `seconds`."""
        m = finished.metrics
        self._answers.labels(model, finished.reason).inc()
        for name in _OF_ANSWERS:
            self._counters[name].labels(model).inc(getattr(m, name))
        times = {
            "answer_seconds": seconds,
            "time_to_first_token_seconds": m.ttft_s,
            "time_per_output_token_seconds": m.tpot_s,
        }
        for name, value in times.items():
            if value is not None:
                self._histograms[name].labels(model).observe(value)
        call = Call(
            at=time.time(),
            model=model,
            prompt_tokens=m.prompt_tokens,
            tokens=m.emitted_tokens,
            tokens_per_second=m.tokens_per_second,
            times_plain=m.times_plain,
            acceptance=m.acceptance_rate,
            tau=m.tau,
            ttft=m.ttft_s,
            tpot=m.tpot_s,
            step_p99=m.step_p99_s,
            seconds=seconds,
            ending=finished.reason,
        )
        for name, record in finished.records.items():
            self._drafters["ratio"].labels(model, name).set(record.share)
            self._drafters["drift"].labels(model, name).set(record.recent - record.share)
        with self._lock:
            self._recent.append(call)
            self._records[model] = finished.records

    def note_death(self, model: str, death: Death) -> None:
        """Log the end of an engine process, and count it unless someone asked for it."""
        if death.is_asked:
            _LOG.info("%s: %s", model, death.reason)
            return
        self._deaths.labels(model, death.cause).inc()
        kept = f" (its output is in {death.log})" if death.log is not None else ""
        _LOG.warning("%s: %s%s", model, death.reason, kept)

    def note_open(self, model: str, context_size: int) -> None:
        """Count and log a model that has been loaded, with a context of `context_size` tokens."""
        self._counters["opens"].labels(model).inc()
        _LOG.info("%s: loaded, with a context of %s tokens", model, f"{context_size:,}")

    def note_remote(self, model: str, *, is_reachable: bool) -> None:
        """Keep whether the server of a model can be reached."""
        self._remotes.labels(model).set(is_reachable)

    def note_embeddings(self, model: str, texts: int, tokens: int) -> None:
        """Count texts that have been embedded, and their tokens."""
        self._counters["embeddings"].labels(model).inc(texts)
        self._counters["embedded_tokens"].labels(model).inc(tokens)

    def note_failed_open(self, model: str, reason: str) -> None:
        """Count and log a model that could not be loaded."""
        self._counters["failed_opens"].labels(model).inc()
        _LOG.warning("%s: not loaded: %s", model, reason)

    def seconds_a_call(self, model: str) -> float:
        """Mean duration of the last answers, in seconds; 1 if there are none."""
        with self._lock:
            durations = [call.seconds for call in self._recent if call.model == model]
        return sum(durations) / len(durations) if durations else 1.0

    def recent(self) -> list[dict[str, object]]:
        """The last answers, newest first, in the keys of /props."""
        with self._lock:
            return [asdict(call) for call in reversed(self._recent)]

    def records(self, model: str) -> Mapping[str, AcceptanceRecord]:
        """The acceptance of a model's drafters, by their names, as its last answer has told."""
        with self._lock:
            return self._records.get(model, {})

    def format_prometheus(self, waiting: dict[str, int], silent_s: dict[str, float]) -> bytes:
        """All metrics in Prometheus' text format, with the length of each model's queue and its engine's silence."""
        for model, count in waiting.items():
            self._waiting.labels(model).set(count)
            for metric in (*self._counters.values(), *self._histograms.values()):
                metric.labels(model)  # which begins at zero, so that the first increase counts in rates
        for model, seconds in silent_s.items():
            self._silent.labels(model).set(seconds)
        return generate_latest(self._registry)

    def notice(self, text: str) -> None:
        _LOG.info("%s", text)

    def download(self, name: str, done: int, total: int) -> None:
        _LOG.debug("downloading %s: %s of %s", name, gib(done), gib(total))

    def loading(self, name: str, fraction: float) -> None:
        _LOG.debug("loading %s: %.0f%%", name, fraction * 100)

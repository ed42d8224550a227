"""What a server has done, for /metrics and the status page; no prompts, no answers."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from dataclasses import asdict, dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from edgespec.engine.events import Finished
from edgespec.units import gib

_RECENT = 50
_LOG = logging.getLogger("edgespec.server")


@dataclass(frozen=True, slots=True)
class Call:
    """One answer that is over; times in seconds, `at` since the epoch."""

    at: float
    model: str
    prompt_tokens: int
    tokens: int
    tokens_per_second: float | None
    times_plain: float | None
    acceptance: float | None
    tau: float | None
    ttft: float | None
    seconds: float
    ending: str


class ServerMetrics:
    """Counters, and the last calls. Also hears what opening a model has to say, which goes to the log."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._lock = threading.Lock()
        self._recent: deque[Call] = deque(maxlen=_RECENT)

        def counter(name: str, told: str) -> Counter:
            return Counter(f"edgespec_{name}", told, ["model"], registry=self._registry)

        self.refused = counter("refused", "Calls refused because too many waited.")
        self._answers = Counter("edgespec_answers", "Answers that are over.", ["model", "ending"],
                                registry=self._registry)  # fmt: skip
        self._prompt = counter("prompt_tokens", "Tokens of prompts.")
        self._emitted = counter("emitted_tokens", "Tokens of answers.")
        self._drafted = counter("drafted_tokens", "Tokens that were drafted.")
        self._accepted = counter("accepted_tokens", "Drafted tokens that the target let through.")
        self._forwards = counter("target_forwards", "Forwards of the target.")
        self._seconds = Histogram("edgespec_answer_seconds", "Time of an answer.", ["model"], registry=self._registry,
                                  buckets=(0.1, 0.3, 1, 3, 10, 30, 100, 300))  # fmt: skip
        self._ttft = Histogram("edgespec_first_token_seconds", "Time to the first token, without waiting for a turn.",
                               ["model"], registry=self._registry, buckets=(0.03, 0.1, 0.3, 1, 3, 10, 30))  # fmt: skip
        self._waiting = Gauge("edgespec_waiting", "Calls that wait for their turn.", ["model"], registry=self._registry)

    def add(self, model: str, finished: Finished, seconds: float) -> None:
        """An answer is over."""
        m = finished.metrics
        self._answers.labels(model, finished.reason).inc()
        self._prompt.labels(model).inc(m.prompt_tokens)
        self._emitted.labels(model).inc(m.emitted_tokens)
        self._drafted.labels(model).inc(m.drafted_tokens)
        self._accepted.labels(model).inc(m.accepted_tokens)
        self._forwards.labels(model).inc(m.target_forwards)
        self._seconds.labels(model).observe(seconds)
        if m.ttft_s is not None:
            self._ttft.labels(model).observe(m.ttft_s)
        call = Call(time.time(), model, m.prompt_tokens, m.emitted_tokens, m.tokens_per_second, m.times_plain,
                    m.acceptance_rate, m.tau, m.ttft_s, seconds, finished.reason)  # fmt: skip
        with self._lock:
            self._recent.append(call)
        speed = "-" if m.tokens_per_second is None else f"{m.tokens_per_second:.1f}"
        accepted = "-" if m.acceptance_rate is None else f"{m.acceptance_rate:.0%}"
        _LOG.info("%s: %d tokens (%s) after %d, %s tok/s, %s accepted, %.2f s",
                  model, m.emitted_tokens, finished.reason, m.prompt_tokens, speed, accepted, seconds)  # fmt: skip

    def seconds_a_call(self, model: str) -> float:
        """How long one of the last answers took on average; 1 where there is none."""
        with self._lock:
            took = [call.seconds for call in self._recent if call.model == model]
        return sum(took) / len(took) if took else 1.0

    def recent(self) -> list[dict[str, object]]:
        """The last calls, newest first."""
        with self._lock:
            return [asdict(call) for call in reversed(self._recent)]

    def exposition(self, waiting: dict[str, int]) -> bytes:
        """Prometheus' text format."""
        for model, count in waiting.items():
            self._waiting.labels(model).set(count)
        return generate_latest(self._registry)

    def notice(self, text: str) -> None:
        _LOG.info("%s", text)

    def download(self, name: str, done: int, total: int) -> None:
        _LOG.debug("downloading %s: %s of %s", name, gib(done), gib(total))

    def loading(self, name: str, fraction: float) -> None:
        _LOG.debug("loading %s: %.0f%%", name, fraction * 100)

"""edgespec and mlx_lm as arms of `benchmarks.peers`, and the record of one generation."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import clock_gettime, perf_counter
from typing import Any, Protocol

from edgespec.backends import BackendName
from edgespec.backends.options import LoadOptions
from edgespec.cli.terminal import TerminalReporter
from edgespec.core.protocols import Step
from edgespec.core.sampling import SamplingParams
from edgespec.engine.drafting import Speculation
from edgespec.engine.events import Finished, MemoryUse, Request
from edgespec.planner.plan import LoadConfig, MemoryOptions
from edgespec.service.process import EngineProcess

LOOKUPS = ("ngram", "suffix")
MLX_DRAFT_TOKENS = 3  # the default of mlx_lm's own commands


@dataclass(frozen=True, slots=True)
class Prompt:
    """`ids` is `text` as edgespec encodes it; the peers get these."""

    id: str
    category: str
    text: str
    ids: list[int]


@dataclass(frozen=True, slots=True)
class Generation:
    """One generation as the reader of its stream saw it.

    tokens     None stands for a token that was counted but not sent
    arrivals   (time.perf_counter(), tokens so far), increasing in both
    rounds     target forwards after those that gave the first arrival
    own        the figures that the arm itself reports
    busy_s     processor time of the arm's process between the first arrival and the last; 0 where it is not measured
    """

    tokens: tuple[int | None, ...]
    arrivals: tuple[tuple[float, int], ...]
    rounds: int
    drafted: int
    accepted: int
    own: dict[str, Any] = field(default_factory=dict)
    busy_s: float = 0.0

    def on_own_processor(self) -> Generation:
        """As if the program had had a processor for itself: with the times of its process."""
        if not (self.busy_s and self.arrivals):
            return self
        return replace(self, arrivals=((0.0, self.arrivals[0][1]), (self.busy_s, self.arrivals[-1][1])))

    @property
    def later(self) -> int:
        """Tokens after the first arrival, which is prefill's: one token, but a whole round in mlx_lm."""
        return self.arrivals[-1][1] - self.arrivals[0][1] if self.arrivals else 0

    @property
    def tokens_per_second(self) -> float | None:
        return self.later / (self.arrivals[-1][0] - self.arrivals[0][0]) if self.later else None


def processor_s(pid: int) -> float:
    """Processor time of a process, exact on Linux alone; 0 for no process."""
    return clock_gettime(~pid << 3 | 2) if pid else 0.0  # the clock that clock_getcpuclockid returns


class PeerFailed(Exception):
    """An arm cannot continue; the others can."""


class Arm(Protocol):
    """One program with one draft mode; `own_plain` names the same program's arm without drafts."""

    name: str
    own_plain: str

    def generate(self, prompt: Prompt, tokens: int, temperature: float) -> Generation:
        """Up to `tokens` after `prompt`. Raises PeerFailed."""


@dataclass
class Edgespec:
    """edgespec's engine process, by its `pid`, with one Speculation. With `memory` it drafts from earlier answers."""

    name: str
    client: EngineProcess
    speculation: Speculation
    own_plain: str = "edgespec plain"
    memory: MemoryUse | None = None
    pid: int = 0

    def generate(self, prompt: Prompt, tokens: int, temperature: float) -> Generation:
        arrivals: list[tuple[float, int]] = []
        start_s = 0.0
        request = Request(prompt.text, SamplingParams(temperature=temperature), tokens, memory=self.memory)
        for event in self.client.stream(request, self.speculation):
            if isinstance(event, Step):
                start_s = start_s or processor_s(self.pid)
                arrivals.append((perf_counter(), (arrivals[-1][1] if arrivals else 0) + len(event.tokens)))
            elif isinstance(event, Finished):
                finished = event
        m = finished.metrics
        own = {"tokens_per_second": m.tokens_per_second, "ttft_s": m.ttft_s}
        counts = m.target_forwards, m.drafted_tokens, m.accepted_tokens
        return Generation(finished.tokens, tuple(arrivals), *counts, own, processor_s(self.pid) - start_s)


def open_edgespec(
    backend: BackendName, target: Path, draft: Path | None, options: LoadOptions, stack: ExitStack
) -> EngineProcess:
    """An engine process with the target, lookups and perhaps the draft model, an empty cache folder and empty memory.

    So nothing is known of the models yet. `stack` ends it. Raises EdgespecError.
    """
    os.environ["EDGESPEC_CACHE_DIR"] = stack.enter_context(tempfile.TemporaryDirectory())
    memory = MemoryOptions(Path(stack.enter_context(tempfile.TemporaryDirectory())))
    client = EngineProcess()
    stack.callback(client.close)
    drafters = "+".join([*LOOKUPS, *([str(draft)] if draft else [])])
    config = LoadConfig(str(target), backend, drafters, load=options, memory=memory)
    list(client.open(config, TerminalReporter()))
    return client


@dataclass
class MlxLm:
    """mlx_lm's generators on `models` that it has loaded: a target, and perhaps a draft."""

    name: str
    models: Sequence[Any]
    stop: frozenset[int]
    own_plain: str = "mlx_lm plain"

    def generate(self, prompt: Prompt, tokens: int, temperature: float) -> Generation:
        text: list[int] = []
        arrivals: list[tuple[float, int]] = []
        accepted = 0
        for token, drafted in self._steps(prompt.ids, tokens, temperature):
            text.append(token)
            accepted += drafted and bool(arrivals)
            if not drafted:  # the end of a round
                arrivals.append((perf_counter(), len(text)))
            if token in self.stop:
                break
        rounds = len(arrivals) - 1
        if arrivals and arrivals[-1][1] < len(text):
            arrivals.append((perf_counter(), len(text)))
            rounds += 1
        return Generation(
            tuple(text), tuple(arrivals), rounds, rounds * MLX_DRAFT_TOKENS * (len(self.models) - 1), accepted
        )

    def _steps(self, ids: list[int], tokens: int, temperature: float) -> Iterator[tuple[int, bool]]:
        import mlx.core as mx
        from mlx_lm.generate import generate_step, speculative_generate_step
        from mlx_lm.sample_utils import make_sampler

        options = {"max_tokens": tokens, "sampler": make_sampler(temp=temperature) if temperature else None}
        if len(self.models) == 1:
            for token, _ in generate_step(mx.array(ids), self.models[0], **options):
                yield int(token), False
            return
        steps = speculative_generate_step(mx.array(ids), *self.models, num_draft_tokens=MLX_DRAFT_TOKENS, **options)
        for token, _, drafted in steps:
            yield int(token), drafted


def mlx_arms(target: Path, draft: Path | None, stop: frozenset[int]) -> list[MlxLm]:
    """Plain decoding, and with a draft speculative decoding, on the same loaded target."""
    models = load_mlx_lm([path for path in (target, draft) if path])
    return [MlxLm("mlx_lm plain", models[:1], stop)] + ([MlxLm("mlx_lm draft", models, stop)] if draft else [])


def load_mlx_lm(paths: Sequence[Path]) -> list[Any]:
    """Models loaded by mlx_lm; on a CPU in single precision, as edgespec computes there."""
    import mlx.core as mx
    from mlx_lm.utils import load_model

    models = [load_model(path)[0] for path in paths]
    if mx.default_device() != mx.gpu:
        for model in models:
            model.set_dtype(mx.float32)
            mx.eval(model.parameters())
    return models

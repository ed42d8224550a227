"""edgespec and mlx_lm as arms of `benchmarks.peers`: the prompts that all get, and the record of one generation."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from time import clock_gettime, perf_counter
from typing import Any, Literal, Protocol

import click
import psutil

from edgespec.autopilot.speculation import Speculation
from edgespec.backends import BackendName
from edgespec.backends.options import LoadOptions
from edgespec.bench.prompt_sets import BenchPrompt
from edgespec.cli.terminal import TerminalReporter
from edgespec.client.process import EngineProcess
from edgespec.core.protocols import Step
from edgespec.core.sampling import SamplingParams
from edgespec.engine.engine import Engine
from edgespec.engine.events import Finished, MemoryUse, Request, TokenPrompt
from edgespec.errors import ContextOverflow
from edgespec.models.load_config import LoadConfig, MemoryOptions
from edgespec.text.chat_template import Message

Form = Literal["chat", "raw"]
"""How a prompt is written: in the model's chat template, or as text to continue."""
MIN_PLAIN = 8  # rounds without a draft, from which on they show the speed of plain decoding
MLX_DRAFT_TOKENS = 3  # the default of mlx_lm's own commands


@dataclass(frozen=True, slots=True)
class Prompt:
    """The first turn of a prompt, as the token ids that every arm gets.

    A second turn would follow the arm's own first answer, so arms that differ in a token would get other prompts.
    """

    id: str
    category: str
    ids: tuple[int, ...]


def select_prompts(
    engine: Engine, candidates: Sequence[BenchPrompt], form: Form, tokens: int, context: int
) -> list[Prompt]:
    """Those that fit with `tokens` more. Raises click.ClickException where none does."""
    prompts = []
    for prompt in candidates:
        turn = prompt.turns[0]
        try:
            ids = engine.encode((Message("user", turn),) if form == "chat" else turn)
        except ContextOverflow:
            ids = []
        if ids and len(ids) + tokens < context:
            prompts.append(Prompt(prompt.id, prompt.category, tuple(ids)))
        else:
            click.echo(f"{prompt.id} is left out: too long for a context of {context}.", err=True)
    if not prompts:
        raise click.ClickException("no prompt fits into the context: give a larger --ctx.")
    return prompts


@dataclass(frozen=True, slots=True)
class Generation:
    """One generation as the reader of its stream saw it.

    tokens      None stands for a token that was counted but not sent
    arrivals    (time.perf_counter(), tokens so far), increasing in both
    rounds      target forwards after those that gave the first arrival
    busy_s      processor time of the arm's process between the first arrival and the last; 0 where it is not measured
    deciding_s  what the controller took of a round
    plain_s     what else a round of plain decoding took at that time, see `measure_plain`; None if too few show it
    """

    tokens: tuple[int | None, ...]
    arrivals: tuple[tuple[float, int], ...]
    rounds: int
    drafted: int
    accepted: int
    busy_s: float = 0.0
    deciding_s: float = 0.0
    plain_s: float | None = None

    @property
    def later(self) -> int:
        """Tokens after the first arrival, which is prefill's: one token, but a whole round in mlx_lm."""
        return self.arrivals[-1][1] - self.arrivals[0][1] if self.arrivals else 0

    @property
    def wall_s(self) -> float:
        return self.arrivals[-1][0] - self.arrivals[0][0] if self.arrivals else 0.0


def measure_plain(steps: Sequence[Step], wall_s: float) -> float | None:
    """Seconds of a round of plain decoding while `steps` were made, without the controller's.

    They are those of rounds without a draft that follow another one. So a draft is compared with times of the same
    seconds, while two answers one after the other differ with the machine's speed. `wall_s` is the time of all `steps`.
    None with less than MIN_PLAIN such rounds.
    """
    rest_s = [step.verify_s + step.sample_s + step.commit_s for step in steps]
    plain = [
        own_s
        for (last, step), own_s in zip(pairwise(steps), rest_s[1:], strict=True)
        if not last.n_drafted + step.n_drafted
    ]
    if len(plain) < MIN_PLAIN:
        return None
    between_s = wall_s - sum(rest_s) - sum(step.draft_s for step in steps)
    return sum(plain) / len(plain) + between_s / len(steps)


def processor_s(pid: int) -> float:
    """Processor time of a process, exact on Linux alone; 0 for no process."""
    return clock_gettime(~pid << 3 | 2) if pid else 0.0  # the clock that clock_getcpuclockid returns


class PeerFailed(Exception):
    """An arm cannot continue; the others can."""


class Arm(Protocol):
    """One program with one draft mode. The first word of its name is the program's."""

    name: str

    def generate(self, prompt: Prompt, tokens: int, temperature: float) -> Generation:
        """Up to `tokens` after `prompt`, which is read with an empty prompt cache. Raises PeerFailed."""


@dataclass
class Edgespec:
    """An engine process of edgespec, by its `pid`, with one Speculation; None is the engine's own, the autopilot.

    With `memory` it drafts from earlier answers.
    """

    name: str
    client: EngineProcess
    pid: int
    speculation: Speculation | None
    memory: MemoryUse | None = None

    def generate(self, prompt: Prompt, tokens: int, temperature: float) -> Generation:
        # A text without a token in common empties the cache: what it holds changes how the next prompt is read.
        other = TokenPrompt((prompt.ids[0] + 1 if prompt.ids[0] == 0 else prompt.ids[0] - 1,))
        list(self.client.stream(Request(other, max_tokens=0), Speculation()))
        arrivals: list[tuple[float, int]] = []
        steps: list[Step] = []
        start_s = 0.0
        sampling = SamplingParams(temperature=temperature)
        request = Request(TokenPrompt(prompt.ids), sampling, tokens, memory=self.memory)
        for event in self.client.stream(request, self.speculation):
            if isinstance(event, Step):
                start_s = start_s or processor_s(self.pid)
                steps.append(event)
                arrivals.append((perf_counter(), (arrivals[-1][1] if arrivals else 0) + len(event.tokens)))
            elif isinstance(event, Finished):
                finished = event
        m = finished.metrics
        counts = m.target_forwards, m.drafted_tokens, m.accepted_tokens
        found = Generation(finished.tokens, tuple(arrivals), *counts, processor_s(self.pid) - start_s)
        deciding_s = sum(step.draft_s for step in steps[1:]) / max(1, len(steps) - 1)
        return replace(found, deciding_s=deciding_s, plain_s=measure_plain(steps[1:], found.wall_s))


def open_edgespec(
    backend: BackendName, target: Path, draft: str, options: LoadOptions, stack: ExitStack
) -> tuple[EngineProcess, int]:
    """An engine process with the drafters that `draft` names and an empty memory, and its pid; `stack` ends it.

    Raises EdgespecError.
    """
    before = set(psutil.Process().children())
    memory = MemoryOptions(Path(stack.enter_context(tempfile.TemporaryDirectory())))
    client = EngineProcess()
    stack.callback(client.close)
    config = LoadConfig(str(target), backend, draft, load=options, memory=memory)
    list(client.open(config, TerminalReporter()))
    started = set(psutil.Process().children()) - before
    return client, max(started, key=lambda each: each.memory_info().rss).pid


@dataclass
class MlxLm:
    """mlx_lm's generators on `models` that it has loaded: a target, and perhaps a draft. Its caches are always new."""

    name: str
    models: Sequence[Any]
    stop: frozenset[int]

    def generate(self, prompt: Prompt, tokens: int, temperature: float) -> Generation:
        text: list[int] = []
        arrivals: list[tuple[float, int]] = []
        accepted = 0
        for token, drafted in self._steps(list(prompt.ids), tokens, temperature):
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

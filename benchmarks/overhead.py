"""What the loop costs: plain decoding through edgespec against bare llama_decode calls in the same process.

    uv run python -m benchmarks.overhead MODEL.gguf [--tokens 64] [--repeats 7] [--threads 1]

Both arms decode the same tokens after the same prompt, one row a call, interleaved A B B A. The bare arm fills a batch,
decodes, and waits for the logits; it neither samples nor keeps any record. The ratio is bare time / loop time, so 1.00
is no overhead. stdout ends with one JSON line.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from time import perf_counter

import click

from benchmarks.machine import describe
from edgespec.backends.llamacpp.model import LlamaModel, load
from edgespec.backends.llamacpp.session import LlamaSession
from edgespec.backends.options import LoadOptions
from edgespec.core.metrics import Metrics
from edgespec.core.sampling import SamplingParams
from edgespec.engine.drafting import Speculation
from edgespec.engine.engine import Engine
from edgespec.engine.events import Finished, Request
from edgespec.text.chat_template import encode_prompt

PROMPT = "def read_lines(path):\n    "


def loop_time(engine: Engine, tokens: int, temperature: float) -> tuple[float, tuple[int, ...], Metrics]:
    """Decode seconds (first token to last), the tokens, and the split."""
    sampling = SamplingParams(temperature=temperature, logit_bias=())
    *_, finished = engine.stream(Request(PROMPT, sampling, max_tokens=tokens, seed=1))
    assert isinstance(finished, Finished) and finished.metrics.tpot_s is not None
    return finished.metrics.tpot_s * (len(finished.tokens) - 1), finished.tokens, finished.metrics


def bare_time(session: LlamaSession, prompt: list[int], tokens: tuple[int, ...]) -> float:
    """Seconds for one llama_decode per token, without the last, which the loop does not decode either."""
    for _ in session.prefill(prompt):
        pass
    decode, synchronize = session._decode, session._lib.api.llama_synchronize
    started = perf_counter()
    for i, token in enumerate(tokens[:-1]):
        code = decode(session._context, session._batch.chain((token,), len(prompt) + i, outputs=1))
        synchronize(session._context)
        assert code == 0
    elapsed = perf_counter() - started
    session._tokens = [*prompt, *tokens[:-1]]  # so that the next prefill cuts them off
    return elapsed


@click.command()
@click.argument("model", type=click.Path(exists=True, path_type=Path))
@click.option("--tokens", default=64, show_default=True)
@click.option("--repeats", default=7, show_default=True)
@click.option("--threads", default=1, show_default=True)
@click.option("--temperature", default=0.0, show_default=True)
def main(model: Path, tokens: int, repeats: int, threads: int, temperature: float) -> None:
    target: LlamaModel = load(model, LoadOptions(threads=threads, context_size=512))
    engine = Engine(target, None, Speculation("none", 0, 0))
    session = target.open_session()
    prompt = encode_prompt(target.tokenizer, PROMPT, parse_special=True)
    _, reference, _ = loop_time(engine, tokens, temperature)
    bare_time(session, prompt, reference)
    ratios, loops, bares, splits = [], [], [], []
    for _ in range(repeats):
        first, _, split = loop_time(engine, tokens, temperature)
        middle = bare_time(session, prompt, reference), bare_time(session, prompt, reference)
        last, _, _ = loop_time(engine, tokens, temperature)
        loops.append((first + last) / 2)
        bares.append(sum(middle) / 2)
        ratios.append(bares[-1] / loops[-1])
        splits.append(split)
        click.echo(f"loop {loops[-1]:.4f} s, bare {bares[-1]:.4f} s, ratio {ratios[-1]:.4f}", err=True)
    n = len(reference) - 1
    result = {
        "benchmark": "overhead",
        "model": model.name,
        "tokens": n,
        "threads": threads,
        "temperature": temperature,
        "ratio_median": round(statistics.median(ratios), 4),
        "ratio_min": round(min(ratios), 4),
        "ratio_max": round(max(ratios), 4),
        "loop_ms_per_token": round(statistics.median(loops) / n * 1e3, 3),
        "bare_ms_per_token": round(statistics.median(bares) / n * 1e3, 3),
        **{
            f"{name}_us_per_token": round(statistics.median(getattr(s, f"{name}_s") for s in splits) / n * 1e6, 1)
            for name in ("draft", "verify", "sample", "commit")
        },
        **describe(model),
    }
    session.close()
    engine.close()
    click.echo(json.dumps(result))


if __name__ == "__main__":
    main()

"""What the loop costs: plain decoding through the whole engine against bare llama_decode calls in the same process.

    uv run python -m benchmarks.overhead MODEL.gguf [--tokens 64] [--repeats 7] [--threads 1]

Both arms decode the same tokens after the same prompt, one row a call, in the order loop, bare, bare, loop. The bare
arm fills a batch, decodes it and waits for the logits; it neither samples nor keeps a record. The ratio is bare time /
loop time: 1.00 means no overhead. stdout ends with one JSON line.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter

import click

from benchmarks.harness import MODEL_PATH, PLAIN, generate, print_result
from edgespec.backends.llamacpp.batch import NativeBatch
from edgespec.backends.llamacpp.library import library
from edgespec.backends.llamacpp.model import load
from edgespec.backends.llamacpp.session import LlamaSession
from edgespec.backends.options import LoadOptions
from edgespec.core.decoding import read_prompt
from edgespec.core.sampling import SamplingParams
from edgespec.engine.engine import Engine
from edgespec.engine.events import Finished, Request

PROMPT = "def read_lines(path):\n    "
PARTS = ("draft", "verify", "sample", "commit")  # of a step; verify is the target's forward


def decode_bare(session: LlamaSession, prompt: Sequence[int], tokens: Sequence[int]) -> float:
    """Seconds of one llama_decode per token, in the session's own context and sequence, after the prompt's prefill.

    The last token is left out, because the loop does not decode it either. Leaves the cache at the prompt's end. Raises
    click.ClickException.
    """
    read_prompt(session, prompt)
    api, native, sequence = library().api, session.context.native, session.sequence
    batch = NativeBatch(api, 1, 1)
    start_s = perf_counter()
    for position, token in enumerate(tokens[:-1], len(prompt)):
        batch.chain((token,), position, sequence, outputs=1)
        code = api.llama_decode(native.handle, batch.native)
        api.llama_synchronize(native.handle)
        batch.clear()
        if code:
            raise click.ClickException(f"llama_decode returned {code}.")
    elapsed_s = perf_counter() - start_s
    api.llama_memory_seq_rm(native.memory, sequence, len(prompt), -1)
    return elapsed_s


def decode_seconds(finished: Finished) -> float:
    """From the first token to the last."""
    assert finished.metrics.tpot_s is not None
    return finished.metrics.tpot_s * (len(finished.tokens) - 1)


@click.command()
@click.argument("model", type=MODEL_PATH)
@click.option("--tokens", type=click.IntRange(2), default=64, show_default=True)
@click.option("--repeats", type=click.IntRange(1), default=7, show_default=True)
@click.option("--threads", default=1, show_default=True)
@click.option("--temperature", default=0.0, show_default=True)
def main(model: Path, tokens: int, repeats: int, threads: int, temperature: float) -> None:
    """Time both arms on the GGUF file MODEL."""
    target = load(model, LoadOptions(threads=threads, context_size=512))
    engine, session = Engine(target, [], PLAIN), target.open_session()
    request = Request(PROMPT, SamplingParams(temperature=temperature), max_tokens=tokens, seed=1)
    prompt = engine.encode(PROMPT)
    text = generate(engine, PLAIN, request).tokens
    decode_bare(session, prompt, text)  # warm-up
    loops, bares, metrics = [], [], []
    for _ in range(repeats):
        first = generate(engine, PLAIN, request)
        bares.append(statistics.mean(decode_bare(session, prompt, text) for _ in range(2)))
        last = generate(engine, PLAIN, request)
        loops.append((decode_seconds(first) + decode_seconds(last)) / 2)
        metrics.append(first.metrics)
        click.echo(f"loop {loops[-1]:.4f} s, bare {bares[-1]:.4f} s, ratio {bares[-1] / loops[-1]:.4f}", err=True)
    session.close()
    engine.close()
    n = len(text) - 1
    ratios = [bare / loop for bare, loop in zip(bares, loops, strict=True)]
    result = {
        "model": model.name,
        "tokens": n,
        "threads": threads,
        "temperature": temperature,
        "ratio_median": round(statistics.median(ratios), 4),
        "ratio_min": round(min(ratios), 4),
        "ratio_max": round(max(ratios), 4),
        "loop_ms_per_token": round(statistics.median(loops) / n * 1e3, 3),
        "bare_ms_per_token": round(statistics.median(bares) / n * 1e3, 3),
    }
    for part in PARTS:
        median_s = statistics.median(getattr(each, f"{part}_s") for each in metrics)
        result[f"{part}_us_per_token"] = round(median_s / n * 1e6, 1)
    print_result("overhead", result, model)


if __name__ == "__main__":
    main()

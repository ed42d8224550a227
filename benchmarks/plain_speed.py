"""Plain decoding against llama.cpp's own `llama-bench` with its defaults: the same file, threads and context.

    uv run python -m benchmarks.plain_speed MODEL.gguf [--llama-bench PATH] [--context 700 ...] [--threads 1]

edgespec runs in its engine process, as the chat does, and measures its settings on load. Both decode `--tokens` after a
prompt of each length, llama-bench after `--n-depth` random tokens. They take turns; llama-bench is a new process each
time, of one repetition after its own warm-up. The ratio is edgespec's tokens/s over llama-bench's. stdout ends with one
JSON line.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from statistics import median

import click

from benchmarks.harness import MODEL_PATH, PLAIN, list_loaded, load_model, print_result
from benchmarks.peers_arms import Edgespec, PeerFailed, Prompt, open_edgespec
from edgespec.backends.options import LoadOptions
from edgespec.engine.engine import Engine
from edgespec.errors import EdgespecError

NO_PEER = "llama-bench was not found: install llama.cpp, or name the program with --llama-bench PATH."
CONTEXTS = (16, 700, 3000)  # tokens
START = "def f(x):\n    "  # continued by code where a prompt has to be longer


@click.command()
@click.argument("model", type=MODEL_PATH)
@click.option("--llama-bench", "peer", default="llama-bench", show_default=True, help="Name on PATH, or path.")
@click.option("--context", "contexts", type=click.IntRange(8), multiple=True, default=CONTEXTS, show_default=True)
@click.option("--tokens", type=click.IntRange(8), default=32, show_default=True)
@click.option("--repeats", type=click.IntRange(1), default=5, show_default=True)
@click.option("--threads", type=click.IntRange(1), default=1, show_default=True)
def main(model: Path, peer: str, contexts: Sequence[int], tokens: int, repeats: int, threads: int) -> None:
    """Compare plain decoding of MODEL at each context length."""
    binary = shutil.which(peer)
    if binary is None:
        raise click.ClickException(NO_PEER)
    options = LoadOptions(context_size=max(contexts) + tokens + 64, threads=threads)
    rows = []
    with ExitStack() as stack:
        try:
            with closing(Engine(load_model("llamacpp", model, options), list_loaded(), PLAIN)) as engine:
                texts = [extend_prompt(engine, START, length) for length in contexts]
                prompts = [Prompt(str(n), "", tuple(engine.encode(text))) for n, text in enumerate(texts)]
            os.environ["EDGESPEC_CACHE_DIR"] = stack.enter_context(tempfile.TemporaryDirectory())
            arm = Edgespec("edgespec plain", *open_edgespec("llamacpp", model, "ngram", options, stack), PLAIN)
            for length, prompt in zip(contexts, prompts, strict=True):
                rows.append(compare(arm, binary, model, length, prompt, tokens, repeats, threads))
                click.echo(rows[-1], err=True)
        except EdgespecError as error:
            raise click.ClickException(f"{error.message} {error.hint}") from error
        except PeerFailed as error:
            raise click.ClickException(str(error)) from error
    print_result("plain_speed", {"threads": threads, "tokens": tokens, "repeats": repeats, "contexts": rows}, model)


def compare(
    arm: Edgespec, binary: str, model: Path, length: int, prompt: Prompt, tokens: int, repeats: int, threads: int
) -> dict[str, float]:
    """Tokens/s of both, in turns, and the median of the ratios with its extremes."""
    arm.generate(prompt, 8, 0.0)  # a warm-up
    ours, theirs = [], []
    for i in range(repeats):
        if i % 2:
            theirs.append(run_llama_bench(binary, model, length, tokens, threads))
        found = arm.generate(prompt, tokens + 1, 0.0)
        ours.append(found.later / found.wall_s)
        if not i % 2:
            theirs.append(run_llama_bench(binary, model, length, tokens, threads))
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    return {
        "context": length,
        "prompt_tokens": len(prompt.ids),
        "edgespec": round(median(ours), 2),
        "llama_bench": round(median(theirs), 2),
        "ratio": round(median(ratios), 3),
        "ratio_min": round(min(ratios), 3),
        "ratio_max": round(max(ratios), 3),
    }


def extend_prompt(engine: Engine, text: str, length: int) -> str:
    """`text` behind as much code of a module of the standard library as makes about `length` tokens."""
    missing = length - len(engine.encode(text))
    if missing <= 0:
        return text
    code = Path(argparse.__file__).read_text(encoding="utf-8")
    sample = code[: 2 * missing]  # characters; fewer tokens than `missing` in any vocabulary of words
    end = round(len(sample) * missing / len(engine.encode(sample)))
    return f"{code[:end].rpartition(chr(10))[0]}\n\n\n{text}"


def run_llama_bench(binary: str, model: Path, depth: int, tokens: int, threads: int) -> float:
    """Tokens/s of one repetition. Raises PeerFailed."""
    command = [binary, "-m", str(model), "-p", "0", "-n", str(tokens), "-d", str(depth), "-t", str(threads)]
    done = subprocess.run([*command, "-r", "1", "-o", "json"], capture_output=True, text=True, check=False)
    if done.returncode:
        raise PeerFailed(f"llama-bench failed: {done.stderr.strip().splitlines()[-1:]}")
    speed: float = json.loads(done.stdout)[0]["avg_ts"]
    return speed


if __name__ == "__main__":
    main()

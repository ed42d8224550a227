"""The promise of --exact: greedy texts that drafts leave as they are, before and with forwards of one width; its price.

    uv run python -m benchmarks.exactness [--backend mlx] [--target T] [--draft D] [--quantize F16] [--threads 1]

Each way to draft runs over each prompt in each mode. The modes are the ordinary one, forwards of `--width` rows and, on
llama.cpp where it has them, kernels whose results do not depend on the rows. A text is equal if it is plain decoding's
of the same mode, to the last token. The difference of logits is the largest one between a forward of one token and the
same token in a draft of `--width` rows. The price is the time of a bare forward after `--context` tokens over that of
an ordinary one of one row: medians of rounds in which all modes take turns, with extremes. stdout ends with one JSON
line.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from time import perf_counter

import click
import numpy as np

from benchmarks.harness import CODE, DRAFT, MODEL_PATH, PLAIN, TARGET, generate, list_loaded, load_model, print_result
from edgespec.autopilot.speculation import Speculation
from edgespec.backends import BackendName, Model
from edgespec.backends.fixed_width import FixedWidthModel
from edgespec.backends.llamacpp.quantize import FTYPES, quantize
from edgespec.backends.options import EXACT_WIDTHS, LoadOptions
from edgespec.core.arrays import Logits
from edgespec.core.decoding import read_prompt
from edgespec.core.protocols import NO_DRAFT, Draft, Session
from edgespec.core.sampling import SamplingParams
from edgespec.engine.engine import Engine
from edgespec.engine.events import Request

ARMS = {
    "ngram, chain of 7": Speculation(("ngram",), 7, 7),
    "model, chain of 3": Speculation(("model",), 3, 3),
    "model, tree of 7, depth 3": Speculation(("model",), 3, 7),
    "autopilot": Speculation(("ngram", "model")),
}
_ROUNDS = 9


@click.command()
@click.option("--backend", type=click.Choice(["llamacpp", "mlx"]), default="llamacpp", show_default=True)
@click.option("--target", type=MODEL_PATH, default=TARGET)
@click.option("--draft", type=MODEL_PATH, default=DRAFT)
@click.option("--quantize", "ftype", type=click.Choice(list(FTYPES)), help="Use the target in this type (llama.cpp).")
@click.option("--width", type=click.Choice([str(width) for width in EXACT_WIDTHS[1:]]), default="4", show_default=True)
@click.option("--prompts", type=click.IntRange(1, len(CODE)), default=len(CODE), show_default=True)
@click.option("--tokens", type=click.IntRange(2), default=96, show_default=True)
@click.option(
    "--context", type=click.IntRange(1), default=512, show_default=True, help="Tokens before a timed forward."
)
@click.option("--threads", default=1, show_default=True)
@click.option("--price-only", is_flag=True, help="Generate no texts.")
def main(
    backend: BackendName,
    target: Path,
    draft: Path,
    ftype: str | None,
    width: str,
    prompts: int,
    tokens: int,
    context: int,
    threads: int,
    price_only: bool,
) -> None:
    """Compare the texts of four ways to draft with plain decoding's, in every mode."""
    options = LoadOptions(threads=threads, context_size=context + 1024)
    with tempfile.TemporaryDirectory() as folder:
        path = target
        if ftype:
            path = Path(folder) / f"{target.stem}-{ftype}.gguf"
            quantize(target, path, ftype)
        modes = open_modes(backend, path, options, int(width))
        texts: dict[str, dict[str, str]] = {}
        if not price_only:
            for name, each in modes.items():
                texts[name] = compare_texts(each, load_model(backend, draft, options), prompts, tokens)
        logits = {name: max_difference(each, int(width)) for name, each in modes.items()}
        price = time_modes(modes, context)
        for name, difference in logits.items():
            click.echo(f"{name}: {texts.get(name, '')} logits differ by {difference:.2g}", err=True)
        for name, cost in price.items():
            click.echo(f"{name}: {cost}", err=True)
    settings = {"backend": backend, "type": ftype, "width": int(width), "tokens": tokens, "context": context}
    found = {"equal_texts": texts, "logit_difference": logits, "price": price}
    print_result("exactness", {**settings, "threads": threads, "prompts": prompts, **found}, target, draft)


def open_modes(backend: BackendName, path: Path, options: LoadOptions, width: int) -> dict[str, Model]:
    """The target in every mode, by name."""
    ordinary = load_model(backend, path, options)
    modes: dict[str, Model] = {"ordinary": ordinary, f"{width} rows": FixedWidthModel(ordinary, width)}
    if backend == "llamacpp":
        invariant = load_model(backend, path, replace(options, exact=True))
        if invariant.is_row_invariant:
            modes["invariant kernels"] = invariant
        else:
            invariant.close()
    return modes


def compare_texts(target: Model, drafter: Model, n_prompts: int, n_tokens: int) -> dict[str, str]:
    """For each way to draft, how many greedy texts are plain decoding's, such as '19 of 20'."""
    engine = Engine(target, list_loaded(model=drafter), PLAIN)
    requests = [Request(prompt, SamplingParams(temperature=0), n_tokens) for prompt in CODE[:n_prompts]]
    plain = [generate(engine, PLAIN, request).tokens for request in requests]
    found = {}
    for name, speculation in ARMS.items():
        drafted = [generate(engine, speculation, request).tokens for request in requests]
        found[name] = f"{sum(a == b for a, b in zip(plain, drafted, strict=True))} of {len(plain)}"
    engine.release_draft()
    return found


def max_difference(target: Model, width: int) -> float:
    """The largest difference of a logit of 120 tokens, decoded one by one and in accepted drafts of `width` rows."""
    text = target.tokenizer.encode("\n\n".join(CODE), parse_special=False)[:150]
    plain, drafted = (_decode(target, text, n) for n in (0, width - 1))
    return max(float(np.abs(plain[at] - drafted[at]).max()) for at in plain)


def _decode(target: Model, text: list[int], n: int) -> dict[int, Logits]:
    """Logits by position of `text`, whose tokens after the 30th are scored in drafts of `n`."""
    session = target.open_session()
    read_prompt(session, text[:30])
    found: dict[int, Logits] = {}
    while (at := session.position) < len(text):
        draft = text[at + 1 : at + 1 + min(n, session.draft_limit)]
        scores = session.forward(text[at], Draft.chain(draft))
        found |= {at + row: scores.logits(row).copy() for row in range(len(draft) + 1)}
        session.commit(range(len(draft)))
    session.close()
    return found


def time_modes(modes: Mapping[str, Model], context: int) -> dict[str, str]:
    """A forward without a draft in each mode and at each width: '1.81 [1.5 to 2.2] times, 102.1 ms'.

    The first is the median, with extremes, of the ratios to the ordinary forward of one row in the same round.
    """
    arms: dict[str, Callable[[], None]] = {}
    sessions: list[Session] = []
    for name, target in modes.items():
        if isinstance(target, FixedWidthModel):
            continue
        session = target.open_session()
        sessions.append(session)
        size = session.capabilities.vocab_size
        read_prompt(session, [(i * 7919 + 11) % size for i in range(context)])
        for width in EXACT_WIDTHS:
            arms[f"{name}, {width} row{'s' if width > 1 else ''}"] = _forward(session, width, context)
    times: dict[str, list[float]] = {name: [] for name in arms}
    for i in range(_ROUNDS + 1):
        for name in list(arms) if i % 2 else list(reversed(arms)):
            started = perf_counter()
            arms[name]()
            if i:  # the first is the warm-up
                times[name].append((perf_counter() - started) * 1e3)
    for session in sessions:
        session.close()
    base = next(iter(times.values()))
    found = {}
    for name, measured in times.items():
        ratios = [one / other for one, other in zip(measured, base, strict=True)]
        spread = f"{statistics.median(ratios):.2f} [{min(ratios):.2f} to {max(ratios):.2f}] times"
        found[name] = f"{spread}, {statistics.median(measured):.2f} ms"
    return found


def _forward(session: Session, width: int, context: int) -> Callable[[], None]:
    draft = Draft.chain([5] * (width - 1)) if width > 1 else NO_DRAFT

    def run() -> None:
        session.forward(5, draft).argmax()
        session.commit(())
        session.rewind(context)

    return run


if __name__ == "__main__":
    main()

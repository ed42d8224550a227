"""How often the probe of a trained head finds the right reading, and how long it takes.

    uv run python -m benchmarks.head_probe TARGET HEAD [--backend mlx] [--tokens 256] [--threads 1]

HEAD is taken to say what is true. The probe then gets what HEAD says, and each reading that differs from it in one
convention, as if a file had said so. It should come back to what HEAD says. stdout ends with one JSON line.
"""

from __future__ import annotations

from pathlib import Path
from time import perf_counter

import click

from benchmarks.harness import MODEL_PATH, load_model, print_result
from edgespec.backends import BackendName
from edgespec.backends.options import LoadOptions
from edgespec.engine.head_probe import N_TOKENS, HeadProbe, describe_reading, list_readings
from edgespec.formats.head_file import read_head


@click.command()
@click.argument("target", type=MODEL_PATH)
@click.argument("head", type=MODEL_PATH)
@click.option("--backend", type=click.Choice(["llamacpp", "mlx"]), default="llamacpp", show_default=True)
@click.option("--tokens", type=click.IntRange(32), default=N_TOKENS, show_default=True)
@click.option("--threads", default=1, show_default=True)
def main(target: Path, head: Path, backend: BackendName, tokens: int, threads: int) -> None:
    """Tamper with each convention of HEAD and probe it beside TARGET."""
    spec = read_head(head)
    if spec is None:
        raise click.BadParameter(f"{head} holds no trained head.")
    model = load_model(backend, target, LoadOptions(threads=threads, context_size=max(512, 2 * tokens)))
    true = spec.complete(model.layer_count)
    rows = []
    for stated in [true, *list_readings(true, backend, model.layer_count)]:
        start_s = perf_counter()
        found = HeadProbe(model, head, backend, n_tokens=tokens).run(stated)
        rows.append(
            {
                "stated": describe_reading(stated),
                "found": describe_reading(found.chosen.spec),
                "right": found.chosen.spec == true,
                "agreement": [round(each, 3) for each in found.chosen.agreement],
                "stated_agreement": [round(each, 3) for each in found.stated.agreement] if found.stated else None,
                "seconds": round(perf_counter() - start_s, 2),
            }
        )
        click.echo(str(rows[-1]), err=True)
    model.close()
    options = {"kind": true.kind, "backend": backend, "tokens": tokens, "threads": threads}
    print_result("head_probe", {**options, "probes": rows}, target, head)


if __name__ == "__main__":
    main()

"""Sliding-window models beyond their window: edgespec's and mlx_lm's speculative output against plain decoding.

    uv run python -m laboratory.mlx_window [--tokens 96] [--models 5]

Random-weight gemma3 pairs with a window of 24 tokens, greedy. mlx_lm checks only once, before it starts, whether the
caches can be trimmed. Reported: the first token where each leaves mlx_lm's own plain output. stdout ends with one JSON
line.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

import click
import gguf

from benchmarks.harness import CODE, TARGET, generate, load_pair, print_result
from edgespec.autopilot.speculation import Speculation
from edgespec.backends.mlx.library import load_mlx
from edgespec.backends.options import LoadOptions
from edgespec.core.sampling import SamplingParams
from edgespec.engine.events import Request
from laboratory.embedding.vocabulary import to_folder

WINDOW, DRAFT_MAX = 24, 3
DRAFT_SEEDS = 100  # added to a target's seed
CONFIG = {
    "model_type": "gemma3_text",
    "hidden_size": 64,
    "num_hidden_layers": 7,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "max_position_embeddings": 2048,
    "sliding_window": WINDOW,
    "sliding_window_pattern": 6,  # every sixth layer has full attention
    "query_pre_attn_scalar": 32,
    "bos_token_id": 0,
    "eos_token_id": 0,
}


@click.command()
@click.option("--tokens", type=click.IntRange(1), default=96, show_default=True)
@click.option("--models", type=click.IntRange(1), default=5, show_default=True)
def main(tokens: int, models: int) -> None:
    """Compare both programs on pairs of random models."""
    load_mlx()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(models):
            target, draft = (write_model(Path(folder) / str(s), s) for s in (seed, seed + DRAFT_SEEDS))
            rows.append(compare(target, draft, tokens))
            click.echo(rows[-1], err=True)
    print_result("mlx_window", {"tokens": tokens, "first_difference": rows})


def write_model(path: Path, seed: int) -> Path:
    """A folder with random weights and the embedded pair's vocabulary; logits have a standard deviation of about 3."""
    import mlx.core as mx
    from mlx.utils import tree_flatten
    from mlx_lm.models.gemma3_text import Model, ModelArgs

    fields = {name: field.contents() for name, field in gguf.GGUFReader(TARGET).fields.items()}
    fields["tokenizer.ggml.add_bos_token"] = False
    config = {**CONFIG, "vocab_size": len(fields["tokenizer.ggml.tokens"])}
    mx.random.seed(seed)
    model = Model(ModelArgs.from_dict(config))
    model.eval()
    model.lm_head.weight *= 3 / mx.std(model(mx.array([[5, 9, 21, 3]])))
    path.mkdir()
    mx.save_safetensors(str(path / "model.safetensors"), dict(tree_flatten(model.parameters())), {"format": "mlx"})
    (path / "config.json").write_text(json.dumps(config))
    for name, content in to_folder(fields).items():
        (path / name).write_bytes(content)
    return path


def compare(target: Path, draft: Path, tokens: int) -> dict[str, int | None]:
    """Prompt length, and where each program's speculative output leaves mlx_lm's plain one; None: nowhere."""
    import mlx.core as mx
    from mlx_lm.generate import generate_step, speculative_generate_step
    from mlx_lm.utils import load_model

    engine = load_pair("mlx", target, draft, LoadOptions(context_size=512))
    request = Request(CODE[3], SamplingParams(temperature=0), tokens)
    text = generate(engine, Speculation(("model",), DRAFT_MAX, DRAFT_MAX), request).tokens
    prompt = mx.array(engine.encode(CODE[3]))
    models = [load_model(path)[0] for path in (target, draft)]
    plain = [int(token) for token, _ in generate_step(prompt, models[0], max_tokens=tokens)]
    steps = speculative_generate_step(prompt, *models, num_draft_tokens=DRAFT_MAX, max_tokens=tokens)
    drafted = [int(token) for token, _, _ in steps]
    return {
        "prompt": prompt.size,
        "edgespec": first_difference(plain, text),
        "mlx_lm": first_difference(plain, drafted),
    }


def first_difference(plain: Sequence[int], other: Sequence[int]) -> int | None:
    """The first position where they differ; None where one begins with the other."""
    return next((i for i, (a, b) in enumerate(zip(plain, other, strict=False)) if a != b), None)


if __name__ == "__main__":
    main()

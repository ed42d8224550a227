"""What a head on MLX saves, and loses, if it scores the frequent tokens of its target alone.

    uv run python -m laboratory.head_vocabulary [--shape 1b] [--vocabulary 131072] [--keep 4] [--kept 1024]

Price: a llama of random 4-bit weights and of this shape, with an MTP layer of the same kind, that scores all tokens and
one in --keep of them. Milliseconds are the least of three rounds; a round drafts three tokens, and the target scores
them. Acceptance: the trained heads of tests/fixtures/heads beside the embedded model, three tokens in every round,
greedily, with all 4,096 tokens and with the --kept frequent ones. stdout ends with one JSON line.
"""

from __future__ import annotations

import json
import tempfile
from contextlib import closing
from pathlib import Path
from time import perf_counter
from typing import Any

import click
import mlx.core as mx
import numpy as np
from mlx.nn import quantize
from mlx_lm.models.llama import Model as Llama
from mlx_lm.models.llama import ModelArgs

from benchmarks.harness import PLAIN, REPOSITORY, TARGET, generate, load_model, print_result
from edgespec.autopilot.speculation import Speculation
from edgespec.backends.attached_draft import AttachedHead
from edgespec.backends.head_session import HeadSession
from edgespec.backends.mlx.heads import MlxHead, open_head
from edgespec.backends.mlx.heads.draft_vocabulary import ShortVocabulary, choose_frequent
from edgespec.backends.mlx.model import MlxModel
from edgespec.backends.options import LoadOptions
from edgespec.bench.prompt_sets import read_shipped_prompts
from edgespec.core.decoding import read_prompt
from edgespec.core.metrics import Metrics
from edgespec.core.protocols import Draft
from edgespec.core.sampling import SamplingParams
from edgespec.drafters.registry import drafter_specs
from edgespec.engine.engine import Engine
from edgespec.engine.events import Request
from edgespec.engine.loaded_drafter import LoadedDrafter
from edgespec.formats.head_file import read_head
from edgespec.models.drafts import DrafterPlan
from edgespec.text.tokenizer import Tokenizer
from laboratory.embedding.shapes import SHAPES, Shape

HEADS = REPOSITORY / "tests" / "fixtures" / "heads"
KINDS = ("mtp", "eagle", "dflash", "dspark", "medusa", "hydra")
DRAFT, HEAD_WIDTH, GROUP = 3, 64, 64
TEXT, REPEATS = 8, 3  # tokens of the text; rounds


@click.command()
@click.option("--shape", type=click.Choice(list(SHAPES)), default="1b", show_default=True)
@click.option("--vocabulary", type=click.IntRange(4096), default=2**17, show_default=True)
@click.option("--keep", type=click.IntRange(2), default=4, show_default=True, help="One in so many tokens.")
@click.option("--kept", type=click.IntRange(256, 4096), default=1024, show_default=True, help="By the trained heads.")
@click.option("--head", "kinds", type=click.Choice(KINDS), multiple=True, default=KINDS, show_default=True)
@click.option("--prompts", type=click.IntRange(1), default=8, show_default=True)
@click.option("--tokens", type=click.IntRange(2), default=48, show_default=True)
def main(shape: str, vocabulary: int, keep: int, kept: int, kinds: tuple[str, ...], prompts: int, tokens: int) -> None:
    """Measure the price on random weights and the acceptance of trained heads."""
    price = measure_price(SHAPES[shape].with_heads(HEAD_WIDTH), vocabulary, keep)
    click.echo(f"{shape}, {vocabulary:,} tokens: {price}", err=True)
    texts = [each.turns[0] for each in read_shipped_prompts(["code_completion"])][:prompts]
    acceptance = {kind: measure_acceptance(HEADS / f"{kind}-python-6m", kept, texts, tokens) for kind in kinds}
    for kind, found in acceptance.items():
        click.echo(f"{kind:8} {found}", err=True)
    options = {"shape": shape, "vocabulary": vocabulary, "keep": keep, "kept": kept, "tokens": tokens}
    print_result("head_vocabulary", {**options, "price": price, "acceptance": acceptance}, TARGET)


def measure_price(shape: Shape, vocabulary: int, keep: int) -> dict[str, float]:
    """Milliseconds of a draft with all tokens and with some, and of the target's forward on it."""
    small = load_model("mlx", TARGET, LoadOptions())
    tokenizer: Any = PaddedTokenizer(small.tokenizer, vocabulary)
    args = describe_llama(shape, vocabulary)
    network = Llama(ModelArgs.from_dict(args))
    quantize(network, GROUP, 4)
    network.set_dtype(mx.float32)
    mx.eval(network.parameters())
    model = MlxModel(network, tokenizer, None, 256, None)
    with tempfile.TemporaryDirectory() as name:
        folder = write_random_mtp(Path(name), shape, args)
        spec = read_head(folder)
        assert spec is not None
        head = open_head(model.network, model.layer_count, tokenizer, folder, spec)
    short = head.network.shorten(mx.array(choose_frequent(tokenizer, vocabulary // keep)))
    whole_s, target_s = time_round(head, model)
    head.network = short
    short_s, _ = time_round(head, model)
    found = {"draft_ms": whole_s, "short_draft_ms": short_s, "forward_ms": target_s}
    found = {name: round(1000 * seconds, 2) for name, seconds in found.items()}
    head.close()
    model.close()
    return found | {"saved": round((whole_s - short_s) / (whole_s + target_s), 3)}


def time_round(head: MlxHead, model: MlxModel) -> tuple[float, float]:
    """(seconds of a draft of three tokens, seconds of the target's forward on it); the least of a few rounds."""
    text, times = list(range(TEXT)), []
    with closing(model.open_session()) as session, closing(head.open_session(session)) as draft:
        assert isinstance(draft, HeadSession)
        read_prompt(session, text[:-1])
        draft.begin(text)
        for _ in range(REPEATS):
            started = perf_counter()
            found = draft.rollout(text, len(text), DRAFT)
            tokens = [] if found is None else found[0].tokens.tolist()
            drafted = perf_counter()
            next_token = int(session.forward(text[-1], Draft.chain(tokens)).argmax()[0])
            times.append((drafted - started, perf_counter() - drafted))
            session.commit(())
            text.append(next_token)
    first, second = zip(*times, strict=True)
    return min(first), min(second)


class PaddedTokenizer:
    """A tokenizer for scores of more tokens than it has."""

    def __init__(self, own: Tokenizer, vocab_size: int) -> None:
        self._own = own
        self.vocab_size = vocab_size

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)


def describe_llama(shape: Shape, vocabulary: int) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "hidden_size": shape.width,
        "num_hidden_layers": shape.layers,
        "intermediate_size": shape.ffn,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head,
        "rms_norm_eps": 1e-5,
        "vocab_size": vocabulary,
        "tie_word_embeddings": False,
    }


def write_random_mtp(folder: Path, shape: Shape, args: dict[str, Any]) -> Path:
    """An MTP layer like those of the target, in 4 bits, that shares its embeddings and output matrix."""
    queries, keys = shape.heads * shape.head, shape.kv_heads * shape.head
    matrices = {
        "fc": (shape.width, 2 * shape.width),
        "layers.0.self_attn.q_proj": (queries, shape.width),
        "layers.0.self_attn.k_proj": (keys, shape.width),
        "layers.0.self_attn.v_proj": (keys, shape.width),
        "layers.0.self_attn.o_proj": (shape.width, queries),
        "layers.0.mlp.gate_proj": (shape.ffn, shape.width),
        "layers.0.mlp.up_proj": (shape.ffn, shape.width),
        "layers.0.mlp.down_proj": (shape.width, shape.ffn),
    }
    layer = ("layers.0.input_layernorm", "layers.0.post_attention_layernorm")
    norms = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm", *layer)
    arrays = {f"mtp.{name}.weight": mx.ones(shape.width) for name in norms}
    for name, size in matrices.items():
        parts = mx.quantize(mx.random.normal(size) * size[1] ** -0.5, GROUP, 4)
        arrays |= {f"mtp.{name}.{part}": each for part, each in zip(("weight", "scales", "biases"), parts, strict=True)}
    mx.save_safetensors(str(folder / "model.safetensors"), arrays)
    config = {**args, "mtp_num_hidden_layers": 1, "quantization": {"group_size": GROUP, "bits": 4}}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def measure_acceptance(folder: Path, kept: int, texts: list[str], tokens: int) -> dict[str, float]:
    """Tokens a round of one head with all tokens and with the `kept` frequent ones, and texts that equal plain ones."""
    model = load_model("mlx", TARGET, LoadOptions(context_size=1024))
    spec = read_head(folder)
    assert spec is not None
    head = model.load_head(spec, folder)
    assert isinstance(head, MlxHead)
    engine = Engine(model, [LoadedDrafter(DrafterPlan(drafter_specs()[head.name]), head)], PLAIN)
    ids = choose_frequent(model.tokenizer, kept)
    is_kept = np.isin(np.arange(model.tokenizer.vocab_size), ids)
    network = head.network
    short = ShortVocabulary(network.shorten(mx.array(ids)), is_kept, saved=2.0)
    found: dict[str, float] = {}
    plain, outside = [], []
    for text in texts:
        finished = generate(engine, PLAIN, Request(text, SamplingParams(temperature=0.0), tokens))
        plain.append(list(finished.tokens))
        outside += [not is_kept[token] for token in finished.tokens]
    for name, network.short in (("tau", None), ("short_tau", short)):
        runs = [run(engine, head, text, tokens) for text in texts]
        found[name] = round(sum(m.emitted_tokens - 1 for m, _ in runs) / sum(m.target_forwards for m, _ in runs), 2)
        found[f"{name}_same"] = sum(each == right for (_, each), right in zip(runs, plain, strict=True))
    engine.close()
    return found | {"outside": round(sum(outside) / len(outside), 3)}


def run(engine: Engine, head: AttachedHead, text: str, tokens: int) -> tuple[Metrics, list[int]]:
    """One answer with three drafted tokens in every round."""
    finished = generate(
        engine, Speculation((head.name,), DRAFT), Request(text, SamplingParams(temperature=0.0), tokens)
    )
    return finished.metrics, list(finished.tokens)


if __name__ == "__main__":
    main()

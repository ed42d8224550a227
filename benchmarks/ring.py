"""What speculation gains over a ring of MLX ranks on a slow network, against the formula.

    uv run python -m benchmarks.ring [--ranks 2] [--rtt-ms 5 ...]

Every rank is a process on a host of its own of `benchmarks.slow_link`. The target is the embedded one, widened by zeros
so that 2, 3 and 4 ranks can share its heads; its text does not change. For each delay it continues code, plainly and
with drafts of a fixed length of the embedded draft model, in turns. Texts that are not those of one process are
counted, and those among them that rounding explains. A layer adds up the ranks' parts twice, and a sum of n ranks takes
n - 1 round trips; the operation reaches the other ranks after half of one. The formula is E (T1 + N) / (R + N). T1 and
R are the times without a delay, of a plain step and of a round (verification and draft). E is tokens a round, and N the
network's time. stdout ends with one JSON line. Linux, and rights to make network namespaces.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click

from benchmarks.harness import CODE, DRAFT, EDGESPEC, PLAIN, TARGET, ask, end, list_loaded, load_model, print_result
from benchmarks.slow_link import SlowLink, find_obstacle
from benchmarks.workers import Client
from edgespec.backends.options import LoadOptions
from edgespec.engine.engine import Engine
from edgespec.engine.team import load_leading
from edgespec.formats.gguf_validate import read_file
from edgespec.machines.ranks import RANK, listen_for_ranks, take_ranks
from edgespec.models.resolve import LocalModel
from edgespec.progress import reporting

_RANK_0 = "rank0"  # the first argument of the process that decides
_PORT = 32323
_HEADS, _HIDDEN = 12, 384  # of the widened target


@click.command()
@click.option("--ranks", "count", type=click.IntRange(2, 4), default=2, show_default=True)
@click.option(
    "--rtt-ms", "delays_ms", type=click.FloatRange(0), multiple=True, default=(0.1, 1, 5, 20), show_default=True
)
@click.option("--draft-max", type=click.IntRange(1), default=3, show_default=True)
@click.option("--autopilot", is_flag=True, help="Measure its choice too.")
@click.option("--prompts", type=click.IntRange(1, len(CODE)), default=2, show_default=True)
@click.option("--tokens", type=click.IntRange(2), default=32, show_default=True)
@click.option("--repeats", type=click.IntRange(1), default=3, show_default=True)
def main(count: int, delays_ms: Sequence[float], **sizes: Any) -> None:
    """Compare plain and speculative decoding by delay."""
    if reason := find_obstacle():
        raise click.ClickException(f"There is no slow network: {reason}.")
    with TemporaryDirectory() as name, SlowLink(count) as link, ExitStack() as stack:
        folder = Path(name)
        n_layers = write_target(folder / "target")
        hosts = folder / "hosts.json"
        hosts.write_text(json.dumps([[f"{link.address(host)}:{_PORT}"] for host in range(count)]))
        environment = {**os.environ, "MLX_HOSTFILE": str(hosts)}
        words = [str(folder / "target"), json.dumps(sizes)]
        client = subprocess.Popen(
            link.command(0, [sys.executable, "-m", "benchmarks.ring", _RANK_0, *words]),
            env={**environment, RANK: "0"}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        for rank in range(1, count):
            follower = link.command(rank, [*EDGESPEC, "run"])
            stack.callback(end, subprocess.Popen(follower, env={**environment, RANK: str(rank)}))
        stack.callback(end, client)  # the first to end
        rows: list[dict[str, Any]] = []
        ask(client)  # the first forwards take longer
        for delay_ms in (0.0, *delays_ms):
            link.set(delay_ms / 1000)
            rows.append({"set_ms": delay_ms, "rtt_ms": 1000 * link.measure_rtt(), **ask(client)})
            trips = 2 * n_layers * (count - 1) + 0.5
            _add_formula(rows[-1], rows[0], trips)
            click.echo(rows[-1], err=True)
    print_result("ring", {**sizes, "ranks": count, "delays": rows}, TARGET, DRAFT)


def _add_formula(row: dict[str, Any], first: dict[str, Any], trips: float) -> None:
    """The network's time of a forward, measured and by `trips`, and the gain that the formula gives from the latter."""
    network_s = trips * (row["rtt_ms"] - first["rtt_ms"]) / 1000
    step_s, round_s, tokens = first["plain"]["round_s"], first["drafts"]["round_s"], row["drafts"]["tokens_per_round"]
    row["network_s"] = row["plain"]["round_s"] - step_s
    row["formula_network_s"] = network_s
    row["formula_gain"] = tokens * (step_s + network_s) / (round_s + network_s)


def write_target(folder: Path) -> int:
    """Write the embedded target with more heads, of which the added ones are zeros; returns its number of layers."""
    import mlx.core as mx
    from mlx.utils import tree_flatten
    from mlx_lm.utils import dequantize_model

    from edgespec.backends.mlx.gguf_llama import load_gguf_llama

    model, config = load_gguf_llama(TARGET)
    dequantize_model(model)
    weights = {name: each.astype(mx.float32) for name, each in tree_flatten(model.parameters())}
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    hidden, width = config["hidden_size"], config["head_dim"]
    inner = {"q_proj": 0, "k_proj": 0, "v_proj": 0, "o_proj": 1}  # the axis of the heads
    for name, matrix in weights.items():
        part = name.rsplit(".", 2)[-2]
        if part in ("k_proj", "v_proj"):  # for each query head its own
            grouped = mx.repeat(matrix.reshape(kv_heads, width, -1), heads // kv_heads, axis=0)
            matrix = grouped.reshape(heads * width, -1)
        if part.endswith("norm"):
            matrix = matrix * (hidden / _HIDDEN) ** 0.5
        sizes = [_HIDDEN if size == hidden else size for size in matrix.shape]
        if part in inner:
            sizes = [_HIDDEN, _HIDDEN]
            sizes[inner[part]] = _HEADS * width
        weights[name] = mx.pad(matrix, [(0, new - old) for new, old in zip(sizes, matrix.shape, strict=True)])
    config |= {"num_attention_heads": _HEADS, "num_key_value_heads": _HEADS, "hidden_size": _HIDDEN}
    config["rms_norm_eps"] *= hidden / _HIDDEN
    folder.mkdir()
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config))
    _write_tokenizer(folder)
    return int(config["num_hidden_layers"])


def _write_tokenizer(folder: Path) -> None:
    """The vocabulary of the embedded target, which is byte-level BPE."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

    fields: dict[str, Any] = dict(read_file(TARGET).metadata)
    tokens, kinds = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    merges = [tuple(each.split(" ")) for each in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == 3]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{special[0]} $A", special_tokens=[(special[0], tokens.index(special[0]))]
    )
    (folder / "tokenizer.json").write_text(tokenizer.to_str())
    names = {"bos_token": special[0], "eos_token": special[0], "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))


class _Reporter:
    """Says nothing."""

    def notice(self, text: str) -> None:
        """Nobody waits for it."""

    def download(self, name: str, done: int, total: int) -> None:
        """Nobody waits for it."""

    def loading(self, name: str, fraction: float) -> None:
        """Nobody waits for it."""


def _lead(target: str, sizes: str) -> None:
    """Load the model over the ranks, then measure once for each line of the input."""
    path, options = Path(target), LoadOptions(context_size=512)
    ranks = take_ranks()
    assert ranks is not None
    listen_for_ranks(ranks)
    with ExitStack() as stack:
        alone = stack.enter_context(closing(Engine(load_model("mlx", path, options), [], PLAIN)))
        pair = list_loaded(model=load_model("mlx", DRAFT, options))
        with reporting(_Reporter()):
            split = load_leading(LocalModel(path, "mlx"), path, options)
        engine = stack.enter_context(closing(Engine(split, pair, PLAIN)))
        client = Client(engine, alone, **json.loads(sizes))
        for _ in sys.stdin:
            print(json.dumps(client.measure()), flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == [_RANK_0]:
        _lead(*sys.argv[2:])
    else:
        main()

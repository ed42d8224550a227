"""Commands over several ranks of MLX on this machine: equal texts, and the ends of ranks."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from edgespec.backends.attached_draft import Unsupported, parse
from edgespec.backends.options import LoadOptions
from edgespec.core.decoding import read_prompt
from edgespec.core.protocols import Draft
from edgespec.errors import InvalidRequest
from edgespec.machines.ranks import RANK
from tests.backends.mlx_pairs import read_spec
from tests.gguf_models import DRAFT, REPOSITORY
from tests.mlx_models import CONFIGS, DENSE, make_folder
from tests.ranks import RANK_CONFIGS, load_on_two_ranks, start_rank, write_hosts
from tests.zygote import run_command

WIDE = {**DENSE, "hidden_size": 96, "intermediate_size": 192, "num_attention_heads": 12, "num_key_value_heads": 12}
HEAD = REPOSITORY / "tests" / "fixtures" / "heads" / "eagle3-python-6m"
END_S = 60.0  # of ranks that wait for each other on a busy machine


class Ranks:
    """The same command on several ranks; those that still run at the end are killed."""

    def __init__(self, folder: Path, n: int, arguments: Sequence[str]) -> None:
        hosts = write_hosts(folder, n)
        self.processes = [start_rank(rank, hosts, arguments) for rank in range(n)]

    def wait(self) -> tuple[str, str]:
        """What rank 0 has printed, once all have ended."""
        out, err = self.processes[0].communicate(timeout=120)
        for other in self.processes[1:]:
            assert other.communicate(timeout=END_S)[0] == ""
        return out, err

    def close(self) -> None:
        for each in self.processes:
            if each.poll() is None:
                each.kill()
                each.communicate()


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("ranks") / "wide", WIDE)


def run_on(stack: ExitStack, folder: Path, n: int, arguments: Sequence[str]) -> Ranks:
    ranks = Ranks(folder, n, ("run", *arguments))
    stack.callback(ranks.close)
    return ranks


def command(model: Path | str, *more: str) -> list[str]:
    return ["def f(x):", "--model", str(model), "--backend", "mlx", "--ctx", "256", "--no-memory", "--max-tokens", "24",
            *more]  # fmt: skip


def test_the_text_is_that_of_one_process(stack: ExitStack, tmp_path: Path, wide: Path) -> None:
    options = ("--temperature", "0", "--draft", "ngram+recycling", "--draft-max", "3", "--draft-tree", "7")
    alone = run_alone(command(wide, *options))
    text, err = run_on(stack, tmp_path, 3, command(wide, *options)).wait()
    assert text == alone, err
    assert len(text) > 20


def test_a_head_of_a_split_target_drafts(stack: ExitStack, tmp_path: Path) -> None:
    arguments = command("python-6m", "--temperature", "0", "--draft", str(HEAD), "--draft-max", "3")
    alone = run_alone(arguments)
    text, err = run_on(stack, tmp_path, 2, arguments).wait()
    assert text == alone, err
    assert re.search(r" [1-9]\d* of \d+ drafted accepted", err), "tokens of the head were accepted"


def run_alone(arguments: Sequence[str]) -> str:
    done = run_command(("run", *arguments), dict(os.environ), REPOSITORY, b"")
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_killed_rank_is_named_and_ends_the_command(stack: ExitStack, tmp_path: Path, wide: Path) -> None:
    arguments = command(wide, "--temperature", "0", "--ctx", "2048", "--max-tokens", "2000", "--draft", "none")
    first, killed = run_on(stack, tmp_path, 2, arguments).processes
    assert first.stdout is not None
    first.stdout.read(20)  # the answer has begun
    killed.send_signal(signal.SIGKILL)
    _, err = first.communicate(timeout=END_S)
    assert first.returncode == 7
    assert "error: Rank 1 of 2 has ended.\nhint: Start all ranks again.\n" in err


def test_no_rank_outlives_rank_0(stack: ExitStack, tmp_path: Path, wide: Path) -> None:
    arguments = command(wide, "--temperature", "0", "--ctx", "2048", "--max-tokens", "2000", "--draft", "none")
    ranks = run_on(stack, tmp_path, 2, arguments)
    first, other = ranks.processes
    assert first.stdout is not None
    first.stdout.read(20)
    first.kill()
    assert other.communicate(timeout=END_S)[0] == ""
    assert other.returncode == 0


def test_ctrl_c_ends_all_ranks(stack: ExitStack, tmp_path: Path, wide: Path) -> None:
    arguments = command(wide, "--temperature", "0", "--ctx", "2048", "--max-tokens", "2000", "--draft", "none")
    ranks = run_on(stack, tmp_path, 2, arguments)
    assert ranks.processes[0].stdout is not None
    ranks.processes[0].stdout.read(20)
    for each in reversed(ranks.processes):  # a terminal sends it to all
        each.send_signal(signal.SIGINT)
    ranks.processes[0].communicate(timeout=END_S)
    assert ranks.processes[0].returncode == 130
    assert ranks.processes[1].wait(END_S) == 0


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["run", "hi"], 2, "error: Under mlx.launch a model runs on MLX, and python-6m opens with llama.cpp."),
        (["run", "hi", "--model", "./nothing", "--backend", "mlx"], 3, "error:"),
    ],
)
def test_commands_that_load_nothing_end_all_ranks(
    stack: ExitStack, tmp_path: Path, arguments: list[str], code: int, said: str
) -> None:
    ranks = Ranks(tmp_path, 2, arguments)
    stack.callback(ranks.close)
    _, err = ranks.wait()
    assert ranks.processes[0].returncode == code
    assert said in err
    assert ranks.processes[1].returncode == 0


def test_what_cannot_be_split_is_refused_and_the_next_model_loads(tmp_path: Path) -> None:
    options = LoadOptions(context_size=256)
    with pytest.raises(InvalidRequest, match=r"2 ranks cannot share \d+ attention heads and 1 key-value heads"):
        load_on_two_ranks(DRAFT, options)
    with pytest.raises(InvalidRequest, match="cannot split a model of type mamba"):
        load_on_two_ranks(make_folder(tmp_path / "mamba", CONFIGS["recurrent"]), options)
    model = load_on_two_ranks(make_folder(tmp_path / "dense", DENSE), options)
    assert model.description.endswith("on 2 ranks")
    assert RANK not in os.environ, "children of rank 0 are no ranks"
    session = model.open_session()
    expected = read_prompt(session, [1, 2, 3]).logits(0)
    found = parse("layerskip:1")
    assert found is not None
    with pytest.raises(Unsupported, match="cannot draft for itself"):
        model.make_self_draft(found, folder=tmp_path)
    session.rewind(2)
    assert abs(session.forward(3, Draft.chain([])).logits(0) - expected).max() < 1e-3
    session.close()
    model.close()


def test_a_head_is_refused_where_the_output_matrix_is_split(tmp_path: Path) -> None:
    model = load_on_two_ranks(
        make_folder(tmp_path / "target", RANK_CONFIGS["gated-delta"]), LoadOptions(context_size=256)
    )
    with pytest.raises(Unsupported, match="output matrix"):
        model.load_head(read_spec(HEAD), HEAD)
    model.close()

"""Forwards of one width: scores are equal to the last bit, drafted or not, where kernels change with the rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from edgespec.backends import Model, open_model
from edgespec.backends.fixed_width import FixedWidthSession, check_width, rank_widths
from edgespec.backends.llamacpp.quantize import quantize
from edgespec.backends.options import EXACT_WIDTHS, LoadOptions
from edgespec.backends.toy_session import ToyModel, ToySession
from edgespec.core.arrays import Logits
from edgespec.core.decoding import read_prompt
from edgespec.core.peers import YIELD
from edgespec.core.protocols import NO_DRAFT, Draft, PrefillProgress, Session
from edgespec.core.scores import Scores
from edgespec.errors import ContextOverflow
from tests.gguf_models import MAKERS, llama
from tests.mlx_models import CONFIGS, make_folder

TEXT = [(i * 37 + 5) % 4000 for i in range(90)]
TOY = ToyModel(seed=3, vocab_size=64)


def open_(backend: str, path: Path, **options: object) -> Model:
    chosen = LoadOptions(context_size=300, threads=1, **options)  # type: ignore[arg-type]
    return open_model(backend, path, chosen)  # type: ignore[arg-type]


def make(name: str, folder: Path) -> Model:
    """Floats on llama.cpp, repacked weights, a ring of recurrent states, MLX. Most kernels change with the rows."""
    if name.startswith("mlx-"):
        return open_("mlx", make_folder(folder / name, CONFIGS[name.removeprefix("mlx-")]))
    path = folder / f"{name}.gguf"
    if name in ("Q4_0", "Q4_K_M"):
        llama(folder / "wide.gguf", width=256)
        quantize(folder / "wide.gguf", path, name)
        return open_("llamacpp", path, kv_type="q8_0" if name == "Q4_0" else "f16")
    MAKERS[name](path)
    return open_("llamacpp", path)


@pytest.fixture(scope="module", params=["llama", "sliding-window", "hybrid", "Q4_0", "Q4_K_M", "mlx-dense"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    opened = make(request.param, tmp_path_factory.mktemp("models"))
    yield opened
    opened.close()


def decode(session: Session, draft: Callable[[int], list[int]], kept: Callable[[int], int]) -> list[Logits]:
    """Logits [V] of TEXT's tokens from the 20th on: `draft(position)` is scored, `kept(position)` accepted at most."""
    read_prompt(session, TEXT[:20])
    session.checkpoint()
    found: list[Logits] = []
    while (at := session.position) < len(TEXT):
        drafted = draft(at)[: session.draft_limit]
        scores = session.forward(TEXT[at], Draft.chain(drafted))
        right = next((i for i, token in enumerate(drafted) if [token] != TEXT[at + 1 + i : at + 2 + i]), len(drafted))
        accepted = min(right, kept(at))
        found += [scores.logits(row).copy() for row in range(1 + accepted)]
        session.commit(range(accepted))
    return found[: len(TEXT) - 20]


def wrong(at: int, n: int) -> list[int]:
    return [(at * 11 + i * 7 + 1) % 4000 for i in range(n)]


@pytest.mark.parametrize("width", EXACT_WIDTHS)
def test_no_draft_changes_a_bit(model: Model, width: int) -> None:
    def scores(draft: Callable[[int], list[int]], kept: Callable[[int], int] = lambda at: 9) -> list[Logits]:
        session = FixedWidthSession(model.open_session(), width)
        found = decode(session, draft, kept)
        session.close()
        return found

    plain = scores(lambda at: [])
    drafts: dict[str, list[Logits]] = {
        "right": scores(lambda at: TEXT[at + 1 : at + 9]),
        "half right": scores(lambda at: [*TEXT[at + 1 : at + 3], *wrong(at, 5)]),
        "wrong": scores(lambda at: wrong(at, at % 8)),
        "cut": scores(lambda at: TEXT[at + 1 : at + 9], lambda at: at % 4),
    }
    for name, found in drafts.items():
        assert len(found) == len(plain)
        for at, (a, b) in enumerate(zip(plain, found, strict=True)):
            assert (a == b).all(), (name, at, float(np.abs(a - b).max()))


class NarrowWhenPlain(FixedWidthSession):
    """A mutant: one row less without a draft."""

    def forward(self, root: int, draft: Draft, *, run_ahead: bool = False) -> Scores:
        if len(draft):
            return super().forward(root, draft)
        return self.inner.forward(root, Draft.chain([root] * max(0, self.draft_limit - 1)))


class Unfilled(FixedWidthSession):
    """A mutant: no filler at all."""

    def forward(self, root: int, draft: Draft, *, run_ahead: bool = False) -> Scores:
        return self.inner.forward(root, draft)


@pytest.mark.parametrize("mutant", [NarrowWhenPlain, Unfilled])
def test_forwards_of_other_widths_would_be_seen(mutant: type[FixedWidthSession], tmp_path: Path) -> None:
    """On weights of floats, one row and several take different kernels. Two or more take the same."""
    model = make("llama", tmp_path)
    width = 2
    plain = decode(mutant(model.open_session(), width), lambda at: [], lambda at: 9)
    drafted = decode(mutant(model.open_session(), width), lambda at: TEXT[at + 1 : at + 9], lambda at: 9)
    assert any((a != b).any() for a, b in zip(plain, drafted, strict=True))


def test_a_model_that_replays_accepted_tokens_is_found(tmp_path: Path) -> None:
    """llama.cpp keeps no ring of states for Mamba: what was accepted runs again, in a forward of another width."""
    mamba = make("mamba", tmp_path)
    assert not check_width(mamba, 4)
    assert check_width(mamba, 1)
    hybrid = make("hybrid", tmp_path)
    assert check_width(hybrid, 8)


def toy(width: int, size: int = 2000) -> FixedWidthSession:
    return FixedWidthSession(ToySession(TOY, context_size=size, chunk=512), width)


def test_every_forward_has_the_width_and_filler_is_not_scored() -> None:
    session = toy(4)
    read_prompt(session, [1, 2, 3])
    for n in range(4):
        scores = session.forward(5, Draft.chain([6, 7, 8][:n]))
        assert session.inner.draft_limit == 2000 - 4 and len(scores.argmax()) == n + 1
        with pytest.raises(IndexError):
            scores.logits(n + 1)
        session.rewind(3)
    with pytest.raises(ValueError, match="chains only"):
        session.forward(5, Draft(np.array([6, 7], np.int32), np.array([-1, -1], np.int32)))
    assert not session.capabilities.tree


def test_the_filler_fits_at_the_end_of_the_context() -> None:
    session = toy(4, size=100)
    assert session.capabilities.context_size == 97
    with pytest.raises(ContextOverflow):
        read_prompt(session, [1] * 98)
    read_prompt(session, [1] * 96)
    assert session.draft_limit == 0
    session.forward(5, NO_DRAFT)
    session.commit(())
    assert session.position == 97


def test_drafts_do_not_cross_the_cells_at_which_kernels_change() -> None:
    """A drafted token sees as many cells, rounded up or down to 256, as it would as the root of the next forward."""
    session, width = toy(8), 8
    read_prompt(session, [1])
    while session.position < 1100:
        at, limit = session.position, session.draft_limit
        ends = [at + i + width for i in range(limit + 1)]
        assert len({end // 256 for end in ends}) == len({-(-end // 256) for end in ends}) == 1
        assert limit == width - 1 or len({(end + 1) // 256 for end in ends} | {-(-(ends[-1] + 1) // 256)}) > 1
        session.forward(3, Draft.chain([4] * limit))
        session.commit(range(0, limit, 1))


def reused(session: Session, tokens: Sequence[int]) -> int:
    first = next(event for event in session.prefill(tokens) if event is not YIELD)
    assert isinstance(first, PrefillProgress)
    read_prompt(session, tokens)
    return first.reused


def test_only_whole_chunks_of_a_prompt_are_reused() -> None:
    """So a prompt is read in the same chunks whatever the cache held."""
    prompt = [(i * 31) % 61 for i in range(1100)]
    session = toy(4)
    assert reused(session, prompt) == 0
    assert reused(session, [*prompt, 1, 2]) == 1024
    assert reused(session, prompt[:1024]) == 512, "its last token is scored"
    session.forward(7, NO_DRAFT)
    session.commit(())
    assert reused(session, [*prompt[:1024], 7, 8]) == 512, "the last chunk of a prompt may have been cut"
    assert reused(session, [9, *prompt]) == 0
    session.rewind(700)
    assert reused(session, [9, *prompt]) == 512


class CoarseSession(ToySession):
    """Can return to multiples of 300 tokens only, as where checkpoints of a recurrent state lie."""

    def rewind(self, position: int) -> int:
        return super().rewind(position // 300 * 300 if position < self.position else position)


def test_a_recurrent_session_starts_again_where_its_checkpoint_is_no_chunk() -> None:
    prompt = [(i * 31) % 61 for i in range(600)]
    alone = CoarseSession(TOY, context_size=2000)
    read_prompt(alone, prompt)
    assert reused(alone, [*prompt[:512], 1]) == 300, "which is no chunk"
    session = FixedWidthSession(CoarseSession(TOY, context_size=2000), 2)
    read_prompt(session, prompt)
    assert reused(session, [*prompt, 1]) == 0


def test_the_cheapest_width_is_chosen() -> None:
    flat = dict.fromkeys(range(1, 17), 1.0)
    assert rank_widths(flat)[0] == 8
    linear = {n: float(n) for n in range(1, 17)}
    assert rank_widths(linear)[0] == 1
    assert rank_widths({1: 1.0, 2: 1.3, 4: 1.6, 8: 2.9})[0] == 4
    assert rank_widths({1: 1.0, 2: 1.2}) == [2, 1]

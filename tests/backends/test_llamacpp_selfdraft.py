"""Self-drafts on llama.cpp: what they run is what they say, and the target's text stays its own."""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from edgespec.backends.attached_draft import AttachedDraft, SelfDraftSpec, Unsupported, parse
from edgespec.backends.llamacpp.library import library
from edgespec.backends.llamacpp.low_bit import evict, low_bit_copy
from edgespec.backends.llamacpp.model import LlamaModel, load
from edgespec.backends.llamacpp.prune import prune
from edgespec.backends.llamacpp.selfdraft import SLACK
from edgespec.backends.llamacpp.session import LlamaSession
from edgespec.backends.options import LoadOptions
from edgespec.cancel import cancellable
from edgespec.core.arrays import Logits
from edgespec.core.protocols import NO_DRAFT, Draft, Session
from edgespec.errors import Cancelled, DoesNotFit, InvalidModelFile, InvalidRequest
from edgespec.files import lock_file
from edgespec.formats.gguf_validate import read_file
from edgespec.machines.memory import Memory
from tests.contract.runtimes import prefill
from tests.gguf_models import TARGET, GgufBuilder, hybrid, llama, mamba, mixture, sliding_window

OPTIONS = LoadOptions(context_size=1024, threads=1)
PATTERN = [1, 1, 0, 1, 1, 0, 1]  # 1 for a layer with a window
TEXT = [5, 9, 14, 33, 7, 21, 40, 12, 5, 9, 14, 2, 60, 11, 8, 17, 29, 3, 44, 50] * 12


@pytest.fixture(scope="module")
def target() -> Iterator[LlamaModel]:
    model = load(TARGET, OPTIONS)
    yield model
    model.close()


def draft_of(target: LlamaModel, method: str, folder: Path) -> AttachedDraft:
    found = parse(method)
    assert found is not None and str(found) == method
    return target.make_self_draft(found, folder=folder)


def attach(draft: AttachedDraft, target: LlamaSession) -> LlamaSession:
    session = draft.open_session(target)
    assert isinstance(session, LlamaSession)
    return session


def logits(session: Session, tokens: list[int]) -> Logits:
    z = prefill(session, tokens).copy()
    session.close()
    return z


def pruned_by_llama_cpp(layers: list[int], path: Path) -> Path:
    """TARGET without `layers`, written by llama.cpp itself."""
    api = library().api
    params = api.llama_model_quantize_default_params()
    params.only_copy = True
    gone = (ctypes.c_int32 * (len(layers) + 1))(*layers, -1)
    params.prune_layers = ctypes.cast(gone, ctypes.POINTER(ctypes.c_int32))
    assert api.llama_model_quantize(os.fsencode(TARGET), os.fsencode(path), params) == 0
    return path


@pytest.mark.parametrize("kept", [(0, 1), (0, 1, 5), (1, 3, 4, 5)])
def test_fewer_layers_are_what_llama_cpp_makes_of_them(
    target: LlamaModel, kept: tuple[int, ...], tmp_path: Path
) -> None:
    reference = load(pruned_by_llama_cpp([i for i in range(6) if i not in kept], tmp_path / "pruned.gguf"), OPTIONS)
    draft = target.make_self_draft(SelfDraftSpec(kept), folder=tmp_path)
    idle = target.open_session()
    np.testing.assert_array_equal(
        logits(draft.open_session(idle), TEXT[:40]), logits(reference.open_session(), TEXT[:40])
    )
    assert 0 < draft.extra_bytes < TARGET.stat().st_size
    assert [p.name for p in tmp_path.iterdir()] == ["pruned.gguf"]  # the copy is in memory
    idle.close()
    draft.close()
    reference.close()


def test_a_follower_has_the_targets_text_without_reading_it(target: LlamaModel, tmp_path: Path) -> None:
    theirs = target.open_session()
    draft = draft_of(target, "sparse:4,512", tmp_path)  # with room for everything: the same model, the same cache
    ours = attach(draft, theirs)
    prefill(theirs, TEXT[:50])
    assert ours.position == 50
    for root in (7, 8):
        expected = theirs.forward(root, NO_DRAFT).logits(0).copy()
        assert np.abs(ours.forward(root, NO_DRAFT).logits(0) - expected).max() < 0.05
        ours.commit(())
        ours.forward(60, NO_DRAFT)  # goes on in vain
        ours.commit(())
        theirs.commit(())
        assert ours.position == theirs.position
    assert ours.rewind(3) == theirs.position == 52  # never below the target's
    theirs.rewind(20)
    assert ours.position == 20
    steps = ours.prefill(TEXT[:20])
    assert [step.done for step in steps] == [20]
    ours.close()
    theirs.close()


def test_with_several_slots_the_text_comes_from_the_target_too(tmp_path: Path) -> None:
    """A model that has lent no cells until it was opened has streams, and its first draft reads the text."""
    target = load(TARGET, replace(OPTIONS, caches=3))
    theirs = target.open_session(shared=True)
    draft = draft_of(target, "sparse:4,200", tmp_path)
    for has_streams in (True, False):
        assert theirs.context.has_streams == has_streams
        ours = attach(draft, theirs)
        prefill(theirs, TEXT[:50])
        assert ours.position == (0 if has_streams else 50)
        list(ours.prefill(TEXT[:50]))
        expected = theirs.forward(7, NO_DRAFT).logits(0).copy()
        assert np.abs(ours.forward(7, NO_DRAFT).logits(0) - expected).max() < 0.15
        ours.close()
        theirs.close()
        theirs = target.open_session(shared=True)
    theirs.close()
    target.close()


def test_a_sparse_cache_keeps_its_size_and_its_ends(target: LlamaModel, tmp_path: Path) -> None:
    sink, window = 4, 24
    draft = draft_of(target, f"sparse:{sink},{window}", tmp_path)
    theirs = target.open_session()
    ours = attach(draft, theirs)
    api, sizes, far = library().api, [], []
    for n in (20, 100, 200, 240):
        prefill(theirs, TEXT[:n])
        assert ours.position == n
        for token in TEXT[:SLACK]:  # as many as fit at once
            ours.forward(token, NO_DRAFT)
            ours.commit(())
        sizes.append(api.llama_state_seq_get_size(ours.context.native.handle, 0))
        ours.rewind(0)
        expected = theirs.forward(3, NO_DRAFT).logits(0).copy()
        far.append(float(np.abs(ours.forward(3, NO_DRAFT).logits(0) - expected).max()))
        ours.commit(())
        theirs.commit(())
    assert far[0] < 0.1 < min(far[1:])  # a short text is seen in full, a long one is not
    assert sizes[1] == sizes[2] == sizes[3]  # whatever the length of the text
    ours.close()
    theirs.close()


def test_a_sparse_session_reads_a_text_of_its_own(target: LlamaModel, tmp_path: Path) -> None:
    draft = draft_of(target, "sparse:2,8", tmp_path)
    idle = target.open_session()
    session = attach(draft, idle)
    for length in (240, 10, 130, 131):
        assert np.isfinite(prefill(session, TEXT[:length])).all() and session.position == length
        session.forward(1, Draft.chain(list(range(1, 60))))
        session.commit(range(20))
        assert session.position == length + 21
    session.close()
    idle.close()


def test_cells_are_lent_as_long_as_a_draft_copies_them(tmp_path: Path) -> None:
    """Meanwhile all slots are over the same ones, and attention passes over the texts of the others."""
    target = load(TARGET, replace(OPTIONS, caches=2))
    assert target.has_streams
    first, second, pruned = (draft_of(target, method, tmp_path) for method in ("sparse:2,8", "qspec:2", "layerskip:2"))
    for each in (first, first, pruned):
        each.close()
    assert not target.has_streams
    second.close()
    assert target.has_streams
    target.close()


def test_low_bits_are_made_once_and_found_again(target: LlamaModel, tmp_path: Path) -> None:
    made = low_bit_copy(TARGET, 2, tmp_path / "a")
    assert made.name == "target-q2_k.gguf" and made.stat().st_size < TARGET.stat().st_size
    before = made.stat().st_ino
    assert low_bit_copy(TARGET, 2, tmp_path / "a").stat().st_ino == before
    other = low_bit_copy(TARGET, 4, tmp_path / "b")
    os.utime(made, (1, 1))
    evict(tmp_path, other.stat().st_size)
    assert other.exists() and not made.exists()


def test_a_build_that_is_stopped_leaves_nothing_to_be_used(tmp_path: Path) -> None:
    def check() -> None:
        raise Cancelled

    (tmp_path / "x").mkdir()
    (tmp_path / "x" / ".target-q2_k.gguf.abc").write_bytes(b"half of an earlier one")
    other = tmp_path / "x" / ".target-q4_0.gguf.abc"
    other.write_bytes(b"what another process is writing")
    with pytest.raises(Cancelled), cancellable(check):
        low_bit_copy(TARGET, 2, tmp_path / "x")
    assert {*(tmp_path / "x").iterdir()} == {other, tmp_path / "x" / "lock"}


def test_what_another_process_makes_is_waited_for(tmp_path: Path) -> None:
    """It is used then, and neither removed nor made once more."""
    (tmp_path / "target-q2_k.gguf.part").write_bytes(b"what it has written")
    asked: list[None] = []

    def check() -> None:
        asked.append(None)
        if len(asked) == 2:
            (tmp_path / "target-q2_k.gguf.part").rename(tmp_path / "target-q2_k.gguf")
            theirs.close()

    with ExitStack() as theirs, cancellable(check):
        theirs.enter_context(lock_file(tmp_path / "lock", wait=False))
        made = low_bit_copy(TARGET, 2, tmp_path)
    assert made.read_bytes() == b"what it has written" and len(asked) == 2


def test_a_damaged_source_is_refused(tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(TARGET.read_bytes()[:1_000_000])
    with pytest.raises(InvalidModelFile, match="cut short"):
        low_bit_copy(broken, 2, tmp_path / "x")
    with pytest.raises(InvalidModelFile, match="cut short"), prune(broken, (0, 1)):
        pass
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("method", ["layerskip:1", "qspec:4"])
def test_experts_stay_in_ram_as_those_of_the_target(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mixture(tmp_path / "model.gguf")
    asked = []
    monkeypatch.setattr(
        "edgespec.backends.llamacpp.model.place_tensors", lambda params, places: asked.append([*places])
    )
    for options in ({}, {"n_cpu_moe": 1, "override_tensor": "blk.*norm=CPU"}):
        model = load(tmp_path / "model.gguf", LoadOptions(context_size=64, threads=1, **options))
        draft_of(model, method, tmp_path).close()
        model.close()
    plain, plain_draft, placed, placed_draft = asked
    assert plain == plain_draft == [] and placed_draft[: len(placed)] == placed
    assert any(re.match(pattern, "blk.1.ffn_up_exps.weight") for pattern, _ in placed_draft)


@pytest.mark.parametrize(
    ("method", "reason"),
    [
        ("layerskip:2+sparse:4,16", "does not combine sparse with layerskip"),
        ("layerskip:6", "6 layers"),
        ("layerskip:0,9", "6 layers"),
        ("layerskip:0,1,2,3,4,5", "6 layers"),
    ],
)
def test_what_cannot_be_is_said(target: LlamaModel, method: str, reason: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=reason):  # or Unsupported, which is one
        draft_of(target, method, tmp_path)


@pytest.mark.parametrize(
    ("maker", "exit_after", "refused", "why"),
    [
        (llama, 1, "layerskip:0,1", "2 layers"),
        (sliding_window, 6, "layerskip:0,1,2,3,4,6", "finds the window layers of gemma3 by number"),
        (mamba, 1, "sparse:4,16", "this model has recurrent states"),
        (
            partial(sliding_window, pattern=PATTERN),
            3,
            "layerskip:2,5",
            "cannot run model.gguf with only its layers 2",
        ),
        (hybrid, None, "layerskip:3", "cannot run model.gguf with only its layers 0, 1, 2"),
        (hybrid, None, "layerskip:0,1,3", "finds the recurrent layers of .* by number"),
        (hybrid, None, "sparse:4,16", "this model has recurrent states"),
    ],
)
def test_other_architectures(
    maker: Callable[[Path], None], exit_after: int | None, refused: str, why: str, tmp_path: Path
) -> None:
    maker(tmp_path / "model.gguf")
    model = load(tmp_path / "model.gguf", LoadOptions(context_size=256, threads=1))
    idle = model.open_session()
    if exit_after is not None:
        draft = draft_of(model, f"layerskip:{exit_after}", tmp_path)
        assert np.isfinite(logits(draft.open_session(idle), TEXT[:20])).all()
        draft.close()
    with pytest.raises(InvalidRequest, match=why):
        draft_of(model, refused, tmp_path)
    idle.close()
    model.close()


def test_layers_keep_their_windows(tmp_path: Path) -> None:
    sliding_window(tmp_path / "model.gguf", pattern=PATTERN)
    with prune(tmp_path / "model.gguf", (0, 2, 3, 5)) as part:
        pattern = read_file(part.path).per_block("attention.sliding_window_pattern")
        assert pattern == (1, 0, 1, 0)
        model = load(part.path, OPTIONS)
    assert model.has_window and np.isfinite(logits(model.open_session(), TEXT[:60])).all()
    model.close()


def test_recurrent_layers_that_the_file_states_leave_gaps(tmp_path: Path) -> None:
    """llama.cpp computes them from the number where it does not."""
    hybrid(tmp_path / "model.gguf", recurrent=[1, 1, 1, 0])
    model = load(tmp_path / "model.gguf", OPTIONS)
    idle = model.open_session()
    draft = draft_of(model, "layerskip:0,3", tmp_path)
    assert np.isfinite(logits(draft.open_session(idle), TEXT[:20])).all()
    draft.close()
    with pytest.raises(Unsupported, match="with only its layer 0"):
        draft_of(model, "layerskip:1", tmp_path)
    idle.close()
    model.close()


def test_a_copy_keeps_norms_and_short_rows_as_they_are(tmp_path: Path) -> None:
    """llama.cpp quantizes those that it does not know by name, and aborts in a forward."""
    m = GgufBuilder(tmp_path / "model.gguf", "llama", layers=1, width=64)
    m.attention(heads=4, kv_heads=2, head_width=16)
    m.embeddings(64)
    names = {"blk.0.ple_norm_key.weight": (4, 64), "blk.0.ple_conv1d.weight": (64, 4), "blk.0.ffn_up.weight": (64, 64)}
    for name, (rows, columns) in names.items():
        m.matrix(name.removesuffix(".weight"), rows, columns)
    m.save()
    copy = low_bit_copy(tmp_path / "model.gguf", 4, tmp_path / "x")
    types = {tensor.name: tensor.type.name for tensor in read_file(copy).tensors if tensor.name in names}
    assert types == dict(zip(names, ("F32", "F32", "Q4_0"), strict=True))


def test_layers_that_do_not_fit_are_refused_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgespec.backends.llamacpp.prune.host_memory", lambda: Memory(1000))
    with pytest.raises(DoesNotFit, match="2 layers of target"), prune(TARGET, (0, 1)):
        pass


def test_few_bits_are_not_made_of_few(target: LlamaModel, tmp_path: Path) -> None:
    two = low_bit_copy(TARGET, 2, tmp_path / "a")
    with pytest.raises(Unsupported, match="the draft was to have 4"):
        low_bit_copy(two, 4, tmp_path / "b")

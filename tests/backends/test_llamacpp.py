"""The llama.cpp backend below the Session contract: loading, vocabulary, quantizing, capabilities."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgespec.backends.llamacpp.library import library
from edgespec.backends.llamacpp.model import LlamaModel, load
from edgespec.backends.llamacpp.quantize import quantize
from edgespec.backends.llamacpp.rollback import CutCache, SnapshotCache, SnapshotRing
from edgespec.backends.options import LoadOptions, idle_cores, physical_cores
from edgespec.core.protocols import NO_DRAFT, Draft
from edgespec.errors import BackendError, CacheError, Cancelled, InvalidModelFile, InvalidRequest
from edgespec.text.vocabulary import vocabulary_mismatch
from tests.models import DRAFT, MAKERS, TARGET, trained

OPTIONS = LoadOptions(threads=1, context_size=256)


@pytest.fixture(scope="module")
def target() -> LlamaModel:
    return load(TARGET, OPTIONS)


def test_loading_reports_progress_and_can_be_cancelled() -> None:
    seen: list[float] = []
    load(TARGET, OPTIONS, progress=seen.append).close()
    assert seen == sorted(seen)
    assert seen[-1] == 1.0

    def stop() -> None:
        raise Cancelled

    with pytest.raises(Cancelled):
        load(TARGET, OPTIONS, check=stop)


def test_without_mapping_the_weights_are_the_same(target: LlamaModel) -> None:
    other = load(TARGET, LoadOptions(threads=1, context_size=256, mmap=False))
    logits = []
    for model in (target, other):
        session = model.open_session()
        for _ in session.prefill([1, 2, 3]):
            pass
        logits.append(session.forward(4, NO_DRAFT).logits(0).tolist())
        session.close()
    other.close()
    assert logits[0] == logits[1]


def test_a_file_that_llama_cpp_refuses_names_the_reason(tmp_path: Path) -> None:
    file = tmp_path / "bad.gguf"
    file.write_bytes(b"GGUF" + bytes(40))
    with pytest.raises(InvalidModelFile, match=r"cannot load bad\.gguf: .+\.$"):
        load(file, OPTIONS)
    with pytest.raises(InvalidModelFile, match=r"none\.gguf"):
        load(tmp_path / "none.gguf", OPTIONS)


def test_a_context_that_cannot_be_allocated_is_an_error(target: LlamaModel) -> None:
    huge = load(TARGET, LoadOptions(threads=1, context_size=2**24, kv_type="q8_0", flash_attention=True))
    huge.context_size = 2**31 - 256  # three terabytes of cache
    with pytest.raises(BackendError, match="could not set up a context"):
        huge.open_session()
    huge.close()


@pytest.mark.parametrize("kv_type", ["f16", "q8_0", "q4_0"])
def test_cache_types_agree_within_their_precision(target: LlamaModel, kv_type: str) -> None:
    other = load(TARGET, LoadOptions(threads=1, context_size=256, kv_type=kv_type))  # type: ignore[arg-type]
    prompt = target.tokenizer.encode("import os\nimport sys\n", parse_special=False)
    best = []
    for model in (target, other):
        session = model.open_session()
        for _ in session.prefill(prompt):
            pass
        best.append(int(session.forward(prompt[0], NO_DRAFT).argmax()[0]))
        session.close()
    other.close()
    assert best[0] == best[1]


def test_the_vocabulary_round_trips_and_matches_its_draft(target: LlamaModel) -> None:
    tokenizer = target.tokenizer
    for text in ("def f(x):\n    return x", "naïve — ünïcode 🦙\0 end", "   \n\t", "x" * 5000, ""):
        tokens = tokenizer.encode(text, parse_special=False)
        assert b"".join(map(tokenizer.piece, tokens)).decode() == text
    special = tokenizer.special_text(0)
    assert tokenizer.encode(special, parse_special=True) == [0]
    assert tokenizer.encode(special, parse_special=False) != [0]
    assert tokenizer.piece(0) == b""
    assert (tokenizer.bos, tokenizer.add_bos) == (0, True)
    assert 0 in tokenizer.end_of_generation
    for wrong in (-1, tokenizer.vocab_size):
        with pytest.raises(ValueError, match="not in"):
            tokenizer.piece(wrong)
    draft = load(DRAFT, OPTIONS)
    assert vocabulary_mismatch(tokenizer, draft.tokenizer) is None
    draft.close()


@pytest.mark.parametrize("ftype", ["Q4_0", "Q8_0"])
def test_quantizing_makes_a_model_that_works(tmp_path: Path, ftype: str) -> None:
    made = tmp_path / "made.gguf"
    quantize(trained("target"), made, ftype)
    model = load(made, OPTIONS)
    assert ftype in model.description
    session = model.open_session()
    for _ in session.prefill([1, 2, 3]):
        pass
    assert session.forward(4, Draft.chain([5, 6])).argmax().shape == (3,)
    session.close()
    model.close()


def test_quantizing_leaves_nothing_half_done(tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(TARGET.read_bytes()[:100_000])
    with pytest.raises(BackendError, match="could not quantize"):
        quantize(broken, tmp_path / "out.gguf", "Q8_0")
    with pytest.raises(InvalidRequest):
        quantize(TARGET, tmp_path / "out.gguf", "Q9_9")
    with pytest.raises(CacheError):
        quantize(TARGET, tmp_path / "no" / "folder.gguf", "Q8_0")
    assert [p.name for p in tmp_path.iterdir()] == ["broken.gguf"]


@pytest.mark.parametrize(
    ("name", "rollback", "tree"),
    [
        ("llama", CutCache, True),
        ("sliding-window", CutCache, True),
        ("mamba", SnapshotCache, False),
        ("hybrid", SnapshotRing, False),
    ],
)
def test_each_architecture_gets_its_rollback(tmp_path: Path, name: str, rollback: type, tree: bool) -> None:
    MAKERS[name](tmp_path / "m.gguf")
    model = load(tmp_path / "m.gguf", OPTIONS)
    session = model.open_session()
    assert type(session._rollback) is rollback
    assert session.capabilities.tree is tree
    session.close()
    model.close()


def test_the_log_is_kept_and_quiet(capfd: pytest.CaptureFixture[str]) -> None:
    load(TARGET, OPTIONS).close()
    assert capfd.readouterr().err == ""
    library().log.echo = True
    try:
        load(TARGET, OPTIONS).close()
    finally:
        library().log.echo = False
    assert "llama" in capfd.readouterr().err


def test_devices_and_cores() -> None:
    assert any(device.kind == "cpu" and device.total > 0 for device in library().devices())
    assert 1 <= idle_cores() <= physical_cores()

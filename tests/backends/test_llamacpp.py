"""The llama.cpp backend below the Session contract: loading, vocabulary, quantizing, capabilities."""

from __future__ import annotations

import re
import resource
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from edgespec.backends.llamacpp.library import NativeLog, library, list_handles
from edgespec.backends.llamacpp.model import LlamaModel, load
from edgespec.backends.llamacpp.quantize import quantize
from edgespec.backends.options import LoadOptions
from edgespec.cancel import cancellable
from edgespec.core.decoding import read_prompt
from edgespec.core.protocols import NO_DRAFT, Draft
from edgespec.errors import BackendError, CacheError, Cancelled, ContextOverflow, InvalidModelFile
from edgespec.models.tokenizer_compat import find_tokenizer_mismatch
from edgespec.progress import loading, reporting
from tests.contract.runtimes import prefill
from tests.gguf_models import DRAFT, MAKERS, TARGET, GgufBuilder, cogvlm, find_trained
from tests.reporter import Heard

OPTIONS = LoadOptions(threads=1, context_size=256)


@pytest.fixture(scope="module")
def target() -> LlamaModel:
    return load(TARGET, OPTIONS)


def test_loading_reports_progress_and_can_be_cancelled() -> None:
    heard = Heard()
    with reporting(heard), loading("it"):
        load(TARGET, OPTIONS).close()
    seen = heard.fractions
    assert seen == sorted(seen)
    assert seen[-1] == 1.0

    def stop() -> None:
        raise Cancelled

    with pytest.raises(Cancelled), cancellable(stop):
        load(TARGET, OPTIONS)


def read_locked() -> int:
    """KiB of this process that the system may not swap out."""
    status = Path("/proc/self/status")
    found = re.search(r"VmLck:\s+(\d+) kB", status.read_text()) if status.exists() else None
    return int(found[1]) if found else 0


@pytest.mark.parametrize(("mmap", "mlock"), [(False, False), (True, True), (False, True)])
def test_however_the_weights_are_loaded_they_are_the_same(target: LlamaModel, mmap: bool, mlock: bool) -> None:
    before = read_locked()
    other = load(TARGET, LoadOptions(threads=1, context_size=256, mmap=mmap, mlock=mlock))
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]  # -1: none
    if sys.platform == "linux" and not 0 <= limit < 1.2 * TARGET.stat().st_size:
        assert (read_locked() - before > 1000) == mlock
    logits = []
    for model in (target, other):
        session = model.open_session()
        read_prompt(session, [1, 2, 3])
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


def test_a_context_that_cannot_be_set_up_is_an_error(tmp_path: Path) -> None:
    """Heads of 16 numbers do not fill a q8_0 block of 32."""
    MAKERS["llama"](tmp_path / "m.gguf")
    model = load(tmp_path / "m.gguf", LoadOptions(threads=1, context_size=256, kv_type="q8_0"))
    with pytest.raises(BackendError, match="could not set up a context"):
        model.open_session()
    model.close()


def test_a_context_is_as_long_as_was_asked_for(target: LlamaModel) -> None:
    """llama.cpp itself rounds up to 256."""
    small = load(TARGET, LoadOptions(threads=1, context_size=20))
    session = small.open_session()
    read_prompt(session, list(range(1, 19)))
    assert session.draft_limit == 1
    session.close()
    small.close()


def test_drafts_are_bounded_by_the_rows_and_by_the_ring(tmp_path: Path) -> None:
    """As many as the limit says are taken and rejected in full; one more is refused before llama.cpp sees it."""
    for path, limit in ((TARGET, 63), (tmp_path / "hybrid.gguf", 8)):
        if not path.exists():
            MAKERS["hybrid"](path)
        model = load(path, OPTIONS)
        session = model.open_session()
        read_prompt(session, [1, 2, 3])
        assert session.draft_limit == limit
        with pytest.raises(ContextOverflow):
            session.forward(4, Draft.chain([5] * (limit + 1)))
        session.forward(4, Draft.chain([5] * limit))
        session.commit(())
        kept = session.forward(6, NO_DRAFT).logits(0).copy()
        session.commit(())
        session.rewind(0)
        read_prompt(session, [1, 2, 3, 4])
        assert abs(kept - session.forward(6, NO_DRAFT).logits(0)).max() < 0.15
        session.close()
        model.close()


def test_a_closed_session_refuses(target: LlamaModel) -> None:
    session = target.open_session()
    session.close()
    session.close()
    for use in (lambda: session.forward(1, NO_DRAFT), lambda: session.rewind(0), session.checkpoint):
        with pytest.raises(BackendError, match="closed"):
            use()
    with pytest.raises(BackendError, match="closed"):
        next(session.prefill([1]))


def test_scores_that_are_no_numbers_are_an_error(tmp_path: Path) -> None:
    path = tmp_path / "nan.gguf"
    MAKERS["llama"](path)
    data = bytearray(path.read_bytes())
    data[-4:] = b"\x00\x00\xc0\x7f"  # a NaN in the last weight
    path.write_bytes(data)
    model = load(path, OPTIONS)
    session = model.open_session()
    read_prompt(session, [1, 2, 3])
    scores = session.forward(4, NO_DRAFT)
    with pytest.raises(BackendError, match="NaN or infinite logits"):
        scores.argmax()
    session.close()
    model.close()


def test_a_side_branch_leaves_exact_cells_in_order() -> None:
    """Accepted from behind other branches again and again, the scores stay equal to the last bit in exact mode."""
    model = load(TARGET, LoadOptions(threads=1, context_size=512, exact=True))
    text = model.tokenizer.encode(
        "import os\nimport sys\n\n\ndef main(argv):\n    for name in argv:\n" * 12, parse_special=False
    )
    one, other = model.open_session(), model.open_session()
    for session in (one, other):
        read_prompt(session, text[:4])
    at = 4
    while at + 4 <= len(text) and at < 220:
        root, *rest = text[at : at + 4]
        wrong = (rest[0] + 1) % 4096
        tokens = np.array([wrong, wrong, *rest], np.int32)
        scores = one.forward(root, Draft(tokens, np.array([-1, 0, -1, 2, 3], np.int32)))
        plain = other.forward(root, Draft.chain(rest))
        for row, straight in ((0, 0), (3, 1), (4, 2), (5, 3)):
            assert (scores.logits(row) == plain.logits(straight)).all(), (at, row)
        one.commit((2, 3, 4))
        other.commit((0, 1, 2))
        at += 4
    assert at >= 200
    one.close()
    other.close()
    model.close()


def test_a_prompt_that_is_asked_again_has_the_same_scores(target: LlamaModel) -> None:
    """To the last bit: its last token alone, in a forward of one row, would be rounded in another way."""
    session = target.open_session()
    prompt = [(i * 7919 + 11) % target.tokenizer.vocab_size for i in range(150)]
    first = read_prompt(session, prompt).logits(0).copy()
    session.forward(5, Draft.chain([6, 7]))
    session.commit((0,))
    assert (read_prompt(session, prompt).logits(0) == first).all() and session.position == len(prompt)
    read_prompt(session, [*prompt[:100], 1, 2])
    again = read_prompt(session, prompt).logits(0)
    assert np.abs(again - first).max() < 0.15, "its end has been dropped, so it is read again"
    session.rewind(len(prompt) - 1)
    assert (session.forward(prompt[-1], NO_DRAFT).logits(0) != first).any(), "else this test shows nothing"
    session.close()


@pytest.mark.parametrize("kv_type", ["q8_0", "q4_0"])
def test_cache_types_agree_within_their_precision(target: LlamaModel, kv_type: str) -> None:
    other = load(TARGET, LoadOptions(threads=1, context_size=256, kv_type=kv_type))  # type: ignore[arg-type]
    prompt = target.tokenizer.encode("import os\nimport sys\n", parse_special=False)
    best = []
    for model in (target, other):
        session = model.open_session()
        read_prompt(session, prompt)
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
    assert find_tokenizer_mismatch(tokenizer, draft.tokenizer) is None
    draft.close()


@pytest.mark.parametrize("ftype", ["Q4_0"])
def test_quantizing_makes_a_model_that_works(tmp_path: Path, ftype: str) -> None:
    made = tmp_path / "made.gguf"
    quantize(find_trained("target"), made, ftype)
    model = load(made, OPTIONS)
    assert ftype in model.description
    session = model.open_session()
    read_prompt(session, [1, 2, 3])
    assert session.forward(4, Draft.chain([5, 6])).argmax().shape == (3,)
    session.close()
    model.close()


def test_quantizing_leaves_nothing_half_done(tmp_path: Path) -> None:
    broken, unknown = tmp_path / "broken.gguf", tmp_path / "unknown.gguf"
    broken.write_bytes(TARGET.read_bytes()[:100_000])
    m = GgufBuilder(unknown, "nonesuch", layers=1, width=64)
    m.embeddings(64)
    m.save()
    with pytest.raises(InvalidModelFile, match="is damaged"):
        quantize(broken, tmp_path / "out.gguf", "Q8_0")
    with pytest.raises(BackendError, match="could not quantize"):
        quantize(unknown, tmp_path / "out.gguf", "Q8_0")
    with pytest.raises(CacheError):
        quantize(TARGET, tmp_path / "no" / "folder.gguf", "Q8_0")
    assert {*tmp_path.iterdir()} == {broken, unknown}


def test_the_log_is_quiet_unless_it_is_echoed(capfd: pytest.CaptureFixture[str]) -> None:
    load(TARGET, OPTIONS).close()
    assert capfd.readouterr().err == ""
    library().log.echo = True
    try:
        load(TARGET, OPTIONS).close()
    finally:
        library().log.echo = False
    assert "llama" in capfd.readouterr().err


def test_the_reason_of_a_failure_is_its_first_error() -> None:
    log = NativeLog()
    assert log.reason() == "no reason given"
    for line in (b"llama_load: loading\n", b"\n", *(b"llama_load: fault %d.\n" % n for n in range(25))):
        log.write(2 if b"loading" in line else 4, line, None)
    assert log.reason() == "fault 0"
    log.clear_error()
    assert log.reason() == "no reason given"


@pytest.mark.parametrize(
    ("options", "sees_gpus", "listed"),
    [
        ({"gpu_layers": 0}, False, [[]]),
        ({"gpu_layers": 0, "tensor_split": "3,1", "override_tensor": "blk=CPU"}, False, [[]]),
        ({"gpu_layers": 0}, True, []),
        ({"gpu_layers": 1}, False, []),
    ],
)
def test_without_layers_on_gpus_none_is_used(
    options: dict[str, object], sees_gpus: bool, listed: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    monkeypatch.setattr(
        "edgespec.backends.llamacpp.model.list_handles", lambda names: list_handles(found.append(names) or names)
    )
    load(TARGET, replace(OPTIONS, **options), sees_gpus=sees_gpus).close()
    assert found == listed


def test_a_process_that_ggml_ends_tells_the_logged_error() -> None:
    code = """
from edgespec.backends.llamacpp.library import ggml, library
library()
for line in LINES:
    ggml().ggml_log_internal(4, line)
ggml().ggml_abort(b"x.cu", 98, b"CUDA error")
"""
    for lines, told in ((["CUDA error: out of memory\n", "  current device: 0\n"], ": out of memory"), ([], "")):
        script = code.replace("LINES", repr([line.encode() for line in lines]))
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
        assert done.stderr == f"x.cu:98: CUDA error{told}\n" and done.returncode < 0


def test_scores_of_a_graph_that_computes_all_of_them(tmp_path: Path) -> None:
    """Those of the last token of a prompt, alone and beside the rows of another session, are its own."""
    cogvlm(tmp_path / "model.gguf")
    text = [5, 9, 14, 33, 7, 21]
    model = load(tmp_path / "model.gguf", replace(OPTIONS, caches=2))
    first, second = (model.open_session(shared=True) for _ in range(2))
    z = prefill(first, text).copy()
    prefill(second, text[:-1])
    alone = second.forward(text[-1], NO_DRAFT).logits(0).copy()
    np.testing.assert_allclose(z, alone, atol=1e-3 * z.std())
    second.commit(())
    first.rewind(0)
    reading = first.prefill(text)
    next(reading)  # staged, in the batch of the other one
    scores = second.forward(7, Draft.chain([21]))
    beside = scores.logits(1).copy()
    second.rewind(0)
    z = prefill(second, [*text, 7, 21])
    np.testing.assert_allclose(beside, z, atol=1e-3 * z.std())
    model.close()

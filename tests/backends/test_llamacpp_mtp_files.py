"""Files with MTP layers that llama.cpp does not run, and what `edgespec plan` measures of those that it runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgespec.backends.attached_draft import Unsupported
from edgespec.backends.llamacpp.heads import open_head
from edgespec.backends.llamacpp.model import load
from edgespec.backends.options import LoadOptions
from edgespec.errors import InvalidModelFile
from edgespec.formats.gguf_validate import read_file
from tests.backends.mtp_heads import WIDTH, make_mixture, spec_of
from tests.contract.runtimes import prefill
from tests.models import TARGET

OPTIONS = LoadOptions(context_size=256, threads=1, mtp=True)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_mixture(tmp_path_factory.mktemp("mtp") / "model.gguf")


def test_layers_for_another_model_are_refused(mixture: Path, tmp_path: Path) -> None:
    llama = load(TARGET, OPTIONS)
    with pytest.raises(Unsupported, match=f"a head for a hidden size of {WIDTH}; the model has 256"):
        open_head(llama, mixture, spec_of(mixture))
    wide = make_mixture(tmp_path / "wide.gguf", width=256, is_alone=True)
    with pytest.raises(Unsupported, match=r"wide\.gguf has the MTP layer of another model"):
        open_head(llama, wide, spec_of(wide))
    session = llama.open_session()
    with pytest.raises(Unsupported, match="does not give the last hidden state of 'llama' models"):
        session.tap(())
    session.close()
    llama.close()
    target = load(mixture, OPTIONS)
    other = make_mixture(tmp_path / "other.gguf")
    with pytest.raises(Unsupported, match="draft for the model in that file alone"):
        open_head(target, other, spec_of(other))
    target.close()


def test_a_target_that_was_loaded_without_its_layer_has_none(mixture: Path) -> None:
    target = load(mixture, LoadOptions(context_size=256, threads=1))
    with pytest.raises(Unsupported, match="was loaded without its MTP layers"):
        open_head(target, mixture, spec_of(mixture))
    prefill(target.open_session(), [5, 6, 7])
    target.close()


def test_what_llama_cpp_would_abort_on_is_refused(mixture: Path, tmp_path: Path) -> None:
    target = load(mixture, OPTIONS)

    def refuse(file: Path, error: type[Exception], match: str) -> None:
        with pytest.raises(error, match=match):
            open_head(target, file, spec_of(file))

    refuse(
        make_mixture(tmp_path / "two.gguf", chained=2, is_alone=True),
        Unsupported,
        "has 2 MTP layers; llama.cpp runs one",
    )
    refuse(make_mixture(tmp_path / "a.gguf", left_out=("hnorm",), is_alone=True), InvalidModelFile, "lacks nextn.hnorm")
    dense = make_mixture(tmp_path / "dense.gguf", left_out=("ffn_gate_inp",), is_alone=True)
    refuse(dense, InvalidModelFile, "lacks ffn_gate_inp")
    data = make_mixture(tmp_path / "cut.gguf", is_alone=True).read_bytes()
    for size in (100, read_file(tmp_path / "cut.gguf").data_offset + 1000, len(data) - 5000):
        (tmp_path / "cut.gguf").write_bytes(data[:size])
        with pytest.raises(InvalidModelFile):
            open_head(target, tmp_path / "cut.gguf", spec_of(mixture))
    target.close()

"""Settings that llama.cpp leaves open: measured on sessions of their own, used by every later session."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from edgespec.backends import options as backend_options
from edgespec.backends.attached_draft import SelfDraftSpec
from edgespec.backends.llamacpp import model as model_module
from edgespec.backends.llamacpp import settings as tuning
from edgespec.backends.llamacpp.model import LlamaModel, load
from edgespec.backends.llamacpp.session import LlamaSession
from edgespec.backends.options import LoadOptions
from edgespec.backends.settings import RuntimeSettings, measured_lengths
from edgespec.cancel import cancellable
from edgespec.errors import Cancelled
from tests.contract.runtimes import llama_model, prefill
from tests.gguf_models import TARGET

OPEN = LoadOptions(threads=1, context_size=1024)
PROMPT = [(i * 7919 + 11) % 4000 for i in range(150)]
WITHOUT_FLASH = RuntimeSettings(flash_attention=False)


def nothing() -> None:
    """Never cancelled."""


def threads_of(session: LlamaSession) -> tuple[int, int]:
    handle = session.context.native.handle
    return session.api.llama_n_threads(handle), session.api.llama_n_threads_batch(handle)


def test_a_measurement_leaves_the_model_as_it_was() -> None:
    model = load(TARGET, OPEN)
    settings = model.measure_settings(0.3)
    assert settings is not None and settings.flash_attention in (None, False)
    assert list(settings.without_flash) == [440, 100] and min(settings.without_flash.values()) > 0
    assert (settings.threads, settings.batch_threads, settings.with_fewer_threads) == (None, None, {})
    assert model.options == OPEN
    model.close()


def test_contexts_that_are_measured_fit_into_the_models_own() -> None:
    assert measured_lengths(LoadOptions(), 8192) == (1500, 100)
    assert measured_lengths(LoadOptions(), 1024) == (440, 100)
    assert measured_lengths(LoadOptions(caches=4), 1024) == (952, 100)
    assert measured_lengths(LoadOptions(), 512) == ()


@pytest.mark.parametrize(
    "options",
    [
        LoadOptions(threads=1, context_size=1024, flash_attention=True),
        LoadOptions(threads=1, context_size=1024, flash_attention=False),
        LoadOptions(threads=1, context_size=1024, kv_type="q8_0"),
        LoadOptions(threads=1, context_size=1024, exact=True),
        LoadOptions(threads=1, context_size=128),
        LoadOptions(batch_threads=1, context_size=128),
    ],
    ids=["flash", "no-flash", "quantized-cache", "exact", "short", "batch-threads"],
)
def test_what_the_user_has_set_is_not_measured(options: LoadOptions) -> None:
    model = load(TARGET, options)
    assert model.measure_settings(1.0) is None
    settings = RuntimeSettings(options.kv_type != "f16" or None, threads=3, batch_threads=2)
    applied = settings.apply(options)
    for name in ("flash_attention", "threads", "batch_threads"):
        given = getattr(options, name)
        assert getattr(applied, name) == (getattr(settings, name) if given is None else given)
    model.close()


def test_contexts_that_cannot_be_filled_are_not_measured(tmp_path: Path) -> None:
    """A sliding window: forwards would take the time of an empty cache."""
    model = llama_model("sliding-window", tmp_path, context=1024)
    assert model.measure_settings(1.0) is None
    model.close()


def test_slow_models_are_measured_only_in_enough_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "_MAX_STEP_S", 0.0)
    model = load(TARGET, OPEN)
    assert model.measure_settings(1e-5) == RuntimeSettings()
    model.close()


@pytest.mark.parametrize("calls", [1, 5, 12])
def test_a_cancelled_measurement_changes_nothing(calls: int) -> None:
    left = [calls]

    def check() -> None:
        left[0] -= 1
        if not left[0]:
            raise Cancelled

    model = load(TARGET, OPEN)
    with pytest.raises(Cancelled), cancellable(check):
        model.measure_settings(5.0)
    assert model.options == OPEN
    model.close()


def test_fewer_threads_than_idle_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (tuning, model_module, backend_options):
        monkeypatch.setattr(module, "idle_cores", lambda: 2)
    model = load(TARGET, LoadOptions(context_size=128))
    settings = model.measure_settings(20.0)
    assert settings is not None and settings.flash_attention is None and settings.without_flash == {}
    assert settings.threads in (None, 1) and settings.batch_threads in (None, 1)
    assert set(settings.with_fewer_threads) <= {1, 4}
    model.close()


def logits(model: LlamaModel) -> np.ndarray:
    session = model.open_session()
    found = prefill(session, PROMPT).copy()
    session.close()
    return found


def test_later_sessions_use_the_settings() -> None:
    """The sums of attention are rounded in another order without flash attention."""
    plain, without = load(TARGET, OPEN), load(TARGET, LoadOptions(threads=1, context_size=1024, flash_attention=False))
    default, expected = logits(plain), logits(without)
    assert (default != expected).any()
    plain.use(WITHOUT_FLASH)
    assert (logits(plain) == expected).all()
    assert plain.options.flash_attention is False
    plain.use(RuntimeSettings())
    assert (logits(plain) == default).all()
    plain.close()
    without.close()


def test_every_kind_of_session_uses_the_threads(tmp_path: Path) -> None:
    model = load(TARGET, LoadOptions(context_size=512, caches=2))
    model.use(RuntimeSettings(threads=2, batch_threads=1))
    session = model.open_session(shared=True)
    assert threads_of(session) == threads_of(model.open_session()) == (2, 1)
    for method in (SelfDraftSpec(sparse=(4, 64)), SelfDraftSpec(bits=2)):
        draft = model.make_self_draft(method, folder=tmp_path)
        drafting = draft.open_session(model.open_session())
        assert isinstance(drafting, LlamaSession) and threads_of(drafting) == (2, 1)
        drafting.close()
        draft.close()
    model.close()


@pytest.mark.parametrize(
    "change", [{"threads": "4"}, {"threads": 2.7}, {"batch_threads": True}, {"flash_attention": 1.0}]
)
def test_stored_settings_of_other_types_are_refused(change: dict[str, object]) -> None:
    stored = asdict(RuntimeSettings(True, 1, 2))
    assert RuntimeSettings.from_dict(stored) == RuntimeSettings(True, 1, 2)
    with pytest.raises(ValueError, match="out of range"):
        RuntimeSettings.from_dict({**stored, **change})

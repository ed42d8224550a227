"""The logs that killed programs leave behind."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from edgespec.service.process import _make_log


def test_logs_of_yesterday_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    old, recent, other = (tmp_path / f"{name}.log" for name in ("edgespec-engine-a", "edgespec-engine-b", "edgespec-c"))
    for path, age_s in ((old, 90_000), (recent, 3_600), (other, 90_000)):
        path.touch()
        os.utime(path, (path.stat().st_mtime - age_s,) * 2)
    made = _make_log()
    assert sorted(tmp_path.iterdir()) == sorted([made, recent, other])

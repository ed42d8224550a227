"""Tests on whatever device llama.cpp finds; `make gpu` runs them with the contract on the same device."""

from __future__ import annotations

import pytest

from edgespec.backends import device_memory
from edgespec.machines.memory import DeviceMemory
from tests.api.conftest import folders

__all__ = ["folders"]


@pytest.fixture(autouse=True)
def devices() -> tuple[DeviceMemory, ...]:
    """Those with memory of their own."""
    found = device_memory("llamacpp")
    if not found:
        pytest.skip("llama.cpp finds no GPU here: laboratory.software_gpu builds one in software")
    return found

"""Imports MLX and mlx-lm without their side effects, describes the device, and maps errors."""

from __future__ import annotations

import atexit
import contextlib
import gc
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from edgespec.errors import BackendError, BackendUnavailable, Cancelled, EdgespecError, reason_of
from edgespec.installation import install_command


@dataclass(frozen=True, slots=True)
class Device:
    """The device that MLX computes on; sizes in bytes. `on_gpu` is False for the CPU builds."""

    name: str
    on_gpu: bool
    working_set: int  # the system's recommended limit; 0 if it has none


@cache
def load_mlx() -> Any:
    """The module mlx.core. Imports mlx-lm as well. Raises BackendUnavailable."""
    try:
        with _keep_file_limits():
            import mlx.core
            import mlx_lm
    except ImportError as error:
        package = "mlx-lm[cpu]" if sys.platform == "linux" else "mlx-lm"
        hint = f"Install it: {install_command(package)}, or use --backend llamacpp."
        raise BackendUnavailable(f"MLX cannot be imported: {error}.", hint=hint) from error
    del mlx_lm
    atexit.register(_leave_process)
    return mlx.core


def leave_thread() -> None:
    """The last call of a thread that has used MLX. Without it the process may abort when the thread ends."""
    mx = load_mlx()
    mx.synchronize()
    mx.clear_streams()


def _leave_process() -> None:
    """`leave_thread` for the main thread. Garbage is collected first: MLX may abort if its arrays are freed later."""
    gc.collect()
    leave_thread()


@cache
def device() -> Device:
    """The device that MLX computes on. Raises BackendUnavailable."""
    mx = load_mlx()
    info = mx.device_info()
    on_gpu = mx.default_device() == mx.gpu
    return Device(
        str(info.get("device_name") or info.get("architecture") or mx.default_device()),
        on_gpu,
        int(info.get("max_recommended_working_set_size", 0)),
    )


def read(*arrays: Any) -> list[npt.NDArray[Any]]:
    """The arrays in host memory. The host waits once for the device, and nowhere else in a round."""
    mx = load_mlx()
    with map_errors():
        mx.eval(*arrays)
        return [np.array(each) for each in arrays]


@contextlib.contextmanager
def map_errors() -> Iterator[None]:
    """Inside, errors of MLX become BackendError."""
    try:
        yield
    except (EdgespecError, Cancelled):
        raise
    except Exception as error:
        reason = reason_of(error)
        if "memory" in reason.lower() or "malloc" in reason.lower():
            raise BackendError(f"MLX is out of memory: {reason}.", hint="Use a smaller --ctx or model.") from error
        raise BackendError(f"MLX failed: {reason}.", hint="Try again, or use --backend llamacpp.") from error


@contextlib.contextmanager
def _keep_file_limits() -> Iterator[None]:
    """Inside, importing mlx-lm does not lower the limits of file descriptors.

    It would lower the hard limit as well, which only a privileged process can raise again. So setrlimit does nothing.
    """
    import resource

    setrlimit = resource.setrlimit
    resource.setrlimit = lambda *_: None
    try:
        yield
    finally:
        resource.setrlimit = setrlimit

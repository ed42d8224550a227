"""Long contexts for measurements: cells are copied, not computed."""

from __future__ import annotations

import ctypes

from edgespec.backends.llamacpp.session import LlamaSession
from edgespec.core.protocols import Session

_CHUNK = 512  # cells of one copy
_NO_TOKEN = -1  # equals no token of a prompt, so that no answer reuses such cells


def extend_cache(session: Session, n: int) -> int:
    """Make the cache hold `n` tokens by copies of its own cells; returns how many it holds then.

    Forwards then take the time that they take after a text of that length; their scores mean nothing, since keys are
    rotated for other positions. `rewind(0)` drops the copies. The cache has to hold a token. Fewer than `n` are held
    where the context ends, or where llama.cpp cannot move cells: other runtimes, recurrent states, several positions a
    token, and sliding windows, where it aborts if all layers have one. No other session of the context may hold a text
    in a quantized cache: llama.cpp rounds all keys once more.
    """
    n = min(n, session.capabilities.context_size)
    if not isinstance(session, LlamaSession) or not 0 < session.position < n:
        return session.position
    context = session.context
    api, native = session.api, context.native
    if api.llama_model_n_swa(api.llama_get_model(native.handle)):
        return session.position
    spare = context.sequences.acquire_spare(1)
    if not spare or not session.capabilities.tree or not api.llama_memory_can_shift(native.memory):
        context.sequences.release_spare(spare)
        return session.position
    (copy,) = spare
    held, saved, size = session.position, None, 0
    while held < n:
        if (next_size := min(_CHUNK, held, n - held)) != size:
            size = next_size
            saved = _save_cells(session, copy, size)
        if saved is None or not api.llama_state_seq_set_data(native.handle, saved, len(saved), copy):
            break
        api.llama_memory_seq_add(native.memory, copy, -1, -1, held)
        api.llama_memory_seq_cp(native.memory, copy, session.sequence, -1, -1)
        api.llama_memory_seq_rm(native.memory, copy, -1, -1)
        held += size
    context.sequences.release_spare(spare)
    session.hold([*session.tokens, *[_NO_TOKEN] * (held - session.position)])
    return held


def _save_cells(session: LlamaSession, spare: int, n: int) -> ctypes.Array[ctypes.c_uint8] | None:
    """The first `n` cells of the session's text, in llama.cpp's format; None where it cannot read them."""
    api, native = session.api, session.context.native
    api.llama_memory_seq_cp(native.memory, session.sequence, spare, 0, n)
    size = api.llama_state_seq_get_size(native.handle, spare)
    saved = (ctypes.c_uint8 * size)()
    n_read = api.llama_state_seq_get_data(native.handle, saved, size, spare)
    api.llama_memory_seq_rm(native.memory, spare, -1, -1)
    return saved if n_read == size else None

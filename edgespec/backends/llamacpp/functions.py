"""Functions that llama.cpp exports without a public header, looked up by name when they are needed."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

from edgespec.backends.attached_draft import Unsupported
from edgespec.backends.llamacpp.library import library

_ARGUMENTS = {"b": ctypes.c_bool, "i": ctypes.c_int32, "j": ctypes.c_uint32}
# name: (arguments behind the context as GCC and Clang mangle them, whether it returns an address)
_FUNCTIONS = {
    "llama_set_embeddings_layer_inp": ("jb", False),
    "llama_get_embeddings_layer_inp": ("j", True),
    "llama_set_embeddings_nextn": ("bb", False),
    "llama_set_nextn_layer_offset": ("i", False),
    "llama_get_embeddings_nextn": ("", True),
}


@cache
def find_function(name: str) -> Any:
    """A function of llama-ext.h; pointers to floats are returned as addresses. Raises Unsupported without it."""
    arguments, returns_address = _FUNCTIONS[name]
    for symbol in (name, f"_Z{len(name)}{name}P13llama_context{arguments}"):
        try:
            function = library().api._lib[symbol]  # a function object of our own, with types of our own
        except AttributeError:
            continue
        function.argtypes = [ctypes.c_void_p, *map(_ARGUMENTS.__getitem__, arguments)]
        function.restype = ctypes.c_void_p if returns_address else None
        return function
    raise Unsupported(
        f"this build of llama.cpp has no {name}, which trained heads need.", hint="Install llama-cpp-python 0.3.36."
    )

"""Functions that llama.cpp exports without a public header: looked up by name, and only when they are needed."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

from edgespec.backends.attached_draft import Unsupported
from edgespec.backends.llamacpp.library import library

_CONTEXT = ctypes.c_void_p
# name: (argument types, result type, mangled by GCC and Clang, mangled by MSVC)
_FUNCTIONS: dict[str, tuple[list[Any], Any, str, str]] = {
    "llama_set_embeddings_layer_inp": (
        [_CONTEXT, ctypes.c_uint32, ctypes.c_bool],
        None,
        "_Z30llama_set_embeddings_layer_inpP13llama_contextjb",
        "?llama_set_embeddings_layer_inp@@YAXPEAUllama_context@@I_N@Z",
    ),
    "llama_get_embeddings_layer_inp": (
        [_CONTEXT, ctypes.c_uint32],
        ctypes.c_void_p,
        "_Z30llama_get_embeddings_layer_inpP13llama_contextj",
        "?llama_get_embeddings_layer_inp@@YAPEAMPEAUllama_context@@I@Z",
    ),
    "llama_set_embeddings_nextn": (
        [_CONTEXT, ctypes.c_bool, ctypes.c_bool],
        None,
        "_Z26llama_set_embeddings_nextnP13llama_contextbb",
        "?llama_set_embeddings_nextn@@YAXPEAUllama_context@@_N1@Z",
    ),
    "llama_set_nextn_layer_offset": (
        [_CONTEXT, ctypes.c_int32],
        None,
        "_Z28llama_set_nextn_layer_offsetP13llama_contexti",
        "?llama_set_nextn_layer_offset@@YAXPEAUllama_context@@H@Z",
    ),
    "llama_get_embeddings_nextn": (
        [_CONTEXT],
        ctypes.c_void_p,
        "_Z26llama_get_embeddings_nextnP13llama_context",
        "?llama_get_embeddings_nextn@@YAPEAMPEAUllama_context@@@Z",
    ),
}


@cache
def find_function(name: str) -> Any:
    """A function of llama-ext.h; pointers to floats are returned as addresses. Raises Unsupported without it."""
    argument_types, result_type, *mangled = _FUNCTIONS[name]
    for symbol in (name, *mangled):
        try:
            function = library().api._lib[symbol]  # a function object of our own, with types of our own
        except AttributeError:
            continue
        function.argtypes, function.restype = argument_types, result_type
        return function
    raise Unsupported(
        f"this build of llama.cpp has no {name}, which trained heads need.", hint="Install llama-cpp-python 0.3.36."
    )

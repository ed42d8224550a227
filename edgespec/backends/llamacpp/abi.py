"""What is true of one version of llama.cpp, and stated in no header: look here when the version changes.

Its private functions are looked up by name when they are needed. The tables name architectures by
what their graphs do.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

from edgespec.backends.attached_draft import Unsupported
from edgespec.backends.llamacpp.library import library

VERSION = "0.3.36"  # of llama-cpp-python

SCORE_ALL = (b"cogvlm",)  # architectures that need a FullBatch
# Architectures that expose the input of every layer, one row of the hidden size for each token. Asking any other aborts
# the process; so does qwen4exp, whose rows are wider.
WITH_LAYER_INPUTS = frozenset(
    (
        *("bailingmoe3", "deepseek4", "gemma4", "gpt-oss", "hunyuan-dense", "hunyuan_vl", "lfm2", "lfm2moe", "llama"),
        *("mimo2", "minimax-01", "minimax-m2", "muse-glimmer", "nanbeige", "nemotron_h", "nemotron_h_moe"),
        *("qwen3", "qwen35", "qwen35moe", "qwen3moe", "qwen3next"),
    )
)
# Architectures that expose the output of the final norm (t_h_nextn). Other contexts leave the rows as they are;
# deepseek4's are wider, and from before its norm.
WITH_LAST_STATE = frozenset(
    (
        *("bailingmoe3", "cohere2moe", "deepseek2", "deepseek32", "gemma4", "glm-dsa", "glm4moe", "glm5-next"),
        *("gpt-oss", "hy_v3", "mimo2", "nemotron_h", "nemotron_h_moe", "qwen35", "qwen35moe", "qwen3next", "step35"),
    )
)
# Architectures with an MTP graph, and the tensors without which that graph aborts the process although the file loads.
# deepseek4's hidden states are wider than those of other layers, and glm5-next's graph is not written yet.
MTP_TENSORS: dict[str, tuple[str, ...]] = {
    "bailingmoe3": (),
    "cohere2moe": ("ffn_gate_inp",),
    "deepseek2": ("ffn_gate_inp", "attn_k_b"),
    "deepseek32": ("ffn_gate_inp", "attn_k_b"),
    "glm-dsa": ("ffn_gate_inp", "attn_k_b"),
    "glm4moe": ("ffn_gate_inp",),
    "hy_v3": (),
    "mimo2": ("attn_qkv", "ffn_gate", "ffn_up", "ffn_down"),
    "nemotron_h_moe": ("ffn_gate_inp", "nextn.shared_head_norm"),
    "qwen35": (),
    "qwen35moe": ("ffn_gate_inp",),
    "qwen3next": ("ffn_gate_inp",),
    "step35": (),
}
MTP_CHAINS = ("hy_v3", "mimo2", "step35")  # whose graphs run several layers, one for each drafted token

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
        f"this build of llama.cpp has no {name}, which trained heads need.", hint=f"Install llama-cpp-python {VERSION}."
    )

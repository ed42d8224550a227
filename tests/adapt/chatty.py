"""The packaged target with a chat template, so that it writes questions and answers: comments, and code after them."""

from __future__ import annotations

from pathlib import Path

import gguf

from edgespec.adapt.student import copy_field, finish_gguf
from tests.models import TARGET

TEMPLATE = "{{ bos_token }}{% for message in messages %}# {{ message.content }}\n{% endfor %}"
_LEFT_OUT = ("general.architecture", "tokenizer.chat_template")


def make_chatty(path: Path) -> Path:
    reader, writer = gguf.GGUFReader(TARGET), gguf.GGUFWriter(path, "llama")
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name not in _LEFT_OUT:
            copy_field(writer, field)
    writer.add_chat_template(TEMPLATE)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    finish_gguf(writer)
    return path

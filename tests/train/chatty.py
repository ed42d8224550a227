"""The packaged target with a chat template, so that it writes questions and answers: comments, and code after them."""

from __future__ import annotations

from pathlib import Path

import gguf

from edgespec.train.student import copy_fields, finish_gguf
from tests.gguf_models import TARGET

TEMPLATE = "{{ bos_token }}{% for message in messages %}# {{ message.content }}\n{% endfor %}"


def make_chatty(path: Path) -> Path:
    reader, writer = gguf.GGUFReader(TARGET), gguf.GGUFWriter(path, "llama")
    copy_fields(writer, reader, lambda name: name != "tokenizer.chat_template")
    writer.add_chat_template(TEMPLATE)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    finish_gguf(writer)
    return path

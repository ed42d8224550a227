"""Give a model file a vocabulary of single characters, of as many tokens as its own has."""

from __future__ import annotations

from pathlib import Path

import gguf

END = "<end>"
_BYTES = [*map(chr, range(ord("!"), ord("~") + 1)), "Ġ", "Ċ"]  # GPT-2 writes a space and a line break as these
_PAIR = "ĠĠ"  # the merge that llama.cpp wants of such a vocabulary


def write_with_characters(source: Path, destination: Path) -> None:
    """Copy `source` with tokens for printable ASCII, space and line break; the rest is never part of a text.

    Raises ValueError where `source` has too few tokens for them.
    """
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(destination, str(reader.fields["general.architecture"].contents()))
    for name, field in reader.fields.items():
        if name.startswith(("GGUF.", "tokenizer.")) or name == "general.architecture":
            continue
        kinds = field.types
        if (value := field.contents()) != []:  # gguf writes no empty arrays
            writer.add_key_value(name, value, kinds[0], kinds[1] if len(kinds) > 1 else None)
    _add_vocabulary(writer, len(reader.fields["tokenizer.ggml.tokens"].data))
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_vocabulary(writer: gguf.GGUFWriter, size: int) -> None:
    known = [END, *_BYTES, _PAIR]
    if size < len(known):
        raise ValueError(f"a vocabulary of {size} tokens has no room for {len(known)}")
    kind = gguf.TokenType
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([*known, *(f"<unused{i}>" for i in range(size - len(known)))])
    writer.add_token_types(
        [kind.CONTROL, *[kind.NORMAL] * (len(known) - 1), *[kind.UNUSED] * (size - len(known))],
    )
    writer.add_token_merges(["Ġ Ġ"])
    writer.add_eos_token_id(0)
    writer.add_add_bos_token(False)

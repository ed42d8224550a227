"""The memory of earlier texts for the vocabulary of a model."""

from __future__ import annotations

from edgespec.backends import Model
from edgespec.memory.memory import Memory
from edgespec.planner.plan import MemoryOptions, Reporter
from edgespec.registry.tokenizer_compat import identify_tokenizer


def open_memory(options: MemoryOptions | None, target: Model, name: str, reporter: Reporter) -> Memory | None:
    """The texts of all models with the vocabulary of `target`, which its user calls `name`; None without `options`.

    A new folder is told of.
    """
    if options is None:
        return None
    if not options.folder.exists():
        reporter.notice(
            f"Texts are kept in {options.folder} to draft later ones faster; `edgespec memory clear` removes them,"
            " --no-memory keeps none."
        )
    memory = Memory(options.folder, identify_tokenizer(target.tokenizer), options.limit_bytes)
    memory.name_model(name)
    return memory

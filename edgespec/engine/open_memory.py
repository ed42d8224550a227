"""The earlier texts of a model that is opened, and their caches."""

from __future__ import annotations

import json
from pathlib import Path

from edgespec.autopilot.store import Setting
from edgespec.backends import Model
from edgespec.formats.fingerprint import fingerprint_weights
from edgespec.memory.memory import Memory
from edgespec.memory.prefix_files import PrefixFiles
from edgespec.models.load_config import MemoryOptions
from edgespec.models.tokenizer_compat import identify_tokenizer
from edgespec.progress import notice

_NOT_IN_CELLS = (  # settings that may differ from load to load, such as with the free memory, for the same caches
    "threads", "batch_threads", "gpu_layers", "gpu_layers_draft", "n_cpu_moe", "device", "tensor_split",
    "override_tensor",
)  # fmt: skip


def open_prefixes(
    options: MemoryOptions | None, memory: Memory | None, key: Setting, target: Model, path: Path
) -> PrefixFiles | None:
    """The caches of earlier texts of a model, which is at `path`, in the memory's folder; None if none are kept."""
    if options is None or not options.keeps_caches or memory is None or memory.database is None:
        return None
    config = path / "config.json"
    setting = {
        **key,
        **dict.fromkeys(_NOT_IN_CELLS),
        "weights": fingerprint_weights(path) if path.exists() else path.name,  # the toy has none
        "config": config.read_text(encoding="utf-8") if config.is_file() else None,
        "context_size": target.context_size,  # on which rotary factors may depend
    }
    return PrefixFiles(options.folder, json.dumps(setting, sort_keys=True))


def open_memory(options: MemoryOptions | None, target: Model, name: str) -> Memory | None:
    """The texts of all models with the vocabulary of `target`, which its user calls `name`; None without `options`.

    Tells the user when the folder is new.
    """
    if options is None:
        return None
    is_new = not options.folder.exists()
    memory = Memory(options.folder, identify_tokenizer(target.tokenizer), options.limit_bytes)
    if is_new and memory.database is not None:
        notice(
            f"Texts are kept in {options.folder} to draft later ones faster; `edgespec memory clear` removes them,"
            " --no-memory keeps none."
        )
    memory.name_model(name)
    return memory

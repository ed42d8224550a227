"""Load an MLX model folder (or the packaged GGUF file) and open sessions on it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.utils import compute_bits_per_weight, get_total_parameters, load_model, maybe_set_recommended_wired_limit
from mlx_lm.utils import load_tokenizer as load_hf_tokenizer

from edgespec.backends.attached_draft import SelfDraftSpec
from edgespec.backends.mlx.caches import KVQuantization
from edgespec.backends.mlx.gguf_llama import load_gguf_llama
from edgespec.backends.mlx.heads import MlxHead, open_head
from edgespec.backends.mlx.hooks import LayerHooks, get_layers
from edgespec.backends.mlx.library import device, map_errors
from edgespec.backends.mlx.probe import probe
from edgespec.backends.mlx.runner import ModelRunner
from edgespec.backends.mlx.selfdraft import MlxSelfDraft, check_layers
from edgespec.backends.mlx.session import MlxSession
from edgespec.backends.mlx.tokenizer import HfTokenizer
from edgespec.backends.options import LoadOptions
from edgespec.cancel import check_cancelled
from edgespec.core.protocols import Capabilities
from edgespec.errors import (
    STOPS,
    BackendError,
    BackendUnavailable,
    EdgespecError,
    InvalidModelFile,
    InvalidRequest,
    reason_of,
)
from edgespec.formats.heads import HeadSpec
from edgespec.formats.mlx_folder import read_folder
from edgespec.progress import report_loaded
from edgespec.text.chat_template import read_template
from edgespec.text.tokenizer import Tokenizer

_GROUP = 32  # elements that share a scale in a quantized cache, as in llama.cpp's
_KV_QUANTIZATIONS = {"f16": None, "q8_0": (8, _GROUP), "q4_0": (4, _GROUP)}
_BATCH = 16  # arrays of weights that are read between two reports


class MlxModel:
    """A loaded model. The thread that loaded it uses it and its sessions."""

    is_row_invariant = False
    no_batching_reason = "MLX sessions do not share forwards"

    def __init__(
        self,
        model: Any,
        tokenizer: Tokenizer,
        template: str | None,
        context_size: int,
        quantization: KVQuantization | None,
        share: Callable[[Any], Any] = lambda scores: scores,
    ) -> None:
        """Probes the model (see `probe`). Raises BackendError."""
        self.tokenizer = tokenizer
        self.chat_template = template
        self.context_size = context_size
        self._model = model
        self._quantization = quantization
        self._hooks: LayerHooks | None = None
        self.description = describe(model)
        self.layer_count = len(get_layers(model))
        self.no_tree_reason = probe(self._open_runner, tokenizer.vocab_size, share)

    @property
    def network(self) -> Any:
        """mlx-lm's model. Raises BackendError."""
        if self._model is None:
            raise BackendError("the model has been closed.")
        return self._model

    def open_session(self, *, shared: bool = False) -> MlxSession:
        """A session with caches of its own, which polls between the chunks and layers of a prefill."""
        return MlxSession(*self._session_parts())

    def make_self_draft(self, spec: SelfDraftSpec, *, folder: Path | None = None) -> MlxSelfDraft:
        """Makes a draft of the model itself; `folder` is not used."""
        runner = self._open_runner()
        check_layers(runner)
        return MlxSelfDraft(runner, self._open_hooks(), self.tokenizer, spec, lambda: self.open_session())

    def load_head(self, spec: HeadSpec, path: Path) -> MlxHead:
        check_cancelled()
        head = open_head(self.network, self.layer_count, self.tokenizer, path, spec)
        report_loaded(1.0)
        return head

    def open_embedder(self, cells: int) -> NoReturn:
        raise InvalidRequest("edgespec makes no embeddings on MLX.", hint="Serve the model with --backend llamacpp.")

    def close(self) -> None:
        if self._hooks is not None:
            self._hooks.forget()
        self._model = self._hooks = None
        mx.clear_cache()

    def _session_parts(self) -> tuple[Any, ...]:
        has_trees = self.no_tree_reason is None
        capabilities = Capabilities(self.tokenizer.vocab_size, self.context_size, has_trees)
        return self._open_runner, self._open_hooks, capabilities

    def _open_runner(self) -> ModelRunner:
        return ModelRunner(self.network, self._quantization)

    def _open_hooks(self) -> LayerHooks:
        """The hooks of the model's layers, which are made once. Raises BackendError."""
        if self._hooks is None:
            self._hooks = LayerHooks(self.network)
        return self._hooks


def load(path: Path, options: LoadOptions) -> MlxModel:
    """Load a folder with config.json, safetensors and a tokenizer, or a packaged GGUF file.

    Computes in the type of the weights on a GPU, and in float32 on a CPU, which emulates half precision.
    Raises InvalidModelFile, InvalidRequest, BackendError, Cancelled.
    """
    parts = open_parts(path, options)
    read_weights(parts.model)
    return MlxModel(*parts)


class ModelParts(NamedTuple):
    """What a model is made of, before its weights are read."""

    model: Any
    tokenizer: Tokenizer
    template: str | None
    context_size: int
    quantization: KVQuantization | None


def open_parts(path: Path, options: LoadOptions) -> ModelParts:
    """Opens a folder or a packaged GGUF file. Raises InvalidModelFile, BackendUnavailable."""
    if options.mlock:  # memory that is wired is tied to kernel panics of Macs with 24 to 128 GB (ml-explore/mlx #3186)
        maybe_set_recommended_wired_limit()
    model, tokenizer, template, trained = _load_folder(path) if path.is_dir() else _load_gguf(path)
    return ModelParts(model, tokenizer, template, options.context_for(trained), _KV_QUANTIZATIONS[options.kv_type])


def describe(model: Any) -> str:
    """Architecture, size and quantization of mlx-lm's model."""
    count = get_total_parameters(model)
    size = f"{count / 1e9:.1f}B" if count >= 1e8 else f"{count / 1e6:.1f}M"
    return f"{model.model_type} {size}, {compute_bits_per_weight(model):.1f} bits a weight (MLX)"


def load_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of a model folder, without its weights. Raises InvalidModelFile, BackendUnavailable."""
    folder = read_folder(path)
    with explain_errors(path):
        wrapper = _read_tokenizer(path)
        return HfTokenizer(wrapper, folder.integer("vocab_size") or len(wrapper))


_LARGE_ID = re.compile(rb"[:\[,]\s*(\d{9,})\s*[,}\]]")


def _read_tokenizer(path: Path, **more: Any) -> Any:
    """mlx-lm's tokenizer. Raises ValueError for an id that no vocabulary has: memory would be allocated up to it."""
    file = path / "tokenizer.json"
    if file.is_file() and (found := _LARGE_ID.search(file.read_bytes())) is not None:
        raise ValueError(f"{file.name} has the id {found[1].decode()}")
    return load_hf_tokenizer(path, {"trust_remote_code": False}, **more)


def _load_folder(path: Path) -> tuple[Any, Tokenizer, str | None, int | None]:
    folder = read_folder(path)
    with explain_errors(path):
        model, config = load_model(path, lazy=True, strict=True, trust_remote_code=False)
        wrapper = _read_tokenizer(path, eos_token_ids=config.get("eos_token_id"))
        logits = model(mx.array([[0]], mx.int32))  # a lazy array: nothing is computed
        tokenizer = HfTokenizer(wrapper, logits.shape[-1])
    return model, tokenizer, read_template(path), folder.trained_context


def _load_gguf(path: Path) -> tuple[Any, Tokenizer, str | None, int | None]:
    """The tokenizer is that of llama.cpp."""
    from edgespec.backends.llamacpp.model import load as load_gguf

    vocabulary = load_gguf(path, LoadOptions(), vocabulary_only=True)
    vocabulary.close_with_tokenizer()
    model, config = load_gguf_llama(path)
    return model, vocabulary.tokenizer, vocabulary.chat_template, config["max_position_embeddings"]


def read_weights(model: Any) -> None:
    """Read the weights from the files, a batch at a time. Raises BackendError, Cancelled."""
    if not device().on_gpu:
        model.set_dtype(mx.float32)
    weights = [array for _, array in tree_flatten(model.parameters())]
    for start in range(0, len(weights), _BATCH):
        check_cancelled()
        with map_errors():
            mx.eval(weights[start : start + _BATCH])
        report_loaded(min(1.0, (start + _BATCH) / len(weights)))


@contextmanager
def explain_errors(path: Path) -> Iterator[None]:
    """Inside, what mlx-lm or a tokenizer raises for the model at `path` becomes one of our errors."""
    try:
        yield
    except (EdgespecError, *STOPS):
        raise
    except MemoryError as error:
        raise BackendError("the model does not fit into memory.", hint="Use a smaller model.") from error
    except ImportError as error:
        raise BackendUnavailable(
            f"MLX cannot open {path.name}: {reason_of(error)}.", hint="Install the package that it names."
        ) from error
    except BaseException as error:  # a class of mlx-lm exits if a package is missing, and a tokenizer may panic
        reason = reason_of(error)
        shown = reason if len(reason) <= 300 else f"{reason[:297]}..."
        raise InvalidModelFile(
            f"mlx-lm {version('mlx-lm')} cannot open {path.name}: {shown}.",
            hint="Pull it again, or upgrade mlx-lm if the model is newer than it.",
        ) from error

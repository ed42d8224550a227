"""The plausible readings of a head: what its file may have meant where it states a convention wrongly."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from edgespec.backends import BackendName
from edgespec.formats.heads import HeadKind, HeadSpec, usual_layers

Convention = Callable[[HeadSpec, int], list[HeadSpec]]
"""The other readings of one convention, of a head whose target has so many layers."""


def list_conventions(kind: HeadKind, backend: BackendName) -> tuple[Convention, ...]:
    """What may be wrong with a head's spec and makes a difference on `backend`.

    llama.cpp takes norms and feedback from the file itself. Medusa and Hydra heads have one convention. Two more need
    no probe, since tensors tell: ids of a reduced vocabulary ascend in one reading only, and norms' weights that are
    stored less 1 have means near 0.
    """
    return _CONVENTIONS.get(kind, {}).get(backend, ())


def complete(spec: HeadSpec, n_layers: int) -> HeadSpec:
    """`spec` with the usual layers of a target with `n_layers` where the file names none."""
    return replace(spec, layers=usual_layers(n_layers)) if spec.layers is None else spec


def describe(spec: HeadSpec) -> str:
    """A reading in a few words: 'layers 1, 3, 5, norm_output'."""
    word = "layer" if spec.layers and len(spec.layers) == 1 else "layers"
    parts = [f"{word} {_join(spec.layers)}" if spec.layers else _join(spec.layers)]
    return ", ".join(parts + [words for name, words in _FLAGS.items() if getattr(spec, name)])


def describe_change(stated: HeadSpec, chosen: HeadSpec) -> str:
    """How `chosen` differs from what the file says, as the end of "the head's ..."; empty where it does not."""
    changes = []
    if stated.layers != chosen.layers:
        says = "names none" if stated.layers is None else f"says {_join(stated.layers)}"
        changes.append(f"layers were read as {_join(chosen.layers)} (the file {says})")
    for name, key in _FLAGS.items():
        was, says = (str(getattr(spec, name)).lower() for spec in (chosen, stated))
        if was != says:
            changes.append(f"{key} was read as {was} (the file says {says})")
    return ", and ".join(changes)


def _shift_layers(spec: HeadSpec, n_layers: int) -> list[HeadSpec]:
    """Inputs for outputs, and the reverse."""
    shifted = [tuple(layer + by for layer in spec.layers or ()) for by in (1, -1)]
    return [replace(spec, layers=each) for each in shifted if each and min(each) >= 0 and max(each) <= n_layers]


def _flip(name: str) -> Convention:
    def flip(spec: HeadSpec, _n_layers: int) -> list[HeadSpec]:
        flipped: dict[str, Any] = {name: not getattr(spec, name)}
        return [replace(spec, **flipped)]

    return flip


def _swap_final_norm(spec: HeadSpec, n_layers: int) -> list[HeadSpec]:
    """The last hidden state before the final norm for that after it, and the reverse."""
    return [replace(spec, layers=() if spec.layers else (n_layers,))]


def _join(layers: Sequence[int] | None) -> str:
    return ", ".join(map(str, layers)) if layers else "the last hidden state"


_FLAGS = {  # by the keys of files
    "norm_before_residual": "norm_before_residual",
    "feeds_normed": "norm_output",
    "predicts_at_root": "sample_from_anchor",
}
_BLOCK = (_flip("predicts_at_root"), _shift_layers)
_CONVENTIONS: Mapping[HeadKind, Mapping[BackendName, tuple[Convention, ...]]] = {  # what matters most comes first
    "eagle3": {
        "llamacpp": (_shift_layers,),
        "mlx": (_flip("norm_before_residual"), _flip("feeds_normed"), _shift_layers),
    },
    "eagle": {"mlx": (_swap_final_norm,)},
    "mtp": {"mlx": (_swap_final_norm, _flip("feeds_normed"))},
    "dflash": {"llamacpp": (_shift_layers,), "mlx": (_shift_layers,)},
    "dspark": {"llamacpp": _BLOCK, "mlx": _BLOCK},
}

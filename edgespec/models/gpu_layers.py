"""Choose which layers of a target the GPUs hold."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from edgespec.formats.gguf import Header
from edgespec.machines.memory import RESERVE_BYTES
from edgespec.models.fit import Fit, score_bytes


class Placement(NamedTuple):
    """Says where the layers of a target go; None is llama.cpp's default, which is all layers on the accelerators.

    layers  for the accelerators, the last ones; the output matrix counts as one more
    in_ram  first layers whose experts stay in RAM
    shares  layers of each device of the machine
    """

    layers: int | None = None
    in_ram: int | None = None
    shares: tuple[float, ...] | None = None


def place_layers(target: Header, fit: Fit, *, flash: bool = False) -> Placement:
    """Choose what the accelerators hold beside caches and drafts.

    If they have no room for a whole mixture of experts, experts stay in RAM rather than layers: few of them are read
    for a token. If layers stay in RAM, llama.cpp computes without flash attention, unless it was asked for (`flash`).
    It divides layers among accelerators by their number, so a mixture whose layers differ has shares.
    """
    devices, used = fit.memory.devices, fit.memory.layer_devices
    rooms = [max(0, each.free - RESERVE_BYTES - fit.target.compute) if each in used else 0 for each in devices]
    count = target.own("block_count") or 0
    if not rooms or not count:
        return Placement()
    if fit.draft is not None and (room := sum(rooms)):
        rooms = [max(0, each - fit.draft.total * each // room) for each in rooms]
    layers, experts = [(fit.target.kv + fit.target.states) // count] * count, [0] * count
    for tensor in target.tensors:
        if 0 <= (block := tensor.block) < count:
            layers[block] += tensor.nbytes
            experts[block] += tensor.nbytes * ("_exps." in tensor.name)
    last = target.tensor("output.weight") or target.tensor("token_embd.weight")
    output = last.nbytes if last is not None else 0
    if sum(layers) + output <= sum(rooms):
        return Placement()
    without = [layer - expert for layer, expert in zip(layers, experts, strict=True)]
    for in_ram in range(1, count + 1) if any(experts) else ():
        if shares := _fill([*without[:in_ram], *layers[in_ram:], output], rooms):
            return Placement(None, in_ram, shares if len(used) > 1 else None)
    room = sum(rooms) - output - (0 if flash else score_bytes(target, fit.context))
    fitting = sum(each <= room for each in accumulate(reversed(without)))
    return Placement(fitting + 1 if room >= 0 else 0, count if any(experts) and fitting else None)


def _fill(sizes: Sequence[int], rooms: Sequence[int]) -> tuple[int, ...] | None:
    """How many of `sizes` each room takes in their order; None if there is not enough room."""
    counts: list[int] = []
    for room in rooms:
        counts.append(sum(each <= room for each in accumulate(sizes[sum(counts) :])))
    return tuple(counts) if sum(counts) == len(sizes) else None

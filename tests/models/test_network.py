"""Plans of models that are divided: memory of all machines, drafts on this one, the network's time."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from edgespec.backends.llamacpp.split import Split
from edgespec.backends.options import LoadOptions
from edgespec.errors import DoesNotFit, DraftRefused
from edgespec.formats.gguf_validate import read_file
from edgespec.machines.memory import RESERVE_BYTES, DeviceMemory, Memory, host_memory
from edgespec.machines.workers import Worker
from edgespec.models.fit import check_fit, estimate_memory
from edgespec.models.hub import Hub
from edgespec.models.load_config import LoadConfig
from edgespec.models.network import Network, find_network
from edgespec.models.plan import plan
from edgespec.models.registry import load_registry
from edgespec.models.report import describe_plan
from edgespec.models.report_text import format_plan
from edgespec.models.speed import SpeedEstimate
from tests.backends.assistant_heads import make_assistant, make_target
from tests.gguf_models import TARGET
from tests.reporter import Heard
from tests.workers import lending, started_worker

GIB = 2**30


def options(*workers: str, gpu_layers: int | None = None) -> LoadOptions:
    return LoadOptions(context_size=256, threads=1, workers=workers, gpu_layers=gpu_layers)


def planned(config: LoadConfig, heard: Heard) -> str:
    found = plan(config, load_registry(), Hub.from_environment())
    return "+".join(each.spec.name for each in found.drafters)


def test_the_memory_of_other_machines_counts() -> None:
    here = Memory(4 * GIB + RESERVE_BYTES)
    with lending((8 * GIB + RESERVE_BYTES, 9 * GIB), (4 * GIB + RESERVE_BYTES, 5 * GIB)) as address:
        network, memory = find_network(options(address), "llamacpp", read_file(TARGET), here)
    assert memory.usable == 16 * GIB
    assert network is not None and network.split == Split(2, ((3, 1),), ())
    assert network.row_bytes == 2 * 2 * 4 * 256 and network.wait_s == 2 * network.workers[0].round_trip_s


@pytest.mark.parametrize(
    ("shares_ram", "gpu_layers", "fits"), [(False, None, False), (False, 3, True), (True, None, True)]
)
def test_a_gpu_holds_all_layers_of_this_machine_beside_workers(
    shares_ram: bool, gpu_layers: int | None, fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = DeviceMemory("CUDA0", RESERVE_BYTES + 2**20, 2 * GIB, shares_ram)
    monkeypatch.setattr("edgespec.models.fit.host_memory", lambda _=(): Memory(64 * GIB, (gpu,)))
    with lending((2 * GIB, 3 * GIB)) as address:
        load = replace(options(address), gpu_layers=gpu_layers)
        found = plan(LoadConfig(draft="none", load=load, force=True), load_registry(), Hub.from_environment())
    assert found.fit.headroom > 0 and found.fit.fits == fits


def test_the_memory_of_a_worker_on_this_machine_is_not_counted_twice() -> None:
    here = host_memory()
    with started_worker() as worker:
        network, memory = find_network(options(worker.address), "llamacpp", read_file(TARGET), here)
    assert network is not None and network.workers[0].is_here
    assert memory.usable == here.usable


def test_drafts_have_to_fit_on_this_machine() -> None:
    header, everywhere = read_file(TARGET), Memory(64 * GIB)
    check_fit(header, [(header, None)], context=256, memory=everywhere, own=(Memory(RESERVE_BYTES + GIB), 0.5))
    with pytest.raises(DoesNotFit, match=r"on this machine its layers need .*, the drafts .*, and 0\.0 MiB are free"):
        check_fit(header, [(header, None)], context=256, memory=everywhere, own=(Memory(RESERVE_BYTES), 0.0))
    allowed = Memory(RESERVE_BYTES + GIB, limit=estimate_memory(header, 256).total // 2)
    check_fit(header, [], context=256, memory=everywhere, own=(allowed, 0.5))
    with pytest.raises(DoesNotFit, match=r"on this machine its layers need [\d.]+ MiB, and [\d.]+ MiB are allowed"):
        check_fit(header, [], context=256, memory=everywhere, own=(allowed, 0.6))


def test_a_plan_that_is_forced_tells_what_this_machine_lacks() -> None:
    """As `edgespec plan` makes it: there is memory for all, and too little of it here."""
    with lending((64 * GIB, 65 * GIB)) as address:
        config = LoadConfig(load=options(address), force=True)
        found = plan(config, load_registry(), Hub.from_environment())
    assert found.fit.own is not None and describe_plan(found).fits
    assert found.fit.draft is not None
    target, draft = found.fit.target.total, found.fit.draft.total
    for lacking, fits_without_draft in ((draft, True), (draft + 1, False)):
        here = Memory(RESERVE_BYTES + target // 2 + draft - lacking)
        report = describe_plan(replace(found, fit=replace(found.fit, own=(here, 0.5))))
        facts = report.to_dict()
        assert not facts["fits"] and facts["fits_without_draft"] == fits_without_draft
        assert facts["needed_bytes"] < facts["free_bytes"] and facts["lacking_here_bytes"] == lacking
        told = "\n".join(format_plan(report))
        assert "DOES NOT FIT: needs" in told and "this machine lacks" in told
        assert ("fits without the draft model" in told) == fits_without_draft


def test_a_draft_that_reads_the_targets_cache_is_left_out(tmp_path: Path) -> None:
    target, assistant = make_target(tmp_path / "t.gguf"), make_assistant(tmp_path / "a.gguf")
    with lending((GIB, 2 * GIB)) as address:
        config = LoadConfig(model=str(target), draft=str(assistant), load=options(address))
        with pytest.raises(DraftRefused, match="reads the target's cache, a part of which is on workers"):
            planned(config, Heard())


def test_the_network_adds_to_every_forward_and_so_less_to_a_token_of_a_draft() -> None:
    alone = SpeedEstimate({1: 0.010, 2: 0.012, 4: 0.016}, 0.001)
    slow = alone.with_network(0.050)
    assert slow.rows == pytest.approx({1: 0.060, 2: 0.062, 4: 0.066})
    tokens = 1 + 0.8 + 0.8**2 + 0.8**3
    (near, gain), (far, slow_gain) = alone.speculative(0.8), slow.speculative(0.8)
    assert near == far == 3
    assert gain == pytest.approx(tokens * 0.010 / (0.016 + 3 * 0.001))
    assert slow_gain == pytest.approx(tokens * 0.060 / (0.066 + 3 * 0.001))


def test_what_a_network_says() -> None:
    workers = (Worker("10.0.0.2:1", ((8 * GIB, 8 * GIB),), 0.0012), Worker("10.0.0.3:1", ((GIB, GIB),), 0.003))
    network = Network(workers, Split(1, ((4,), (1,)), ()), 4096)
    assert network.describe() == "1 layer here, 4 on 10.0.0.2:1, 1 on 10.0.0.3:1; the network adds 4.2 ms to a forward."
    idle = Network(workers, Split(2, ((4,), (0,)), ()), 4096)
    assert idle.wait_s == 0.0012 and idle.split.hops == 1

"""The registry: built-in drafters, and those of packages by real entry points."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import dedent

import pytest

from edgespec.backends.toy_session import ToyModel, ToySession
from edgespec.core.drafter import Drafter
from edgespec.drafters import registry
from edgespec.drafters.block import BlockDrafter
from edgespec.drafters.lookahead import LookaheadDrafter
from edgespec.drafters.ngram import NgramDrafter
from edgespec.drafters.recycling import RecyclingDrafter
from edgespec.drafters.registry import SELF, SlotResources, drafter_specs, find_spec, refused_plugins
from edgespec.drafters.sequential import ModelDraftSession, SequentialDrafter
from edgespec.drafters.suffix import SuffixDrafter

Install = Callable[[str, str], None]
V = 8


@pytest.fixture
def install(tmp_path: Path) -> Iterator[Install]:
    """Installs (the source of a module `example_plugin`, the lines of its entry points)."""

    def put(source: str, entry_points: str) -> None:
        (tmp_path / "example_plugin.py").write_text(
            "from edgespec.core.drafter import Drafter\nfrom edgespec.drafters import DrafterSpec\n\n\n"
            "class Silent(Drafter):\n    name = 'silent'\n\n\n"
            "def opened(resources):\n    return Silent()\n\n\n" + dedent(source)
        )
        information = tmp_path / "example_plugin-1.0.dist-info"
        information.mkdir()
        (information / "METADATA").write_text("Metadata-Version: 2.1\nName: example-plugin\nVersion: 1.0\n")
        (information / "entry_points.txt").write_text(f"[{registry.GROUP}]\n{dedent(entry_points)}\n")
        sys.path.insert(0, str(tmp_path))
        importlib.invalidate_caches()
        registry._installed.cache_clear()

    yield put
    if str(tmp_path) in sys.path:
        sys.path.remove(str(tmp_path))
    sys.modules.pop("example_plugin", None)
    registry._installed.cache_clear()


HEADS = ["mtp", "eagle3", "eagle", "dflash", "dspark", "medusa", "hydra"]
BUILT_IN = ["ngram", "suffix", "recycling", "lookahead", "model", *HEADS, "pard", SELF]
GOOD = "SPEC = DrafterSpec('silent', 'proposes nothing', opened)\n"


def make_resources(**options: int) -> SlotResources:
    model = ToyModel(vocab_size=V)
    session = ToySession(model)
    return SlotResources(ToySession(model), V, session, head=ModelDraftSession(session, V), **options)


def test_the_built_in_drafters() -> None:
    specs = drafter_specs()
    assert [*specs][: len(BUILT_IN)] == BUILT_IN
    assert all(spec.name == name and spec.summary for name, spec in specs.items())
    kinds: dict[str, type[Drafter]] = {
        "ngram": NgramDrafter,
        "suffix": SuffixDrafter,
        "recycling": RecyclingDrafter,
        "lookahead": LookaheadDrafter,
        "model": SequentialDrafter,
        **dict.fromkeys(HEADS, SequentialDrafter),
        "pard": BlockDrafter,
        SELF: SequentialDrafter,
    }
    for name, kind in kinds.items():
        drafter = specs[name].open(make_resources(mask_token=7))
        assert isinstance(drafter, kind) and drafter.name == name
    assert [name for name in BUILT_IN if specs[name].draws] == ["model", *HEADS, "pard", SELF]
    assert [name for name in BUILT_IN if not specs[name].in_auto] == ["recycling", "lookahead"]
    assert specs["ngram"].needs == "nothing" and specs[SELF].needs == "target"


def test_what_is_missing_is_said() -> None:
    specs = drafter_specs()
    for name in ("model", "pard", SELF):
        with pytest.raises(ValueError, match="no draft was loaded"):
            specs[name].open(SlotResources(ToySession(ToyModel()), V, None, 3))
    with pytest.raises(ValueError, match="no head was loaded"):
        specs["eagle3"].open(SlotResources(ToySession(ToyModel()), V))
    with pytest.raises(ValueError, match="names no mask token"):
        specs["pard"].open(make_resources())
    with pytest.raises(ValueError, match="the model has no token"):
        specs["pard"].open(make_resources(mask_token=V))


def test_a_package_adds_a_drafter(install: Install) -> None:
    install(GOOD, "silent = example_plugin:SPEC")
    assert [*drafter_specs()] == [*BUILT_IN, "silent"]
    assert not refused_plugins()
    found = find_spec("silent")
    assert found is not None and found.open(make_resources()).name == "silent"


def test_a_package_adds_several(install: Install) -> None:
    install(
        "SPECS = [DrafterSpec('one', '', opened), DrafterSpec('two', '', opened, words=('zwei', 'deux'))]",
        "both = example_plugin:SPECS",
    )
    assert [*drafter_specs()] == [*BUILT_IN, "one", "two"]
    found = find_spec("zwei")
    assert found is not None and found.name == "two" and find_spec("two") is None


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("import no_such_module", "No module named 'no_such_module'"),
        ("", "has no attribute 'BAD'"),
        ("BAD = 5", "it is a int, not a DrafterSpec"),
        ("BAD = DrafterSpec('Big Name', '', opened)", "'Big Name' is not a name"),
        ("BAD = DrafterSpec('ngram', '', opened)", "the name 'ngram' is taken"),
        ("BAD = DrafterSpec('qspec', '', opened)", "the name 'qspec' is taken"),
        ("BAD = DrafterSpec('auto', '', opened)", "the name 'auto' is taken"),
        ("BAD = DrafterSpec('other', '', opened, words=('none',))", "the name 'none' is taken"),
        ("BAD = DrafterSpec('other', '', opened, needs='model')", "cannot have a model loaded"),
    ],
)
def test_a_plugin_that_cannot_be_used_is_refused_with_the_reason(install: Install, source: str, reason: str) -> None:
    """The other plugin of the same distribution is used, where its module can be imported."""
    is_imported = "import" not in source and "raise" not in source
    install(f"{GOOD}{source}", "bad = example_plugin:BAD\nsilent = example_plugin:SPEC")
    assert [*drafter_specs()] == [*BUILT_IN, *(["silent"] if is_imported else [])]
    assert reason in refused_plugins()["bad"]
    assert [*refused_plugins()] == (["bad"] if is_imported else ["bad", "silent"])

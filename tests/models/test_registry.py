"""The shipped models.toml, the user's file over it, and every kind of mistake in one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from edgespec.errors import CacheError, RegistryError, UnknownModel
from edgespec.models.references import HubFile, HubQuant, HubRepo, LocalPath, PackagedFile
from edgespec.models.registry import EMBEDDED_ALIAS, ROLES, Originals, Registry, load_registry

FAMILIES = ["llama-70b-q4", "llama-8b-q4", "qwen2.5-72b-q4", "qwen3-32b-q4", "qwen3.5-9b-q4", "qwen3.6-27b-q4"]
FAMILIES += ["qwen3.8-27b-q4", "gemma-3-27b-q4", "gemma-4-31b-q4", "gpt-oss-20b", "mistral-small-24b-q4"]
FAMILIES += ["deepseek-r1-32b-q4", "glm-4.5-air-q4", "phi-4-q4"]


def load(tmp_path: Path, text: str) -> Registry:
    path = tmp_path / "models.toml"
    path.write_text(text, encoding="utf-8")
    return load_registry(path)


def shipped(tmp_path: Path) -> Registry:
    return load_registry(tmp_path / "absent.toml")


def test_the_shipped_file_covers_every_family(tmp_path: Path) -> None:
    registry = shipped(tmp_path)
    assert set(FAMILIES) <= set(registry.entries)
    for entry in registry.entries.values():
        assert entry.description and entry.about.parameters and entry.about.tasks, entry.alias
        assert entry.about.active is None or entry.about.active < entry.about.parameters
        for pair in filter(None, (entry.gguf, entry.mlx)):
            assert pair.target != pair.draft and (pair.pard is None) == (pair.pard_token is None)
            for role in ROLES:
                reference = getattr(pair, role)
                is_here = reference is None or isinstance(reference, PackagedFile)
                assert is_here or getattr(entry.originals, role), f"{entry.alias}: {role} has no original"
        if entry.mlx:
            is_packaged = entry.alias in (EMBEDDED_ALIAS, "smollm2-135m")
            assert isinstance(entry.mlx.target, PackagedFile if is_packaged else HubRepo)


def test_the_acceptance_of_a_pair_is_kept(tmp_path: Path) -> None:
    def acceptance(text: str) -> tuple[float, float] | None:
        pair = load(tmp_path, text).get(EMBEDDED_ALIAS).pair("llamacpp")
        assert pair is not None
        return pair.acceptance

    shipped_ = acceptance("")
    assert shipped_ is not None and 0 < shipped_[0] < shipped_[1] < 1
    assert acceptance(f"[{EMBEDDED_ALIAS}.gguf]\nverified = false\n") == shipped_
    assert acceptance(f'[{EMBEDDED_ALIAS}.gguf]\ndraft = "a/b"\n') is None, "another draft"
    assert acceptance(f"[{EMBEDDED_ALIAS}.gguf]\nacceptance = [0.25, 1]\n") == (0.25, 1.0)


def test_a_pard_model_has_a_reference_and_a_mask_token(tmp_path: Path) -> None:
    def pard(text: str, alias: str = "qwen3-32b-q4") -> tuple[object, int | None]:
        entry = load(tmp_path, text).get(alias)
        pair = entry.mlx or entry.gguf
        assert pair is not None
        return pair.pard, pair.pard_token

    assert pard('[x.gguf]\ntarget = "a/b"\n', "x") == (None, None)
    assert pard('[x.gguf]\ntarget = "a/b"\npard = "c/d:Q8_0"\n', "x") == (HubQuant("c/d", "Q8_0"), None)
    mine = '[x.gguf]\ntarget = "a/b"\npard = "/p.gguf"\npard_token = 0\n'
    assert pard(mine, "x") == (LocalPath(Path("/p.gguf")), 0)
    shipped_ = HubRepo("amd/PARD-Qwen3-0.6B")
    assert pard("") == pard('[qwen3-32b-q4.mlx]\ndraft = "a/b"\n') == (shipped_, 151670)
    assert pard("[qwen3-32b-q4.mlx]\npard_token = 5\n") == (shipped_, 5)
    assert pard('[qwen3-32b-q4.mlx]\npard = "a/b"\n') == (HubRepo("a/b"), None), "another one has another token"


def test_heads_of_the_shipped_targets(tmp_path: Path) -> None:
    registry = shipped(tmp_path)
    pairs = [(entry, pair) for entry in registry.entries.values() for pair in (entry.gguf, entry.mlx) if pair]
    for entry, pair in pairs:
        assert (pair.head is None) == (pair.head_kind is None), entry.alias
        assert pair.head != pair.target and not pair.head_verified, "no head was run with its target yet"
        assert pair.with_head is None or pair is entry.gguf
    families = ("llama-70b", "llama-8b", "qwen3-32b", "qwen3.5-9b", "qwen3.6-27b", "qwen3.8-27b", "gemma-4", "gpt-oss")
    with_heads = {entry.alias for entry, pair in pairs if pair.head or pair.with_head}
    assert all(any(alias.startswith(family) for alias in with_heads) for family in (*families, "glm"))
    gemma = registry.get("gemma-4-31b-q4").gguf
    assert gemma is not None and gemma.head_kind == "gemma4-assistant"
    assert gemma.head == HubFile("unsloth/gemma-4-31B-it-GGUF", "MTP/mtp-gemma-4-31B-it-Q8_0.gguf")


def test_another_head_does_not_inherit_its_kind(tmp_path: Path) -> None:
    mine = '[qwen3-32b-q4.mlx]\nhead = "a/b"\nhead_kind = "dflash"\n'
    pair = load(tmp_path, mine).get("qwen3-32b-q4").mlx
    assert pair is not None and (pair.head, pair.head_kind) == (HubRepo("a/b"), "dflash")
    with pytest.raises(RegistryError, match="head and head_kind need each other"):
        load(tmp_path, '[qwen3-32b-q4.mlx]\nhead = "a/b"\n')


def test_an_unknown_name_gets_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(UnknownModel, match="llama-70b-q4") as caught:
        shipped(tmp_path).get("lama-70b-q4")
    assert caught.value.hint == "Run `edgespec list` to see the known models."


def test_the_users_file_changes_single_keys(tmp_path: Path) -> None:
    registry = load(
        tmp_path,
        '[llama-70b-q4.gguf]\ndraft = "ngram"\n[llama-70b-q4.sampling]\ntemperature = 0.5\ntop_k = 7\n'
        '[mine]\ndescription = "Mine"\n[mine.gguf]\ntarget = "/models/mine.gguf"\ndraft = "a/b:Q8_0"\n',
    )
    changed = registry.get("llama-70b-q4")
    assert changed.gguf is not None and changed.gguf.draft is None
    assert changed.gguf.target == shipped(tmp_path / "x").get("llama-70b-q4").gguf.target  # type: ignore[union-attr]
    assert (changed.sampling.temperature, changed.sampling.top_k, changed.sampling.min_p) == (0.5, 7, None)
    assert changed.description.startswith("Llama 3.3")
    mine = registry.get("mine").pair("llamacpp")
    assert mine is not None
    assert (mine.target, mine.draft) == (LocalPath(Path("/models/mine.gguf")), HubQuant("a/b", "Q8_0"))


def test_a_target_of_the_user_is_not_that_of_a_package(tmp_path: Path) -> None:
    assert isinstance(shipped(tmp_path).get("smollm2-135m").pair("llamacpp").target, PackagedFile)  # type: ignore[union-attr]
    own = load(tmp_path, '[smollm2-135m.gguf]\ntarget = "/models/mine.gguf"\n').get("smollm2-135m").pair("llamacpp")
    assert own is not None
    assert (own.target, own.verified) == (LocalPath(Path("/models/mine.gguf")), False)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[x.gguf\n", "not valid TOML"),
        ("x = " + "[" * 5000, "not valid TOML: it is nested too deep"),
        ("x = 1\n", "[x]: a model is a table with a name of letters"),
        ('[x.ggfu]\ntarget = "a/b"\n', "[x]: ggfu: this key is not known"),
        ('[x.gguf]\ntarget = "a/b"\ndarft = "c/d"\n', "[x]: gguf.darft: this key is not known"),
        ('[x.gguf]\ndraft = "a/b"\n', "[x]: gguf.target: Field required"),
        ("[x.gguf]\ntarget = 7\n", "target: 7 is not a file or a repository"),
        ('[x.gguf]\ntarget = "llama-70b-q4"\n', "target: 'llama-70b-q4' is not a file or a repository"),
        ('[x.gguf]\ntarget = "hf:a/b/../c.gguf"\n', "leaves its folder"),
        ('[x.gguf]\ntarget = "a/b"\nverified = "yes"\n', "verified: Input should be a valid boolean"),
        *(
            (f'[x.gguf]\ntarget = "a/b"\nacceptance = {value}\n', "gguf.acceptance")
            for value in ("0.5", "[0.8, 0.5]", "[0.5, 1.5]", '["a", 1]', "[nan, 1]")
        ),
        ("[x]\ngguf = 3\n", "gguf: Input should be a dictionary"),
        ('[x.gguf]\ntarget = "a/b"\npard = "python-6m"\n', "pard: 'python-6m' is not a file or a repository"),
        ('[x.gguf]\ntarget = "a/b"\npard = "hf:a/b/../c.gguf"\n', "pard: 'hf:a/b/../c.gguf' is not a model reference"),
        ('[x.gguf]\ntarget = "a/b"\nwith_head = "python-6m"\n', "with_head: 'python-6m' is not a file"),
        *(
            (f'[x.gguf]\ntarget = "a/b"\npard_token = {value}\n', "pard_token: Input should be")
            for value in ("-1", "1.5", "true", '"7"', "[7]")
        ),
        ('[x.gguf]\ntarget = "a/b"\nhead = 7\nhead_kind = "mtp"\n', "head: 7 is not a file"),
        ('[x.gguf]\ntarget = "a/b"\nhead = "c/d"\n', "head and head_kind need each other"),
        ('[x.gguf]\ntarget = "a/b"\nhead_kind = "mtp"\n', "head and head_kind need each other"),
        ('[x.gguf]\ntarget = "a/b"\nhead = "c/d"\nhead_kind = "eagle4"\n', "head_kind: Input should be 'eagle3',"),
        ('[x.gguf]\ntarget = "a/b"\nhead_verified = 1\n', "head_verified: Input should be a valid boolean"),
        ('[x]\noriginals = "a/b"\n', "originals: Input should be a dictionary"),
        ('[x.originals]\ntraget = "a/b"\n', "originals.traget: this key is not known"),
        *(
            (f"[x.originals]\ndraft = {value}\n", "originals.draft: ")
            for value in ("7", '"a"', '"a/b:Q4_0"', '"a/b/c.gguf"', '"a/b@main"', '"https://huggingface.co/a/b"', '""')
        ),
        ('[x]\ndescription = "only"\n', "neither a gguf nor an mlx"),
        ("[x]\ndescription = 3\n", "description: Input should be a valid string"),
        ("[x.sampling]\ntemperature = true\n", "sampling.temperature: Input should be a valid number"),
        ("[x.sampling]\ntop_k = 1.5\n", "sampling.top_k: Input should be a valid integer"),
        ("[x.sampling]\ntop_p = 1.5\n", "sampling.top_p: Input should be less than or equal to 1"),
        ("[x.sampling]\ntemperature = nan\n", "sampling.temperature: Input should be"),
        ("[x.sampling]\ntopk = 1\n", "sampling.topk: this key is not known"),
        ('["a b".gguf]\ntarget = "a/b"\n', "a name of letters"),
        ("[python-6m]\nparameters = 0", "parameters: Input should be greater than 0"),
        ("[python-6m.description]\nlong = 1", "description: Input should be a valid string"),
        ('[python-6m]\nactive = "3B"', "active: Input should be a valid number"),
        ("[python-6m]\nlicense = 2", "license: Input should be a valid string"),
        ('[python-6m]\ntasks = ["cooking"]', "tasks.0: Input should be 'chat', 'code' or 'reasoning'"),
    ],
)
def test_each_mistake_names_file_and_table(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(RegistryError) as caught:
        load(tmp_path, text)
    assert message in caught.value.message
    assert str(tmp_path / "models.toml") in caught.value.message


def test_a_file_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CacheError, match="cannot be read"):
        load_registry(tmp_path)
    (tmp_path / "models.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(RegistryError, match="not valid TOML"):
        load_registry(tmp_path / "models.toml")


def test_the_originals_of_a_replaced_model_are_dropped(tmp_path: Path) -> None:
    def originals(text: str) -> Originals:
        return load(tmp_path, text).get("llama-70b-q4").originals

    known = shipped(tmp_path).get("llama-70b-q4").originals
    assert known.target == "meta-llama/Llama-3.3-70B-Instruct" and known.draft == "meta-llama/Llama-3.2-1B-Instruct"
    assert originals("[llama-70b-q4.sampling]\ntop_k = 7\n") == known
    assert originals('[llama-70b-q4.gguf]\ndraft = "a/b"\n') == replace(known, draft=None)
    mine = '[llama-70b-q4.gguf]\ntarget = "a/b"\n[llama-70b-q4.originals]\ntarget = "c/d"\n'
    assert originals(mine) == replace(known, target="c/d")

"""`edgespec pull`, `list`, `rm` against a real local hub: what a user sees of downloads that fail and that resume."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.backends.eagle3_heads import make_head, make_head_folder
from tests.cli.conftest import COMMAND, Cli
from tests.gguf_models import DRAFT, TARGET
from tests.models.hubserver import HubServer
from tests.models.hubstate import Fault

REPO, FILE = "me/python-GGUF", "python-Q8_0.gguf"
REFERENCE = f"hf:{REPO}/{FILE}"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[HubServer]:
    folder = tmp_path / "served" / REPO
    folder.mkdir(parents=True)
    (folder / FILE).write_bytes(TARGET.read_bytes())
    (tmp_path / "served" / "me" / "draft-GGUF").mkdir()
    (tmp_path / "served" / "me" / "draft-GGUF" / "draft-Q8_0.gguf").write_bytes(DRAFT.read_bytes())
    with HubServer(tmp_path / "served", token="hf_right") as running:
        yield running


@pytest.fixture
def online(environment: dict[str, str], server: HubServer, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    # The client has read the variable already where another test of this process imported it.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    environment.update(HF_ENDPOINT=server.url, HF_HUB_OFFLINE="0", HF_TOKEN="")
    return environment


def test_pull_run_list_remove(online: dict[str, str], cli: Cli, server: HubServer) -> None:
    done = cli("pull", f"hf.co/{REPO}:Q8_0", "--draft", "https://huggingface.co/me/draft-GGUF")
    assert done.returncode == 0, done.stderr
    target, draft = (Path(line) for line in done.stdout.splitlines())
    assert target.read_bytes() == TARGET.read_bytes()
    assert draft.read_bytes() == DRAFT.read_bytes()
    answer = cli("run", "def f", "--model", REFERENCE, "--draft", "me/draft-GGUF", "--max-tokens", "8", "--json",
                 "--temperature", "0", "--threads", "1", "--draft-max", "3", HF_HUB_OFFLINE="1")  # fmt: skip
    assert json.loads(answer.stdout)["metrics"]["drafted_tokens"] > 0, answer.stderr
    cached = [m["model"] for m in json.loads(cli("list", "--json").stdout)["cached"]]
    assert REFERENCE in cached
    assert cli("pull", REFERENCE, "--verify").returncode == 0
    unanswered = cli("rm", REFERENCE)
    assert unanswered.returncode == 2 and "--yes" in unanswered.stderr
    assert cli("rm", REFERENCE, "--yes").returncode == 0
    missing = cli("rm", REFERENCE)
    assert missing.returncode == 4 and missing.stderr.startswith("error: "), "nothing is asked"


def test_a_mirror_on_this_machine_is_asked_without_a_proxy(online: dict[str, str], cli: Cli) -> None:
    done = cli("pull", REFERENCE, "--draft", "none", is_new=True, HTTP_PROXY="http://127.0.0.1:9", **online)
    assert done.returncode == 0, done.stderr


def test_killed_midway_it_resumes(online: dict[str, str], cli: Cli, server: HubServer, tmp_path: Path) -> None:
    half = TARGET.stat().st_size // 2
    server.fault(REPO, FILE, Fault("stall", at=half))
    child = subprocess.Popen([*COMMAND, "pull", REFERENCE, "--draft", "none"], env=online, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not any(p.stat().st_size > half // 2 for p in (tmp_path / "hf").rglob("*.incomplete")):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    child.kill()
    child.wait()
    server.fault(REPO, FILE, None)
    done = cli("pull", REFERENCE, "--draft", "none")
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).read_bytes() == TARGET.read_bytes()
    last = [r for r in server.log if r.path.endswith(FILE) and r.method == "GET" and r.range][-1]
    start = int(last.range.split("=")[1].split("-")[0]) if last.range else 0
    assert half // 2 < start <= half
    assert last.sent == TARGET.stat().st_size - start


@pytest.mark.parametrize(
    ("fault", "code", "told"),
    [
        (Fault("corrupt", at=2_000_000), 5, "is damaged: its hash is"),
        (Fault("status", code=404, error_code="EntryNotFound"), 4, "no file"),
        (Fault("status", code=403, error_code="GatedRepo"), 4, "gated"),
    ],
    ids=["corrupt", "404", "gated"],
)
def test_each_failure_is_a_sentence(
    online: dict[str, str], cli: Cli, server: HubServer, fault: Fault, code: int, told: str
) -> None:
    server.fault(REPO, FILE, fault)
    done = cli("pull", REFERENCE, "--draft", "none")
    assert done.returncode == code, done.stderr
    assert told in done.stderr
    assert "hint: " in done.stderr
    assert not cli("list", "--json").stdout.count(REFERENCE)


def test_a_mismatching_draft_is_refused_before_any_download(
    online: dict[str, str], cli: Cli, server: HubServer, tmp_path: Path
) -> None:
    odd = tmp_path / "served" / "me" / "odd-GGUF"
    odd.mkdir()
    entry = (6).to_bytes(8, "little") + b"return"
    (odd / "odd-Q8_0.gguf").write_bytes(DRAFT.read_bytes().replace(entry, entry.replace(b"return", b"retorn"), 1))
    done = cli("pull", REFERENCE, "--draft", "me/odd-GGUF")
    assert done.returncode == 5
    assert "'retorn'" in done.stderr
    sent = sum(r.sent for r in server.log if r.path.endswith(".gguf"))
    assert sent < 2 * 600_000  # headers only: the two files hold seven megabytes


def test_a_head_comes_with_its_target_once_it_is_pulled(
    online: dict[str, str], cli: Cli, server: HubServer, tmp_path: Path
) -> None:
    served, config = tmp_path / "served" / "me", tmp_path / "config"
    (served / "head-GGUF").mkdir()
    make_head(served / "head-GGUF" / "head-Q8_0.gguf")
    config.mkdir()
    pair = f'target = "{REFERENCE}"\ndraft = "me/draft-GGUF"\nhead = "me/head-GGUF"\nhead_kind = "eagle3"\n'
    (config / "models.toml").write_text(f"[here.gguf]\n{pair}")
    assert cli("pull", "here", "--draft", "none").returncode == 0
    before = cli("plan", "here", "--no-speed", "--json")
    assert [head["head"] for head in json.loads(before.stdout)["heads"]] == ["me/head-GGUF"], "read by ranges"
    assert not list((tmp_path / "hf").rglob("*head*.gguf"))
    run = ["run", "def", "--model", "here", "--max-tokens", "4", "--temperature", "0", "--threads", "1", "--ctx", "64"]
    told = "Drafting without a head: me/head-GGUF, an EAGLE-3 head for this target, is not downloaded; "
    assert f"{told}`edgespec pull here` does that." in cli(*run).stderr
    pulled = cli("pull", "here")
    assert pulled.returncode == 0 and len(pulled.stdout.splitlines()) == 3, pulled.stderr
    taken = "Drafting with me/head-GGUF, an EAGLE-3 head that the registry pairs with the target."
    assert taken in cli(*run, HF_HUB_OFFLINE="1").stderr
    listed = json.loads(cli("list", "--json").stdout)
    assert [head["model"] for head in listed["heads"]] == ["hf:me/head-GGUF/head-Q8_0.gguf"]
    assert len(listed["cached"]) == 2 and "Trained heads, which draft for their targets:" in cli("list").stdout
    assert cli("rm", "me/head-GGUF", "--yes").returncode == 0 and not json.loads(cli("list", "--json").stdout)["heads"]


@pytest.mark.parametrize(("size", "told"), [(256, ""), (128, "for a hidden size of 128; the target has 256")])
def test_a_heads_folder_is_checked_before_its_weights_are_fetched(
    online: dict[str, str], cli: Cli, server: HubServer, tmp_path: Path, size: int, told: str
) -> None:
    head = make_head_folder(tmp_path / "served" / "me" / "head", target_size=size, layers=(2, 3, 5), vocab_size=4096)
    done = cli("pull", "python-6m", "--backend", "mlx", "--draft", "eagle3:me/head")
    sent = sum(r.sent for r in server.log if r.path.endswith(".safetensors"))
    weights = (head / "model.safetensors").stat().st_size
    if told:
        assert done.returncode == 5 and told in done.stderr, done.stderr
        assert sent < 100_000 < weights
    else:
        assert done.returncode == 0 and sent > weights, done.stderr
        assert (Path(done.stdout.splitlines()[1]) / "model.safetensors").stat().st_size == weights

"""The text of an export: what a shell makes of it."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from pathlib import Path

from edgespec.export.engine import TENSORRT_FILE
from edgespec.export.plan import Exported
from edgespec.export.script import format_script


def check_syntax(exported: Exported, folder: Path) -> None:
    """A shell that takes the script would run the very words."""
    text = format_script(exported, ['It\'s a "remark" with $(words) `of` \\ a user.'], with_files=True)
    shown = re.sub(
        r"^(\S*(?:vllm|sglang|trtllm-serve|text-gen\S+|llama-server|mlx_lm.server|ollama)) ",
        r"echo_words \1 ",
        text,
        flags=re.M,
    )
    echo = "echo_words() { for word; do printf '%s\\n' \"$word\"; done; }\n"
    ran = subprocess.run(["sh", "-c", echo + shown], cwd=folder, capture_output=True, text=True, check=True)
    assert ran.stdout.splitlines() == [word for command in exported.commands for word in command]
    for name, content in exported.files.items():
        assert (folder / name).read_text() == content


def test_words_of_a_shell_stay_words(tmp_path: Path) -> None:
    nasty = ("ollama", "$(touch /tmp/x)", "a b", "it's", '"', "--x=$HOME", "\\", "*")
    check_syntax(Exported((nasty,), files={"f": "x $y `z`\n"}), tmp_path)
    assert shutil.which("sh") and shlex.split(shlex.join(nasty)) == list(nasty)


def test_a_script_beside_its_files_finds_them() -> None:
    exported = Exported((("x",),), files={TENSORRT_FILE: "a: 1\n"})
    text = format_script(exported, ["word " * 60], with_files=False)
    assert 'cd "$(dirname "$0")"' in text and "cat >" not in text and text.endswith('x "$@"\n')
    assert max(map(len, text.splitlines())) <= 100


def test_what_fails_ends_the_script(tmp_path: Path) -> None:
    exported = Exported((("false",), ("touch", "reached")), files={"f": "x\n"})
    for with_files in (True, False):
        text = format_script(exported, [], with_files=with_files)
        assert subprocess.run(["sh", "-c", text], cwd=tmp_path, check=False).returncode == 1
    assert not (tmp_path / "reached").exists()

"""Agents of others: what starts each on a task without a terminal, and what its model writes to do the task."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.gguf_models import REPOSITORY

FOLDER = Path(os.environ.get("EDGESPEC_TEST_AGENTS", REPOSITORY / ".agents"))
"""Where `make agents` installs them."""

FILE, BEFORE, AFTER = "pears.txt", "unripe", "mellow"
TASK = f"Correct the word in {FILE} that says how far the fruit is."
_WRONG = "overripe"
_MAX_S = 180  # for a task
_PATHS = (FOLDER / "node_modules" / ".bin", FOLDER / "aider" / "bin")

Call = tuple[str, Mapping[str, Any]]
"""The name of a tool, and its arguments. FOLDER/ in a text is the folder of the file."""


def write_sentence(word: str) -> str:
    """The text of the file."""
    return f"The pears are {word}.\n"


@dataclass(frozen=True)
class Agent:
    """A program that works on files through a model.

    name      of its program, and for `edgespec launch`
    options   which make it do the task that follows, and end
    steps     what the model writes, in order: a call, or a text where the agent has no tools. Each but the first comes
              with a word, which the agent's answer to the step before brings into the prompt
    reused    the least share of a prompt that the next one finds in the cache
    context   tokens; a 64th of them is read again rather than copied
    settings  the file below the home folder for what `edgespec launch` prints; "" for lines of a shell, of which the
              last starts the program
    goes_on   options that do so in its last session; "" for an agent that shows a model of unknown abilities no images
    """

    name: str
    options: str
    steps: tuple[tuple[str, Call | str], ...]
    reused: float = 0.95
    context: int = 65_536
    settings: str = ""
    goes_on: str = ""

    @property
    def has_tools(self) -> bool:
        return not isinstance(self.steps[0][1], str)

    def find(self) -> str | None:
        """The path of its program; None where it is not installed."""
        return shutil.which(self.name, path=os.pathsep.join([*map(str, _PATHS), os.environ.get("PATH", "")]))

    def prepare(self, settings: str, home: Path) -> str:
        """Put what `edgespec launch` has printed into its place; returns the lines of a shell that start the program,
        which arguments may follow.
        """
        if not self.settings:
            return settings.rstrip()
        file = home / self.settings
        file.parent.mkdir(parents=True)
        file.write_text(settings, encoding="utf-8")
        return self.name

    def run(self, script: str, home: Path, work: Path) -> subprocess.CompletedProcess[str]:
        """Run lines of a shell in the folder `work`."""
        program = self.find()
        assert program is not None
        path = os.pathsep.join([str(Path(program).parent), os.environ["PATH"]])
        variables = {"HOME": str(home), "PATH": path, "LANG": "C.UTF-8", "TERM": "dumb"}
        variables |= {"CLINE_SESSION_BACKEND_MODE": "local"}  # else it leaves a process behind
        return subprocess.run(["bash", "-ec", script], cwd=work, env=variables, stdin=subprocess.DEVNULL,
                              capture_output=True, text=True, timeout=_MAX_S, check=False)  # fmt: skip


def _read_and_edit(
    reader: str, editor: str, path: str, before: str, after: str, **more: object
) -> tuple[tuple[str, Call], ...]:
    """By tools that take the path of a file, and a text with its replacement."""
    place = f"FOLDER/{FILE}"
    return ("", (reader, {path: place})), (BEFORE, (editor, {**more, path: place, before: BEFORE, after: AFTER}))


def _write_whole(word: str) -> str:
    return f"{FILE}\n```\n{write_sentence(word)}```\n"


_PATCH = f"""\
apply_patch <<'END'
*** Begin Patch
*** Update File: {FILE}
@@
-{write_sentence(BEFORE)}+{write_sentence(AFTER)}*** End Patch
END
"""
AGENTS = (
    Agent(
        "aider",  # has no tools: it shows the file, takes texts of whole files, and tells what a check has found
        f"--yes-always --no-auto-commits --no-dirty-commits --no-check-update --analytics-disable {FILE} "
        f"--auto-test --test-cmd 'cat {FILE}; grep -q {AFTER[:1]}.{AFTER[2:]} {FILE}' --message",
        (("", _write_whole(_WRONG)), (_WRONG, _write_whole(AFTER))),
        reused=0.5,  # the file, which changes, comes before the conversation
        context=8192,
    ),
    Agent(
        "claude",
        "--permission-mode acceptEdits -p",
        _read_and_edit("Read", "Edit", "file_path", "old_string", "new_string", replace_all=False),
        goes_on="--continue -p",
    ),
    Agent(
        "cline",
        "",
        (
            ("", ("read_files", {"files": [{"path": f"FOLDER/{FILE}"}]})),
            (BEFORE, ("editor", {"path": f"FOLDER/{FILE}", "old_text": BEFORE, "new_text": AFTER})),
        ),
    ),
    Agent(
        "codex",
        "exec --dangerously-bypass-approvals-and-sandbox",
        (("", ("exec_command", {"cmd": f"cat {FILE}"})), (BEFORE, ("exec_command", {"cmd": _PATCH}))),
        settings=".codex/config.toml",
        goes_on="exec resume --last --dangerously-bypass-approvals-and-sandbox",
    ),
    Agent(
        "opencode",
        "run",
        _read_and_edit("read", "edit", "filePath", "oldString", "newString"),
        settings=".config/opencode/opencode.json",
    ),
    Agent(
        "qwen",
        "--approval-mode yolo -p",
        _read_and_edit("read_file", "edit", "file_path", "old_string", "new_string"),
    ),
)

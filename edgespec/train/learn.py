"""Learning while an engine runs: its draft is trained on the newest texts, in a process of its own, while it is idle.

The process is `edgespec adapt train --newest`. It waits by itself while engines answer, and ends with this process.
The engine takes the version that it leaves as it takes any other.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import threading
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import asdict
from math import inf
from pathlib import Path
from time import monotonic, time

import psutil

from edgespec.engine.loaded_model import LoadedModel
from edgespec.errors import EdgespecError, InvalidRequest, reason_of
from edgespec.files import lock_file, write_private
from edgespec.isolated import python_command
from edgespec.memory.administration import TextStore
from edgespec.models.load_config import LearnOptions, LoadConfig
from edgespec.models.tokenizer_compat import identify_tokenizer
from edgespec.models.versions import BASE, may_train
from edgespec.options import LOADING
from edgespec.units import GIB


def is_on_battery() -> bool:
    """Whether the machine runs on its battery; False if that is not known."""
    battery = psutil.sensors_battery() if hasattr(psutil, "sensors_battery") else None
    return battery is not None and battery.power_plugged is False


SHARE = 0.2
"""The share of the time that trainings may take, their pauses included."""
_POLL_S = 0.2
_LEARNED, _LOCK = "learned", "learning.lock"  # in the folder of a pair: when a training began, and who trains
_NOTHING = "Nothing is learned"
_log = logging.getLogger(__name__)


class Learner:
    """Starts trainings from a thread of its own, until it is closed or one has failed."""

    def __init__(
        self,
        command: Sequence[str],
        pair: Path,
        memory: Path,
        tokenizer: str,
        options: LearnOptions,
        notify: Callable[[str], None],
    ) -> None:
        """`command` trains the draft with its versions in `pair` on the texts of `tokenizer` in `memory`.

        `notify` gets sentences for the user, on the thread.
        """
        self._command = command
        self._pair = pair
        self._memory = memory
        self._tokenizer = tokenizer
        self._options = options
        self._notify = notify
        self._idle_s = inf  # since when the engine is idle
        self._counted_s = inf  # the idle time in which new texts were counted last
        self._rest_s = 0.0  # when the next training may begin
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="edgespec-learn", daemon=True)
        self._thread.start()

    def set_idle(self, is_idle: bool) -> None:
        """Tell whether the engine has nothing to do."""
        self._idle_s = monotonic() if is_idle else inf

    def close(self) -> None:
        """End the training; the next one goes on from its last checkpoint."""
        self._closing.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            while not self._closing.wait(_POLL_S):
                if self._is_due():
                    self._pair.mkdir(mode=0o700, parents=True, exist_ok=True)
                    with suppress(BlockingIOError), lock_file(self._pair / _LOCK, wait=False):
                        self._train()  # unless another engine learns this draft
        except (EdgespecError, OSError, ValueError, KeyError) as error:  # the last two: of what the child printed
            self._notify(f"Learning has failed and stops: {reason_of(error)}.")

    def _is_due(self) -> bool:
        """Whether to train now. Texts are counted once in each idle time. Raises CacheError."""
        idle_s, now_s = self._idle_s, monotonic()
        if now_s < idle_s + self._options.idle_s or now_s < self._rest_s or idle_s == self._counted_s:
            return False
        if not may_train(self._pair.parent) or is_on_battery():
            return False
        self._counted_s = idle_s
        if not self._memory.is_dir():
            return False
        began_s = 0.0  # the last training
        with suppress(OSError, ValueError):
            began_s = float((self._pair / _LEARNED).read_text(encoding="utf-8"))
        with closing(TextStore.open(self._memory)) as store:
            return store.count_answers(self._tokenizer, began_s) >= self._options.new_tokens

    def _train(self) -> None:
        """Run one training to its end. Raises OSError, and ValueError or KeyError if it fails."""
        began_s, start_s = time(), monotonic()
        command = (*self._command, "--parent", str(os.getpid()))
        with subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            errors="replace", start_new_session=True,
        ) as child:  # fmt: skip
            while True:
                with suppress(subprocess.TimeoutExpired):
                    output, told = child.communicate(timeout=_POLL_S)
                    break
                if self._closing.is_set():
                    child.kill()
        self._rest_s = monotonic() + (1 / SHARE - 1) * (monotonic() - start_s)
        _log.debug("%s ended with %s: %s%s", " ".join(command), child.returncode, output, told)
        if self._closing.is_set():
            return
        if child.returncode not in (0, InvalidRequest.exit_code):
            errors = [line.removeprefix("error: ") for line in told.splitlines() if line.startswith("error: ")]
            raise ValueError(errors[-1] if errors else f"the training ended with the exit code {child.returncode}")
        # Refused are too few texts, those that may no longer be trained on, and a draft that another process trains. On
        # battery the next training goes on with this one's checkpoint.
        if child.returncode == 0 or not is_on_battery():
            write_private(self._pair / _LEARNED, str(began_s))
        if child.returncode == 0 and (version := json.loads(output)["returned"]) is not None:
            draft = "the draft before any training" if version == BASE else f"version {version} of the draft"
            self._notify(f"Drafting with {draft} again: it predicts the newest texts better.")


def open_learner(loaded: LoadedModel, notice: Callable[[str], None], notify: Callable[[str], None]) -> Learner | None:
    """A learner for the draft of `loaded`; None if none is asked for, or possible.

    `notice` hears why nothing is learned, now; `notify` hears of trainings, later and on another thread.
    """
    config, planned = loaded.config, loaded.plan
    if config.learn is None:
        return None
    found = [each for each in planned.drafters if each.spec.name == "model"] if planned is not None else []
    pair = next((each.adaptation.pair.folder for each in found if each.adaptation is not None), None)
    reason = ""
    if config.load.workers:
        reason = "a part of the model is on workers, which serve one program at a time"
    if config.memory is None or pair is None or reason:
        notice(f"{_NOTHING}, because {reason or 'it takes kept texts and a draft model to train'}.")
        return None
    if not may_train(pair.parent):
        notice(f"{_NOTHING} yet: `edgespec adapt` asks whether texts may be trained on.")
    tokenizer = identify_tokenizer(loaded.engine.target.tokenizer)
    command = _make_command(config, loaded.info.backend)
    return Learner(command, pair, config.memory.folder, tokenizer, config.learn, notify)


def _make_command(config: LoadConfig, backend: str) -> tuple[str, ...]:
    """The training, for the models of `config`, loaded as the engine loads them."""
    learn, load = config.learn or LearnOptions(), config.load
    values = asdict(load) | {
        "ctx": load.context_size,
        "device": None if load.device is None else ",".join(load.device),
        "max_memory": None if config.max_bytes is None else config.max_bytes / GIB,
        "force": config.force,
    }
    options = ["--draft", config.draft, "--backend", backend, "--minutes", str(learn.minutes)]
    for option in LOADING:
        value, name = values[option.name], option.name.replace("_", "-")
        if isinstance(value, bool):
            options += [f"--{name}" if value else f"--no-{name}"] if value != option.default else []
        elif value is not None:
            options += [f"--{name}", str(value)]
    command = (*python_command("edgespec.cli.main", "main"), "adapt", "train", "--newest", "--no-documents", "--json")
    return (*command, *options, *learn.training, *(() if config.model is None else ("--", config.model)))

"""The interface has the command line's options, under the same names and with the same defaults."""

from __future__ import annotations

import edgespec
from edgespec.api import options
from edgespec.cli import options as command_line
from edgespec.cli.run import run_command
from edgespec.models.registry import SamplingDefaults

COMMAND_LINE_ONLY = {"words", "model", "file", "raw", "as_json", "explain", "verbose", "help_all", "preset",
                     "continue_last", "answer_format", "schema"}  # fmt: skip
PYTHON_ONLY = {"isolated", "parallel", "schema", "tools", "tool_choice", "parallel_tool_calls", "template_variables",
               "memory_source"}  # fmt: skip


def test_names_are_those_of_the_command_line() -> None:
    names = {parameter.name for parameter in run_command.params} - COMMAND_LINE_ONLY
    arguments = edgespec.LoadArguments.__annotations__.keys() | edgespec.GenerationArguments.__annotations__.keys()
    assert arguments - PYTHON_ONLY == names


def test_defaults_are_those_of_the_command_line() -> None:
    defaults = run_command.make_context("run", ["x"]).params
    assert defaults["memory"] is None, "which keeps texts; the interface keeps them only if it is asked to"
    assert options.build_load_config(None, {"memory": True}) == command_line.load_config(None, defaults)
    defaults["memory"] = False
    assert options.build_load_config(None, {}) == command_line.load_config(None, defaults)
    recommended = SamplingDefaults(top_k=20)
    assert options.resolve_sampling({}, recommended) == options.resolve_sampling(defaults, recommended)
    assert defaults["max_tokens"] is None


def test_values_mean_the_same_as_on_the_command_line() -> None:
    line = ["x", "--draft-max", "3", "--draft-tree", "5", "--acceptance", "sample", "--ctx", "512", "--kv-type", "q8_0"]
    line += ["--device", "CUDA0, CUDA1"]
    line += ["--no-memory"]
    line += ["--top-p", "0.9", "--logit-bias", "7=-1.5", "--backend", "llamacpp", "--exact"]
    values = run_command.make_context("run", line).params
    config = options.build_load_config(
        None,
        {"draft_max": 3, "draft_tree": 5, "acceptance": "sample", "ctx": 512, "kv_type": "q8_0", "backend": "llamacpp",
         "exact": True, "device": ["CUDA0", "CUDA1"]},
    )  # fmt: skip
    assert config == command_line.load_config(None, values)
    sampling = options.resolve_sampling({"top_p": 0.9, "logit_bias": {7: -1.5}}, SamplingDefaults())
    assert sampling == options.resolve_sampling(values, SamplingDefaults())

"""Build llama-cpp-python with llama.cpp's Vulkan backend, which runs on Mesa's software device where there is no GPU.

    uv run python -m laboratory.software_gpu FOLDER
    eval "$(uv run python -m laboratory.software_gpu FOLDER)" && make gpu

It needs a C++ compiler, CMake, glslc, the Vulkan and SPIR-V headers, and a driver; on Debian these are the packages
glslc, libvulkan-dev, spirv-headers and mesa-vulkan-drivers. Mesa 22.3.6, Debian 12's, crashes at times where another
thread computes beside the device; 25.0.7, of its backports, does not. It compiles shaders for minutes, once, since they
are kept on disk. A build takes 15 to 30 minutes on one core. stdout has the shell commands that select the build; a
folder that has one is left as it is.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from importlib.metadata import version
from pathlib import Path

import click

HEADER = Path(__file__).with_name("layer_settings.hpp")
LEAN = Path(__file__).parent.parent / ".ci" / "lean.cmake"
PACKAGES = "apt-get install glslc libvulkan-dev spirv-headers mesa-vulkan-drivers"


def build(folder: Path) -> None:
    """Install the package of this environment's version into `folder`. Raises click.ClickException."""
    if shutil.which("glslc") is None:
        raise click.ClickException(f"glslc is missing: {PACKAGES}")
    flags = f"-DGGML_VULKAN=ON -DGGML_NATIVE=OFF -DCMAKE_PROJECT_llama_cpp_INCLUDE={LEAN}"
    environment = os.environ | {"CMAKE_ARGS": flags, "CXXFLAGS": f"-include {HEADER}"}
    package = f"llama-cpp-python=={version('llama-cpp-python')}"
    command = ["uv", "pip", "install", "--no-cache", "--no-deps", "--no-binary", "llama-cpp-python", "--target"]
    if subprocess.run([*command, str(folder), package], env=environment, check=False, stdout=2).returncode:
        raise click.ClickException(f"the build failed; perhaps a package is missing: {PACKAGES}")


@click.command()
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
def main(folder: Path) -> None:
    """Build into FOLDER and print the environment."""
    if not (folder / "llama_cpp").exists():
        build(folder)
    click.echo(f"export PYTHONPATH={shlex.quote(str(folder.absolute()))} GGML_VK_VISIBLE_DEVICES=0")


if __name__ == "__main__":
    main()

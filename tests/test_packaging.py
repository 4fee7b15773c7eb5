"""One version everywhere, documented extras, pins inside the ranges, and no torch in the build."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import turnwise

ROOT = Path(__file__).parents[1]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
EXTRAS: dict[str, list[str]] = PROJECT["project"]["optional-dependencies"]

PINS = {
    canonicalize_name(name): Version(version)
    for name, version in re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), flags=re.MULTILINE)
}


def requirements(*extras: str) -> list[Requirement]:
    texts = PROJECT["project"]["dependencies"] + [text for extra in extras for text in EXTRAS[extra]]
    return [Requirement(text) for text in texts if not text.startswith("turnwise")]


def test_version_extras_and_typing_files() -> None:
    version = PROJECT["project"]["version"]
    assert turnwise.__version__ == version
    headings = re.findall(r"^## (\d\S*)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert headings[0] == version
    text = (ROOT / "docs" / "concepts.md").read_text(encoding="utf-8")
    assert [name for name in EXTRAS if f"`{name}`" not in text] == []
    package = Path(turnwise.__file__).parent
    assert [name for name in ("py.typed", "_C.pyi") if not (package / name).exists()] == []


def test_tests_run_against_what_is_installed() -> None:
    """Where turnwise is installed, the source tree must not stand in front of it."""
    try:
        installed = metadata.distribution("turnwise")
    except metadata.PackageNotFoundError:
        pytest.skip("turnwise is not installed here: the tests run on the source tree")
    if (ROOT / "python") in Path(turnwise.__file__).parents:
        pytest.skip("PYTHONPATH names the source tree")
    assert installed.version == turnwise.__version__
    assert Path(str(installed.locate_file("turnwise/__init__.py"))).samefile(turnwise.__file__)


@pytest.mark.parametrize("requirement", requirements("test", "plot"), ids=str)
def test_pins_lie_in_the_ranges(requirement: Requirement) -> None:
    name = canonicalize_name(requirement.name)
    assert name in PINS, f"constraints.txt does not pin {name}"
    assert PINS[name] in requirement.specifier


def test_torch_has_no_upper_cap() -> None:
    """The build knows no torch header, so a new torch needs no new turnwise."""
    torch = next(requirement for requirement in requirements() if requirement.name == "torch")
    assert Version("2.8.0") not in torch.specifier
    assert Version("99.0") in torch.specifier
    names = {Requirement(text).name for text in PROJECT["build-system"]["requires"]}
    assert "torch" not in names


CHOOSE = f"""
include({ROOT}/cmake/choose_cuda.cmake)
turnwise_choose_cuda(${{MODE}} "${{PYTHON}}")
message("${{with_cuda}}: ${{cuda_reason}}")
"""


@pytest.mark.parametrize(
    ("mode", "gpu", "torch_cuda", "nvcc", "expected"),
    [
        ("AUTO", True, None, True, "ON: found nvcc and a GPU (NVIDIA H100 80GB HBM3)"),
        ("AUTO", False, "12.8", True, "ON: found nvcc and a torch for CUDA 12.8"),
        ("AUTO", True, "12.8", False, "OFF: found a GPU (NVIDIA H100 80GB HBM3) but no nvcc"),
        ("AUTO", False, None, True, "OFF: found no GPU and no torch for CUDA"),
        ("ON", False, None, True, "ON: TURNWISE_CUDA=ON"),
        ("ON", True, "12.8", False, "expected nvcc on the PATH"),
        ("OFF", True, "12.8", True, "OFF: TURNWISE_CUDA=OFF"),
    ],
)
def test_cuda_is_built_where_it_serves(
    tmp_path: Path, mode: str, gpu: bool, torch_cuda: str | None, nvcc: bool, expected: str
) -> None:
    """A machine in files: an nvidia-smi, a torch that nobody may import, and CMake's own look for nvcc."""
    answer = "echo 'GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-1)'" if gpu else "echo 'no driver is loaded'; exit 9"
    files = {
        "bin/nvidia-smi": f"#!/bin/sh\n{answer}\n",
        "torch/__init__.py": "raise RuntimeError('imported')",
        "torch/version.py": f"cuda = {torch_cuda!r}",
        "modules/CheckLanguage.cmake": "macro(check_language name)\n"
        f"set(CMAKE_CUDA_COMPILER {'nvcc' * nvcc})\nendmacro()",
        "choose.cmake": CHOOSE,
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "bin/nvidia-smi").chmod(0o755)
    cmake = shutil.which("cmake", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    assert cmake is not None, "no cmake: pip install 'turnwise[test]'"
    settings = [f"-DMODE={mode}", f"-DPYTHON={sys.executable}", f"-DCMAKE_MODULE_PATH={tmp_path / 'modules'}"]
    done = subprocess.run(
        [cmake, *settings, "-P", str(tmp_path / "choose.cmake")],
        env={**os.environ, "PATH": str(tmp_path / "bin"), "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert expected in " ".join(done.stderr.split()), done.stderr

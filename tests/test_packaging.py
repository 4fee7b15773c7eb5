"""One version everywhere, documented extras, pins inside the ranges, and no torch in the build."""

from __future__ import annotations

import re
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


def test_version_is_the_same_everywhere() -> None:
    version = PROJECT["project"]["version"]
    assert turnwise.__version__ == version
    headings = re.findall(r"^## (\d\S*)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert headings[0] == version


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


def test_every_extra_is_documented() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert [name for name in EXTRAS if f"`{name}`" not in readme] == []


@pytest.mark.parametrize("requirement", requirements("test", "plot"), ids=str)
def test_pins_lie_in_the_ranges(requirement: Requirement) -> None:
    name = canonicalize_name(requirement.name)
    assert name in PINS, f"constraints.txt does not pin {name}"
    assert PINS[name] in requirement.specifier


def test_torch_range_is_capped() -> None:
    torch = next(requirement for requirement in requirements() if requirement.name == "torch")
    assert Version("2.8.0") not in torch.specifier
    assert Version("99.0") not in torch.specifier


def test_the_build_needs_no_torch() -> None:
    names = {Requirement(text).name for text in PROJECT["build-system"]["requires"]}
    assert "torch" not in names


def test_typing_files_are_installed() -> None:
    package = Path(turnwise.__file__).parent
    assert [name for name in ("py.typed", "_C.pyi") if not (package / name).exists()] == []

"""``turnwise doctor``: every row has a state, every missing part a remedy, and a broken machine is no crash."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from turnwise import cli, doctor
from turnwise.doctor import Check, Package

EXTRAS = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]["optional-dependencies"]


@pytest.fixture
def no_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packages are looked up, not imported: importing transformers and others takes seconds."""
    monkeypatch.setattr(
        doctor, "check_package", lambda package: Check(package.module, "missing", "not installed", "pip install it")
    )


def test_examine_covers_every_part(no_imports: None) -> None:
    checks = doctor.examine()
    names = {check.name for check in checks}
    assert {"python", "turnwise", "turnwise._C", "torch", "torch.cuda", "GPU driver"} <= names
    assert {"ops: native", "ops: triton", "ops: torch", "cores", "memory", "disk"} <= names
    assert {package.module for package in doctor.PACKAGES} <= names
    assert all(check.detail for check in checks)


@pytest.mark.parametrize("package", doctor.PACKAGES, ids=lambda package: package.module)
def test_remedies_name_extras_that_exist(package: Package) -> None:
    assert package.extra is None or package.extra in EXTRAS


def test_installed_package_is_ok() -> None:
    check = doctor.check_package(Package("pytest", "test", "tests"))
    assert (check.status, check.detail) == ("ok", pytest.__version__)


@pytest.mark.parametrize(("extra", "status"), [("ray", "missing"), (None, "broken")])
def test_absent_package(extra: str | None, status: str) -> None:
    check = doctor.check_package(Package("no_such_module", extra, "nothing"))
    assert (check.status, check.detail) == (status, "not installed")
    assert check.remedy == f"pip install '{'turnwise[ray]' if extra else 'no_such_module'}' for nothing"


def test_package_that_does_not_import(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "half_installed.py").write_text("raise OSError('libcuda.so.1 is not here')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: SimpleNamespace(name=name))
    check = doctor.check_package(Package("half_installed", "vllm", "fast inference"))
    assert check.status == "missing"
    assert check.detail == "version unknown does not import: OSError: libcuda.so.1 is not here"


def test_package_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    def hang(*args: Any, **settings: Any) -> None:
        raise subprocess.TimeoutExpired("python", settings["timeout"])

    monkeypatch.setattr(doctor.subprocess, "run", hang)
    assert "does not import within" in doctor.check_package(Package("pytest", "test", "tests")).detail


def test_torchvision_of_another_build(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert doctor.check_beside_torch() == [], "none of them is here"
    (tmp_path / "torchvision").mkdir()
    (tmp_path / "torchvision" / "__init__.py").write_text(
        'raise RuntimeError("operator torchvision::nms does not exist")', encoding="utf-8"
    )
    info = tmp_path / "torchvision-0.28.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torchvision\nVersion: 0.28.0\n", encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(tmp_path)
    [check] = doctor.check_beside_torch()
    assert (check.name, check.status) == ("torchvision", "broken")
    assert "0.28.0 does not import: RuntimeError: operator torchvision::nms does not exist" in check.detail
    assert "pip uninstall torchvision" in check.remedy


def test_missing_extension_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "turnwise._C", None)
    check = doctor.check_turnwise()[1]
    assert (check.name, check.status) == ("turnwise._C", "broken")
    assert "compiler" in check.remedy


class CudaBuild(ModuleType):
    """A CUDA build of the compiled module, where asking for devices fails with ``error``, if given, and the device does
    not take the kernels for the reason ``obstacle``, if given."""

    with_cuda = True

    def __init__(self, error: str = "", obstacle: str = "") -> None:
        super().__init__("turnwise._C")
        self.error, self.obstacle = error, obstacle

    def cuda_runtime_version(self) -> tuple[int, int]:
        return 13, 0

    def cuda_architectures(self) -> str:
        return "80-real 90-real"

    def cuda_device_count(self) -> int:
        if self.error:
            raise RuntimeError(self.error)
        return 1

    def cuda_device(self, index: int) -> dict[str, object]:
        return {"name": "H200", "memory_bytes": 150e9}

    def cuda_obstacle(self, index: int) -> str:
        return self.obstacle


def test_cuda_build_names_its_devices() -> None:
    check = doctor.check_cuda(CudaBuild())
    assert (check.status, check.detail) == ("ok", "runtime 13.0, architectures 80-real 90-real; H200 (150 GB)")


def test_cuda_build_without_a_driver() -> None:
    check = doctor.check_cuda(CudaBuild("CUDA: no driver (error 35)"))
    assert check.status == "missing"
    assert check.detail.endswith("CUDA: no driver (error 35)")


def test_cuda_build_without_code_for_the_device() -> None:
    check = doctor.check_cuda(CudaBuild(obstacle="CUDA: no kernel image (error 209)"))
    assert check.status == "missing"
    assert check.detail.endswith("; H200 (150 GB): CUDA: no kernel image (error 209)")
    assert "build turnwise for these devices" in check.remedy


def test_missing_torch_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    assert doctor.check_torch()[0].status == "broken"


@pytest.mark.parametrize(
    ("answer", "status", "detail"),
    [
        (SimpleNamespace(returncode=0, stdout="H200, 143771 MiB, 590.1\n", stderr=""), "ok", "H200, 143771 MiB, 590.1"),
        (SimpleNamespace(returncode=9, stdout="no driver\n", stderr=""), "missing", "no driver"),
    ],
)
def test_driver(answer: SimpleNamespace, status: str, detail: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.shutil, "which", lambda program: program)
    monkeypatch.setattr(doctor.subprocess, "run", lambda *args, **settings: answer)
    check = doctor.check_driver()[0]
    assert (check.status, check.detail) == (status, detail)


def test_low_memory_and_disk_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "free_memory", lambda: 0.5)
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: SimpleNamespace(free=1e9))
    states = {check.name: check.status for check in doctor.check_machine()}
    assert states == {"cores": "ok", "memory": "missing", "disk": "missing"}


def test_free_memory_is_plausible() -> None:
    assert 0.01 < doctor.free_memory() < 1e5


CHECKS = [Check("torch", "ok", "2.13.0"), Check("ray", "missing", "not installed", "pip install 'turnwise[ray]'")]


def test_render_as_text() -> None:
    assert doctor.render(CHECKS).splitlines() == [
        "ok       torch  2.13.0",
        "missing  ray    not installed -> pip install 'turnwise[ray]'",
        "",
        "every required part works; optional parts missing: 1",
    ]
    assert "\x1b[32mok" in doctor.render(CHECKS, colour=True)


def test_render_as_json() -> None:
    report = json.loads(doctor.render([*CHECKS, Check("turnwise._C", "broken", "gone")], as_json=True))
    assert report["usable"] is False
    assert report["checks"][0] == {"name": "torch", "status": "ok", "detail": "2.13.0", "remedy": ""}


@pytest.mark.parametrize(("status", "code"), [("ok", 0), ("missing", 0), ("broken", 1)])
def test_exit_code(status: Any, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(doctor, "examine", lambda: [Check("torch", status, "2.13.0")])
    assert cli.main(["doctor", "--json"]) == code
    assert json.loads(capsys.readouterr().out)["usable"] is (code == 0)

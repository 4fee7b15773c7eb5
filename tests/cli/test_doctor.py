"""``turnwise doctor``: ``ok`` means imported, every missing part has a remedy, and a broken machine is no crash."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import sys
import time
import tomllib
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from turnwise.cli import main as cli
from turnwise.cli.look import doctor, probes
from turnwise.cli.look.doctor import Package
from turnwise.cli.look.probes import DoctorRow

EXTRAS = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]["optional-dependencies"]


def soon() -> float:
    return time.monotonic() + 120


def test_a_package_that_imports_is_ok() -> None:
    [check] = doctor.check_package(Package("safetensors", None, "checkpoints"), soon())
    assert (check.status, check.detail) == ("ok", importlib.metadata.version("safetensors"))


def test_examine_covers_every_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without importing transformers and others, which takes seconds."""
    monkeypatch.setattr(
        doctor, "check_package", lambda package, deadline: [DoctorRow(package.module, "missing", "skipped")]
    )
    checks = doctor.examine()
    names = {check.name for check in checks}
    assert {"turnwise", "turnwise._C", "turnwise CUDA", "torch", "torch.cuda", "GPU driver"} <= names
    assert {"ops: triton", "ops: torch", "cores", "memory", "disk"} <= names
    assert {package.module for package in doctor.PACKAGES} <= names
    assert all(check.detail for check in checks) and "broken" not in {check.status for check in checks}
    assert 0.01 < doctor.free_memory() < 1e5
    for package in doctor.PACKAGES:
        assert package.extra is None or package.extra in EXTRAS


def test_a_triton_that_does_not_belong_to_torch_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = ["triton==3.7.1; platform_system == 'Plan9'", "triton==3.7.1", "jinja2", "opt-einsum>=3.3; extra == 'opt'"]
    versions = {"torch": "2.13.0", "triton": "3.9.0", "jinja2": "3.1.6", "opt-einsum": "1.0"}
    monkeypatch.setattr(doctor.importlib.metadata, "requires", {"torch": wanted}.get)
    monkeypatch.setattr(doctor.importlib.metadata, "version", versions.__getitem__)
    [check] = doctor.check_versions_with_torch()
    assert (check.name, check.status) == ("triton for torch", "broken")
    assert check.detail == "3.9.0 does not belong to torch 2.13.0, which requires triton==3.7.1"
    assert check.remedy == "pip install 'triton==3.7.1'"
    versions["triton"] = "3.7.1"
    assert doctor.check_versions_with_torch() == []


@pytest.mark.parametrize(("extra", "status"), [("peft", "missing"), (None, "broken")])
def test_absent_package(extra: str | None, status: str) -> None:
    [check] = doctor.check_package(Package("no_such_module", extra, "nothing"), soon())
    assert (check.status, check.detail) == (status, "not installed")
    assert check.remedy == f"pip install '{'turnwise[peft]' if extra else 'no_such_module'}' for nothing"


@pytest.mark.parametrize(
    ("body", "program", "problem"),
    [
        ("raise OSError('libcuda.so.1 is not here')", "", "fails: OSError: libcuda.so.1 is not here"),
        ("", "import bm25s; bm25s.BM25()", "fails: AttributeError: module 'bm25s' has no attribute 'BM25'"),
    ],
)
def test_a_package_that_does_not_import_or_is_another_is_not_ok(
    body: str, program: str, problem: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "bm25s.py").write_text(body)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path(doctor.__file__).parents[3]}")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: SimpleNamespace(name=name))
    [check] = doctor.check_package(Package("bm25s", "search", "search", program=program), soon())
    assert check.status == "missing" and check.detail.endswith(problem)


def test_the_time_limit_ends_a_check_that_hangs() -> None:
    start = time.monotonic()
    assert doctor.run_command(["-c", "import time; time.sleep(60)"], start + 0.5)[1].startswith("did not answer within")
    assert time.monotonic() - start < 30
    assert "Raise --seconds" in doctor.run_command(["-c", ""], start)[1]


def test_torchvision_of_another_build(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert doctor.check_beside_torch("torchvision", soon()) == [], "it is not here"
    (tmp_path / "torchvision").mkdir()
    (tmp_path / "torchvision" / "__init__.py").write_text(
        'raise RuntimeError("operator torchvision::nms does not exist")', encoding="utf-8"
    )
    info = tmp_path / "torchvision-0.28.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torchvision\nVersion: 0.28.0\n", encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(tmp_path)
    [check] = doctor.check_beside_torch("torchvision", soon())
    assert (check.name, check.status) == ("torchvision", "broken")
    assert "0.28.0 fails: RuntimeError: operator torchvision::nms does not exist" in check.detail
    assert "pip uninstall torchvision" in check.remedy


class CudaBuild(ModuleType):
    """A CUDA build of the compiled module with one device, which refuses kernels for the reason ``obstacle``, if given;
    ``error`` is what asking for devices raises."""

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

    def cuda_unsupported_reason(self, index: int) -> str:
        return self.obstacle


def wrong_result(index: int) -> None:
    raise AssertionError("tensor([0.]) on cuda:0, expected tensor([1.])")


@pytest.mark.parametrize(
    ("extension", "launch", "status", "detail"),
    [
        (CudaBuild(), print, "ok", "H200 (150 GB): group_advantage"),
        (CudaBuild(), wrong_result, "missing", "tensor([0.]) on cuda:0, expected tensor([1.])"),
        (CudaBuild("CUDA: no driver (error 35)"), print, "missing", "CUDA: no driver (error 35)"),
        (CudaBuild(obstacle="CUDA: no kernel image (error 209)"), wrong_result, "missing",
         "H200 (150 GB): CUDA: no kernel image (error 209)"),
    ],
)  # fmt: skip
def test_a_cuda_build_is_ok_where_an_op_was_right_on_every_device(
    extension: CudaBuild, launch: Any, status: str, detail: str
) -> None:
    check = probes.check_cuda(extension, launch)
    assert check.status == status and check.detail.startswith("runtime 13.0, architectures 80-real 90-real; ")
    assert check.detail.endswith(detail) and bool(check.remedy) == (status == "missing")


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
    check = doctor.check_driver()
    assert (check.status, check.detail) == (status, detail)


def test_what_the_machine_and_the_build_lack_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "free_memory", lambda: 0.5)
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: SimpleNamespace(free=1e9))
    states = {check.name: check.status for check in doctor.check_machine()}
    assert states == {"cores": "ok", "memory": "missing", "disk": "missing"}
    monkeypatch.setitem(sys.modules, "turnwise._C", None)
    check = probes.use_ops()[0]
    assert (check.name, check.status) == ("turnwise._C", "broken")
    assert "compiler" in check.remedy


CHECKS = [
    DoctorRow("torch", "ok", "2.13.0"),
    DoctorRow("ray", "missing", "not installed", "pip install 'turnwise[ray]'"),
]


def test_render() -> None:
    assert doctor.render(CHECKS).splitlines() == [
        "ok       torch  2.13.0",
        "missing  ray    not installed -> pip install 'turnwise[ray]'",
        "",
        "every required part works; optional parts missing: 1",
    ]
    assert "\x1b[32mok" in doctor.render(CHECKS, colour=True)
    report = json.loads(doctor.render([*CHECKS, DoctorRow("turnwise._C", "broken", "gone")], as_json=True))
    assert report["usable"] is False
    assert report["checks"][0] == {"name": "torch", "status": "ok", "detail": "2.13.0", "remedy": ""}


@pytest.mark.parametrize(("status", "code"), [("ok", 0), ("missing", 0), ("broken", 1)])
def test_exit_code(status: Any, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(doctor, "examine", lambda seconds: [DoctorRow("torch", status, "2.13.0")])
    assert cli.main(["doctor", "--json"]) == code
    assert json.loads(capsys.readouterr().out)["usable"] is (code == 0)

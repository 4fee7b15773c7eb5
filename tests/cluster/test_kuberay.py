"""The KubeRay job: a manifest that says what it should, and that YAML reads back whole."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import yaml

from turnwise.cli import main as cli
from turnwise.cli.options import EXIT_OK, EXIT_USAGE
from turnwise.cluster.launch.kuberay import rayjob
from turnwise.train.config.schema import TrainConfig
from turnwise.train.validate import load_config

AWKWARD = 'it\'s "quoted": {a}\n\t#no comment & é \U0001f600 \\ \x07 - @NAME@'
"""Text that only right quoting keeps whole."""


def config_of(**settings):
    return TrainConfig.model_validate({"run_dir": "some/where/My Run_1", "steps": 3, **settings})


def objects(text):
    config_map, job = yaml.safe_load_all(text)
    assert (config_map["kind"], job["kind"]) == ("ConfigMap", "RayJob")
    return config_map, job


def test_the_job_by_hand():
    config_map, job = objects(rayjob(config_of(), "registry:5000/turnwise:1@sha256:0a", workers=3, gpus_per_node=4))
    assert job["apiVersion"] == "ray.io/v1" and config_map["apiVersion"] == "v1"
    assert config_map["metadata"] == job["metadata"] == {"name": "turnwise-my-run-1"}
    spec = job["spec"]
    assert spec["entrypoint"] == "turnwise train /etc/turnwise/config.toml --cluster auto"
    assert (spec["backoffLimit"], spec["shutdownAfterJobFinishes"]) == (3, True)
    cluster = spec["rayClusterSpec"]
    assert cluster["authOptions"] == {"mode": "token"}
    assert tuple(map(int, cluster["rayVersion"].split("."))) >= (2, 52, 0), "tokens need 2.52"
    [workers] = cluster["workerGroupSpecs"]
    assert [workers[name] for name in ("replicas", "minReplicas", "maxReplicas")] == [3, 3, 3]
    for group, gpus in ((cluster["headGroupSpec"], None), (workers, "4")):
        pod = group["template"]["spec"]
        [container] = pod["containers"]
        assert container["image"] == "registry:5000/turnwise:1@sha256:0a"
        assert container["resources"]["limits"] == container["resources"]["requests"]
        assert container["resources"]["limits"].get("nvidia.com/gpu") == gpus
        assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
        assert all(isinstance(variable["value"], str) for variable in container["env"])
        held = {volume["name"]: volume for volume in pod["volumes"]}
        assert held["runs"]["persistentVolumeClaim"] == {"claimName": "turnwise-runs"}
        assert held["config"]["configMap"] == {"name": "turnwise-my-run-1"}


@pytest.mark.parametrize("text", [AWKWARD, AWKWARD + "\u2028\x85\ufeff", ""], ids=["block", "line", "empty"])
def test_the_config_arrives_as_it_is_but_for_its_folder(tmp_path, text):
    config = config_of(task_options={"text": text, "many": ["a", 1]}, device="cpu")
    manifest = rayjob(config, "image")
    assert ("config.toml: |\n" in manifest) == ("\u2028" not in text)
    config_map, job = objects(manifest)
    path = tmp_path / "config.toml"
    path.write_text(config_map["data"]["config.toml"], encoding="utf-8")
    mounts = job["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]["containers"][0]["volumeMounts"]
    assert {"name": "runs", "mountPath": "/runs"} in mounts
    assert load_config(path) == config.model_copy(update={"run_dir": Path("/runs/My Run_1")})


def test_the_entrypoint_needs_no_quoting(monkeypatch):
    """Ray joins its words by the rules of Windows before a shell reads them."""
    _, job = objects(rayjob(config_of(run_dir="a $(b) 'c'"), "image"))
    assert re.fullmatch(r"[\w./ -]+", job["spec"]["entrypoint"])
    assert shlex.split(job["spec"]["entrypoint"])[2] == "/etc/turnwise/config.toml"
    for name in ("TURNWISE_CLUSTER_KEY", "RAY_AUTH_TOKEN", "HF_TOKEN"):
        monkeypatch.setenv(name, "key-7f3a91")
    assert "key-7f3a91" not in rayjob(config_of(), "image")


@pytest.mark.parametrize(
    ("name", "expected"),
    [("A" * 80, 47), ("x" * 37 + "-" * 9, 46), ("é!é", 8)],
)
def test_names_are_ones_that_kubernetes_takes(name, expected):
    config_map, _ = objects(rayjob(config_of(run_dir=name), "image"))
    name = config_map["metadata"]["name"]
    assert re.fullmatch("[a-z0-9]([a-z0-9-]*[a-z0-9])?", name) and len(name) == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"image": "a b"}, "image='a b': expected the name of an image"),
        ({"image": "a\nb: c"}, "image="),
        ({"claim": "Runs"}, "claim='Runs': expected the name of a volume claim"),
        ({"workers": 0}, "workers=0: expected a count >= 1"),
    ],
)
def test_what_kubernetes_would_not_take_is_refused(changes, message):
    with pytest.raises(ValueError) as raised:
        rayjob(config_of(), **{"image": "image", **changes})
    assert message in str(raised.value)


def test_the_command(tmp_path, capsys):
    (tmp_path / "run.toml").write_text('task = "sudoku"\n')
    words = ["launch", "kuberay", str(tmp_path / "run.toml")]
    assert cli.main([*words, "--image", "i:1", "--workers", "2", "--claim", "c", "--seed", "9"]) == EXIT_OK
    config_map, job = objects(capsys.readouterr().out)
    assert "seed = 9\n" in config_map["data"]["config.toml"]
    assert job["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]["replicas"] == 2
    for wrong, message in (([], "--image: expected the image"), (["--image", "i", "--nodes", "2"], "--nodes: is of")):
        assert cli.main([*words, *wrong]) == EXIT_USAGE
        assert message in capsys.readouterr().err

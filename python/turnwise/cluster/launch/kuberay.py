"""Writes the manifest of a KubeRay job: a Ray cluster with a token of its own, and the run on it."""

from __future__ import annotations

import json
import re
from importlib import metadata
from pathlib import Path

from turnwise.cluster.launch.checks import check_size, job_name
from turnwise.train.config import nulls
from turnwise.train.config.schema import TrainConfig

RUNS = Path("/runs")
"""Folder of the volume that all nodes mount. The run's folder is in it."""

CONFIG = Path("/etc/turnwise/config.toml")
"""The config in the containers."""

LONGEST_NAME = 47
"""Characters of a job's name in KubeRay."""

RAY = "2.60.0"
"""Version of Ray in the image, if none is installed here."""

MANIFEST = """\
# Trains on a Ray cluster that KubeRay (1.5.1 or newer) starts for it: kubectl apply -f FILE
# KubeRay makes the token that Ray checks, in a secret. All nodes mount the volume claim of the runs (ReadWriteMany).
apiVersion: v1
kind: ConfigMap
metadata:
  name: @NAME@
data:
  config.toml: @CONFIG@
---
apiVersion: ray.io/v1
kind: RayJob
metadata:
  name: @NAME@
spec:
  entrypoint: @ENTRYPOINT@
  # A new cluster is started if the job fails, and the run goes on from its newest checkpoint.
  backoffLimit: 3
  shutdownAfterJobFinishes: true
  ttlSecondsAfterFinished: 600
  rayClusterSpec:
    rayVersion: @RAY@
    authOptions:
      mode: token
    headGroupSpec:
      rayStartParams: {}
      template:
        spec:
          containers:
          - name: ray-head
@CONTAINER@
            resources:
              limits: {cpu: "8", memory: 32Gi}
              requests: {cpu: "8", memory: 32Gi}
@VOLUMES@
    workerGroupSpecs:
    - groupName: workers
      replicas: @WORKERS@
      minReplicas: @WORKERS@
      maxReplicas: @WORKERS@
      rayStartParams: {}
      template:
        spec:
          containers:
          - name: ray-worker
@CONTAINER@
            resources:
              limits: @RESOURCES@
              requests: @RESOURCES@
@VOLUMES@
"""

CONTAINER = """\
            image: @IMAGE@
            env:
            - {name: RAY_DEDUP_LOGS, value: "0"}
            - {name: RAY_ENABLE_UV_RUN_RUNTIME_ENV, value: "0"}
            volumeMounts:
            - {name: runs, mountPath: @RUNS@}
            - {name: config, mountPath: @CONFIG_FOLDER@, readOnly: true}
            - {name: shared-memory, mountPath: /dev/shm}"""

VOLUMES = """\
          volumes:
          - name: runs
            persistentVolumeClaim: {claimName: @CLAIM@}
          - name: config
            configMap: {name: @NAME@}
          - name: shared-memory
            emptyDir: {medium: Memory}"""


def rayjob(
    config: TrainConfig, image: str, *, workers: int = 1, gpus_per_node: int = 8, claim: str = "turnwise-runs"
) -> str:
    """Return a manifest of two objects, the config and the ``RayJob`` that trains it on ``workers`` GPU nodes.

    The head is one node more, without GPUs. ``image`` has turnwise, what the config needs, and Ray. The run's folder is
    the one of this name in the volume ``claim``. Raises ``ValueError`` for names that Kubernetes would refuse, and for
    nodes without room for the run.
    """
    check_size(config, workers, gpus_per_node, "workers")
    if not re.fullmatch(r"[\w./:@-]+", image, flags=re.ASCII):
        raise ValueError(f"image={image!r}: expected the name of an image, such as registry.example.com/turnwise:1.0")
    if not re.fullmatch(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?", claim):
        raise ValueError(f"claim={claim!r}: expected the name of a volume claim: small letters, digits, '-' and '.'")
    placed = config.model_copy(update={"run_dir": RUNS / config.run_dir.name})
    gpus = {"nvidia.com/gpu": str(gpus_per_node)} if gpus_per_node else {}
    each = max(gpus_per_node, 1)
    parts = {
        "NAME": job_name(config, LONGEST_NAME),
        "CONFIG": _text(nulls.dumps(placed.model_dump(mode="json", exclude_none=True, exclude_defaults=True))),
        "ENTRYPOINT": f"turnwise train {CONFIG} --cluster auto",
        "RAY": json.dumps(_ray_version()),
        "WORKERS": str(workers),
        "RESOURCES": json.dumps({"cpu": str(8 * each), "memory": f"{64 * each}Gi", **gpus}),
        "IMAGE": json.dumps(image),
        "RUNS": str(RUNS),
        "CONFIG_FOLDER": str(CONFIG.parent),
        "CLAIM": claim,
    }
    text = MANIFEST.replace("@CONTAINER@", CONTAINER).replace("@VOLUMES@", VOLUMES)
    return re.sub("@([A-Z_]+)@", lambda match: parts[match[1]], text)


def _text(text: str) -> str:
    """Return lines of ``text`` as a YAML value: a block that people can read, or else one quoted line."""
    if all(line.replace("\t", "").isprintable() for line in text.split("\n")):
        return "|\n" + "".join(f"    {line}\n" if line else "\n" for line in text.split("\n")[:-1]).rstrip("\n")
    quoted = json.dumps(text, ensure_ascii=False)  # YAML also breaks lines at characters that JSON leaves as they are
    return "".join(char if char.isprintable() else f"\\U{ord(char):08x}" for char in quoted)


def _ray_version() -> str:
    try:
        return metadata.version("ray")
    except metadata.PackageNotFoundError:
        return RAY

"""``turnwise launch``: print a Slurm script or a KubeRay job for a config. It submits nothing."""

from __future__ import annotations

import argparse

from turnwise.cli.options import EXIT_OK
from turnwise.cluster.launch.kuberay import rayjob
from turnwise.cluster.launch.slurm import slurm_script
from turnwise.tasks import task_type
from turnwise.train.validate import read_config

OF_SYSTEM = {"slurm": ("nodes", "time", "partition"), "kuberay": ("workers", "image", "claim")}
"""Options that only one of the two has."""


def run(options: argparse.Namespace) -> int:
    for system, names in OF_SYSTEM.items():
        for name in names:
            if system != options.system and getattr(options, name) is not None:
                raise ValueError(f"--{name}: is of `turnwise launch {system}`, not of {options.system}")
    config = read_config(options.config, options.overrides, task_type=task_type, import_code=False)
    given = {n: v for n in OF_SYSTEM[options.system] if (v := getattr(options, n)) is not None}
    given["gpus_per_node"] = options.gpus_per_node
    if options.system == "slurm":
        print(slurm_script(config, options.config, overrides=options.overrides, **given), end="")
        return EXIT_OK
    if "image" not in given:
        raise ValueError("--image: expected the image that the nodes run, with turnwise and Ray in it")
    print(rayjob(config, **given), end="")
    return EXIT_OK

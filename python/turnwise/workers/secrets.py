"""Keep keys out of the environment of user code: a worker starts itself again without them."""

from __future__ import annotations

import json
import os
import re
import sys
import tomllib
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from turnwise.utils.files import KEY_VARIABLE
from turnwise.utils.output import Output

_SECRET = re.compile(
    r"(AWS|AZURE|GOOGLE|GCP|CLOUDSDK|OCI|RAY|WANDB|HF|HUGGING_?FACE|HUGGINGFACEHUB|OPENAI|ANTHROPIC|KUBE|VAULT)_.*|"
    r"(.*_)?(KEY|KEYS|TOKEN|TOKENS|SECRET|SECRETS|PASSWORD|PASSWD|PASSPHRASE|CREDENTIAL|CREDENTIALS|PAT|AUTH)|"
    r"SSH_AUTH_SOCK|SSH_AGENT_PID|KUBECONFIG|NETRC|DATABASE_URL|DOCKER_AUTH_CONFIG|TURNWISE_CLUSTER_.*",
    re.IGNORECASE,
)
_HARMLESS = frozenset({"HF_HOME", "HF_HUB_OFFLINE", "HF_HUB_CACHE", "HF_DATASETS_CACHE", "HF_ENDPOINT"})


def is_secret(name: str) -> bool:
    """True if the environment variable ``name`` may hold a credential, or belongs to a cluster."""
    return name.upper() not in _HARMLESS and _SECRET.fullmatch(name) is not None


def without_secrets(environment: Mapping[str, str], keep: Iterable[str] = ()) -> dict[str, str]:
    """Return ``environment`` without the variables that :func:`is_secret` names, except those to ``keep``.

    The key of the run is never kept.
    """
    kept = set(keep) - {KEY_VARIABLE}
    return {name: value for name, value in environment.items() if name in kept or not is_secret(name)}


def restart_without_secrets(names: Iterable[str], keep: Iterable[str] = ()) -> NoReturn:
    """Start this process again, with the same arguments and pid, and no secrets in its environment.

    The variables ``names`` pass through a pipe, whose descriptor the new process gets as ``--key-fd``;
    :func:`read_keys` reads it. ``/proc/PID/environ`` then shows neither these nor any other secret.
    """
    keys = {name: os.environ[name] for name in names if os.environ.get(name)}
    source, sink = os.pipe()
    os.write(sink, json.dumps(keys).encode())
    os.close(sink)
    os.set_inheritable(source, True)
    arguments = [sys.executable, *sys.orig_argv[1:], "--key-fd", str(source)]
    for stream in (sys.stdout, sys.stderr):
        Output.over(stream).finish()
    os.execve(sys.executable, arguments, without_secrets(os.environ, keep))


def read_keys(descriptor: int) -> dict[str, str]:
    """Return the keys that :func:`restart_without_secrets` wrote, by the names of their variables."""
    with os.fdopen(descriptor, "rb") as pipe:
        keys: dict[str, str] = json.loads(pipe.read())
    return keys


def key_names(config: Path, overrides: Mapping[str, str]) -> list[str]:
    """Return the environment variables whose keys a worker of the config file needs: the run's, and the engines'.

    It reads the file, and those that it extends, without importing what a config needs. A broken file names no further
    key; the process that reads the config reports it.
    """
    named: Any = overrides.get("rollout.server.api_key_env")
    with suppress(OSError, ValueError, AttributeError):
        while named is None:
            settings = tomllib.loads(config.read_text(encoding="utf-8"))
            named = settings.get("rollout", {}).get("server", {}).get("api_key_env")
            if "extends" not in settings:
                break
            config = config.parent / settings["extends"]
    return [KEY_VARIABLE] if named in (None, KEY_VARIABLE) else [KEY_VARIABLE, str(named)]

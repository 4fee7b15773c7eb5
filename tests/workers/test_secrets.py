"""Keys that user code must not find in its environment."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from turnwise.utils.files import KEY_VARIABLE
from turnwise.workers.secrets import is_secret, key_names, without_secrets

SECRET = [
    "TURNWISE_CLUSTER_KEY", "AWS_ACCESS_KEY_ID", "AWS_PROFILE", "GOOGLE_APPLICATION_CREDENTIALS", "HF_TOKEN",
    "OPENAI_API_KEY", "GITHUB_TOKEN", "MY_SECRET", "DB_PASSWORD", "RAY_ADDRESS", "RAY_AUTH_TOKEN", "SSH_AUTH_SOCK",
    "wandb_api_key", "TOKEN", "KUBECONFIG", "AZURE_CLIENT_SECRET", "SERVER_KEY",
]  # fmt: skip
OTHERS = [
    "PATH", "PYTHONPATH", "HOME", "OMP_NUM_THREADS", "TOKENIZERS_PARALLELISM", "HF_HOME", "HF_HUB_OFFLINE", "LANG",
    "CUDA_VISIBLE_DEVICES", "MONKEY", "TMPDIR", "LD_LIBRARY_PATH",
]  # fmt: skip


def test_secrets_go_and_other_variables_stay() -> None:
    assert [name for name in [*SECRET, *OTHERS] if is_secret(name)] == SECRET
    assert list(without_secrets(dict.fromkeys([*SECRET, *OTHERS], "x"))) == OTHERS
    # A named variable is kept but never the key of the run.
    environment = {"SEARCH_API_KEY": "a", "OTHER_API_KEY": "b", KEY_VARIABLE: "c"}
    assert without_secrets(environment, keep=["SEARCH_API_KEY", KEY_VARIABLE]) == {"SEARCH_API_KEY": "a"}


def test_names_of_keys_in_a_config(tmp_path: Path) -> None:
    (tmp_path / "base.toml").write_text('[rollout.server]\napi_key_env = "SERVER_KEY"\n')
    (tmp_path / "own.toml").write_text('extends = "base.toml"\nsteps = 3\n')
    (tmp_path / "plain.toml").write_text("steps = 3\n")
    (tmp_path / "broken.toml").write_text("steps = \n")
    assert key_names(tmp_path / "own.toml", {}) == [KEY_VARIABLE, "SERVER_KEY"]
    assert key_names(tmp_path / "own.toml", {"rollout.server.api_key_env": "MINE"}) == [KEY_VARIABLE, "MINE"]
    for name in ("plain.toml", "broken.toml", "missing.toml"):
        assert key_names(tmp_path / name, {}) == [KEY_VARIABLE]


def test_a_process_starts_itself_again_without_secrets(tmp_path: Path) -> None:
    """Its environment block, which /proc shows, has none either. The pid stays."""
    script = tmp_path / "again.py"
    script.write_text(
        "import json, os, sys\n"
        "from turnwise.workers.secrets import read_keys, restart_without_secrets\n"
        "if '--key-fd' not in sys.argv:\n"
        "    print(os.getpid(), flush=True)\n"
        "    restart_without_secrets(['TURNWISE_CLUSTER_KEY', 'SERVER_KEY', 'ABSENT'], keep=['SEARCH_API_KEY'])\n"
        "keys = read_keys(int(sys.argv[-1]))\n"
        "block = open('/proc/self/environ').read() if os.path.exists('/proc/self/environ') else ''\n"
        "print(json.dumps([os.getpid(), keys, dict(os.environ), block, sys.argv[1:2]]))\n"
    )
    secrets = {"TURNWISE_CLUSTER_KEY": "of-the-run", "SERVER_KEY": "of-servers", "AWS_SECRET_ACCESS_KEY": "of-aws"}
    environment = {**os.environ, **secrets, "SEARCH_API_KEY": "kept", "PLAIN": "plain"}
    told = subprocess.run(
        [sys.executable, "-P", str(script), "argument"], env=environment, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    pid, keys, found, block, arguments = json.loads(told[1])
    assert pid == int(told[0]) and arguments == ["argument"]
    assert keys == {"TURNWISE_CLUSTER_KEY": "of-the-run", "SERVER_KEY": "of-servers"}
    assert found["PLAIN"] == "plain" and found["SEARCH_API_KEY"] == "kept" and not secrets.keys() & found.keys()
    assert not any(value in block for value in secrets.values())

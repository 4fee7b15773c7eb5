"""The keys of the config, frozen: adding, renaming or cutting one is a change for users, and so a line of a diff.

``PYTHONPATH=python .venv/bin/python tests/train/test_config_keys.py`` writes the list again.
"""

from __future__ import annotations

from pathlib import Path

from turnwise.cli.look.config import list_sections
from turnwise.train.config.schema import TrainConfig

LIST = Path(__file__).with_name("config_keys.txt")


def keys() -> str:
    return "".join(f"{key.name}\n" for section in list_sections(TrainConfig) for key in section.keys)


def test_the_keys_are_those_of_the_list():
    assert keys().splitlines() == LIST.read_text(encoding="utf-8").splitlines(), __doc__


if __name__ == "__main__":
    LIST.write_text(keys(), encoding="utf-8")

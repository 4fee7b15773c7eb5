"""The keys of the config, frozen: adding, renaming or cutting one is a change for users, and so a line of a diff.

``PYTHONPATH=python .venv/bin/python tests/train/test_config_keys.py`` writes the list again.
"""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

from turnwise.arena import Filters, TreeSampler
from turnwise.cli.look.config import list_sections
from turnwise.ops import ImportanceCorrection
from turnwise.train.config.optimization import CorrectionConfig
from turnwise.train.config.rewards import FilterConfig
from turnwise.train.config.sampling import TreeConfig
from turnwise.train.config.schema import TrainConfig

LIST = Path(__file__).with_name("config_keys.txt")


def keys() -> str:
    return "".join(f"{key.name}\n" for section in list_sections(TrainConfig) for key in section.keys)


def test_the_keys_are_those_of_the_list():
    assert keys().splitlines() == LIST.read_text(encoding="utf-8").splitlines(), __doc__


@pytest.mark.parametrize(
    ("section", "made"),
    [(TreeConfig, TreeSampler), (FilterConfig, Filters), (CorrectionConfig, ImportanceCorrection)],
)
def test_a_section_has_the_names_and_defaults_of_the_class_that_it_is_unpacked_into(section, made):
    parameters = inspect.signature(made).parameters
    assert {name: parameters[name].default for name in section.model_fields} == section().model_dump()


if __name__ == "__main__":
    LIST.write_text(keys(), encoding="utf-8")

"""Torch describes a checkpoint in shards by a pickle. It may build torch's own classes of data and no others."""

from __future__ import annotations

import os
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from turnwise.train.checkpoint.files import CheckpointError
from turnwise.train.checkpoint.shards import _reader


class Command:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def saved(folder: Path) -> Any:
    tensors = {"m/a": torch.arange(3.0), "m/b": torch.ones(2, 2, dtype=torch.bfloat16), "o/0.step": torch.tensor(1.0)}
    dcp.save(tensors, checkpoint_id=folder, no_dist=True)
    return tensors, pickle.loads((folder / ".metadata").read_bytes())


@pytest.mark.filterwarnings("ignore:torch.distributed")
def test_tensors_of_a_checkpoint_come_back(tmp_path: Path) -> None:
    tensors, _ = saved(tmp_path)
    read = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    dcp.load(read, storage_reader=_reader(tmp_path), no_dist=True)
    assert all(torch.equal(read[name], tensor) for name, tensor in tensors.items())


@pytest.mark.filterwarnings("ignore:torch.distributed")
def test_a_description_with_other_classes_or_places_is_refused(tmp_path: Path) -> None:
    _, good = saved(tmp_path)
    made = tmp_path / "made"
    entries, places = good.state_dict_metadata, good.storage_data
    elsewhere = {index: replace(place, relative_path="../other") for index, place in places.items()}
    for wrong, message in [
        (Command(made), "it names posix.mkdir"),
        (replace(good, planner_data=Command(made)), "it names posix.mkdir"),
        (
            replace(good, state_dict_metadata=entries | {"m/a": BytesStorageMetadata()}),
            "it names .*BytesStorageMetadata",
        ),
        (replace(good, state_dict_metadata={"m/a": torch.Size([3])}), "other things than tensors"),
        (replace(good, storage_data=elsewhere), "files outside of its folder"),
        ([], "AttributeError"),
    ]:
        (tmp_path / ".metadata").write_bytes(pickle.dumps(wrong))
        with pytest.raises(CheckpointError, match=message):
            _reader(tmp_path).read_metadata()
    assert not made.exists()

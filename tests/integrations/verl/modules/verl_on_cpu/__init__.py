"""Make verl's trainers run on a CPU: a platform, and a rollout that samples with transformers.

Set ``VERL_USE_EXTERNAL_MODULES=verl_on_cpu``, ``VERL_PLATFORM=cpu`` and ``VERL_ENGINE_DEVICE=cuda``. Everything goes
through verl's registries, but for two functions. The process group starts with gloo alone: verl asks for
``cpu:gloo,cpu:gloo``, and torch takes a device once. The trainers' advantages are also written to a file, or replayed
from that of another run, and the rows of an update have an order that is the same in both runs.
"""

from __future__ import annotations

import contextlib
import os
import types
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import verl.utils.distributed
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry


class _Device(types.ModuleType):
    """``torch.cpu`` with what verl asks of ``torch.cuda``."""

    _ZERO = ("max_memory_allocated", "max_memory_reserved", "memory_allocated", "memory_reserved")
    _NOTHING = ("empty_cache", "ipc_collect", "reset_peak_memory_stats", "manual_seed", "manual_seed_all", "set_device")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if hasattr(torch.cpu, name):
            return getattr(torch.cpu, name)
        if name in self._ZERO:
            return lambda *_: 0
        if name in self._NOTHING:
            return lambda *_: None
        if name == "get_rng_state":
            return lambda *_: torch.get_rng_state()
        if name == "set_rng_state":
            return lambda state, *_: torch.set_rng_state(state)
        known = {"get_device_name": "cpu", "get_device_capability": (0, 0), "mem_get_info": (0, 0)}
        if name not in known:
            raise AttributeError(name)
        return lambda *_: known[name]


_DEVICE = _Device("verl_on_cpu.device")


@PlatformRegistry.register(platform="cpu")
class CPUPlatform(PlatformBase):
    device_name = vendor_name = property(lambda self: "cpu")
    device_module = property(lambda self: _DEVICE)

    def is_available(self) -> bool:
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        return True

    def current_device(self) -> torch.device:
        return torch.device("cpu")

    def device_count(self) -> int:
        return 1

    def set_device(self, index: int) -> None:
        pass

    def synchronize(self, index: int | None = None) -> None:
        pass

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None:
        pass

    def empty_cache(self) -> None:
        pass

    def get_device_capability(self, index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    @contextlib.contextmanager
    def nvtx_range(self, message: str) -> Iterator[None]:
        yield

    def profiler_start(self) -> None:
        pass

    def profiler_stop(self) -> None:
        pass

    def ray_resource_name(self) -> str:
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"]

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> None:
        return None


def start_process_group(timeout_second: float | None = None, backend: str | None = None) -> None:
    """verl's ``initialize_global_process_group_ray``, with gloo alone."""
    if torch.distributed.is_initialized():
        return
    torch.distributed.init_process_group(
        "gloo",
        rank=int(os.environ.get("RANK", 0)),
        world_size=int(os.environ.get("WORLD_SIZE", 1)),
        timeout=timedelta(seconds=timeout_second) if timeout_second else None,
        init_method=os.environ.get("DIST_INIT_METHOD"),
    )


verl.utils.distributed.initialize_global_process_group_ray = start_process_group  # before any worker imports it


def _register() -> None:
    from verl.trainer.ppo.v1 import trainer_base
    from verl.workers.rollout import base, replica

    def load() -> type:
        from verl_on_cpu.rollout import Replica

        return Replica

    base._ROLLOUT_REGISTRY["transformers", "async"] = "verl_on_cpu.rollout.Adapter"
    replica.RolloutReplicaRegistry.register("transformers", load)

    if "VERL_ON_CPU_FOLDER" not in os.environ:
        return
    folder, replayed = Path(os.environ["VERL_ON_CPU_FOLDER"]), os.environ.get("VERL_ON_CPU_REPLAYED")
    compute, update = trainer_base.compute_advantage_for_multi_trajectories, trainer_base.PPOTrainer._update_actor
    contents: dict[str, tuple[float, ...]] = {}

    def record(data: Any, batch_keys: list[str], **options: Any) -> Any:
        """Write the advantages of each batch, or put those of the other run into the rows with its samples."""
        done = compute(data, batch_keys=batch_keys, **options)
        name = f"advantages-{len(list(folder.glob('advantages-*')))}.pt"
        masks, advantages = done.batch["response_mask"].bool(), done.batch["advantages"]
        samples = [tuple(row[mask].tolist()) for row, mask in zip(done.batch["rollout_log_probs"], masks, strict=True)]
        if replayed:
            theirs: dict[Any, list[torch.Tensor]] = {}
            for sample, row in torch.load(Path(replayed) / name).values():
                theirs.setdefault(sample, []).append(row)
            for row, mask, sample in zip(advantages, masks, samples, strict=True):
                row[mask] = theirs[sample].pop()
            done.batch["returns"] = advantages.clone()
        rows = [(sample, row[mask]) for row, mask, sample in zip(advantages, masks, samples, strict=True)]
        torch.save(dict(zip(batch_keys, rows, strict=True)), folder / name)
        contents.update((key, (*sample, *row.tolist())) for key, (sample, row) in zip(batch_keys, rows, strict=True))
        return done

    def in_order(self: Any, batch: Any, metrics: dict[str, Any]) -> Any:
        places = sorted(range(len(batch.keys)), key=lambda place: contents[batch.keys[place]])
        batch.keys, batch.tags = ([of[place] for place in places] for of in (batch.keys, batch.tags))
        return update(self, batch, metrics)

    trainer_base.compute_advantage_for_multi_trajectories = record
    trainer_base.PPOTrainer._update_actor = in_order


_register()

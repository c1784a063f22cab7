"""A rank's shards of a model's weights that lie in a file: FSDP2 gathers them from there, layer by layer."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from offload import combinations
from offload.errors import ConfigError
from offload.optim import shards
from offload.units import format_bytes
from offload.weights.layers import check_weights, give_buffers
from offload.weights.mapping import PAGE_BYTES, Layers, MappedFile, up
from offload.weights.safetensors import checked, read_into

log = logging.getLogger("offload")


class ShardsInFile:
    """Shards that lie in a file; see `weights_in_file`.

    Each of FSDP2's groups is read before it is gathered, and the one that came next last time meanwhile.

    Attributes:
        file: Where they lie.
        nbytes: How much they are on this rank, with what aligns them.
    """

    def __init__(
        self, model: nn.Module, path: str | os.PathLike[str], safetensors: Iterable[str | os.PathLike[str]] = ()
    ) -> None:
        self._groups = shards.unsharders(model)
        names = {id(weight): name for name, weight in model.named_parameters()}
        for name, weight in model.named_parameters():
            if not shards.is_sharded(weight):
                raise ConfigError(name, "not sharded", "have fully_shard take every weight, or none")
        check_weights(model, combinations.FILE_LATE)
        files = checked(model, safetensors)
        self._places: dict[Any, tuple[str, int]] = {}
        """Name and address of each weight, by torch's `FSDPParam`."""
        offsets, ranges = dict[Any, int](), list[tuple[int, int]]()
        self.nbytes = 0
        for group in self._groups:
            begin = self.nbytes = up(self.nbytes, PAGE_BYTES)
            for each in group.fsdp_params:
                _check_shard(names[id(each.sharded_param)], each)
                offsets[each] = self.nbytes
                self.nbytes += up(each._sharded_param_data.nbytes)
            ranges.append((begin, self.nbytes - begin))
        self.file = MappedFile(path, up(max(self.nbytes, 1), PAGE_BYTES))
        for group, (begin, nbytes) in zip(self._groups, ranges, strict=True):
            for each in group.fsdp_params:
                name = names[id(each.sharded_param)]
                self._places[each] = name, self._place(each, offsets[each])
            self.file.let_go(begin, nbytes, was_written=True)
        self._numbers = {group: number for number, group in enumerate(self._groups)}
        self._layers = Layers(self.file, [[each] for each in ranges])
        give_buffers(model, self._groups[0].device)
        read_into(model, files, self.file)
        self._handles = [shards.StandIn(group, "unshard", self._bring) for group in self._groups]
        model.register_forward_pre_hook(self._stay)
        said = format_bytes(self.nbytes), os.fspath(path), len(self._places), len(self._groups)
        log.info("%s of this rank's weights lie in a file in %s: %d shards, gathered in %d groups", *said)

    def close(self) -> None:
        """Tell the kernel nothing more; shards stay in the file, which goes with the last of them; idempotent."""
        while self._handles:
            self._handles.pop().remove()

    def _stay(self, model: nn.Module, inputs: object) -> None:
        """Do nothing, as a hook that keeps this for as long as there is the model."""

    def _place(self, managed: Any, offset: int) -> int:
        """Have a weight's shard lie in the file; return its address."""
        before, weight = managed._sharded_param_data, managed.sharded_param
        mine = shards.local(weight)
        place = self.file.tensor(offset, before.numel(), before.dtype)
        part = place[: mine.numel()].view(mine.shape)  # torch pads shards to one size
        if mine.is_meta:
            made = nn.Parameter(managed.to_sharded_dtensor(part), requires_grad=weight.requires_grad)
            made.__dict__.update(weight.__dict__)
            managed._setattr_on_modules(made)
            managed.sharded_param = made
        else:
            place.copy_(before)
            weight._local_tensor = part
        managed._sharded_param_data = place
        return place.data_ptr()

    def _bring(self, group: Any, unshard: Any, async_op: bool = False) -> None:
        """Wait until a group's shards are in memory, and have FSDP2 gather them."""
        if group._all_gather_result is None and group.is_sharded:
            for each in group.fsdp_params:
                name, address = self._places[each]
                if each._sharded_param_data.data_ptr() != address:
                    what = f"{each._sharded_param_data.dtype}, on {each._sharded_param_data.device}"
                    allowed = "change dtype or device, and load with assign=True, before weights_in_file"
                    raise ConfigError(name, what, f"{allowed}: this weight has left its file")
            self._layers.begin(self._numbers[group])
        unshard(async_op)


def _check_shard(name: str, managed: Any) -> None:
    """Refuse a shard that is not in plain host memory, by name."""
    if managed.pin_memory:
        combinations.FILE_PINNED.refuse(name, "CPUOffloadPolicy(pin_memory=True)")
    mine = shards.local(managed.sharded_param)
    if type(mine) is not torch.Tensor or mine.device.type not in ("cpu", "meta"):
        what = f"{type(mine).__name__} on {mine.device}"
        raise ConfigError(name, what, "have plain shards in host memory: CPUOffloadPolicy(pin_memory=False)")

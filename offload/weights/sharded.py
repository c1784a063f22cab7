"""A rank's shards of a model's weights in a mapped file, from which FSDP2 gathers them, layer by layer."""

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
from offload.weights.mapping import PAGE_BYTES, LayerReadAhead, MappedFile, up
from offload.weights.safetensors import checked, read_into

log = logging.getLogger("offload")


class ShardsInFile:
    """A rank's shards in a mapped file; see `weights_in_file`.

    Each of FSDP2's groups is read before it is gathered, and the group that came next last time is read ahead.

    Attributes:
        file: The mapped file.
        nbytes: Size of this rank's shards, with padding for alignment.
    """

    def __init__(
        self, model: nn.Module, path: str | os.PathLike[str], safetensors: Iterable[str | os.PathLike[str]] = ()
    ) -> None:
        self._groups = shards.fsdp_groups(model)
        names = {id(weight): name for name, weight in model.named_parameters()}
        for name, weight in model.named_parameters():
            if not shards.is_dtensor(weight):
                raise ConfigError(name, "not sharded", "have fully_shard take every weight, or none")
        check_weights(model, combinations.FILE_LATE)
        files = checked(model, safetensors)

        self._places: dict[Any, tuple[str, int]] = {}
        """Name and address of each weight, by torch's `FSDPParam`."""
        offsets = dict[Any, int]()
        ranges = list[tuple[int, int]]()  # of each group: offset and size in the file
        self.nbytes = 0
        for group in self._groups:
            begin = self.nbytes = up(self.nbytes, PAGE_BYTES)
            for fsdp_param in group.fsdp_params:
                _check_shard(names[id(fsdp_param.sharded_param)], fsdp_param)
                offsets[fsdp_param] = self.nbytes
                self.nbytes += up(fsdp_param._sharded_param_data.nbytes)
            ranges.append((begin, self.nbytes - begin))

        self.file = MappedFile(path, up(max(self.nbytes, 1), PAGE_BYTES))
        for group, (begin, nbytes) in zip(self._groups, ranges, strict=True):
            for fsdp_param in group.fsdp_params:
                name = names[id(fsdp_param.sharded_param)]
                self._places[fsdp_param] = name, self._move_shard(fsdp_param, offsets[fsdp_param])
            self.file.advise_unneeded(begin, nbytes, was_written=True)

        self._layer_numbers = {group: number for number, group in enumerate(self._groups)}
        self._layers = LayerReadAhead(self.file, [[each] for each in ranges])
        give_buffers(model, self._groups[0].device)  # on which all groups compute
        read_into(model, files, self.file)
        self._handles = [shards.PatchedMethod(group, "unshard", self._begin_gather) for group in self._groups]
        model.register_forward_pre_hook(self._keep_alive)
        said = format_bytes(self.nbytes), os.fspath(path), len(self._places), len(self._groups)
        log.info("%s of this rank's weights lie in a file in %s: %d shards, gathered in %d groups", *said)

    def close(self) -> None:
        """Remove the hooks; shards stay in the file, which is freed with the last of them; idempotent."""
        while self._handles:
            self._handles.pop().remove()

    def _keep_alive(self, model: nn.Module, inputs: object) -> None:
        """Do nothing: a hook of the model, which keeps this object alive as long as the model."""

    def _move_shard(self, fsdp_param: Any, offset: int) -> int:
        """Move a weight's shard to the file, from which FSDP2 then gathers it; return its address.

        Parameters stay the same objects, but for a shard on the meta device its module gets a new one.
        """
        padded = fsdp_param._sharded_param_data
        weight = fsdp_param.sharded_param
        shard = shards.local(weight)
        place = self.file.tensor(offset, padded.numel(), padded.dtype)
        unpadded = place[: shard.numel()].view(shard.shape)  # FSDP2 pads the shards of all ranks to one size
        if shard.is_meta:
            moved = nn.Parameter(fsdp_param.to_sharded_dtensor(unpadded), requires_grad=weight.requires_grad)
            moved.__dict__.update(weight.__dict__)  # attributes that the user has set
            fsdp_param._setattr_on_modules(moved)
            fsdp_param.sharded_param = moved
        else:
            place.copy_(padded)
            weight._local_tensor = unpadded  # the parameter stays the same object
        fsdp_param._sharded_param_data = place
        return place.data_ptr()

    def _begin_gather(self, group: Any, unshard: Any, async_op: bool = False) -> None:
        """Wait until a group's shards are in memory, then let FSDP2 gather them.

        Called in place of the group's method `unshard`, which is passed. Refuses a shard that has left the file.
        """
        # Else nothing is read from the file: the group is gathered, about to be, or was cut anew after forward.
        if group._all_gather_result is None and group.is_sharded:
            for fsdp_param in group.fsdp_params:
                name, address = self._places[fsdp_param]
                data = fsdp_param._sharded_param_data
                if data.data_ptr() != address:
                    what = f"{data.dtype}, on {data.device}"
                    allowed = "change dtype or device, and load with assign=True, before weights_in_file"
                    raise ConfigError(name, what, f"{allowed}: this weight has left its file")
            self._layers.begin(self._layer_numbers[group])
        unshard(async_op)


def _check_shard(name: str, fsdp_param: Any) -> None:
    """Refuse a shard that is neither in plain host memory nor on the meta device; the error names the weight."""
    if fsdp_param.pin_memory:
        combinations.FILE_PINNED.refuse(name, "CPUOffloadPolicy(pin_memory=True)")
    shard = shards.local(fsdp_param.sharded_param)
    if type(shard) is not torch.Tensor or shard.device.type not in ("cpu", "meta"):
        what = f"{type(shard).__name__} on {shard.device}"
        raise ConfigError(name, what, "have plain shards in host memory: CPUOffloadPolicy(pin_memory=False)")

"""What a checkpoint has of a model beside the optimizer's state: buffers, frozen weights, other optimizers' weights.

This rest of the model is saved with the state and restored with it. Frozen weights are not copied, but read where
they lie while training goes on. All else, which training may change, is copied when the save begins.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import torch

from offload import combinations
from offload.checkpoint.folder import open_folder
from offload.checkpoint.manifest import model_name
from offload.errors import CheckpointError, ConfigError
from offload.layout import bare_names
from offload.optim import shards
from offload.tiers.common import digest_of
from offload.tiers.place import Folder, raising_checkpoint_error

Form = tuple[str, str, list[int]]
"""Name, dtype and shape of a frozen weight; of this rank's shard, if it is sharded."""
Place = list[list[int]]
"""Where a rank's shard lies in a sharded tensor. Three lists, with a number for each dimension: the sizes of the
whole tensor, the shard's first indices, the shard's sizes."""


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's elements, as a tensor that shares their memory."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _form(name: str, tensor: torch.Tensor) -> Form:
    """Return name, dtype and shape of a tensor, as they are written to a checkpoint."""
    return name, str(tensor.dtype).removeprefix("torch."), [*tensor.shape]


def _places(tensors: Mapping[str, torch.Tensor]) -> dict[str, Place]:
    """Return the places of the sharded tensors among these, by name.

    A `DTensor` that is only replicated or partial has none: each rank has a value, or a summand, of every element.
    """
    places: dict[str, Place] = {}
    for name, tensor in tensors.items():
        kinds: Any = getattr(tensor, "placements", ())
        if shards.is_dtensor(tensor) and not all(kind.is_replicate() or kind.is_partial() for kind in kinds):
            box = shards.box_of(tensor)
            places[name] = [[*tensor.shape], [first for first, _ in box], [size for _, size in box]]
    return places


def _describe(place: Place | None) -> str:
    """Return in words, for errors, which elements a rank has; a place of None stands for all."""
    if place is None:
        return "all elements"
    whole, firsts, sizes = place
    ranges = ", ".join(f"{first}:{first + size}" for first, size in zip(firsts, sizes, strict=True))
    return f"[{ranges}] of shape {whole}"


def _bytes(tensor: torch.Tensor) -> memoryview:
    """Return a tensor's content as bytes: a view of its memory if it is contiguous in host memory, else a copy."""
    elements: Any = shards.content(tensor).numpy()
    return memoryview(elements)


@dataclass(frozen=True)
class ModelRest:
    """The part of a model that is not the optimizer's. Names are those in the bare model, without wrappers.

    Attributes:
        copied: Values of `state_dict` that training may change, by name.
        places: The parameters and buffers among `copied`, which are restored in place. All else is modules' extra
            state.
        frozen: Weights that want no gradient, by name; not in `copied`.
        versions: Torch's version counts of the frozen weights, which show afterwards whether they were changed.
    """

    copied: dict[str, Any]
    places: dict[str, torch.Tensor]
    frozen: dict[str, torch.Tensor]
    versions: dict[str, int]

    @classmethod
    def of(cls, model: torch.nn.Module, own: Collection[torch.Tensor]) -> ModelRest:
        """Find what the optimizer's checkpoint lacks of a model's `state_dict`; nothing is copied.

        Args:
            model: The model, or a wrapper of it.
            own: The optimizer's parameters, whose weights its state gives.

        Raises:
            ConfigError: `model` is no module, or FSDP1 has sharded it: then `state_dict` would gather all shards.
        """
        if not isinstance(model, torch.nn.Module):
            raise ConfigError("model", type(model).__name__, "give a torch.nn.Module, or leave it out")
        if any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules()):
            combinations.FSDP1_MODEL.refuse("model", "FullyShardedDataParallel")
        own_ids = {id(parameter) for parameter in own}
        state = model.state_dict(keep_vars=True)  # first: FSDP2 may replace gathered parameters by shards in it
        parameters = dict(model.named_parameters(remove_duplicate=False))
        tensors = {**parameters, **dict(model.named_buffers(remove_duplicate=False))}
        bare_by_name = bare_names(state)
        copied: dict[str, Any] = {}
        frozen: dict[str, torch.Tensor] = {}
        for name, value in state.items():
            parameter = parameters.get(name)
            if parameter is None or id(parameter) not in own_ids:
                if parameter is not None and not parameter.requires_grad:
                    frozen[bare_by_name[name]] = value
                else:  # a buffer, extra state, or a weight of another optimizer
                    copied[bare_by_name[name]] = value
        places = {bare: tensors[name] for name, bare in bare_by_name.items() if name in tensors and bare in copied}
        return cls(copied, places, frozen, {name: value._version for name, value in frozen.items()})

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """All parameters and buffers of this rest, by name."""
        return {**self.places, **self.frozen}

    @property
    def has_dtensors(self) -> bool:
        """Whether some of these tensors are `DTensor`s, of which each rank saves its own elements."""
        return any(hasattr(tensor, "to_local") for tensor in self.tensors.values())

    def snapshot(self) -> ModelRest:
        """Return the same with copies of the values that training may change."""
        return replace(self, copied={name: _copy(value) for name, value in self.copied.items()})

    def write(self, folder: Folder, id: str, rank: int, extra: bytes | None) -> bytes:
        """Write frozen weights to a file of the checkpoint; return all else as bytes, for `SavedRest.read`.

        The file's name has the checkpoint's `id` and `rank`. The bytes are a line of JSON that describes the weights
        in the file, then `extra` (the caller's own bytes, if any), then `copied` as `torch.save` writes it. If this
        fails, the file is deleted.

        Raises:
            CheckpointError: The file cannot be written, or a frozen weight was changed meanwhile.
        """
        file = model_name(id, rank)
        try:
            digest = self._write_frozen(folder, file)
            copied = io.BytesIO()
            torch.save(self.copied, copied)
        except BaseException:
            with contextlib.suppress(CheckpointError):
                folder.delete(file)
            raise
        head = {
            "extra": None if extra is None else len(extra),
            "frozen": [_form(name, _local(weight.detach())) for name, weight in self.frozen.items()],
            "places": _places(self.tensors),
            "checksum": digest,
        }
        return json.dumps(head).encode() + b"\n" + (extra or b"") + copied.getvalue()

    def _write_frozen(self, folder: Folder, file: str) -> int:
        """Write frozen weights to a file, one after another, and return the file's digest.

        Raises:
            CheckpointError: A weight was changed since `of` was called, so the file may have some of its new values.
        """
        digest = 0

        def pieces() -> Iterator[memoryview]:
            """Yield the weights' contents to `Folder.write`, and add them to the digest."""
            nonlocal digest
            for weight in self.frozen.values():
                piece = _bytes(_local(weight.detach()))
                digest = digest_of(piece, digest)
                yield piece

        folder.write(file, pieces())
        changed = [name for name, weight in self.frozen.items() if weight._version != self.versions[name]]
        if changed:
            raise CheckpointError(
                f"frozen weights were changed while they were saved: {listed(changed)}. Call wait_checkpoint before"
            )
        return digest


def _copy(value: Any) -> Any:
    """Return a copy of a value of a `state_dict`; of a sharded tensor this rank's elements."""
    return _local(value.detach()).clone() if isinstance(value, torch.Tensor) else deepcopy(value)


@dataclass(frozen=True)
class SavedRest:
    """The rest of a model as a checkpoint has it.

    Attributes:
        path: The checkpoint's folder.
        file: The file with frozen weights.
        extra: The caller's own bytes; None if there were none.
        frozen: Forms of the weights in the file, in their order.
        places: The places of all sharded tensors; None if they are not known, as in files of earlier versions.
        digest: Checksum of the file.
        content: `ModelRest.copied`, as `torch.save` wrote it.
    """

    path: str
    file: str
    extra: bytes | None
    frozen: list[Form]
    places: dict[str, Place] | None
    digest: int
    content: bytes

    @classmethod
    def read(cls, path: str, id: str, rank: int, written: bytes) -> SavedRest:
        """Parse the bytes that `ModelRest.write` has returned.

        Raises:
            CheckpointError: The bytes are damaged.
        """
        head, _, content = written.partition(b"\n")
        try:
            header = json.loads(head)
            forms = [(str(name), str(dtype), [*shape]) for name, dtype, shape in header["frozen"]]
            places = None if header.get("places") is None else dict(header["places"])
            extra = None if header["extra"] is None else content[: int(header["extra"])]
            rest = content[len(extra or b"") :]
            return cls(path, model_name(id, rank), extra, forms, places, int(header["checksum"]), rest)
        except (ValueError, TypeError, LookupError) as cause:
            raise CheckpointError(f"{path} is damaged: what it has of the model cannot be read") from cause

    def verify(self) -> None:
        """Read the file with frozen weights, which may be larger than memory, and compare its checksum.

        Raises:
            CheckpointError: It is damaged, or cannot be read.
        """
        digest = 0
        with (
            raising_checkpoint_error("read", os.path.join(self.path, self.file)),
            open_folder(self.path).content(self.file, scratch=None) as content,
        ):
            for piece in content:
                digest = digest_of(piece, digest)
        if digest != self.digest:
            raise self._damage()

    def _damage(self) -> CheckpointError:
        """Return the error for a file with another checksum."""
        return CheckpointError(f"{os.path.join(self.path, self.file)} is damaged: its checksum is another one")

    def check(self, rest: ModelRest, *, weights_only: bool) -> dict[str, Any]:
        """Verify that a model has the tensors that were saved, and no others; return the values that were copied.

        Names, dtypes, shapes, and for sharded tensors this rank's elements have to be the same.

        Raises:
            CheckpointError: The model has other tensors, or the values cannot be read.
        """
        try:
            copied: dict[str, Any] = torch.load(io.BytesIO(self.content), weights_only=weights_only)
        except Exception as cause:
            raise CheckpointError(f"what {self.path} has of the model cannot be read: {cause}") from cause
        here = {name: _form(name, _local(tensor.detach())) for name, tensor in rest.tensors.items()}
        saved = {name: _form(name, value) for name, value in copied.items() if isinstance(value, torch.Tensor)}
        saved |= {name: (name, dtype, shape) for name, dtype, shape in self.frozen}
        # `here` has the forms of parameters and buffers. `saved` has those of all tensors, also where a
        # module's extra state is one. All other extra state is only in `copied` and `rest.copied`.
        missing_here = [name for name in (*copied, *saved) if name not in rest.copied and name not in here]
        not_saved = [name for name in (*rest.copied, *here) if name not in copied and name not in saved]
        if missing_here or not_saved:
            raise CheckpointError(
                f"{self.path} is of another model: it has {listed(missing_here)} that are not here, and lacks "
                f"{listed(not_saved)}"
            )
        for name, form in saved.items():
            if here.get(name, form) != form:  # a tensor that is extra state is not in `here`
                _, saved_dtype, saved_shape = form
                _, dtype, shape = here[name]
                raise CheckpointError(
                    f"{self.path} has {name} as {saved_dtype} of shape {saved_shape}, and here it is {dtype} of "
                    f"shape {shape}; of frozen weights that ranks share, each rank has its own part"
                )
        places_here = _places(rest.tensors)
        saved_places = places_here if self.places is None else self.places
        for name in here:
            place, place_here = saved_places.get(name), places_here.get(name)
            if place != place_here:
                raise CheckpointError(
                    f"{self.path} has {_describe(place)} of {name} for this rank, which here has "
                    f"{_describe(place_here)}: load it with the mesh and placements that it was saved with"
                )
        return copied

    def restore(self, model: torch.nn.Module, rest: ModelRest, copied: Mapping[str, Any]) -> None:
        """Restore a model: read the frozen weights from their file, and copy the other values.

        Args:
            model: The model.
            rest: Its tensors, which are written to in place.
            copied: What `check` has returned.

        Raises:
            CheckpointError: The file is damaged; weights may have been replaced in part.
        """
        tensors = {name: _local(tensor.detach()) for name, tensor in rest.tensors.items()}
        self._read_frozen([tensors[name] for name, _, _ in self.frozen])
        for name, value in copied.items():
            if name in tensors:
                tensors[name].copy_(value)
        bare_by_name = bare_names(model.state_dict(keep_vars=True))
        others = {name: copied[bare] for name, bare in bare_by_name.items() if bare in copied and bare not in tensors}
        if others:  # modules' extra state (`get_extra_state`)
            model.load_state_dict(others, strict=False)  # all other names were restored above

    def _read_frozen(self, targets: Sequence[torch.Tensor]) -> None:
        """Read the file with frozen weights into `targets`, one for each weight in the file, in order.

        A target that is contiguous in host memory is read in place; others through a copy of their size.

        Raises:
            CheckpointError: The file is damaged; some weights may have been replaced.
        """
        read_to = [
            target
            if target.device.type == "cpu" and target.is_contiguous()
            else torch.empty(target.shape, dtype=target.dtype, device="cpu")
            for target in targets
        ]
        pieces = [_bytes(tensor) for tensor in read_to]
        if pieces:  # else the file is empty, and its digest 0
            open_folder(self.path).read_into(self.file, pieces)
        digest = 0
        for piece in pieces:
            digest = digest_of(piece, digest)
        if digest != self.digest:
            raise self._damage()
        for target, tensor in zip(targets, read_to, strict=True):
            if target is not tensor:
                target.copy_(tensor)


def listed(names: Sequence[str]) -> str:
    """Return the first three names as text; "nothing" if there are none."""
    if not names:
        return "nothing"
    return ", ".join(names[:3]) + (" and more" if len(names) > 3 else "")

"""Tensors that autograd saves for backward leave memory for the paths, and come back ahead of it.

`ActivationsOnPaths` sees each tensor that is saved, by torch's own hooks for saved tensors (`torch.autograd.graph`).
It says which of them leave, knows those that share memory, and holds torch's rule that a saved tensor is not changed.

A tensor that leaves is known by its storage, which is written once however many views of it are saved. Weights and
buffers of the model stay, and so do small tensors, those of other devices and of unusual kinds, and what backward
itself saves. What stays is saved where it is; a custom Function gets it without what Python has hung on it, as with
any hooks for saved tensors.

Not here: where the bytes are (`offload.session.activations`).
"""

from __future__ import annotations

import threading
import weakref
from itertools import chain
from typing import Any

import torch
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.autograd.graph import increment_version, saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from offload.config import parse_bytes
from offload.errors import ConfigError
from offload.optim import shards
from offload.optim.holder import EngineHolder
from offload.session.activations import Activations, Written

LEAST_BYTES = 1 << 20
"""Of a tensor that leaves, unless the caller says so: smaller ones are many, and their sum is little."""

MOST_AROUND = 16
"""A storage that is larger than this many times a tensor is somebody else's, of which the tensor is a small view."""

_counting = threading.Lock()
"""Held while a version counter is moved, to see whose it is."""


class _Saved:
    """A tensor that is saved where it is: what it was, to see whether it has been changed.

    Attributes:
        tensor: It, if it is a leaf, as parameters are, else an alias without history: that would keep its own graph.
            Of one that has left an alias without memory.
        version: What torch has counted of changes to it when it was saved.
    """

    __slots__ = "_origin", "_shape", "tensor", "version"

    def __init__(self, tensor: torch.Tensor) -> None:
        self._origin = None if tensor.grad_fn is None else (tensor.output_nr, tensor.grad_fn.name())
        self._shape = tensor.shape
        self.tensor = tensor if tensor.is_leaf and tensor._base is None else tensor.detach()
        self.version = tensor._version

    def check(self) -> None:
        """Raise what torch raises for a saved tensor that was changed in place."""
        if self.tensor._version == self.version:
            return
        with _counting:
            version = self.tensor._version
        if version != self.version:
            origin = "" if self._origin is None else ", which is output {} of {},".format(*self._origin)
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"[{self.tensor.type()} {[*self._shape]}]{origin} is at version {version}; expected version "
                f"{self.version} instead. Hint: enable anomaly detection to find the operation that failed to "
                "compute its gradient, with torch.autograd.set_detect_anomaly(True, check_nan=False)."
            )

    def get(self) -> torch.Tensor:
        """Return it, as it was saved."""
        self.check()
        return self.tensor


class _Storage:
    """The content of a storage that has left, as it was when tensors with this version counter were saved."""

    __slots__ = "__weakref__", "counter", "key", "nbytes", "version", "written"

    def __init__(self, tensor: torch.Tensor, counter: torch.Tensor, written: Written) -> None:
        storage = tensor.untyped_storage()
        # While it is there, no other storage has its number.
        self.key: Any = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        with _counting:
            self.version = tensor._version
        self.nbytes, self.counter, self.written = storage.nbytes(), counter, written

    def is_of(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor of this storage has the content that has left."""
        if tensor._version != self.version:
            return False
        # Numbers may be equal by chance: an alias made by `.data` counts its changes alone.
        with _counting, _unsafe_preserve_version_counter(self.counter):
            increment_version(self.counter)
            return tensor._version != self.version


class _Left(_Saved):
    """A tensor that has left: its storage, and how it lies there."""

    __slots__ = "activations", "form", "kind", "storage"

    def __init__(self, tensor: torch.Tensor, activations: Activations) -> None:
        super().__init__(tensor)
        self.tensor = tensor.detach()
        self.activations = activations
        self.form = tensor.storage_offset(), tensor.size(), tensor.stride()
        self.kind = tensor.device, tensor.dtype
        self.storage: _Storage

    def get(self) -> torch.Tensor:
        """Return a tensor like it, in new memory, once it is there."""
        self.check()
        device, dtype = self.kind
        memory = torch.empty(self.storage.nbytes, dtype=torch.uint8, device=device)
        self.activations.read(self.storage.written, memory.data_ptr())
        self.check()
        with torch.no_grad():
            return torch.empty(0, dtype=dtype, device=device).set_(memory.untyped_storage(), *self.form)


class ActivationsOnPaths:
    """A context in which tensors that autograd saves leave for the paths; see `activations_on_paths`.

    Args:
        holder: Holds the engine.
        device: That of the weights.
        model: Whose weights stay.
        host_memory: Bytes of the buffers.
        least_bytes: Of a tensor that leaves.

    Raises:
        ConfigError: An argument cannot be used.
    """

    def __init__(
        self,
        holder: EngineHolder,
        device: torch.device,
        model: torch.nn.Module,
        host_memory: int | str,
        least_bytes: int | str,
    ) -> None:
        self._holder = holder
        self._device = device
        self._model = model
        self._host_bytes = parse_bytes("host_memory", host_memory)
        self._least_bytes = max(1, parse_bytes("least_bytes", least_bytes))
        self._weights: set[int] = set()
        self._left: weakref.WeakValueDictionary[int, _Storage] = weakref.WeakValueDictionary()
        self._hooks: list[saved_tensors_hooks] = []

    def __enter__(self) -> ActivationsOnPaths:
        self._holder.check_open()
        self._holder.open().activations.take(self._host_bytes)
        self._weights = {
            shards.local(tensor).untyped_storage()._cdata
            for tensor in chain(self._model.parameters(), self._model.buffers())
            if tensor.layout is torch.strided  # others stay anyway
        }
        hooks = saved_tensors_hooks(self._pack, lambda saved: saved.get())
        hooks.__enter__()
        self._hooks.append(hooks)
        return self

    def __exit__(self, *exception: Any) -> None:
        self._hooks.pop().__exit__(*exception)
        if self._holder.engine_if_open is not None:
            self._holder.engine_if_open.activations.rest()

    def _pack(self, tensor: torch.Tensor) -> _Saved:
        saved = self._leave(tensor) if self._may_leave(tensor) else None
        return saved or _Saved(tensor)

    def _may_leave(self, tensor: torch.Tensor) -> bool:
        if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided or tensor.device != self._device:
            return False
        if tensor.is_conj() or tensor.is_neg() or tensor.is_quantized or tensor._is_zerotensor():
            return False
        # Within a transform of torch.func tensors have no memory of their own; in backward they are used at once.
        if torch._C._functorch.peek_interpreter_stack() is not None or torch._C._current_graph_task_id() != -1:
            return False
        storage = tensor.untyped_storage()
        nbytes = storage.nbytes()
        if nbytes < self._least_bytes:
            return False
        if storage._cdata in self._weights or isinstance(tensor._base, torch.nn.Parameter):
            return False
        return storage._cdata in self._left or nbytes <= MOST_AROUND * tensor.nbytes

    def _leave(self, tensor: torch.Tensor) -> _Left | None:
        """Have the storage of a tensor leave, unless it has; return None if there is no room."""
        activations, storage = self._holder.engine.activations, tensor.untyped_storage()
        left = _Left(tensor, activations)
        shared = self._left.get(storage._cdata)
        if shared is not None and shared.is_of(tensor):
            left.storage = shared
        else:
            written = activations.write(storage.data_ptr(), storage.nbytes(), tensor)
            if written is None:
                return None
            left.storage = self._left[storage._cdata] = _Storage(tensor, left.tensor, written)
        shards.free_memory(left.tensor)
        return left


def check_model(model: Any, parameters: set[torch.Tensor]) -> None:
    """Refuse what is no model of these parameters.

    Raises:
        ConfigError: It is no module, or has none of them.
    """
    if not isinstance(model, torch.nn.Module):
        raise ConfigError("model", type(model).__name__, "give the torch.nn.Module whose forward pass trains")
    if parameters.isdisjoint(model.parameters()):
        allowed = "give a model that this optimizer updates parameters of, not a copy"
        raise ConfigError("model", type(model).__name__, allowed)

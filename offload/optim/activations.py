"""Tensors that autograd saves for backward are written to the paths, and read back in backward.

`ActivationsOnPaths` sees each tensor that is saved, by torch's own hooks for saved tensors (`torch.autograd.graph`).
It decides which of them are written, knows which share memory, and keeps torch's rule that a saved tensor must not be
changed before backward.

A tensor that is written is identified by its storage, which is written once however many views of it are saved.
Weights and buffers of the model stay in memory, and so do small tensors, those of other devices and of unusual kinds,
and tensors that backward itself saves. If a custom Function saves a tensor that stays, it may get back an alias
without the attributes that Python code has set on the tensor; so it is with any hooks for saved tensors.

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
"""Default for the smallest tensors that are written: smaller ones are many, and their sum is little."""

MOST_AROUND = 16
"""A storage larger than this many times a tensor is not written for it: it counts as a buffer with a small view."""

_counter_lock = threading.Lock()
"""Held while a version counter is incremented and restored, to see which tensors share it (`_Storage.is_of`)."""


class _Saved:
    """What autograd keeps for a tensor that stays in memory: the tensor, and its version when it was saved.

    Backward compares the version: as in torch, a saved tensor that was changed in place is an error.

    Attributes:
        tensor: The tensor itself, if it is a leaf and no view, as parameters are. Else an alias without history: the
            tensor itself would keep its own graph alive. Of a tensor on the paths an alias without memory.
        version: The tensor's version counter when it was saved.
    """

    __slots__ = "_origin", "_shape", "tensor", "version"

    def __init__(self, tensor: torch.Tensor) -> None:
        # For the error's text alone: the function that made the tensor, and which of its outputs the tensor is.
        self._origin = None if tensor.grad_fn is None else (tensor.output_nr, tensor.grad_fn.name())
        self._shape = tensor.shape
        self.tensor = tensor if tensor.is_leaf and tensor._base is None else tensor.detach()
        self.version = tensor._version

    def check(self) -> None:
        """Raise what torch raises for a saved tensor that was changed in place."""
        if self.tensor._version == self.version:
            return
        # Look again under the lock: another thread may have incremented the counter for a moment (`_Storage.is_of`).
        with _counter_lock:
            version = self.tensor._version
        if version != self.version:
            origin = "" if self._origin is None else ", which is output {} of {},".format(*self._origin)
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"[{self.tensor.type()} {[*self._shape]}]{origin} is at version {version}; expected version "
                f"{self.version} instead. Hint: enable anomaly detection to find the operation that failed to "
                "compute its gradient, with torch.autograd.set_detect_anomaly(True, check_nan=False)."
            )

    def unpack(self) -> torch.Tensor:
        """Return the tensor, unchanged since it was saved."""
        self.check()
        return self.tensor


class _Storage:
    """A storage's content at one version, as written to the paths, for all tensors that share the version counter.

    Attributes:
        key: Identifies the storage: while this weak reference lives, no other storage can have the same `_cdata`.
        version: The version that was written.
        nbytes: Bytes of the storage.
        counter: An alias of the tensor that was written, without memory, which shares its version counter.
        written: Where the content is.
    """

    __slots__ = "__weakref__", "counter", "key", "nbytes", "version", "written"

    def __init__(self, tensor: torch.Tensor, counter: torch.Tensor, written: Written) -> None:
        storage = tensor.untyped_storage()
        self.key: Any = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        with _counter_lock:  # `is_of` may have incremented the counter for a moment, on another thread
            self.version = tensor._version
        self.nbytes = storage.nbytes()
        self.counter = counter
        self.written = written

    def is_of(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor of this storage still has the content that was written.

        That is so if the tensor shares the version counter of the tensor that was written, and the version is the
        same. Equal versions are not enough: an alias made by `.data` has a counter of its own. So this increments the
        counter for a moment, and looks whether the tensor's version follows.
        """
        # Another thread may have incremented the counter for a moment: then the storage is written once more.
        if tensor._version != self.version:
            return False
        with _counter_lock, _unsafe_preserve_version_counter(self.counter):  # which sets the counter back at the end
            increment_version(self.counter)
            return tensor._version != self.version


class _SavedOnPaths(_Saved):
    """What autograd keeps for a tensor whose storage was written to the paths.

    Attributes:
        activations: Reads the storage back.
        form: How the tensor lies in its storage: offset, sizes and strides, in elements.
        kind: The tensor's device and dtype.
        storage: Where the storage's content is; set by `_write_storage`.
    """

    __slots__ = "activations", "form", "kind", "storage"

    def __init__(self, tensor: torch.Tensor, activations: Activations) -> None:
        super().__init__(tensor)
        self.tensor = tensor.detach()  # an alias: `_write_storage` frees its memory; its version counter is needed
        self.activations = activations
        self.form = tensor.storage_offset(), tensor.size(), tensor.stride()
        self.kind = tensor.device, tensor.dtype
        self.storage: _Storage  # which `_write_storage` sets

    def unpack(self) -> torch.Tensor:
        """Read the whole storage into new memory, and return a tensor that lies in it as the saved one did."""
        self.check()
        device, dtype = self.kind
        memory = torch.empty(self.storage.nbytes, dtype=torch.uint8, device=device)
        self.activations.read(self.storage.written, memory.data_ptr())
        self.check()  # again, as reading takes a while
        with torch.no_grad():
            return torch.empty(0, dtype=dtype, device=device).set_(memory.untyped_storage(), *self.form)


class ActivationsOnPaths:
    """A context in which tensors that autograd saves are written to paths: `OffloadedOptimizer.activations_on_paths`.

    Args:
        holder: Holds the engine.
        device: The weights' device; tensors on others stay.
        model: The model, whose weights and buffers stay.
        host_memory: Bytes of the buffers.
        least_bytes: Bytes of the smallest tensors that are written.

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
        # At least 1: a storage without bytes has nothing to write, or to read back.
        self._least_bytes = max(1, parse_bytes("least_bytes", least_bytes))
        self._weights: set[int] = set()  # storages of weights and buffers, by torch's `_cdata`
        self._written_storages: weakref.WeakValueDictionary[int, _Storage] = weakref.WeakValueDictionary()
        self._hooks: list[saved_tensors_hooks] = []  # of each context that is open; they may be nested

    def __enter__(self) -> ActivationsOnPaths:
        """Allocate buffers, note which storages stay, and have autograd call `_pack` for what it saves.

        If the engine's opening was deferred, it is opened now.
        """
        self._holder.check_open()  # `open` alone would return an engine that has been closed
        self._holder.open().activations.allocate_buffers(self._host_bytes)
        self._weights = {
            shards.local(tensor).untyped_storage()._cdata
            for tensor in chain(self._model.parameters(), self._model.buffers())
            if tensor.layout is torch.strided  # other layouts are never written
        }
        hooks = saved_tensors_hooks(self._pack, lambda saved: saved.unpack())
        hooks.__enter__()
        self._hooks.append(hooks)
        return self

    def __exit__(self, *exception: Any) -> None:
        """Remove autograd's hooks, and release the tiles that are kept in buffers for the next write or read."""
        self._hooks.pop().__exit__(*exception)
        if self._holder.engine_if_open is not None:  # `__enter__` has opened it; for the type checker
            self._holder.engine_if_open.activations.release_tiles()

    def _pack(self, tensor: torch.Tensor) -> _Saved:
        """Return what autograd keeps in place of a tensor; the hook that it calls for each tensor that it saves."""
        on_paths = self._write_storage(tensor) if self._is_candidate(tensor) else None
        return on_paths or _Saved(tensor)

    def _is_candidate(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor that autograd saves may be written to the paths."""
        if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided or tensor.device != self._device:
            return False
        # Such a tensor's values are not what its memory has, and the memory alone would be written.
        if tensor.is_conj() or tensor.is_neg() or tensor.is_quantized or tensor._is_zerotensor():
            return False
        # In a transform of torch.func tensors have no memory of their own; those saved in backward are used at once.
        is_in_transform = torch._C._functorch.peek_interpreter_stack() is not None
        is_in_backward = torch._C._current_graph_task_id() != -1  # the number of the pass, -1 for none
        if is_in_transform or is_in_backward:
            return False
        storage = tensor.untyped_storage()
        # A parameter itself was refused above, as its class is `Parameter`. A view of one is a plain tensor; its base
        # tells, also for a parameter of another model.
        is_of_weight = storage._cdata in self._weights or isinstance(tensor._base, torch.nn.Parameter)
        if storage.nbytes() < self._least_bytes or is_of_weight:
            return False
        # The whole storage is written: not worth it for a small view, unless it was written for another tensor.
        return storage._cdata in self._written_storages or storage.nbytes() <= MOST_AROUND * tensor.nbytes

    def _write_storage(self, tensor: torch.Tensor) -> _SavedOnPaths | None:
        """Write a tensor's storage to the paths, unless that was done for another tensor with the same content.

        Returns:
            What autograd keeps in place of the tensor; None if there is no room on the paths, so the tensor stays.
        """
        activations = self._holder.engine.activations
        storage = tensor.untyped_storage()
        saved = _SavedOnPaths(tensor, activations)
        earlier_storage = self._written_storages.get(storage._cdata)
        if earlier_storage is not None and earlier_storage.is_of(tensor):
            saved.storage = earlier_storage
        else:
            # `tensor` keeps the memory alive until a device has copied it.
            written = activations.write(storage.data_ptr(), storage.nbytes(), tensor)
            if written is None:
                return None
            saved.storage = self._written_storages[storage._cdata] = _Storage(tensor, saved.tensor, written)
        shards.free_memory(saved.tensor)  # else the alias would keep the storage in memory until backward
        return saved


def check_model(model: Any, parameters: set[torch.Tensor]) -> None:
    """Raise `ConfigError` unless `model` is a module that has some of these parameters."""
    if not isinstance(model, torch.nn.Module):
        raise ConfigError("model", type(model).__name__, "give the torch.nn.Module whose forward pass trains")
    if parameters.isdisjoint(model.parameters()):
        allowed = "give a model that this optimizer updates parameters of, not a copy"
        raise ConfigError("model", type(model).__name__, allowed)

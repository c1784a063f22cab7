"""The device "late": a torch accelerator on the CPU, on which every mistake of order or of place shows.

After `load()`, torch has devices `late:0`, `late:1`, ... They do what CUDA's do, later: a stream is a thread that
runs its work in order, held back as a test says. The host cannot read their memory: SIGSEGV. Memory that is new or
was dropped reads as NaN. What fails on a device is said at a later call.

Tests decide when work runs: by `held` (a gate before a stream), never by time. Within it nothing may be asked for
that waits, as `torch.tensor(..., device="late")` does.

An operator has the bits of the CPU's. What torch composes otherwise for another device has other bits: attention.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import importlib.machinery
import importlib.util
import os
import types
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch

from accelerator import build, one_order

_native: Any = None
_delays = 0, 0, 0
"""Of all streams; see `delays`."""


def load(devices: int = 2) -> None:
    """Make the device known to this process, which cannot be undone. Later calls do nothing.

    Args:
        devices: How many there are.

    Raises:
        build.CannotBuild: It cannot be built here.
    """
    global _native
    if _native is not None:
        _native.set_device_count(devices)
        return
    path = str(build.library())
    loader = importlib.machinery.ExtensionFileLoader("_late", path)
    spec = importlib.util.spec_from_file_location("_late", path, loader=loader)
    native = importlib.util.module_from_spec(spec)
    loader.exec_module(native)
    native.set_device_count(devices)
    native.init()
    torch.utils.rename_privateuse1_backend("late")
    torch._register_device_module("late", _module(native))
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    if torch.distributed.is_available():
        torch.distributed.Backend.register_backend("late", _group, extended_api=True, devices=["late"])
    atexit.register(_stop, os.getpid())
    _take_native_forms()
    _native = native


def _take_native_forms() -> None:
    """Have torch's native Meta kernels tell the form of operators' results, wherever it has any.

    Importing torch puts others before them, in Python, which take a hundred times as long and the interpreter's lock.
    """
    registrations = importlib.import_module("torch._meta_registrations")
    name = "_meta_lib_dont_use_me_use_register_meta"
    if not hasattr(registrations, name):  # another release of torch: all is slower, and the same
        return
    before = getattr(registrations, name)
    operators = [operator.split("/")[1] for operator in before._op_impls]
    before._destroy()
    kept = torch.library.Library("aten", "IMPL", "Meta")
    for operator in operators:
        if not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{operator}", "Meta"):
            packet, _, overload = operator.partition(".")
            found = getattr(getattr(torch.ops.aten, packet), overload or "default")
            kept.impl(found, found.py_kernels[torch._C.DispatchKey.Meta])
    setattr(registrations, name, kept)


def tell_offload() -> None:
    """Have offload know the device, and measure it once, as if nothing dawdled; after `load`, once.

    What a session measures as it begins is hundreds of tasks, waited for one by one, and no bit depends on it: it
    takes longer than a test's training. `workloads.py` has every session measure, and streams dawdle there, too.
    """
    from offload.backends import BACKENDS, Backend
    from offload.measure import probe

    measure, known = probe.probe_gpu, dict[str, Any]()

    def probe_gpu(lanes: Any, **options: Any) -> Any:
        device, before = lanes.device.name, _delays
        if device not in known:
            delays()
            try:
                known[device] = measure(lanes, **options)
            finally:
                delays(*before)
        return known[device]

    probe.probe_gpu = probe_gpu
    BACKENDS["late"] = Backend(pin=pin, unpin=unpin)


def _stop(process: int) -> None:
    """End all work at the end of the process that loaded the device: one forked from it has no streams."""
    if process == os.getpid():
        _native.stop()


def end_rank() -> NoReturn:
    """End a rank that has done its work, and say so; ranks have issued the device's collectives in one order.

    The interpreter does not end: a thread of gloo that drops what a last collective used asks for it a moment later,
    and the process aborts where the group outlives `destroy_process_group`, as it does with FSDP2.
    """
    torch.accelerator.synchronize()
    one_order.check()
    torch.distributed.destroy_process_group()
    print("passed", flush=True)
    os._exit(0)


# -- What tests set


def _forwarded(name: str) -> Any:
    """Return what calls a function of the native module, which is there once it has been loaded."""
    return lambda *arguments: getattr(_native, name)(*arguments)


hold = _forwarded("hold")
"""(stream) Let no work of a stream start until it is released. What runs already goes on."""

release = _forwarded("release")
"""(stream) Let a stream that was held go on."""

is_waited_for = _forwarded("is_waited_for")
"""(stream) Return whether a thread of the host waits for a stream's work now."""

forget_errors = _forwarded("forget_errors")
"""() Let devices on which a task has failed work again, and let nothing fail that has not failed yet."""


@contextlib.contextmanager
def held(stream: torch.Stream) -> Iterator[None]:
    """Hold a stream within a block. Who waits for it there, waits for another thread that releases it."""
    hold(stream)
    try:
        yield
    finally:
        release(stream)


def last(stream: torch.Stream, is_last: bool = True) -> None:
    """Let a stream run only while all others have nothing to do, or somebody waits for it."""
    _native.run_last(stream, is_last)


def dawdle(stream: torch.Stream, dawdles: bool = True) -> None:
    """Let a stream run only when somebody waits for it: the host, or a stream that does not dawdle.

    So what should wait for it, and does not, comes first. Asking whether it has come to an event does not wait.
    """
    _native.dawdle(stream, dawdles)


def delays(least_us: int = 0, most_us: int = 0, seed: int = 0, stream: torch.Stream | None = None) -> None:
    """Let a stream, or all of them, sleep before each task; without arguments, no more.

    Args:
        least_us: The shortest sleep in microseconds.
        most_us: The longest.
        seed: Where draws start: each stream's sleeps are the same each time it is set.
        stream: The one stream. Otherwise all, those to come as well.
    """
    if not 0 <= least_us <= most_us:
        raise ValueError(f"no delays from {least_us} to {most_us} us")
    global _delays
    if stream is None:
        _delays = least_us, most_us, seed
        _native.set_delays(*_delays)
    else:
        _native.set_stream_delays(stream, least_us, most_us, seed)


def set_device_bytes(nbytes: int, device: int = 0) -> None:
    """Set how much memory a device has: 4 GiB at first."""
    _native.set_device_bytes(device, nbytes)


def fail(name: str, after: int = 0) -> None:
    """Let a task fail.

    Args:
        name: How its name begins: an operator's ("aten::add"), "copy", "fill", a collective's, one given to `launch`.
        after: How many such tasks go well before.
    """
    _native.fail(name, after)


# -- What a driver offers


pin = _forwarded("pin")
"""(address, nbytes) Register host memory, so that copies from and to it need not wait, as `cudaHostRegister` does.

It raises `RuntimeError` if some of it is registered already.
"""

unpin = _forwarded("unpin")
"""(address) Take a registration back, after all work that uses the memory.

It raises `RuntimeError` if there is none at this address.
"""

registered = _forwarded("registered")
"""() Return the addresses of all host memory that is registered now."""


def launch(function: Callable[[], object], name: str = "launch", stream: torch.Stream | None = None) -> None:
    """Run a function in a stream's order, as a kernel of one's own.

    It cannot reach device memory. What it raises is the device's error.
    """
    _native.launch(stream or torch.accelerator.current_stream(), name, function)


# -- What has happened


counts = _forwarded("counts")
"""() Return how often operators ran later ("asynchronous"), and by name those that the host waited for."""

host_waits = _forwarded("host_waits")
"""() Return how often threads of the host have waited for work that was not done, by the system's name for each."""

streams = _forwarded("list_streams")
"""() Return (device, id, tasks put, tasks done) of all streams that have been used."""


# -- What torch asks of a device's module


class Stream(torch.Stream):
    """A stream of the current device unless told otherwise."""

    def __new__(cls, device: Any = None, priority: int = 0, **known: Any) -> Stream:
        if known:
            return super().__new__(cls, priority=priority, **known)
        return super().__new__(cls, device=_place(device), priority=priority)


def event(enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> torch.Event:
    """Return an event of the device; not one of a class derived from torch's, between which no time elapses."""
    return torch.Event("late", enable_timing=enable_timing, blocking=blocking, interprocess=interprocess)


def _place(device: Any) -> torch.device:
    """Return a device as torch's modules are told it: None, an index, a string or a device."""
    index = torch.accelerator.current_device_index()
    if device is None:
        return torch.device("late", index)
    place = torch.device("late", device) if isinstance(device, int) else torch.device(device)
    return place if place.index is not None else torch.device("late", index)


def _module(native: Any) -> types.ModuleType:
    process = os.getpid()
    generators = [native.default_generator(index) for index in range(native.device_count())]
    made = types.ModuleType("torch.late")
    accelerator = torch.accelerator

    def generator(device: Any) -> torch.Generator:
        return generators[_place(device).index]

    def manual_seed_all(seed: int) -> None:
        for each in generators:
            each.manual_seed(seed)

    def use(stream: torch.Stream | None) -> Any:
        return contextlib.nullcontext() if stream is None else stream

    def properties(device: Any = None) -> types.SimpleNamespace:
        total_bytes = accelerator.get_memory_info(_place(device))[1]
        return types.SimpleNamespace(name="late", total_memory=total_bytes)

    names: dict[str, Any] = {
        "Stream": Stream,
        "Event": event,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "init": lambda: None,
        "_lazy_init": lambda: None,
        "_is_in_bad_fork": lambda: os.getpid() != process,
        "is_bf16_supported": lambda *_: True,
        "get_amp_supported_dtype": lambda: [torch.bfloat16, torch.float16],
        "device_count": native.device_count,
        "current_device": accelerator.current_device_index,
        "set_device": accelerator.set_device_index,
        "device": lambda device: accelerator.device_index(None if device is None else _place(device).index),
        "stream": use,
        "current_stream": lambda device=None: accelerator.current_stream(_place(device)),
        "default_stream": lambda device=None: native.default_stream(_place(device).index),
        "set_stream": accelerator.set_stream,
        "synchronize": lambda device=None: accelerator.synchronize(_place(device)),
        "get_device_name": lambda device=None: "late",
        "get_device_properties": properties,
        "mem_get_info": lambda device=None: accelerator.get_memory_info(_place(device)),
        "default_generators": tuple(generators),
        "manual_seed": lambda seed: generator(None).manual_seed(seed),
        "manual_seed_all": manual_seed_all,
        "seed": lambda: generator(None).seed(),
        "initial_seed": lambda: generator(None).initial_seed(),
        "get_rng_state": lambda device=None: generator(device).get_state(),
        "set_rng_state": lambda state, device=None: generator(device).set_state(state),
    }
    alike = ("memory_stats", "memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved")
    for name in (*alike, "empty_cache", "reset_peak_memory_stats", "reset_accumulated_memory_stats"):
        names[name] = getattr(accelerator, name)
    made.__dict__.update(names)
    return made


def _group(chosen: Any, options: Any) -> Any:
    """Return a process group for tensors of the device: gloo on their memory, in the order of streams."""
    store = torch.distributed.PrefixStore("late", chosen.store)
    gloo = torch.distributed.ProcessGroupGloo(store, chosen.group_rank, chosen.group_size, chosen.timeout)
    ranks = chosen.global_ranks_in_group or range(chosen.group_size)
    return _native.make_group(gloo, one_order.note(chosen.group_id, ranks))

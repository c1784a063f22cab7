"""A simulated world for the engine: clock, lanes, bytes and faults; a checker."""

from offload.schedule.timeline import Interval
from world.checker import CheckedExecutor
from world.data import SimData, SimStore, StoredTile, mix
from world.device import HazardError, SimulatedDevice
from world.executor import Disorder, SimExecutor
from world.faults import (
    CorruptPayload,
    Crash,
    FailOperation,
    Fault,
    MisdirectedWrite,
    PathFull,
    ShortTransfer,
    SimulatedCrash,
    SlowLane,
    StuckOperation,
    random_faults,
)

__all__ = [
    "CheckedExecutor",
    "CorruptPayload",
    "Crash",
    "Disorder",
    "FailOperation",
    "Fault",
    "HazardError",
    "Interval",
    "MisdirectedWrite",
    "PathFull",
    "ShortTransfer",
    "SimData",
    "SimExecutor",
    "SimStore",
    "SimulatedCrash",
    "SimulatedDevice",
    "SlowLane",
    "StoredTile",
    "StuckOperation",
    "mix",
    "random_faults",
]

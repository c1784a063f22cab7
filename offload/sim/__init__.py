"""A simulated world for the engine: clock, lanes, bytes and faults; a checker; predictions."""

from offload.engine.timeline import Interval
from offload.sim.checker import CheckedExecutor
from offload.sim.data import SimData, SimStore, StoredTile, mix
from offload.sim.device import HazardError, SimulatedDevice
from offload.sim.executor import Disorder, SimExecutor
from offload.sim.explanation import Explanation, LaneSeconds, compare, explain
from offload.sim.faults import (
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
from offload.sim.forecast import Forecast, PlanReport, carry_on
from offload.sim.predict import Prediction, predict

__all__ = [
    "CheckedExecutor",
    "CorruptPayload",
    "Crash",
    "Disorder",
    "Explanation",
    "FailOperation",
    "Fault",
    "Forecast",
    "HazardError",
    "Interval",
    "LaneSeconds",
    "MisdirectedWrite",
    "PathFull",
    "PlanReport",
    "Prediction",
    "ShortTransfer",
    "SimData",
    "SimExecutor",
    "SimStore",
    "SimulatedCrash",
    "SimulatedDevice",
    "SlowLane",
    "StoredTile",
    "StuckOperation",
    "carry_on",
    "compare",
    "explain",
    "mix",
    "predict",
    "random_faults",
]

"""A simulated world for the engine: clock, lanes, bytes and faults; a checker; and a GPU that is not there."""

from world.device import HazardError, SimulatedDevice

__all__ = ["HazardError", "SimulatedDevice"]

"""Measuring: rates from a short probe, and from what the lanes of a session did."""

from offload.measure.observe import lane_totals, refine
from offload.measure.probe import quick_probe

__all__ = ["lane_totals", "quick_probe", "refine"]

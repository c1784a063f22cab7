"""Measuring: rates from a short probe, and from what the lanes of a session did."""

from offload.measure.observe import HISTORY, lane_totals, observe, typical
from offload.measure.probe import quick_probe

__all__ = ["HISTORY", "lane_totals", "observe", "quick_probe", "typical"]

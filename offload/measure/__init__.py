"""Measuring: rates from probes, files of them, and rates from what the lanes of a session did."""

from offload.measure.depth import choose_depth, tune_depth
from offload.measure.full import full_probe
from offload.measure.nodes import probe_nodes
from offload.measure.observe import HISTORY, as_on_fastest, lane_totals, observe, typical
from offload.measure.probe import quick_probe
from offload.measure.rates_file import (
    Measurement,
    RatesFile,
    default_rates_file,
    find_rates,
    has_default_rates,
    load_rates,
    save_rates,
    session_rates,
)

__all__ = [
    "HISTORY",
    "Measurement",
    "RatesFile",
    "as_on_fastest",
    "choose_depth",
    "default_rates_file",
    "find_rates",
    "full_probe",
    "has_default_rates",
    "lane_totals",
    "load_rates",
    "observe",
    "probe_nodes",
    "quick_probe",
    "save_rates",
    "session_rates",
    "tune_depth",
    "typical",
]

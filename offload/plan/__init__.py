"""Deciding where state lives and in which order it is visited. Pure: no clock, no I/O, no threads."""

from offload.plan.budget import Budgets, PathBudget, Plan, make_plan
from offload.plan.cost import closed_form_step_s
from offload.plan.order import visit_order
from offload.plan.rates import GpuRates, PathRates, Rates

__all__ = [
    "Budgets",
    "GpuRates",
    "PathBudget",
    "PathRates",
    "Plan",
    "Rates",
    "closed_form_step_s",
    "make_plan",
    "visit_order",
]

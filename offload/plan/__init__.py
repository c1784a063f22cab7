"""Deciding where state lives and in which order it is visited. Pure: no clock, no I/O, no threads."""

from offload.plan.budget import Budgets, PathBudget, Plan, make_plan
from offload.plan.order import visit_order
from offload.plan.rates import PathRates, Rates

__all__ = ["Budgets", "PathBudget", "PathRates", "Plan", "Rates", "make_plan", "visit_order"]

"""Deciding where state lives and in which order it is visited. Pure: no clock, no I/O, no threads."""

from offload.plan.budget import (
    Budgets,
    Home,
    NodeBudget,
    PathBudget,
    Placement,
    Plan,
    choose_subgroup_numel,
    make_plan,
)
from offload.plan.cost import Estimate, estimate
from offload.plan.planner import choose_plan, visit_order
from offload.plan.rates import NO_GPU, GpuRates, NodeRates, PathRates, Rates

__all__ = [
    "NO_GPU",
    "Budgets",
    "Estimate",
    "GpuRates",
    "Home",
    "NodeBudget",
    "NodeRates",
    "PathBudget",
    "PathRates",
    "Placement",
    "Plan",
    "Rates",
    "choose_plan",
    "choose_subgroup_numel",
    "estimate",
    "make_plan",
    "visit_order",
]

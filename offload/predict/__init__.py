"""The engine on a virtual clock: how long a step takes, and why."""

from offload.predict.explanation import Explanation, LaneSeconds, compare, explain
from offload.predict.forecast import Forecast, PlanReport, carry_on
from offload.predict.predict import Prediction, predict

__all__ = [
    "Explanation",
    "Forecast",
    "LaneSeconds",
    "PlanReport",
    "Prediction",
    "carry_on",
    "compare",
    "explain",
    "predict",
]

"""What `metrics()` of an engine and of an optimizer says: each figure is declared here once, and named by that.

Whatever computes or reads one uses its name from here; docs/metrics.md is written from this table.
"""

from __future__ import annotations

import re
from typing import NamedTuple

ALWAYS, GPU, NODES = "always", "with weights on a GPU", "`host_memory` has memory nodes"
BORROWED, MIRRORED = '`gpu_memory` is "borrow"', "`mirror` is given"
EARLY, HIDDEN = "steps are hidden in backward", "a step has been hidden in forward or backward"
PARKED, LEFT = "the session has been parked once", "gradients leave for the paths"
SAVED = "activations leave for the paths"
MAPPED = "weights lie in a file"


class Metric(NamedTuple):
    """What is declared of a figure.

    Attributes:
        unit: "B", "s", or "" for what has none.
        since: When it is there.
        meaning: What it is of.
    """

    unit: str
    since: str
    meaning: str


TABLE: dict[str, Metric] = {}
"""By their names; what stands in angle brackets there is a lane, or the number of a path or a memory node."""


def _metric(name: str, unit: str, since: str, meaning: str) -> str:
    """Add a metric to `TABLE`, and return its name."""
    TABLE[name] = Metric(unit, since, meaning)
    return name


def of(name: str, which: object) -> str:
    """Return the name of the figure of one lane, path or memory node: `name` with that in place of "<...>"."""
    return re.sub("<.*>", str(which), name)


def which(name: str, figure: str) -> str | None:
    """Return the lane, path or memory node that a figure is of.

    None if `figure` is not of the metric `name`, or that metric is not of a lane, path or node.
    """
    pattern = re.sub("<.*>", "([^/]+)", name)  # without brackets in `name`, there is no group
    match = re.fullmatch(pattern, figure)
    return match[1] if match and match.re.groups else None


# Of an engine
STEP = _metric("step", "", ALWAYS, "number of the last step that has ended")
STEP_S = _metric("step_s", "s", ALWAYS, "from the begin of that step until all new weights were there")
STATE_BYTES = _metric("state_bytes", "B", ALWAYS, "all state")
RESIDENT_BYTES = _metric("resident_bytes", "B", ALWAYS, "state at home in memory, of the host or the GPU")
STREAMED_BYTES = _metric("streamed_bytes", "B", ALWAYS, "state at home on the paths")
RESIDENT_SHARE = _metric("resident_share", "", ALWAYS, "`resident_bytes` over `state_bytes`")
GPU_BYTES = _metric("gpu_bytes", "B", GPU, "state at home on the GPU")
PINNED_BYTES = _metric("pinned_bytes", "B", GPU, "host memory that the GPU copies from and to")
UNPINNED_BYTES = _metric("unpinned_bytes", "B", GPU, "what of that the system does not let the GPU reach by itself")
BORROWED_BYTES = _metric("borrowed_bytes", "B", BORROWED, "GPU memory that the last step borrowed")
NODE_BYTES = _metric("node/<number>/bytes", "B", NODES, "host memory that is meant to lie on a memory node")
NODE_ELSEWHERE_BYTES = _metric("node/<number>/elsewhere_bytes", "B", NODES, "what of that lies on others")
MIRRORED_BYTES = _metric("mirrored_bytes", "B", MIRRORED, "state and files that this session has copied there")
CONFIRMED_BYTES = _metric(
    "speculation/confirmed_bytes", "B", EARLY, "state updated before the step was sealed, that the step took over"
)
REVOKED_BYTES = _metric("speculation/revoked_bytes", "B", EARLY, "state updated so that the step did not take over")
AWAY_BYTES = _metric("park/away_bytes", "B", PARKED, "state at home in memory that lies on paths now")
PARK_MOVED_BYTES = _metric("park/moved_bytes", "B", PARKED, "state that the last park moved to the paths")
GIVEN_BACK_BYTES = _metric("park/given_back_bytes", "B", PARKED, "memory that the last park gave back")
PARK_S = _metric("park/seconds", "s", PARKED, "what the last park took")
PREDICTED_BACK_S = _metric(
    "park/predicted_back_s", "s", PARKED, "what the first step after it takes longer, memory included"
)
PACKED_BYTES = _metric(
    "activations/packed_bytes", "B", SAVED, "saved tensors of the last forward pass that went to buffers"
)
KEPT_BYTES = _metric("activations/kept_bytes", "B", SAVED, "those that found no room, and stayed where they were")
ACTIVATIONS_WRITTEN_BYTES = _metric("activations/written_bytes", "B", SAVED, "what of those packed went to the paths")
ACTIVATIONS_READ_BYTES = _metric("activations/read_bytes", "B", SAVED, "what came back for its backward passes")
PREDICTED_WRITE_S = _metric("activations/predicted_write_s", "s", SAVED, "what writing takes at the paths' rates")
PREDICTED_READ_S = _metric("activations/predicted_read_s", "s", SAVED, "what reading takes at the paths' rates")
ACTIVATIONS_WAITED_S = _metric("activations/waited_s", "s", SAVED, "what callers have waited for buffers")
WEIGHT_FAULTS = _metric(
    "weights/faults", "", MAPPED,
    "how often threads that update have waited for a page of a drive; 0 where weights are read before them"
)  # fmt: skip
LANE_BYTES = _metric(
    "lane/<lane>/bytes", "B", ALWAYS, "what a lane moved or updated for the last step: `engine` (its own thread), "
    "`cpu`, `read:<path>`, `write:<path>`; with a GPU `gpu`, `h2d`, `d2h`"
)  # fmt: skip
LANE_BUSY_S = _metric("lane/<lane>/busy_s", "s", ALWAYS, "in which it worked")
READ_BYTES = _metric("path/<number>/read_bytes", "B", ALWAYS, "what the last step read from a path")
WRITE_BYTES = _metric("path/<number>/write_bytes", "B", ALWAYS, "what it wrote there")
LIVE_BYTES = _metric("path/<number>/live_bytes", "B", ALWAYS, "what lies there now")
WRITTEN_BYTES = _metric(
    "path/<number>/written_bytes", "B", ALWAYS,
    "what was written there since the session began, checkpoints included: what wears a drive"
)  # fmt: skip

# Of an optimizer besides; predictions are those that were due before the step
LANE_PREDICTED_S = _metric("lane/<lane>/predicted_s", "s", ALWAYS, "in which a lane was expected to work")
FIRST_OF_OPTIMIZER = LANE_PREDICTED_S  # docs/metrics.md has the figures from here on in another table
PREDICTED_STEP_S = _metric("predicted_step_s", "s", ALWAYS, "what the step was expected to take")
PREDICTED_GRADIENTS_S = _metric("predicted_gradients_s", "s", LEFT, "what writing those of one backward pass takes")
GRADIENT_NORM = _metric(
    "gradient_norm", "", ALWAYS, "norm of the gradients, of the last `clip_grad_norm_` or by DeepSpeed; else NaN"
)
HIDDEN_S = _metric("hidden_s", "s", ALWAYS, "what of the step ran beside forward and backward; else 0")
FORWARD_S = _metric("forward_s", "s", HIDDEN, "what forward takes in the last iterations")
BACKWARD_S = _metric("backward_s", "s", HIDDEN, "what backward takes in the last iterations")
WAITED_S = _metric("waited_s", "s", HIDDEN, "what the caller has waited for the last step, in `step` and after it")
PREDICTED_ITERATION_S = _metric("predicted_iteration_s", "s", HIDDEN, "what an iteration was expected to take")

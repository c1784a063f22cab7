"""The figures that `metrics()` of an engine and of an optimizer returns: each name is declared here once.

Code that computes or reads a figure uses the constant for its name; docs/metrics.md is written from `TABLE`. A name
with angle brackets, as "lane/<lane>/bytes", stands for a figure of each lane, path or memory node.
"""

from __future__ import annotations

import re
from typing import NamedTuple

ALWAYS, GPU, NODES = "", "weights on a GPU", "memory nodes"
BORROWED, MIRRORED = '`gpu_memory="borrow"`', "`mirror`"
EARLY, HIDDEN = "steps hidden in backward", "hidden steps"
PARKED, LEFT = "after `park`", "`gradient_memory`"
SAVED = "`activations_on_paths`"
MAPPED = "weights in a file"
"""Values of `Metric.since`, as docs/metrics.md shows them."""


class Metric(NamedTuple):
    """What is declared of a figure.

    Attributes:
        unit: "B", "s", or "" for a number without a unit.
        since: The setting or situation in which `metrics()` has the figure; "" for always.
        meaning: What the figure counts or measures, in the words of docs/metrics.md.
    """

    unit: str
    since: str
    meaning: str


TABLE: dict[str, Metric] = {}
"""All metrics, by name. In a name, angle brackets stand for a lane, or for the number of a path or a memory node."""


def _metric(name: str, unit: str, since: str, meaning: str) -> str:
    """Add a metric to `TABLE`, and return its name."""
    TABLE[name] = Metric(unit, since, meaning)
    return name


def of(name: str, which: object) -> str:
    """Return a metric's name for one lane, path or memory node: "lane/<lane>/bytes", "cpu" -> "lane/cpu/bytes"."""
    return re.sub("<.*>", str(which), name)


def which(name: str, figure: str) -> str | None:
    """Return the lane, path or memory node of a figure, the reverse of `of`.

    "lane/<lane>/bytes", "lane/cpu/bytes" -> "cpu". None if `figure` does not belong to the metric `name`, or `name`
    has no angle brackets.
    """
    pattern = re.sub("<.*>", "([^/]+)", name)  # a name without angle brackets becomes a pattern without a group
    match = re.fullmatch(pattern, figure)
    return match[1] if match and match.re.groups else None


# Of an engine
STEP = _metric("step", "", ALWAYS, "number of that step")
STEP_S = _metric("step_s", "s", ALWAYS, "from its begin until all new weights were there")
STATE_BYTES = _metric("state_bytes", "B", ALWAYS, "all state")
RESIDENT_BYTES = _metric("resident_bytes", "B", ALWAYS, "state at home in memory, of the host or the GPU")
STREAMED_BYTES = _metric("streamed_bytes", "B", ALWAYS, "state at home on the paths")
RESIDENT_SHARE = _metric("resident_share", "", ALWAYS, "`resident_bytes` over `state_bytes`")
GPU_BYTES = _metric("gpu_bytes", "B", GPU, "state at home on the GPU")
PINNED_BYTES = _metric("pinned_bytes", "B", GPU, "host memory that the GPU copies from and to")
UNPINNED_BYTES = _metric("unpinned_bytes", "B", GPU, "what of that could not be pinned")
BORROWED_BYTES = _metric("borrowed_bytes", "B", BORROWED, "GPU memory that it borrowed")
NODE_BYTES = _metric("node/<number>/bytes", "B", NODES, "host memory meant for a node")
NODE_ELSEWHERE_BYTES = _metric("node/<number>/elsewhere_bytes", "B", NODES, "what of that lies on other nodes")
MIRRORED_BYTES = _metric("mirrored_bytes", "B", MIRRORED, "copied there by this session")
CONFIRMED_BYTES = _metric("speculation/confirmed_bytes", "B", EARLY, "state updated early that the step confirmed")
REVOKED_BYTES = _metric("speculation/revoked_bytes", "B", EARLY, "state updated early that was thrown away")
AWAY_BYTES = _metric("park/away_bytes", "B", PARKED, "state at home in memory that lies on the paths now")
PARK_MOVED_BYTES = _metric("park/moved_bytes", "B", PARKED, "state that the last park moved there")
GIVEN_BACK_BYTES = _metric("park/given_back_bytes", "B", PARKED, "memory that it gave back")
PARK_S = _metric("park/seconds", "s", PARKED, "what it took")
PREDICTED_BACK_S = _metric("park/predicted_back_s", "s", PARKED, "how much longer the first step after it takes")
PACKED_BYTES = _metric(
    "activations/packed_bytes", "B", SAVED, "saved tensors of the last forward pass that went to buffers"
)
KEPT_BYTES = _metric("activations/kept_bytes", "B", SAVED, "those that found no room and stayed in memory")
ACTIVATIONS_WRITTEN_BYTES = _metric("activations/written_bytes", "B", SAVED, "what went on to the paths")
ACTIVATIONS_READ_BYTES = _metric("activations/read_bytes", "B", SAVED, "what came back")
PREDICTED_WRITE_S = _metric("activations/predicted_write_s", "s", SAVED, "what writing takes at the paths' rates")
PREDICTED_READ_S = _metric("activations/predicted_read_s", "s", SAVED, "what reading takes at the paths' rates")
ACTIVATIONS_WAITED_S = _metric("activations/waited_s", "s", SAVED, "what callers have waited for buffers")
WEIGHT_FAULTS = _metric(
    "weights/faults", "", MAPPED,
    "how often updating threads have waited for a page of the drive; 0 where weights are read before them"
)  # fmt: skip
LANE_BYTES = _metric(
    "lane/<lane>/bytes", "B", ALWAYS, "what a lane moved or updated: `engine` (its own thread), `cpu`, "
    "`read:<path>`, `write:<path>`; with a GPU `gpu`, `h2d`, `d2h`"
)  # fmt: skip
LANE_BUSY_S = _metric("lane/<lane>/busy_s", "s", ALWAYS, "how long it worked")
READ_BYTES = _metric("path/<number>/read_bytes", "B", ALWAYS, "what the step read from a path")
WRITE_BYTES = _metric("path/<number>/write_bytes", "B", ALWAYS, "what it wrote there")
LIVE_BYTES = _metric("path/<number>/live_bytes", "B", ALWAYS, "what lies there now")
WRITTEN_BYTES = _metric(
    "path/<number>/written_bytes", "B", ALWAYS,
    "what the session has written there, checkpoints included: what wears a drive"
)  # fmt: skip

# Of an optimizer besides; predictions are those made before the step
LANE_PREDICTED_S = _metric("lane/<lane>/predicted_s", "s", ALWAYS, "how long a lane was expected to work")
FIRST_OF_OPTIMIZER = LANE_PREDICTED_S  # docs/metrics.md has the figures from here on in another table
PREDICTED_STEP_S = _metric("predicted_step_s", "s", ALWAYS, "what the step was expected to take")
PREDICTED_GRADIENTS_S = _metric("predicted_gradients_s", "s", LEFT, "what writing the gradients of a pass takes")
GRADIENT_NORM = _metric("gradient_norm", "", ALWAYS, "by the last `clip_grad_norm_` or by DeepSpeed; else NaN")
HIDDEN_S = _metric("hidden_s", "s", ALWAYS, "what of the step ran beside forward and backward")
FORWARD_S = _metric("forward_s", "s", HIDDEN, "what forward takes")
BACKWARD_S = _metric("backward_s", "s", HIDDEN, "what backward takes")
WAITED_S = _metric("waited_s", "s", HIDDEN, "what the caller waited for the step, in `step` and after it")
PREDICTED_ITERATION_S = _metric("predicted_iteration_s", "s", HIDDEN, "what an iteration was expected to take")

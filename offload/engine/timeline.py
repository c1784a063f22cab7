"""What a lane did, and when."""

from __future__ import annotations

from typing import NamedTuple


class Interval(NamedTuple):
    """One operation on a lane, for timelines.

    Attributes:
        lane: "cpu", or "read:<path>" and "write:<path>" with the path's number; with a GPU "gpu", "h2d" and "d2h"; of
            checkpoints "save:<path>" and "copy:<path>".
        label: What it worked on.
        started_s: When it was taken up, on the monotonic clock.
        finished_s: When it was through.
        nbytes: Bytes of state that were moved or updated.
        due_s: When what it follows from had ended: when an engine that takes no time would have handed it to the
            lane. None where that was not noted: as it was taken up.
    """

    lane: str
    label: str
    started_s: float
    finished_s: float
    nbytes: int
    due_s: float | None = None

"""ZeRO-3 with our backend beside stock: no offload, CPU offload, NVMe offload at its best settings.

At two batch sizes: one so small that the step is most of an iteration, and one whose forward and backward take about
as long as the step. What the tables mean is said in `bench/_contest.py`, how every contender is set up in
`bench/_contenders.py`.
"""

from __future__ import annotations

from _contenders import Defaults, contest

if __name__ == "__main__":
    contest(
        __doc__,
        Defaults(groups=("memory", "disk", "standalone"), tokens=(16, 128), minutes=11.0, smoke=("memory", "disk")),
    )

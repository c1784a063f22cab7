"""What an iteration takes: training with the optimizer state in memory and on disk, ours beside the alternatives.

torch's own AdamW, DeepSpeed's ZeRO-3 with its offload to memory and to disk, and ours, alone and inside DeepSpeed, at
the same memory and with less. `offload bench` and `make bench` run this. Everything that the tables mean is said in
`bench/_contest.py`, how every contender is set up in `bench/_contenders.py`.
"""

from __future__ import annotations

from _contenders import Defaults, contest

if __name__ == "__main__":
    contest(
        __doc__, Defaults(groups=("standalone", "memory", "disk"), tokens=(128,), minutes=7.5, smoke=("standalone",))
    )

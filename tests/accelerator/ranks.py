"""Programs of several ranks on the test accelerator, run by torchrun; this one tries collectives of two."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

import prepared
import pytest
import torch
import torch.distributed as dist

from accelerator import late, one_order


def run_ranks(ranks: int, program: str, *arguments: str) -> None:
    """Run a program of this folder, each of whose ranks says at its end that it has passed."""
    here = Path(__file__).parent
    variables = {name: value for name, value in os.environ.items() if not name.startswith("LATE_")}
    variables["PYTHONPATH"] = os.pathsep.join(map(str, (here.parent, here.parent / "e2e")))
    command = [prepared.python(), *prepared.torchrun(ranks), str(here / program), *arguments]
    ended = prepared.ran(command, env=variables)
    assert ended.stdout.count("passed") == ranks


def begin() -> int:
    """Have a rank know the test accelerator and the others; return its number."""
    late.load()
    dist.init_process_group("cpu:gloo,late:late")
    torch.accelerator.set_device_index(0)
    return dist.get_rank()


def serve(known: Mapping[str, Callable[..., None]], most_us: int = 0) -> None:
    """Run what the command line names, each in a folder of its own: FOLDER [[NAME,ARGUMENT...],...].

    `most_us` is the most that a task of the device waits before it begins.
    """
    for number, (name, *arguments) in enumerate(json.loads(sys.argv[2])):
        print(name, *arguments, flush=True)
        late.delays(0, most_us, seed=dist.get_rank())
        folder = Path(sys.argv[1]) / str(number)
        folder.mkdir(exist_ok=True)
        known[name](folder, *arguments)
    late.end_rank()


def collectives(rank: int) -> None:
    here = torch.arange(4.0, device="late") + rank
    main = torch.accelerator.current_stream()
    with late.held(main):  # a collective comes after what was asked for before, and the host does not wait
        total = here * 2
        work = dist.all_reduce(total, async_op=True)
        work.wait()
        total += 1
        assert not work.is_completed()
    assert total.tolist() == [3, 7, 11, 15]
    mean = here.clone()
    dist.all_reduce(mean, op=dist.ReduceOp.AVG)
    assert mean.tolist() == [0.5, 1.5, 2.5, 3.5]
    gathered = torch.empty(8, device="late")
    dist.all_gather_into_tensor(gathered, here)
    assert gathered.tolist() == [0, 1, 2, 3, 1, 2, 3, 4]
    listed = [torch.empty(4, device="late") for _ in range(2)]
    dist.all_gather(listed, here)
    assert [each.tolist() for each in listed] == [[0, 1, 2, 3], [1, 2, 3, 4]]
    part = torch.empty(2, device="late")
    dist.reduce_scatter_tensor(part, here)
    assert part.tolist() == [[1, 3], [5, 7]][rank]
    dist.reduce_scatter(part, list(here.split(2)), op=dist.ReduceOp.MAX)
    assert part.tolist() == [[1, 2], [3, 4]][rank]
    dist.broadcast(here, 1)
    assert here.tolist() == [1, 2, 3, 4]
    swapped = torch.empty(4, device="late")
    dist.all_to_all_single(swapped, here + 10 * rank)
    assert swapped.tolist() == [[1, 2, 11, 12], [3, 4, 13, 14]][rank]
    dist.reduce(here, 0)
    assert here.tolist() == [[2, 4, 6, 8], [1, 2, 3, 4]][rank]
    host = torch.ones(1)
    dist.all_reduce(host)  # gloo's
    assert host.item() == 2
    dist.barrier()
    one_order.check()
    orders(rank)


def orders(rank: int) -> None:
    """What gloo does not mind, and a device would."""
    one, other = dist.new_group(), dist.new_group()
    for group in (one, other) if rank else (other, one):
        dist.all_reduce(torch.ones(2, device="late"), group=group, async_op=True)
    differ = (
        r"ranks 0 and 1 differ from number 0 on:\n  rank 0: allreduce of .* orders\n  rank 1: allreduce .* orders"
    )
    with pytest.raises(AssertionError, match=differ):
        one_order.check()
    here = torch.ones(2, device="late")
    thread = threading.Thread(target=dist.all_reduce, args=(here,), name="beside")
    thread.start()
    thread.join()
    with pytest.raises(AssertionError, match=r"rank 0: 1 by other threads, .*\n  number 0, allreduce of .*'beside'"):
        one_order.check()


def main() -> None:
    rank = begin()
    late.delays(0, 300, seed=rank)
    collectives(rank)
    late.end_rank()


if __name__ == "__main__":
    main()

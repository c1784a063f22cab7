"""Host memory of an offloaded run, beside a twin that has no optimizer.

Both processes run the same forward and backward passes on the same model, with gradients, and have loaded what every
optimizer of torch loads; one of them also steps `offload.AdamW`. The difference of their peak resident sizes (VmHWM)
is what the optimizer costs, and it is compared with what the plan said before anything was allocated: resident state,
staging and named overhead.
(Gradients are in both: ours lie in slots, the twin's where torch puts them.)
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from _common import computing, memory, progress
from _harness import Option, Run, digest, in_process, main

TOLERANCE_BYTES = 64 << 20
TOLERANCE_SHARE = 0.05
OPTIONS = (Option("layers", 26, 3), Option("width", 2048, 512), Option("steps", 4, 2))


def child(request: dict[str, Any]) -> dict[str, Any]:
    """Run one contender: the twin, if no part of the state is to be resident, not even none."""
    size, share = SimpleNamespace(**request), request["share"]
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(size.width, size.width) for _ in range(size.layers))).bfloat16()
    numel = sum(parameter.numel() for parameter in model.parameters())
    found: dict[str, Any] = {"parameters": numel}
    torch.optim.SGD(model.parameters())  # loads what every optimizer of torch does
    optimizer = None
    if share is not None:
        import offload
        from offload.plan import Home

        config = offload.OffloadConfig(host_memory=int(12 * numel * share), paths=[request["folder"]])
        optimizer = offload.AdamW(model.parameters(), lr=1e-3, offload=config)
        plan = optimizer.plan.plan
        found["planned"] = {
            "resident": plan.home_bytes[Home.HOST],
            "staging": plan.staging_bytes,
            "overhead": plan.overhead_bytes,
        }
    for step in range(size.steps):
        torch.manual_seed(step)
        with computing():
            model(torch.randn(8, size.width).bfloat16()).float().square().mean().backward()
        if optimizer is not None:
            optimizer.clip_grad_norm_(1.0)
            optimizer.step()
        model.zero_grad()
    found |= {"peak_bytes": memory()["peak_bytes"], "checksum": digest(model.parameters())}
    if optimizer is not None:
        optimizer.close()
    return found


def measure(run: Run) -> None:
    def took(share: float | None) -> dict[str, Any]:
        with run.brief_place() as folder:
            return dict(in_process(__file__, {**run.options, "share": share, "folder": str(folder)}))

    twin = took(None)
    run.results |= {"parameters": twin["parameters"], "twin": twin, "offload": {}}
    for share in (0.0, 0.5, 1.0):
        progress(f"resident share {share}")
        found = took(share)
        planned = sum(found["planned"].values())
        used = found["peak_bytes"] - twin["peak_bytes"]
        allowed = planned + max(TOLERANCE_SHARE * planned, TOLERANCE_BYTES)
        run.results["offload"][str(share)] = {**found, "used_bytes": used, "planned_bytes": planned}
        print(f"resident share {share:.0%}: used {used >> 20} MiB, planned {planned >> 20} MiB")
        run.at_most(f"peak memory over what is allowed, {share:.0%} resident", used / allowed, 1.0)
    checksums = (found["checksum"] for found in run.results["offload"].values())
    run.checksums.append(run.same("the weights differ between resident shares", checksums))


if __name__ == "__main__":
    main(__doc__, measure, options=OPTIONS, path=True, device="cpu", child=child)

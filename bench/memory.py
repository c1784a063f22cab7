"""Host memory of an offloaded run, beside a twin that has no optimizer.

Both processes run the same forward and backward passes on the same model, with gradients, and have loaded what every
optimizer of torch loads; one of them also steps `offload.AdamW`. The difference of their peak resident sizes (VmHWM)
is what the optimizer costs, and it is compared with what the plan said before anything was allocated: resident state,
staging and named overhead.
(Gradients are in both: ours lie in slots, the twin's where torch puts them.)
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from _common import Target, arguments, computing, environment, progress, report

TOLERANCE_BYTES = 64 << 20
TOLERANCE_SHARE = 0.05


def peak_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) << 10
    raise OSError("/proc/self/status has no VmHWM")


def child(role: str, layers: int, width: int, share: float, steps: int) -> None:
    """Run one contender and print what it took."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(layers))).bfloat16()
    numel = sum(parameter.numel() for parameter in model.parameters())
    found: dict[str, Any] = {"parameters": numel}
    with tempfile.TemporaryDirectory() as folder:
        torch.optim.SGD(model.parameters())  # loads what every optimizer of torch does
        optimizer = None
        if role == "offload":
            import offload
            from offload.plan import Home

            config = offload.OffloadConfig(host_memory=int(12 * numel * share), paths=[folder])
            optimizer = offload.AdamW(model.parameters(), lr=1e-3, offload=config)
            plan = optimizer.plan.plan
            found["planned"] = {
                "resident": plan.home_bytes[Home.HOST],
                "staging": plan.staging_bytes,
                "overhead": plan.overhead_bytes,
            }
        for step in range(steps):
            torch.manual_seed(step)
            with computing():
                model(torch.randn(8, width).bfloat16()).float().square().mean().backward()
            if optimizer is not None:
                optimizer.clip_grad_norm_(1.0)
                optimizer.step()
            model.zero_grad()
        found["peak_bytes"] = peak_bytes()
        digest = hashlib.sha256()
        for parameter in model.parameters():
            digest.update(parameter.detach().view(torch.int16).numpy().tobytes())
        found["checksum"] = digest.hexdigest()[:16]
        if optimizer is not None:
            optimizer.close()
    print(json.dumps(found))


def run(role: str, layers: int, width: int, share: float, steps: int, path: Path | None) -> dict[str, Any]:
    command = [sys.executable, __file__, "--child", role, *map(str, (layers, width, share, steps))]
    place = {"TMPDIR": str(path)} if path else {}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **place})
    if done.returncode:
        raise SystemExit(f"{role} failed:\n{done.stderr}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        role, layers, width, share, steps = sys.argv[2:]
        child(role, int(layers), int(width), float(share), int(steps))
        return
    args = arguments(__doc__, path=True).parse_args()
    described = environment(device="cpu")
    layers, width = (3, 512) if args.smoke else (26, 2048)
    steps = 2 if args.smoke else 4
    twin = run("twin", layers, width, 0.0, steps, args.path)
    results: dict[str, Any] = {"parameters": twin["parameters"], "twin": twin, "offload": {}}
    targets, checksums = [], []
    for share in (0.0, 0.5, 1.0):
        progress(f"resident share {share}")
        found = run("offload", layers, width, share, steps, args.path)
        planned = sum(found["planned"].values())
        used = found["peak_bytes"] - twin["peak_bytes"]
        allowed = planned + max(TOLERANCE_SHARE * planned, TOLERANCE_BYTES)
        results["offload"][str(share)] = {**found, "used_bytes": used, "planned_bytes": planned}
        print(f"resident share {share:.0%}: used {used >> 20} MiB, planned {planned >> 20} MiB")
        targets.append(Target.at_most(f"peak memory over what is allowed, {share:.0%} resident", used / allowed, 1.0))
        checksums.append(found["checksum"])
    if len(set(checksums)) != 1:
        raise SystemExit(f"the weights differ between resident shares: {checksums}")
    report(args, described, results, checksums[0], targets)


if __name__ == "__main__":
    main()

"""What it costs that weights lie in a file: an iteration in memory without room for them, beside one with room.

Two processes train the same model in turns, state and gradients on the path, each layer's activations computed again
in backward. Weights of one are in memory. Those of the other lie in a file (`offload.weights_in_file`), and a control
group leaves it less memory than they take; the kernel reads them again in each pass, and writes what a step changed.

The bound of an iteration is the larger of two. The drive: all bytes of both directions over what it moves alone. The
cores: CPU seconds of the iteration with weights in memory, which computes, updates and makes checksums, and those
that the kernel takes to read as many bytes more through its cache, alone; over the number of cores.
"""

from __future__ import annotations

import os
import time
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from _common import computing, cores, end_with_parent, kernel_io
from _harness import Option, Run, main, medians, show, spawned, turns
from capacity import Group, made_group

OPTIONS = (
    Option("width", 1024, 64),
    Option("layers", 20, 2),
    Option("tokens", [128, 512], [16]),
    Option("pairs", 5, 1),
    Option("room", 0.5, help="of the weights, what memory has room for beside the rest"),
)
ROLES = ("memory", "file")
PIECE_BYTES = 16 << 20
SLACK_BYTES = 32 << 20
"""For what a process takes for a moment."""
CALIBRATED_BYTES = 512 << 20, 4 << 20
"""Of the file by which the drive is measured, at full and at smoke size."""


def serve(pipe: Connection, folder: str, width: int, layers: int) -> None:
    """Train as a pipe says: its role first, then tokens for an iteration each; None to end."""
    import _llama

    import offload
    from offload.cli.model import Shape

    end_with_parent()
    role, group = pipe.recv()
    place = Path(folder) / role
    place.mkdir()
    if group is not None:
        group.join()
    model = _llama.build(Shape(layers, width), 0, str(place) if role == "file" else None)
    config = {"host_memory": 0, "gradient_memory": 0, "paths": [place], "state_format": "compact8"}
    optimizer = offload.AdamW(model.named_parameters(), lr=1e-4, offload={**config, "subgroup_numel": 1 << 20})
    generator = torch.Generator().manual_seed(0)
    pipe.send(sum(weight.nbytes for weight in model.parameters()))
    while (tokens := pipe.recv()) is not None:
        window = torch.randint(0, 250, (1, tokens + 1), generator=generator)
        began_s, used_s, before = time.monotonic(), time.process_time(), kernel_io()
        with computing():
            logits = model(window[:, :-1]).float()
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), window[:, 1:].flatten())
            forward_s = time.monotonic()
            loss.backward()
        backward_s = time.monotonic()
        optimizer.clip_grad_norm_(1e9)
        optimizer.step()
        optimizer.zero_grad()
        marks = (began_s, forward_s, backward_s, time.monotonic())
        names = ("forward_s", "backward_s", "step_s")
        found = {name: end - begin for name, begin, end in zip(names, marks, marks[1:], strict=False)}
        moved = {name: count - before[name] for name, count in kernel_io().items()}
        found |= {"cpu_s": time.process_time() - used_s, "loss": float(loss.detach()), **moved}
        path = optimizer.engine.rates.paths[0]
        rates = {"read_rate": path.read.alone, "write_rate": path.write.alone}
        pipe.send({**found, **rates, "whole_s": sum(found[name] for name in names)})
    optimizer.finish()
    pipe.send(sum(float(weight.detach().double().sum()) for weight in model.parameters()))
    optimizer.close()


def reading_cpu_s(folder: Path, nbytes: int) -> float:
    """Return the CPU seconds of a byte that is read through the kernel's cache."""
    file, piece = folder / "drive", os.urandom(PIECE_BYTES)
    with file.open("wb", buffering=0) as out:
        for _ in range(0, nbytes, PIECE_BYTES):
            out.write(piece)
        os.fsync(out.fileno())
    descriptor, buffer = os.open(file, os.O_RDONLY), bytearray(PIECE_BYTES)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    size, used_s = file.stat().st_size, time.process_time()
    for start in range(0, size, PIECE_BYTES):
        os.preadv(descriptor, [buffer], start)
    took_s = time.process_time() - used_s
    os.close(descriptor)
    file.unlink()
    return took_s / size


def bound_s(memory: dict[str, float], file: dict[str, float], reading_s: float) -> tuple[float, float]:
    """Return the least seconds of an iteration whose weights lie in a file: by the drive, and by the cores."""
    by_drive_s = file["read_bytes"] / memory["read_rate"] + file["write_bytes"] / memory["write_rate"]
    again = max(0.0, file["read_bytes"] - memory["read_bytes"])
    by_cores_s = (memory["cpu_s"] + again * reading_s) / cores()
    return by_drive_s, by_cores_s


def measure(run: Run) -> None:
    args = run.args
    reading_s = reading_cpu_s(run.folder, CALIBRATED_BYTES[run.smoke])
    given = str(run.folder), args.width, args.layers
    with made_group() as group, spawned(serve, len(ROLES), *given) as both:
        pipes = dict(zip(ROLES, both, strict=True))
        for role, pipe in pipes.items():
            pipe.send((role, group if role == "file" else None))
        nbytes = {role: pipe.recv() for role, pipe in pipes.items()}["file"]
        if group is not None:
            for pipe in pipes.values():  # what a process takes, without weights
                pipe.send(min(args.tokens))
                pipe.recv()
            limit = run.results["limit_bytes"] = own_bytes(group) + SLACK_BYTES + int(args.room * nbytes)
            group.limit(limit)
        for tokens in args.tokens:
            rows: list[dict[str, dict[str, float]]] = []
            for number, role in turns(ROLES, args.pairs, settling=1):
                pipes[role].send(tokens)
                found = pipes[role].recv()
                if len(rows) == number and number >= 0:
                    rows.append({})
                if number >= 0:
                    rows[number][role] = found
            figures = []
            for row in rows:
                by_drive_s, by_cores_s = bound_s(row["memory"], row["file"], reading_s)
                whole_s = row["file"]["whole_s"]
                figures.append(
                    {
                        **row["file"],
                        "over_memory": whole_s / row["memory"]["whole_s"],
                        "over_bound": whole_s / max(by_drive_s, by_cores_s),
                        "by_drive_s": by_drive_s,
                        "by_cores_s": by_cores_s,
                        "again_bytes": row["file"]["read_bytes"] - row["memory"]["read_bytes"],
                    }
                )
            name = f"{tokens} tokens"
            found = run.results[name] = medians(figures)
            show(name, found, "forward_s", "backward_s", "step_s", "by_drive_s", "by_cores_s")
            show(name, found, "over_memory", "over_bound", "read_bytes", "write_bytes", "again_bytes", "cpu_s")
            show(name, medians([row["memory"] for row in rows]), "cpu_s", "read_rate", "write_rate", "whole_s")
            run.at_most(f"{name}: iteration over its bound", found["over_bound"], 1.2)
            same = all(row["memory"]["loss"] == row["file"]["loss"] for row in rows)
            run.at_least(f"{name}: losses with weights in memory and in a file, bit for bit", float(same), 1.0)
        sums = []
        for pipe in pipes.values():
            pipe.send(None)
            sums.append(pipe.recv())
    run.at_least("weights in memory and in a file, bit for bit", float(len(set(sums)) == 1), 1.0)
    run.checksums.append(f"{sums[0]!r}")
    run.results |= {"weight_bytes": nbytes, "reading_cpu_s_per_byte": reading_s}


def own_bytes(group: Group) -> int:
    """Return the memory of a control group that is no file's."""
    of, file = {1: ("memory.usage_in_bytes", "cache"), 2: ("memory.current", "file")}[group.version]
    stat = dict(line.split() for line in (group.folder / "memory.stat").read_text().splitlines())
    return int((group.folder / of).read_text()) - int(stat[file])


if __name__ == "__main__":
    main(__doc__, measure, options=OPTIONS, path=True, device="cpu")

"""Files of tensors, written as their format says, where the package that writes them may not be there."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import torch


def saved_as_safetensors(tensors: dict[str, torch.Tensor], path: Path, **changes: Any) -> Path:
    """Write a file as the format says, with some entries changed."""
    names = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
    ends = [0, *itertools.accumulate(each.nbytes for each in tensors.values())]
    header: dict[str, Any] = {
        name: {"dtype": names[each.dtype], "shape": [*each.shape], "data_offsets": [begin, end]}
        for (name, each), (begin, end) in zip(tensors.items(), itertools.pairwise(ends), strict=True)
    }
    text = json.dumps({"__metadata__": {"format": "pt"}} | header | changes).encode()
    content = b"".join(each.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for each in tensors.values())
    path.write_bytes(len(text).to_bytes(8, "little") + text + content)
    return path

"""Compiles the GPU's kernels, for which no GPU is needed: prints Triton's version, then a line of JSON for each.

`compile_kernels.py CAPABILITY OPTIONS`: JSON of how each kernel is compiled; others are left out.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from offload.dtypes import DtypeCode
from offload.formats import COMPACT8, COMPACT16, EXACT, FORMATS
from offload.kernels import triton_kernels
from offload.kernels.gpu import BLOCK_NUMEL, COPY_BLOCK_BYTES
from offload.rules import ADAMW, RULES

CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"

OPTIONS: dict[str, dict[str, Any]] = json.loads(sys.argv[2])
ADDRESSES = ("source", "numel", "blocks", "destination")
OPERATION = re.compile(r"\s+(?:/\*[0-9a-f]{4,}\*/\s+)?(?:@!?%?\w+\s+)?([a-zA-Z][\w.:]*)")


def operations(text: str) -> Counter[str]:
    """Count the operations of PTX, or of cuobjdump's SASS."""
    return Counter(match[1] for line in text.splitlines() if (match := OPERATION.match(line)))


@cache
def cuobjdump() -> bytes:
    """Return a digest of the program."""
    return hashlib.sha256(CUOBJDUMP.read_bytes()).digest()


def disassembled(cubin: bytes) -> str:
    """Return a kernel's SASS; beside what Triton keeps, in a file that is named by all that it is made of."""
    kept = Path(os.environ["TRITON_CACHE_DIR"]) / f"{hashlib.sha256(cuobjdump() + cubin).hexdigest()}.sass"
    if not kept.exists():
        with tempfile.TemporaryDirectory(dir=kept.parent) as folder:
            file, written = Path(folder) / "kernel.cubin", Path(folder) / "sass"
            file.write_bytes(cubin)
            command = [str(CUOBJDUMP), "-sass", str(file)]
            written.write_text(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
            written.rename(kept)
    return kept.read_text()


def compiled(kernel: str, capability: int, types: dict[str, str], constants: dict[str, Any], **changed: Any) -> None:
    function = getattr(triton_kernels, kernel)
    signature = {name: types.get(name, "constexpr") for name in function.arg_names}
    divisible = [["tt.divisibility", 16]]
    pointers = {(number,): divisible for number, name in enumerate(function.arg_names) if "*" in signature[name]}
    source = ASTSource(function, signature=signature, constexprs=constants, attrs=pointers)
    if kernel not in OPTIONS:
        return
    options = OPTIONS[kernel] | {"debug": "TRITON_DEBUG" in os.environ} | changed  # as a launch takes it
    done = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    sass = disassembled(done.asm["cubin"]) if CUOBJDUMP.exists() else ""
    line = {
        "kernel": kernel,
        "constants": constants,
        "changed": changed,
        "ptx": operations(done.asm["ptx"]),
        "sass": operations(sass),
        "asserts": done.asm["ptx"].count("__assertfail"),
    }
    print(json.dumps(line), flush=True)


def main() -> None:
    capability = int(sys.argv[1])
    print(triton.__version__, flush=True)
    tables = {"table": "*i64", "pieces": "*i32", "first": "i32"}
    rows = {"table": "*i64", "pieces": "*i32"}
    none, bfloat16, float16, float32 = (int(code) for code in DtypeCode)
    if "TRITON_DEBUG" in os.environ:  # which adds assertions: some of each kind of kernel
        kinds = {"GRADIENT": bfloat16, "WEIGHT": bfloat16, "ALIGNED": True, "BLOCK": BLOCK_NUMEL}
        updates = {"RULE": ADAMW.code, "STATES": 2, "STATE_FORMAT": COMPACT16.code, **kinds}
        gathers = {"SOURCE": bfloat16, "DESTINATION": bfloat16, "ACCUMULATE": True, "ALIGNED": True}
        for changed in ({}, {"sanitize_overflow": True}):
            compiled("update", capability, tables, updates, **changed)
            compiled("fingerprint_rows", capability, rows, {"SOURCE": bfloat16}, **changed)
            if not changed:
                compiled("gather", capability, dict.fromkeys(ADDRESSES, "i64"), gathers)
                compiled("sum_rows", capability, rows, {"SOURCE": bfloat16})
                compiled("copy_pieces", capability, tables, {"BLOCK": COPY_BLOCK_BYTES})
        return
    combinations = [*itertools.product((none, bfloat16, float16, float32), (none, bfloat16, float16), (True,))]
    for gradient, weight, aligned in [*combinations, (bfloat16, bfloat16, False), (float16, float16, False)]:
        kinds = {"GRADIENT": gradient, "WEIGHT": weight, "ALIGNED": aligned, "BLOCK": BLOCK_NUMEL}
        constants = {"RULE": ADAMW.code, "STATES": 2, "STATE_FORMAT": EXACT.code, **kinds}
        compiled("update", capability, tables, constants)
    for rule, state_format in itertools.product(RULES.values(), FORMATS):
        constants |= {"RULE": rule.code, "STATES": len(rule.state), "STATE_FORMAT": state_format.code}
        constants |= {"ALIGNED": state_format is COMPACT8}
        compiled("update", capability, tables, constants)
    constants |= {"ALIGNED": True}
    compiled("update", capability, tables, constants | {"WEIGHT": none})
    compiled("update", capability, tables, constants | {"GRADIENT": none})
    constants |= {"RULE": ADAMW.code, "STATES": 2, "STATE_FORMAT": EXACT.code}
    compiled("update", capability, tables, constants, enable_fp_fusion=True)
    addresses = dict.fromkeys(ADDRESSES, "i64")
    for source, destination, add, aligned in (
        (bfloat16, bfloat16, True, True),
        (bfloat16, float32, True, True),
        (float16, float16, True, True),
        (float16, float32, False, False),
        (float32, float32, True, True),
        (float32, none, False, False),
    ):
        constants = {"SOURCE": source, "DESTINATION": destination, "ACCUMULATE": add, "ALIGNED": aligned}
        compiled("gather", capability, addresses, constants)
    compiled("gather", capability, addresses, constants, enable_fp_fusion=True)
    for source in (bfloat16, float16, float32):
        compiled("sum_rows", capability, rows, {"SOURCE": source})
        compiled("fingerprint_rows", capability, rows, {"SOURCE": source})
    compiled("copy_pieces", capability, tables, {"BLOCK": COPY_BLOCK_BYTES})


main()

"""Writes docs/configuration.md from the config classes; a test holds that it is what they say.

python docs/generate.py
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from pathlib import Path

from offload.config import OffloadConfig, PathConfig

TARGET = Path(__file__).parent / "configuration.md"

HEAD = """# Configuration

Written by `python docs/generate.py` from `offload/config.py`; change that.

Settings are given as `offload.OffloadConfig(...)`, as a mapping (`offload.AdamW(..., offload={...})`), or in a
DeepSpeed config under `multi_tier_offload`, by the same names. Sizes are bytes or strings such as `"8GiB"`. Values
are checked when the config is made: a wrong one is a `ConfigError` that names setting, value and what is allowed,
before any file is touched. `host_memory`, `gpu_memory`, `staging_memory`, `paths` and `threads` are those of
one process.
"""


def attributes(config: type) -> dict[str, str]:
    """Return what a class's docstring says of each attribute, on one line each."""
    text = inspect.cleandoc(config.__doc__ or "").split("Attributes:\n", 1)[1]
    found: dict[str, str] = {}
    name = ""
    for line in text.splitlines():
        start = re.match(r"    (\w+): (.*)", line)
        if start:
            name = start.group(1)
            found[name] = start.group(2)
        elif line.strip():
            found[name] += " " + line.strip()
    return found


def table(config: type) -> str:
    """Return the settings of a config class as a Markdown table."""
    meanings = attributes(config)
    lines = ["| setting | default | meaning |", "|---|---|---|"]
    for field in dataclasses.fields(config):
        required = field.default is dataclasses.MISSING
        default = "required" if required else f"`{field.default!r}`".replace("'", '"')
        meaning = meanings[field.name].replace("|", "\\|")
        lines.append(f"| `{field.name}` | {default} | {meaning} |")
    return "\n".join(lines)


def page() -> str:
    """Return the whole page."""
    return f"{HEAD}\n## OffloadConfig\n\n{table(OffloadConfig)}\n\n## Entries of `paths`\n\n{table(PathConfig)}\n"


if __name__ == "__main__":
    TARGET.write_text(page())

"""Writes what the pages in docs/ and the README take from code, reports and settings; a test holds that it is there.

    make docs, or: python docs/generate.py

Whole pages: configuration.md (config classes), metrics.md (their table), api.md (docstrings, `reference.py`). Marked
parts of others: measured figures (reports, `figures.py`), the versions that tests run, and what excludes each other.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
import tomllib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import figures
import machines
import reference

from offload import metrics
from offload.combinations import TABLE
from offload.config import OffloadConfig, PathConfig

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"

HEAD = """# Configuration

Written by `python docs/generate.py` from `offload/config.py`; change that.

Settings are given as `offload.OffloadConfig(...)`, as a mapping (`offload.AdamW(..., offload={...})`), or in a
DeepSpeed config under `multi_tier_offload`, by the same names. Sizes are bytes or strings such as `"8GiB"`, and 0 or
at least 4 KiB: 64 bytes are no 64 GiB. Values are checked when the config is made: a wrong one is a `ConfigError`
that names setting, value and what is allowed, before any file is touched. `host_memory`, `gpu_memory`,
`staging_memory`, `paths` and `threads` are those of one process. Words such as subgroup, tier and home are explained
in [step.md](step.md#words).
"""


def table(config: type) -> str:
    """Return the settings of a config class as a Markdown table."""
    lines = ["| setting | default | meaning |", "|---|---|---|"]
    for field in dataclasses.fields(config):
        required = field.default is dataclasses.MISSING
        default = "required" if required else f"`{field.default!r}`".replace("'", '"')
        meaning = field.metadata["meaning"].replace("|", "\\|")
        lines.append(f"| `{field.name}` | {default} | {meaning} |")
    return "\n".join(lines)


METRICS_HEAD = """# Metrics

Written by `python docs/generate.py` from `offload/metrics.py`; change that.

`optimizer.metrics()` returns these figures of the last step that has ended, `offload.Engine.metrics()` those of the
first table. Rows without a "where" are always there. How to log them: [frameworks.md](frameworks.md).
"""


def metrics_page() -> str:
    """Return the page of all metrics."""
    lines = ["| name | unit | where | what it is |", "|---|---|---|---|"]
    for name, metric in metrics.TABLE.items():
        if name == metrics.FIRST_OF_OPTIMIZER:
            lines += [
                "",
                "Of an optimizer besides; predictions are those made before the step:",
                "",
                *lines[:2],
            ]
        lines.append(f"| `{name}` | {metric.unit} | {metric.since} | {metric.meaning} |")
    return "\n".join([METRICS_HEAD, *lines, ""])


def configuration() -> str:
    """Return the page of all settings."""
    return f"{HEAD}\n## OffloadConfig\n\n{table(OffloadConfig)}\n\n## Entries of `paths`\n\n{table(PathConfig)}\n"


def combinations(page: Path) -> str:
    """Return the table of what excludes each other, as the code refuses it."""
    return "\n".join(["| | not with |", "|---|---|", *(f"| {row.one} | {row.other} |" for row in TABLE.values())])


def allowed() -> dict[str, str]:
    """Return the versions that pyproject.toml allows, by package."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    found = {"python": project["requires-python"]}
    for requirement in [*project["dependencies"], *(each for extra in extras.values() for each in extra)]:
        named = re.match(r"([\w-]+)(?:\[[^]]*\])?\s*([^;]*)", requirement)
        assert named is not None
        found[named[1]] = named[2].strip()
    return found


def pinned(package: str) -> str | None:
    """Return the version that `make` installs, if it names one."""
    found = re.search(rf"^\w+ := {package}==(\S+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    return found[1] if found else None


FRAMEWORKS = {"torch": "torch", "deepspeed": "DeepSpeed", "transformers": "transformers", "accelerate": "Accelerate"}
"""Packages whose versions the page of the installation shows."""


def versions(page: Path) -> str:
    """Return the table of versions.

    Where `make` takes whatever release is there, the page keeps the one that it names as long as the release that is
    installed here has the same major version: a minor release changes no page, a major one does.
    """
    lines = ["| | allowed | tests run with |", "|---|---|---|"]
    tried = re.search(r"^VERSIONS = \((.*)\)$", (ROOT / "tests" / "wheels.py").read_text(), re.MULTILINE)
    assert tried is not None
    wheels = ", ".join(re.findall(r'"([\d.]+)"', tried[1]))
    lines.append(f"| Python | {allowed()['python']} | 3.11; wheels also with the others of {wheels} that are here |")
    for package, name in FRAMEWORKS.items():
        with_it = pinned(package)
        if with_it is None:
            before = re.search(rf"^\| {name} \| [^|]* \| ([\d.]+) \|$", page.read_text(), re.MULTILINE)
            try:
                now = version(package).partition("+")[0]
            except PackageNotFoundError:
                now = before[1] if before else "not installed"
            same = before is not None and before[1].split(".")[0] == now.split(".")[0]
            with_it = before[1] if before and same else now
        lines.append(f"| {name} | {allowed()[package]} | {with_it} |")
    return "\n".join(lines)


PAGES = {
    DOCS / "configuration.md": configuration,
    DOCS / "metrics.md": metrics_page,
    DOCS / "api.md": reference.page,
}
PARTS = {
    ROOT / "README.md": {"machines": machines.fitting, "cost": figures.cost},
    DOCS / "step.md": {"cpu": figures.checked_cpu, "hidden": figures.hidden, "saved": figures.saved},
    DOCS / "deepspeed.md": {"overlapped": figures.overlapped_ranks, "in-place": figures.saved_in_place},
    DOCS / "benchmarks.md": {
        "first": figures.first,
        "formats": figures.formats,
        "trainings": figures.trainings,
        "benchmarks": figures.benchmarks,
        "measured": figures.measured,
        "capacity": figures.capacity,
        "capacity-2gib": figures.capacity_small,
        "large": figures.large,
        "ablation": figures.ablation,
        "others": figures.others,
        "megatron-core": figures.megatron_core,
        "largest": figures.largest,
        "left": figures.left,
        "targets": figures.targets,
    },
    DOCS / "weights.md": {"streamed": figures.streamed},
    DOCS / "planning.md": {"commands": machines.commands, "nodes": figures.nodes},
    DOCS / "published.md": {
        "published": figures.published,
        "ours": figures.ours_published,
        "node": figures.node,
        "gpu-parts": figures.gpu_parts,
        "streaming": machines.streaming,
    },
    DOCS / "checkpoints.md": {"stalls": figures.stalled},
    DOCS / "formats.md": {"quality": figures.quality, "quality-muon": figures.quality_of_muon},
    DOCS / "optimizers.md": {"classes": figures.classes},
    DOCS / "install.md": {"versions": versions},
    DOCS / "limits.md": {"combinations": combinations},
}


def expected(only: str | None = None) -> dict[Path, str]:
    """Return every page that has generated parts, or only that of one name, as it has to be."""
    found = {page: make() for page, make in PAGES.items() if only in (None, page.stem)}
    for page, parts in PARTS.items():
        if only not in (None, page.stem):
            continue
        text = page.read_text()
        for name, make in parts.items():
            begin, end = f"<!-- begin {name}: written by docs/generate.py -->\n", f"<!-- end {name} -->\n"
            if text.count(begin) != 1 or text.count(end) != 1:
                raise LookupError(f"{page.name} has no part {name}, which begins with {begin.strip()}")
            before, rest = text.split(begin)
            text = f"{before}{begin}{make(page)}\n{end}{rest.split(end)[1]}"
        found[page] = text
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Write what pages take from code, reports and settings.")
    parser.add_argument("--only", choices=sorted(page.stem for page in (*PAGES, *PARTS)), help="this page alone")
    for file, content in expected(parser.parse_args().only).items():
        if not file.exists() or file.read_text() != content:
            file.write_text(content)
            print(f"wrote {file.relative_to(ROOT)}")

"""The API reference, from the docstrings of public names; `docs/generate.py` writes it."""

from __future__ import annotations

import inspect
import pkgutil
import re
from importlib import import_module
from operator import attrgetter
from typing import Any

import offload
import offload.integrations

HEAD = """# API reference

Written by `python docs/generate.py` from docstrings; change those. All settings are in
[configuration.md](configuration.md), the DeepSpeed object is in [deepspeed.md](deepspeed.md).
Words such as subgroup, tier and home are explained in [step.md](step.md#words).
"""

OPTIMIZERS = ("AdamW", "Adam", "Lion", "Adagrad", "SGD", "Muon")

TASKS: dict[str, tuple[str, ...]] = {
    "Run another class": ("wrap",),
    "Weights that do not fit": ("weights_in_file", "weights_in_host_memory"),
    "Train": (
        *(
            "step",
            "zero_grad",
            "clip_grad_norm_",
            "last_micro_step",
            "skip_step",
            "add_param_group",
            "reopen",
            "unscale",
        ),
        "GradScaler",
    ),
    "Hide a step": ("overlap_forward", "overlap_backward", "finish"),
    "See what happens": (
        *("plan", "explain", "metrics", "report", "log_to", "timeline", "write_trace"),
        *("predict.explain", "predict.Explanation"),
    ),
    "Save and resume": (
        *("save_checkpoint", "wait_checkpoint", "load_checkpoint", "release_checkpoint", "import_state"),
        *("commit_on_sigterm", "checkpoint_folder", "wait_mirror", "release_before_deletion"),
    ),
    "Read and change state": (
        *("state", "state_for", "state_dict", "load_state_dict", "reset_state", "refresh_masters"),
    ),
    "Have less in memory": ("activations_on_paths", "park", "unpark"),
    "End, and look inside": ("close", "config", "keeps_grads", "engine"),
}
"""What one wants to do, and with which members of an optimizer or other public names."""

ENGINE = (
    *("Engine", "session.gradients.Gradients", "session.state.State", "session.checkpoints.Checkpoints"),
    *("SaveRequest", "Parameter", "rules.GroupScalars", "DtypeCode"),
)


def markdown(doc: str) -> str:
    """Return a docstring of Google's form as Markdown."""
    lines: list[str] = []
    section = ""
    for line in inspect.cleandoc(doc).splitlines():
        begins = re.fullmatch(r"(Args|Attributes|Returns|Yields|Raises):", line)
        item = re.fullmatch(r"    (\*{0,2}[\w.]+(?:, [\w.]+)*): (.*)", line)
        if begins:
            section = begins[1]
            lines += [f"*{section}*", ""]
        elif section and line and not line.startswith("    "):
            section = ""
            lines.append(line)
        elif section in ("Args", "Attributes", "Raises") and item:
            lines.append(f"* `{item[1]}`: {item[2]}")
        elif section and line:
            lines.append(line.strip() if section in ("Returns", "Yields") else f"  {line.strip()}")
        else:
            lines.append(line)
    return "\n".join(lines).strip()


class Source:
    """Text that stands in a signature as it is."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


def written(value: Any) -> str:
    """Return a callable's parameters as one would write them."""
    try:
        signature = inspect.signature(value)
    except ValueError:  # an exception without an __init__ of its own
        return "(message)"
    parameters = []
    for name, parameter in signature.parameters.items():
        if name in ("self", "cls"):
            continue
        default, annotation = parameter.default, parameter.annotation
        if isinstance(default, str):
            default = Source(f'"{default}"')
        elif " at 0x" in repr(default):
            default = Source("...")
        if isinstance(annotation, str):
            annotation = Source(annotation)
        parameters.append(parameter.replace(default=default, annotation=annotation))
    returned = signature.return_annotation
    if inspect.isclass(value) or returned == "None":
        returned = signature.empty
    elif isinstance(returned, str):
        returned = Source(returned)
    return str(signature.replace(parameters=parameters, return_annotation=returned))


def fenced(text: str) -> str:
    """Return code as a block; a long signature has a parameter a line."""
    if len(text) > 100 and "(" in text:
        name, rest = text.split("(", 1)
        inside, after = _closing(rest)
        text = f"{name}(\n" + "".join(f"    {part},\n" for part in _split(inside)) + f"){after}"
    return f"```\n{text}\n```"


def _closing(rest: str) -> tuple[str, str]:
    depth = 1
    for index, letter in enumerate(rest):
        depth += (letter in "([") - (letter in ")]")
        if depth == 0:
            return rest[:index], rest[index + 1 :]
    return rest, ""


def _split(inside: str) -> list[str]:
    parts, depth = [""], 0
    for letter in inside:
        depth += (letter in "([") - (letter in ")]")
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts]


def members(value: type) -> dict[str, Any]:
    """Return the documented methods and properties that a class has from this package, in the source's order."""
    found: dict[str, Any] = {}
    for owner in value.__mro__:
        if owner.__module__.startswith("offload"):
            for name, member in vars(owner).items():
                function = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
                if name.startswith("_") or not inspect.isfunction(function) or not function.__doc__:
                    continue
                # torch puts a wrapped `step` into every class of which there has been an optimizer.
                if inspect.unwrap(function).__qualname__ == f"{owner.__qualname__}.{name}":
                    found.setdefault(name, member)
    return found


def entry(name: str, value: Any, level: str, doc: str | None = None) -> str:
    """Return the entry of a function, method, property or class."""
    doc = value.__doc__ if doc is None else doc
    if isinstance(value, property):
        return f"{level} `{name}`\n\nA property. {markdown(doc or '')}"
    function = getattr(value, "__func__", value)
    return f"{level} `{name.rpartition('.')[2]}`\n\n{fenced(name + written(function))}\n\n{markdown(doc or '')}"


def classes(names: tuple[str, ...], shared: set[str] | None = None) -> list[str]:
    """Return the entries of public names, with their methods but for those that are shown once for several."""
    lines = []
    for name in names:
        value = attrgetter(name)(offload)
        doc = value.__doc__ or ""
        if value is offload.OffloadConfig:  # its attributes are a page of their own
            doc = doc.split("Attributes:")[0]
        lines.append(entry(f"offload.{name}", value, "###", doc))
        if inspect.isclass(value):
            for method, member in members(value).items():
                if shared is None or method not in shared:
                    lines.append(entry(method, member, "####"))
    return lines


def errors() -> list[str]:
    """Return the entries of all errors, in the order of their tree."""
    home = import_module("offload.errors")
    tree = inspect.cleandoc(home.__doc__ or "").split("\n\n", 1)[1]
    lines = [f"```\n{tree}\n```"]
    for name in re.findall(r"\w*Error", tree):
        value = getattr(home, name)
        if "__init__" in vars(value):
            lines.append(entry(f"offload.{name}", value, "###"))
    return lines


def integrations() -> list[str]:
    """Return the entries of every integration's public names."""
    lines = []
    for found in filter(lambda module: module.ispkg, pkgutil.iter_modules(offload.integrations.__path__)):
        module = import_module(f"offload.integrations.{found.name}")
        lines += [f"### offload.integrations.{found.name}", markdown(module.__doc__ or "")]
        lines += [entry(f"{found.name}.{name}", getattr(module, name), "####") for name in module.__all__]
    return lines


def task(names: tuple[str, ...], shared: dict[str, Any]) -> list[str]:
    """Return the entries of a task: members of every optimizer, and public names with their own members."""
    lines: list[str] = []
    for name in names:
        lines += [entry(name, shared[name], "###")] if name in shared else classes((name,))
    return lines


def anchor(heading: str) -> str:
    """Return what a heading is linked to by."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def page() -> str:
    """Return the whole page."""
    shared = members(getattr(offload, OPTIMIZERS[0]))
    tasked = [name for names in TASKS.values() for name in names]
    sections = {
        "Make an optimizer": [*classes(OPTIMIZERS, set(shared)), *classes(("OffloadConfig",))],
        **{title: task(names, shared) for title, names in TASKS.items()},
        "The engine without an optimizer": classes(ENGINE),
        "Errors": errors(),
        "Integrations": integrations(),
    }
    rows = [
        f"| [{title}](#{anchor(title)}) | {', '.join(f'`{n}`' for n in names)} |" for title, names in TASKS.items()
    ]
    made = ", ".join(f"`{name}`" for name in (*OPTIMIZERS, "OffloadConfig"))
    index = [f"| [Make an optimizer](#make-an-optimizer) | {made} |", *rows]
    rest = [f"| [{title}](#{anchor(title)}) | |" for title in [*sections][-3:]]
    parts = [
        HEAD.rstrip(),
        "\n".join(["| to | |", "|---|---|", *index, *rest]),
        "An optimizer is a `torch.optim.Optimizer`; what is listed is what it has besides, or does differently.",
    ]
    for title, entries in sections.items():
        parts += [f"## {title}", *entries]
    named = {*OPTIMIZERS, "OffloadConfig", *tasked, *ENGINE}
    missing = [n for n in offload.__all__ if n not in named and not n.endswith("Error")]
    missing += [n for n in shared if n not in named]
    if missing:
        raise LookupError(f"names without a task in docs/reference.py: {missing}")
    return "\n\n".join(parts) + "\n"

"""What a DeepSpeed config says about offloading, read and checked before anything is built.

*Our object* is its top-level object `multi_tier_offload` (`KEY`), which has the fields of `OffloadConfig`.

Invariant: what we cannot run is refused here with a sentence that says what to write instead; nothing falls back to
DeepSpeed's own path in silence.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from offload import ConfigError, OffloadConfig
from offload.combinations import DEEPSPEED_MUON, IMAGES_OF_MAPPED, ZERO_1_REDUCES
from offload.integrations import shared

KEY = shared.OBJECT

CHECKPOINT = "checkpoint"
"""The field of our object that is none of `OffloadConfig`'s: an object with the fields of a `Saving`."""

LAYOUTS = "stock", "in_place"

_FIELDS = tuple(field.name for field in dataclasses.fields(OffloadConfig))

_LEAST_SIMILARITY = 0.8
"""How similar to `multi_tier_offload` (0 to 1) a key has to be to count as mistyped; DeepSpeed's reach half of it."""

VARIABLE = "OFFLOAD_DEEPSPEED_CONFIG"
"""The environment variable that names a JSON file of the object, for programs that write their DeepSpeed config."""


@dataclass(frozen=True)
class Saving:
    """How `save_checkpoint` of a DeepSpeed engine saves state.

    Attributes:
        layout: "stock": state is copied into DeepSpeed's own files; "in_place": it is pinned where it lies.
        wait: Whether the checkpoint is whole when the call returns; else it is completed in the background.
        commit_on_sigterm: The folder that all ranks save to at the end of the step in which one gets a SIGTERM.
    """

    layout: str = LAYOUTS[0]
    wait: bool = True
    commit_on_sigterm: str = ""

    @property
    def is_deepspeeds(self) -> bool:
        """Whether DeepSpeed's own `save_checkpoint` already does this."""
        return self.layout == LAYOUTS[0] and self.wait


OFFLOAD = "zero_optimization.offload_optimizer"

# Keys by which DeepSpeed would do in another way what this backend does, or would do what this backend cannot work
# with: (section, key, harmless value, advice).
_CONTRADICTING_KEYS: tuple[tuple[str, str, Any, str], ...] = (
    (OFFLOAD, "nvme_path", None, f'leave it out and give the directories as {KEY}.paths: ["/mnt/nvme0/offload"]'),
    (OFFLOAD, "pipeline", False, "leave it out: transfers and updates always overlap"),
    (OFFLOAD, "pipeline_read", False, "leave it out: reads always overlap with updates"),
    (OFFLOAD, "pipeline_write", False, "leave it out: writes always overlap with updates"),
    (OFFLOAD, "buffer_count", None, f"leave it out and give bytes as {KEY}.staging_memory"),
    (OFFLOAD, "ratio", 1.0, f"leave it out and say how much state stays in memory: {KEY}.host_memory"),
    (OFFLOAD, "super_offload", False, f"leave it out: {KEY} is a backend of its own"),
    (OFFLOAD, "cpuadam_cores_perc", None, f"leave it out and give {KEY}.threads"),
    ("zero_optimization", "zenflow", None, f"leave it out: {KEY} is a backend of its own"),
    ("zero_optimization", "elastic_checkpoint", False, "leave it out and use universal checkpoints"),
    ("zero_optimization", "mics_shard_size", -1, "leave it out: MiCS is not supported"),
    ("zero_optimization", "zero_hpz_partition_size", 1, "leave it out: ZeRO++ is not supported"),
    ("zero_optimization", "zero_quantized_weights", False, "leave it out: ZeRO++ is not supported"),
    ("zero_optimization", "zero_quantized_nontrainable_weights", False, "leave it out: ZeRO++ is not supported"),
    ("zero_optimization", "zero_quantized_gradients", False, "leave it out: ZeRO++ is not supported"),
    (
        "zero_optimization",
        "round_robin_gradients",
        False,
        "leave it out: DeepSpeed's map of parameters is wrong with it",
    ),
    ("fp16", "fp16_master_weights_and_grads", False, "leave it out: masters are fp32"),
    ("bf16", "bf16_master_weights_and_grads", False, "leave it out: masters are fp32"),
    ("bf16", "bf16_optimizer_states", False, "leave it out: moments are fp32"),
    ("compile", "deepcompile", False, "use false; torch.compile of the model is fine"),
    ("torch_autocast", "enabled", False, 'leave it out and use "bf16" or "fp16"'),
    ("", "managed_gradient_accumulation", True, "leave it out: which backward pass is the last has to be known"),
)

WEIGHTS = "zero_optimization.offload_param"
WEIGHTS_FOLDER = f"{WEIGHTS}.nvme_path"
_SWAPPER_KEYS = "buffer_count", "buffer_size", "max_in_cpu"

ADAM_TYPES, LION_TYPE = ("adam", "adamw"), "lion"


def _section(config: Mapping[str, Any], dotted: str) -> Mapping[str, Any]:
    """Return a nested object of a config by its dotted name ("": the config); an empty one if it is missing."""
    value: Any = config
    for key in filter(None, dotted.split(".")):
        value = value.get(key) or {}  # JSON's null counts as missing
        if not isinstance(value, Mapping):
            return {}
    section: Mapping[str, Any] = value
    return section


def refuse_mistyped_key(config: Mapping[str, Any]) -> None:
    """Check that a config without our object has no key with a similar name, which DeepSpeed would ignore.

    Raises:
        ConfigError: It has one; names it.
    """
    key_by_letters = {re.sub(r"[\W_]", "", str(key)).lower(): key for key in config}
    # At most one, the nearest.
    for near in difflib.get_close_matches(KEY.replace("_", ""), key_by_letters, 1, _LEAST_SIMILARITY):
        key = key_by_letters[near]
        raise ConfigError(key, config[key], f'unknown key; did you mean "{KEY}"?')


def refuse_misplaced_object(config: Mapping[str, Any]) -> None:
    """Check that no section of a DeepSpeed config has our object, which belongs beside them.

    Raises:
        ConfigError: One has it; names it.
    """
    sections = [(str(key), value) for key, value in config.items() if key != KEY and isinstance(value, Mapping)]
    for name, section in sections:  # the list grows by the sections within each
        if KEY in section:
            allowed = f'write it beside "{name.split(".")[0]}", not in it: it is an object of the config\'s top level'
            raise ConfigError(f"{name}.{KEY}", section[KEY], allowed)
        sections += [(f"{name}.{key}", value) for key, value in section.items() if isinstance(value, Mapping)]


@contextlib.contextmanager
def naming_object_in_errors() -> Iterator[None]:
    """Put `multi_tier_offload.` before the field of an `OffloadConfig` that a `ConfigError` names."""
    try:
        yield
    except ConfigError as error:
        if re.split(r"[.\[]", error.field)[0] not in _FIELDS:  # "paths" of "paths[0].path"
            raise
        raise ConfigError(f"{KEY}.{error.field}", error.value, error.allowed) from error.__cause__


def _check_keys(where: str, values: Mapping[str, Any], known: Sequence[str]) -> None:
    """Raise `ConfigError` for a key that is not known, with the nearest that is."""
    for key in values:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, 1)
            nearest = f'did you mean "{near[0]}"? ' if near else ""
            raise ConfigError(f"{where}.{key}", values[key], f"unknown key; {nearest}known are {', '.join(known)}")


def load(config: Mapping[str, Any] | str | os.PathLike[str]) -> Mapping[str, Any]:
    """Check and return a `multi_tier_offload` object that is given, or that a JSON file has.

    Raises:
        ConfigError: If it cannot be used, whatever the rest of a DeepSpeed config says.
    """
    values: Mapping[str, Any] = shared.read_fields(config)
    check(values)
    return values


def check(values: Any) -> OffloadConfig:
    """Return the `OffloadConfig` of a `multi_tier_offload` object.

    Raises:
        ConfigError: If it cannot be used, whatever the rest of a DeepSpeed config says.
    """
    if not isinstance(values, Mapping):
        raise ConfigError(KEY, values, 'give an object, such as {"host_memory": "64GiB", "paths": ["/mnt/nvme0"]}')
    for field in dataclasses.fields(OffloadConfig):
        if field.name in values and field.metadata["deepspeed"] is not None:  # DeepSpeed has a key of its own for it
            field.metadata["deepspeed"].refuse(f"{KEY}.{field.name}", values[field.name])
    given = values.get(CHECKPOINT, {})
    if not isinstance(given, Mapping):
        raise ConfigError(
            f"{KEY}.{CHECKPOINT}", given, 'write {"layout": "stock", "wait": true}, which is the default'
        )
    _check_keys(f"{KEY}.{CHECKPOINT}", given, tuple(field.name for field in dataclasses.fields(Saving)))
    if (layout := given.get("layout", LAYOUTS[0])) not in LAYOUTS:
        raise ConfigError(f"{KEY}.{CHECKPOINT}.layout", layout, f"use one of {', '.join(LAYOUTS)}")
    if (wait := given.get("wait", True)) not in (True, False):
        raise ConfigError(f"{KEY}.{CHECKPOINT}.wait", wait, "use true or false")
    if not isinstance(folder := given.get("commit_on_sigterm", ""), str):
        raise ConfigError(f"{KEY}.{CHECKPOINT}.commit_on_sigterm", folder, "name a folder, or leave it out")
    _check_keys(KEY, values, (*_FIELDS, CHECKPOINT))
    with naming_object_in_errors():
        return OffloadConfig.from_dict({name: values[name] for name in values if name != CHECKPOINT}, KEY)


def saving(config: Mapping[str, Any]) -> Saving:
    """Return how a DeepSpeed config that was read wants checkpoints saved."""
    return Saving(**_section(config, f"{KEY}.{CHECKPOINT}"))


def read(config: Mapping[str, Any]) -> OffloadConfig:
    """Return the `OffloadConfig` of a DeepSpeed config's `multi_tier_offload` object.

    Raises:
        ConfigError: If the object, or something else that the config asks for, cannot be used.
    """
    settings = check(config[KEY])
    _refuse_other_ways(config)
    stage = _section(config, "zero_optimization").get("stage", 0)
    if stage not in (1, 2, 3):
        raise ConfigError(
            "zero_optimization.stage", stage, "use 1, 2 or 3: other stages do not shard optimizer state"
        )
    if not reduces_during_backward(config):  # then no update can be made in backward
        ZERO_1_REDUCES.check(f"{KEY}.overlap", settings.overlap)
    weights = _section(config, WEIGHTS)
    if weights_folder(config) is not None:  # weights on NVMe
        if stage != 3:
            raise ConfigError(f"{WEIGHTS}.device", "nvme", "use stage 3: others do not shard weights")
        # Refuses updates in backward, which keep new weights in memory.
        IMAGES_OF_MAPPED.check(f"{KEY}.overlap", settings.overlap)
    elif (device := weights.get("device", "none")) not in ("none", "cpu"):
        raise ConfigError(f"{WEIGHTS}.device", device, 'use "cpu" or "nvme", or leave it out')
    return settings


def _refuse_other_ways(config: Mapping[str, Any]) -> None:
    """Raise one `ConfigError` about all keys by which DeepSpeed would work in a way that contradicts this backend."""
    contradicting = []  # rows of key, value, advice
    for section_name, key, harmless, advice in _CONTRADICTING_KEYS:
        value = _section(config, section_name).get(key)
        if value is not None and value != harmless:
            contradicting.append((f"{section_name}.{key}".lstrip("."), value, advice))
    device = _section(config, OFFLOAD).get("device") or "none"
    if device not in ("cpu", "none"):
        advice = f'write "cpu", or leave it out; where state lives is then said by {KEY}'
        contradicting.append((f"{OFFLOAD}.device", device, advice))
    weights = _section(config, WEIGHTS)
    if weights.get("device") == "nvme":
        advice = "leave it out: the kernel decides how much of the weights' file stays in memory"
        contradicting += [(f"{WEIGHTS}.{key}", weights[key], advice) for key in _SWAPPER_KEYS if key in weights]
    if contradicting:
        (name, value, advice), *others = contradicting
        too = "".join(f"; nor can {name}: {advice}" for name, _, advice in others)
        raise ConfigError(name, value, f"{advice}{too}")


def weights_folder(config: Mapping[str, Any]) -> str | None:
    """Return the folder in which a config has weights on NVMe; None if they stay in memory.

    Raises:
        ConfigError: The config has weights on NVMe and names no folder.
    """
    weights = _section(config, WEIGHTS)
    if weights.get("device") != "nvme":
        return None
    if not (folder := weights.get("nvme_path")):
        raise ConfigError(WEIGHTS_FOLDER, folder, "give the folder on the drive in which weights are to lie")
    return str(folder)


def reduces_during_backward(config: Mapping[str, Any]) -> bool:
    """Return whether gradients are reduced during backward: ZeRO-1 does it afterwards, unless with `overlap_comm`."""
    zero = _section(config, "zero_optimization")
    return zero.get("stage") != 1 or bool(zero.get("overlap_comm"))


def lion_from_config(given: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the hyperparameters of Lion that a config gives as `optimizer.params`, which is `given`.

    Raises:
        ConfigError: It has others than Lion's.
    """
    params = dict(given or {})
    for key in params:
        if key not in ("lr", "betas", "weight_decay"):
            raise ConfigError(f"optimizer.params.{key}", params[key], "use lr, betas, weight_decay")
    if "betas" in params:
        params["betas"] = tuple(params["betas"])
    return params


def adam_from_config(name: str | None, given: Mapping[str, Any] | None) -> tuple[bool, dict[str, Any]]:
    """Return whether weight decay is decoupled, and the hyperparameters, of an Adam in a config.

    Args:
        name: `optimizer.type` of the config; for Lion see `lion_from_config`.
        given: `optimizer.params` of the config.

    Raises:
        ConfigError: If it is not Adam or AdamW, or asks for a variant that the engine does not run.
    """
    if name is not None and "muon" in name.lower():
        DEEPSPEED_MUON.refuse("optimizer.type", name)
    if name is None or name.lower() not in ADAM_TYPES:
        raise ConfigError("optimizer.type", name, f'use "Adam", "AdamW" or "Lion": {KEY} runs no other optimizer')
    params = dict(given or {})
    if "max_grad_norm" in params:
        raise ConfigError("optimizer.params.max_grad_norm", params["max_grad_norm"], 'write "gradient_clipping"')
    # DeepSpeed's "Adam" decays weights as AdamW does unless adam_w_mode says otherwise.
    decoupled = bool(params.pop("adam_w_mode", True)) or name.lower() == "adamw"
    for key in ("torch_adam", "foreach", "fused"):  # they choose an implementation, and this is another
        params.pop(key, None)
    # Variants of which the engine runs one alone.
    for key, wanted in (("amsgrad", False), ("bias_correction", True), ("fp32_optimizer_states", True)):
        value = params.pop(key, wanted)
        if value != wanted:
            raise ConfigError(f"optimizer.params.{key}", value, f"use {str(wanted).lower()}")
    for key in params:
        if key not in ("lr", "betas", "eps", "weight_decay"):
            raise ConfigError(f"optimizer.params.{key}", params[key], "use lr, betas, eps, weight_decay, adam_w_mode")
    defaults: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
    hyperparameters = {**defaults, **params}
    hyperparameters["betas"] = tuple(hyperparameters["betas"])
    return decoupled, hyperparameters

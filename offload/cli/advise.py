"""What of a plan is left open: idle memory, the switch that makes a model fit, and the settings that pay."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from offload.cli.machine import STAND_IN
from offload.cli.scenario import (
    ADVISED,
    Answer,
    Scenario,
    ask,
    budget_text,
    check_fits,
    gpu_room,
    missing_option_line,
    rank_rates,
    reserved_bytes,
    use,
)
from offload.cli.streamed import path_of
from offload.cli.values import in_columns, in_options, option_of
from offload.errors import ConfigError, InfeasiblePlanError, PlanError
from offload.units import format_bytes, format_seconds

Report = Callable[[int, int, str], None]
"""Told how many of how many settings are done, and what is done to them."""

ROUNDS = 7
"""Of fitting a budget: nothing, then with what is left, or without what is too much. What does not lie in the budget
changes with it: buffers, and gradients of what is updated elsewhere."""

HALVINGS = 7
"""Of the host memory with which a target is met: to within 1% of the most."""

GRAINS = (1 << 30, 1 << 27, 1 << 20)
"""Sizes that are chosen are multiples of the largest that is an eighth of them or less."""

SPARED = 64
"""The part of the state at home in host memory that is given on top of it."""

SHARES = (0.5, 0.25, 0.125)
"""Of updates on the GPU: tried in turn where there is no room for the gradients of as many as are best."""

BEST = 3
SIMULATED = 5
"""Of the settings that the closed form finds best."""

WORTH = 0.02
"""Part of an iteration that a step has to be hidden for to be worth the setting."""

HELP_HOST = 0.25
"""Part by which host memory is raised to see what that would bring."""

MEMORY_WORTH = 0.01
"""Part of an iteration below which the setting that takes less memory is the better one."""


RECOMPUTE_ASKS = 3
"""How much recomputation asks of the user, beside what settings do (`offload.config.Tried`)."""
PLACE_ASKS = {"host": 8, "path": 200}
"""Likewise weights that lie elsewhere than where they are computed."""

ON_GPU = frozenset(name for name, one in ADVISED.items() if one.metadata["advised"].weights_on == "gpu")
"""Settings of weights on a GPU: who gives one has them there."""

COMPUTED = frozenset(name for name, one in ADVISED.items() if not one.metadata["advised"].values)
"""Settings whose values are computed, and not tried."""


@dataclass(frozen=True, slots=True)
class Choices:
    """What nobody has decided.

    Attributes:
        computed: Settings that are to be computed: budgets, and what the GPU updates.
        given: Settings that stay as they are.
        recompute: Whether activations are recomputed: what is to be tried.
        places: Likewise where weights lie.
    """

    computed: frozenset[str]
    given: frozenset[str]
    recompute: tuple[bool, ...]
    places: tuple[str, ...]

    @classmethod
    def of(cls, scenario: Scenario, given: Mapping[str, Any], weights_on: str | None = None) -> Choices:
        """Return what is left open.

        Args:
            scenario: What is asked.
            given: The settings that it was given.
            weights_on: Where its weights are to lie; None if that is left open.
        """
        computed = {name for name in COMPUTED if given.get(name, "auto") == "auto"}
        recompute = (False, True) if scenario.beside and not scenario.model.recompute else (scenario.model.recompute,)
        places = [scenario.model.weights_on]
        if weights_on is None and scenario.machine.all_ranks == 1 and not ON_GPU & given.keys():
            rates = scenario.machine.rates
            places += [place for place, has in (("host", rates.gpu.lanes), ("path", rates.paths)) if has]
        return cls(frozenset(computed - scenario.decided), frozenset(given), recompute, tuple(places))

    def _tried(self, scenario: Scenario) -> dict[str, tuple[Any, ...]]:
        """Return settings that are not computed, with the values that are to be tried in their order."""
        tried = {}
        for name, one in ADVISED.items():
            if name not in COMPUTED and name not in self.given and scenario.tries(name):
                tried[name] = tuple(value for value in one.metadata["advised"].values if scenario.admits(name, value))
            elif name not in COMPUTED:
                tried[name] = (scenario.value(name),)
        return tried

    def variants(self, scenario: Scenario) -> list[Scenario]:
        """Return all switches, those first that ask least of the user."""
        found = []
        for place in self.places:
            lying = scenario.lying(place)
            tried = self._tried(lying)
            for *chosen, recompute in itertools.product(*tried.values(), self.recompute):
                settings = dict(zip(tried, chosen, strict=True))
                asks = RECOMPUTE_ASKS * recompute + PLACE_ASKS.get(place, 0)
                for name, value in settings.items():
                    asks += ADVISED[name].metadata["advised"].asks * tried[name].index(value)
                other = replace(lying, model=replace(lying.model, recompute=recompute))
                found.append((asks, other.given(**settings)))
        return [other for _, other in sorted(found, key=lambda each: each[0])]

    def fitting(
        self, scenario: Scenario, report: Report = lambda done, total, words: None, *, leaves: bool = True
    ) -> Iterator[Answer]:
        """Yield, by the closed form, every variant that fits, with its budgets.

        Args:
            scenario: What is asked.
            report: Told how far it is.
            leaves: Whether one fits only if it leaves what should be left of the host and of the GPU.

        Raises:
            PlanError: None fits; it says what the one that lacks least of it lacks.
            ConfigError: None can be planned.
        """
        variants, lacking, fits = self.variants(scenario), [], False
        for number, variant in enumerate(variants):
            report(number, len(variants), "planned")
            if fits and variant.model.weights_on == "path":
                continue  # slower, and a drive is worn
            try:
                other = self.fix_budgets(variant)
                answer = ask(other, simulate=False)
                # What is left of a host whose budget is given is the user's choice.
                memory = other.machine.memory_bytes if "host_memory" in self.computed else None
                if memory is not None and not (leaves or other.machine.rates.paths):  # else less state were at home
                    memory -= reserved_bytes(memory, other.machine.ranks)
                check_fits(other, memory, answer.use, leaves=leaves)
            except InfeasiblePlanError as error:
                lacking.append((error.needed_bytes - sum(error.available_bytes.values()), other, error))
            else:
                fits = True
                yield answer
        if not fits:
            _, other, why = min(lacking, key=lambda each: each[0])
            raise PlanError(f"no setting fits; with the leanest ({other}), {in_options(str(why), 'plan')}") from why

    def fix_budgets(self, scenario: Scenario) -> Scenario:
        """Return a scenario in whose budgets is what lies idle, and whose GPU updates no more than it has room for.

        Gradients of what the GPU updates stay there until the step.
        """
        size = scenario.machine.rates.gpu.memory_bytes
        if not (size and scenario.computes_on_gpu):
            return self._with_budgets(scenario)
        if size < scenario.least_gpu_bytes:
            least = 0 if scenario.machine.rates.paths else scenario.state_bytes
            leanest = scenario.given(placement="cpu") if "placement" in self.computed else scenario
            return leanest.given(host_memory=least) if "host_memory" in self.computed else leanest
        taken: dict[int, Scenario] = {}
        has_choice = "placement" in self.computed and scenario.model.weights_on_gpu
        for placement in (scenario.config.placement, *(*SHARES, "cpu") * has_choice):
            settled = self._with_budgets(scenario.given(placement=placement))
            try:
                nbytes = use(settled).gpu_bytes
            except (ConfigError, InfeasiblePlanError):
                return settled
            if nbytes <= gpu_room(size):
                return settled
            taken.setdefault(nbytes, settled)
        # None leaves what should be free: the first that fits at all, or what is nearest to it.
        return next((settled for nbytes, settled in taken.items() if nbytes <= size), taken[min(taken)])

    def _with_budgets(self, scenario: Scenario) -> Scenario:
        """Return a scenario with the most memory for state that leaves the system's part, on the GPU and the host.

        Without paths state takes what it needs, as that of a session does.
        """
        gpu, host_room = scenario.machine.rates.gpu.memory_bytes, self._host_room(scenario)
        chooses_host, chooses_gpu = "host_memory" in self.computed, "gpu_memory" in self.computed
        if chooses_gpu:
            scenario = scenario.given(gpu_memory=0)
        if chooses_host and host_room and not scenario.machine.rates.paths:
            scenario, chooses_host = scenario.given(host_memory=_spared(scenario.state_bytes)), False
        if chooses_host:
            scenario = scenario.given(host_memory=_fitted(scenario, "host_memory", host_room))
        # Of activations nothing is known without tokens.
        if chooses_gpu and gpu and scenario.model.weights_on_gpu and scenario.beside:
            scenario = scenario.given(gpu_memory=_fitted(scenario, "gpu_memory", gpu_room(gpu)))
            if chooses_host and scenario.gpu_memory:
                scenario = scenario.given(host_memory=_fitted(scenario, "host_memory", host_room))
        return scenario

    def _host_room(self, scenario: Scenario) -> int:
        """Return the host memory that a rank may take: none where the node's is unknown."""
        memory, ranks = scenario.machine.memory_bytes, scenario.machine.ranks
        return 0 if memory is None else max(0, memory - reserved_bytes(memory, ranks)) // ranks


def _fitted(scenario: Scenario, field: str, room: int) -> int:
    """Return the largest budget with which no more is taken than there is room for; 0 if none fits.

    Args:
        scenario: Whose budget it is.
        field: The budget: "host_memory" or "gpu_memory".
        room: Bytes that a rank may take.
    """
    low, high, budget, before = 0, room + 1, 0, -1
    for _ in range(ROUNDS):
        try:
            parts = getattr(use(scenario.given(**{field: budget})), field.removesuffix("_memory"))
        except InfeasiblePlanError:  # more has to lie there
            if budget >= room:
                return 0
            low, budget = budget, room if not budget else _rounded((low + high) // 2)
            continue
        excess = sum(parts.values()) - room
        if excess > 0:
            high = budget
        else:
            low = budget
        nearer = _rounded(max(0, min(budget, parts["state"]) - excess))  # what lies elsewhere hardly changes
        if nearer <= low or parts["state"] == before:
            break
        before = parts["state"]
        budget = nearer if nearer < high else _rounded((low + high) // 2)
    return _rounded(low)


def _rounded(budget: int) -> int:
    return budget // _grain(budget) * _grain(budget)


def _spared(used: int, most: int = 1 << 62) -> int:
    """Return what state takes with a little to spare, but not more than there is, rounded up."""
    nbytes = min(used + used // SPARED, most)
    return -(-nbytes // _grain(nbytes)) * _grain(nbytes)


def _grain(budget: int) -> int:
    return next((grain for grain in GRAINS if budget >= 8 * grain), 1)


def what_fits(scenario: Scenario, choices: Choices) -> str:
    """Return the fewest switches with which a model fits that does not, in words; "" if none help."""
    for opened in (choices, replace(choices, computed=COMPUTED - scenario.decided)):
        with contextlib.suppress(ConfigError, PlanError):
            return " and ".join(switches(scenario, next(opened.fitting(scenario, leaves=False)).scenario, choices))
    return ""


def switches(before: Scenario, after: Scenario, choices: Choices) -> list[str]:
    """Return how to come from one scenario to another, each switch by its setting and its option."""
    asked: list[tuple[int, str]] = []
    if after.model.weights_on != before.model.weights_on:
        where = {"host": "host memory", "path": "a file on a drive"}[after.model.weights_on]
        asked.append((98, f"weights in {where} (--weights-on {after.model.weights_on}, docs/weights.md)"))
    if after.model.recompute != before.model.recompute:
        asked.append((99, "recomputation of activations (--recompute, gradient checkpointing)"))
    for name, one in ADVISED.items():
        value, option = after.value(name), option_of(name)
        if value == before.value(name) or name in choices.computed:
            continue
        if name in COMPUTED:
            asked.append((1000, f"{name}={budget_text(value)} ({option})"))
            continue
        if isinstance(value, bool):
            option = option if value else option.replace("--", "--no-", 1)
        elif not isinstance(value, str):
            option += f" {value}"
        written = json.dumps(value) if isinstance(value, str) else value
        asked.append((one.metadata["advised"].asks, f"{name}={written} ({option}){one.metadata['advised'].why}"))
    return [text for _, text in sorted(asked, key=lambda each: each[0])]


# Settings


@dataclass(frozen=True, slots=True)
class Setting:
    """A setting and what it comes to.

    Attributes:
        answer: Its plan and prediction.
        overlap: Where the step is hidden, if that pays.
        iteration_s: Seconds of an iteration with it.
    """

    answer: Answer
    overlap: str
    iteration_s: float

    @classmethod
    def of(cls, answer: Answer) -> Setting:
        """Return an answer with the step hidden where that is shortest."""
        hidden = dict(answer.overlapped_s)
        machine, memory = answer.scenario.machine, answer.scenario.machine.memory_bytes
        taken_bytes = machine.ranks * (answer.use.host_bytes + answer.hiding_bytes[0])
        no_room = memory is not None and taken_bytes > memory - reserved_bytes(memory, machine.ranks)
        if (
            machine.all_ranks > 1 and answer.scenario.model.weights_on_gpu
        ):  # what ranks exchange there is not predicted
            hidden = {}
        # Where little is streamed, both together are predicted to hide what waits for the norm.
        if no_room or hidden.get("backward", math.inf) > (1 - WORTH) * answer.iteration_s:
            hidden = {where: seconds for where, seconds in hidden.items() if where == "forward"}
        name = min(hidden, key=lambda where: hidden[where], default="off")
        hidden_s = hidden.get(name, math.inf)
        if hidden_s < (1 - WORTH) * answer.iteration_s:
            return cls(answer, name, hidden_s)
        return cls(answer, "off", answer.iteration_s)

    @property
    def config(self) -> dict[str, Any]:
        """Fields of an `OffloadConfig`, as JSON has them; what is the default is left out."""
        return config_of(self.answer, self.overlap)

    def __str__(self) -> str:
        return str(self.answer.scenario) + (f", overlap {self.overlap}" if self.overlap != "off" else "")


def config_of(answer: Answer, overlap: str = "off") -> dict[str, Any]:
    """Return the fields of an `OffloadConfig` that an answer is about; what is the default is left out."""
    scenario = answer.scenario
    nodes = {f"node{number}": budget_text(nbytes) for number, nbytes in scenario.config.node_bytes.items()}
    used = {
        "host_memory": nodes or budget_text(_used(answer, "HOST", scenario.host_memory, answer.use.host_bytes)),
        "gpu_memory": budget_text(_used(answer, "GPU", scenario.gpu_memory, answer.use.gpu_bytes)),
        "overlap": overlap,
    }
    values = {name: used.get(name, scenario.pasted(name)) for name in ADVISED}
    return {name: value for name, value in values.items() if value != ADVISED[name].default and scenario.takes(name)}


def _used(answer: Answer, home: str, budget: int, taken: int) -> int:
    """Return what a plan uses of a budget for state at home in a tier, rounded up.

    With a little to spare, as the padding of a model's own tensors is not known here, but not more than all that the
    plan takes there.
    """
    from offload.plan import Home

    return min(budget, _spared(answer.plan.home_bytes[Home[home]], taken))


def best(scenario: Scenario, choices: Choices, report: Report) -> list[Setting]:
    """Return the settings with the shortest iterations, the best first; none of them is beaten in time and memory.

    Raises:
        PlanError: None fits.
        ConfigError: None can be planned.
    """
    rough = sorted(choices.fitting(scenario, report), key=lambda answer: answer.iteration_s)[:SIMULATED]
    found = []
    for number, answer in enumerate(rough):
        report(number, len(rough), "simulated")
        found.append(Setting.of(ask(answer.scenario)))
    found.sort(key=lambda setting: (setting.iteration_s, setting.answer.use.host_bytes))
    kept: list[Setting] = []
    for setting in found:
        if not any(_beats(other, setting) for other in found if other is not setting) or not kept:
            kept.append(setting)
    kept += [setting for setting in found if setting not in kept]
    return kept[:BEST]


def _beats(one: Setting, other: Setting) -> bool:
    """Whether a setting is about as fast as another, takes no more memory, and rounds state no more."""
    mine, theirs = one.answer, other.answer
    as_good = (
        one.iteration_s <= (1 + MEMORY_WORTH) * other.iteration_s
        and mine.use.host_bytes <= theirs.use.host_bytes
        and mine.scenario.config.format.code <= theirs.scenario.config.format.code
    )
    return as_good and (one.iteration_s, mine.use.host_bytes) < (other.iteration_s, theirs.use.host_bytes)


def cheapest(scenario: Scenario, choices: Choices, target_s: float, report: Report) -> Setting:
    """Return the setting that asks least of the user and of memory with which an iteration takes no longer.

    Raises:
        PlanError: None is so fast, or none fits.
        ConfigError: None can be planned.
    """
    tried: list[Setting] = []
    for answer in choices.fitting(scenario, report):
        slow = answer.iteration_s > 4 * target_s  # hiding a step does not make an iteration a quarter of it
        setting = Setting.of(answer if slow else ask(answer.scenario))
        if setting.iteration_s <= target_s:
            return _with_least_memory(setting, target_s) if "host_memory" in choices.computed else setting
        tried.append(setting)
    fastest = min(tried, key=lambda setting: setting.iteration_s)
    answer = fastest.answer
    mark, why = (answer.scenario.mark, f"; * {answer.scenario.guessed}") if answer.scenario.guessed else ("", "")
    raise PlanError(
        f"no setting takes {format_seconds(target_s)} or less: the shortest iteration is "
        f"{format_seconds(fastest.iteration_s)}{mark} ({fastest}), of which the step is "
        f"{format_seconds(answer.step_s)}{mark}, bound by {answer.estimate.bound_by}{why}"
    )


def _with_least_memory(setting: Setting, target_s: float) -> Setting:
    """Return a setting with the least host memory with which it still meets a target.

    It is looked for by the closed form, carried on from what was simulated, and simulated where it was found.
    """
    scenario = setting.answer.scenario
    factor = setting.iteration_s / ask(scenario, simulate=False).iteration_s
    low, high = 0, scenario.host_memory
    for _ in range(HALVINGS):
        middle = _rounded((low + high) // 2)
        if not low < middle < high:
            break
        try:
            meets = factor * ask(scenario.given(host_memory=middle), simulate=False).iteration_s <= target_s
        except InfeasiblePlanError:
            meets = False
        low, high = (low, middle) if meets else (middle, high)
    while high < scenario.host_memory:
        with contextlib.suppress(InfeasiblePlanError):
            found = Setting.of(ask(scenario.given(host_memory=high)))
            if found.iteration_s <= target_s:
                return found
        high += (scenario.host_memory - high + 1) // 2
        if scenario.host_memory - high < GRAINS[-1]:
            break
    return setting


# In words


def table(settings: list[Setting]) -> str:
    """Return settings as aligned lines, the best first."""
    cells = [("", "setting", "iteration", "step", "host memory", "GPU memory", "bound by")]
    for number, setting in enumerate(settings, start=1):
        answer = setting.answer
        ranks = answer.scenario.machine.ranks
        gpu = format_bytes(answer.use.gpu_bytes) if answer.use.gpu_bytes else "-"
        iteration = "-" if answer.forward_s is None else format_seconds(setting.iteration_s)
        mark = answer.scenario.mark
        seconds = iteration + mark * (iteration != "-"), format_seconds(answer.step_s) + mark
        host = format_bytes(ranks * answer.use.host_bytes)
        cells.append((f"{number}", str(setting), *seconds, host, gpu, answer.estimate.bound_by))
    return in_columns(cells, right=(2, 3, 4, 5))


def to_paste(setting: Setting) -> str:
    """Return a setting as one would write it: in Python, in JSON, for DeepSpeed and for the Trainer.

    Weights that lie elsewhere than where they are computed: for the Trainer in host memory and of one rank, and in a
    file not for DeepSpeed.
    """
    answer, config, checkpointing = setting.answer, setting.config, _checkpointing()
    model = answer.scenario.model
    python = ", ".join(f"{name}={value!r}" for name, value in config.items()).replace("'", '"')
    # Without a limit of checkpoints each is a copy of all state; without a batch size the Trainer takes 8 rows.
    trainer = (
        'output_dir="out", optim="offload_adamw", save_total_limit=1'
        + ", use_cpu=True" * (not answer.scenario.computes_on_gpu)
        + f", {checkpointing}=True" * model.recompute
    )
    in_host = model.weights_on == "host"
    trainer += ', fsdp=True, fsdp_config={"cpu_offload": True}' * in_host
    if model.tokens is not None:
        trainer += ", per_device_train_batch_size=1"
        trainer += f", gradient_accumulation_steps={model.accumulate}" * (model.accumulate > 1)
    on_gpu = ", for weights on a GPU" if {"gpu_memory", "placement"} & config.keys() else ""
    lines = [
        f"Python{on_gpu}:",
        *([f"    model.{checkpointing}_enable()"] if model.recompute else []),
        *_lying(answer),
        f"    optimizer = offload.AdamW(model.named_parameters(), lr=1e-5, offload=dict({python}))",
    ]
    if setting.overlap in ("forward", "both"):
        lines.append("    optimizer.overlap_forward(model)")
        lines.append("    # optimizer.finish() before you read weights outside the model: an EMA, a save of your own")
    lines += ["JSON:", f"    {json.dumps(config)}"]
    if model.weights_on != "path":
        lines += [
            f"DeepSpeed, in its config{on_gpu}:",
            f'    "multi_tier_offload": {json.dumps(_in_deepspeed(config))}',
        ]
    if in_host:
        lines.append('    "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu", "pin_memory": true}}')
    if not model.is_streamed or (in_host and answer.scenario.machine.all_ranks == 1):
        lines += [
            f"Trainer{on_gpu}{', run by torchrun --nproc-per-node 1' * in_host}:",
            "    import offload.integrations.transformers as offload_transformers",
            f"    offload_transformers.enable({_python(config)})",
            f"    arguments = TrainingArguments({trainer})",
        ]
    return "\n".join(lines)


def _lying(answer: Answer) -> list[str]:
    """Return the lines that have weights lie elsewhere than where they are computed."""
    scenario = answer.scenario
    if not scenario.model.is_streamed:
        return []
    several, sharded = scenario.machine.all_ranks > 1, "    # sharded by FSDP2"
    if scenario.model.weights_on == "host":
        line = f"{sharded} with offload_policy=CPUOffloadPolicy()"
        return [line if several else "    offload.weights_in_host_memory(model)"]
    place = json.dumps(scenario.machine.path_place(path_of(answer.rates)))
    if scenario.computes_on_gpu:
        if not several:
            return [f"    offload.weights_in_host_memory(model, path={place})"]
        sharded += " with offload_policy=CPUOffloadPolicy(pin_memory=False)"
    return [*([sharded] if several else []), f"    offload.weights_in_file(model, {place})"]


def _checkpointing() -> str:
    """Return what transformers calls recomputation: the version that is installed here, or else its newest."""
    with contextlib.suppress(PackageNotFoundError, ValueError):
        if tuple(map(int, version("transformers").split(".")[:2])) < (5, 24):
            return "gradient_checkpointing"
    return "activation_checkpointing"


def _assumed(answer: Answer) -> list[str]:
    """Return what the reader has to know, and to change, before a setting is pasted."""
    scenario, model, lines = answer.scenario, answer.scenario.model, []
    if answer.forward_s is None:
        lines.append(missing_option_line(scenario))
    words = ["weights of 16 bits (dtype=torch.bfloat16)"]
    if model.tokens is not None:
        of_steps = f", in {model.accumulate} micro-steps" if model.accumulate > 1 else ""
        rows = math.ceil(model.tokens / model.accumulate)
        words.append(
            f"{model.tokens:,} tokens of each rank in an iteration{of_steps}: batch size times length is {rows:,}"
        )
    lines.append(f"assumed: {'; '.join(words)}")
    stand_ins = [path.path for path in scenario.config.path_configs if path.path.startswith(STAND_IN)]
    if stand_ins:
        lines.append(f"write directories on your drives in place of {', '.join(stand_ins)}")
    return lines


def _in_deepspeed(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what DeepSpeed's object takes of a config: gradients leave there anyway."""
    return {name: value for name, value in config.items() if ADVISED[name].metadata["deepspeed"] is None}


def _python(config: Mapping[str, Any]) -> str:
    return "{" + ", ".join(f'"{name}": {value!r}' for name, value in config.items()).replace("'", '"') + "}"


def as_dict(setting: Setting) -> dict[str, Any]:
    """Return a setting for `--json`."""
    answer = setting.answer
    return {
        "config": setting.config,
        "recompute": answer.scenario.model.recompute,
        "weights_on": answer.scenario.model.weights_on,
        "computes": answer.forward_s is not None,
        "iteration_s": setting.iteration_s,
        "step_s": answer.step_s,
        "storage_bytes": answer.scenario.machine.ranks * answer.plan.storage_bytes,
        "bound_by": answer.estimate.bound_by,
        "guessed": answer.scenario.guessed,
        **answer.figures,
    }


def describe(settings: list[Setting]) -> str:
    """Return settings as a table, and each as the config to paste."""
    lines = [table(settings)]
    forms = dict.fromkeys(setting.answer.scenario.config.format for setting in settings)
    if rounding := [form.name for form in forms if form.rounds]:
        rounds = f"{' and '.join(rounding)} round{'s' * (len(rounding) == 1)}"
        lines.append(f"{rounds} state; exact does not (docs/formats.md)")
    lines += dict.fromkeys(f"* {text}" for setting in settings if (text := setting.answer.scenario.guessed))
    lines += _assumed(settings[0].answer)
    for number, setting in enumerate(settings, start=1):
        lines += ["", f"{number}. {setting}", to_paste(setting)]
    return "\n".join(lines)


# What would help


def advice(answer: Answer) -> list[tuple[str, float]]:
    """Return what would make the iteration shorter, and by how many seconds, most first; by the closed form."""
    from offload.plan import choose_plan, estimate
    from offload.predict.explanation import LEAST_SAVED, ONE_MORE, changes

    scenario, plan, machine = answer.scenario, answer.plan, answer.scenario.machine
    memory, gpu_memory = machine.memory_bytes or 1 << 60, machine.rates.gpu.memory_bytes or 1 << 60
    host_room = (memory - reserved_bytes(memory, machine.ranks)) // machine.ranks - answer.use.host_bytes
    host_bytes = min(max(1 << 30, int(HELP_HOST * plan.state_bytes)), host_room)
    gpu_bytes = min(10 << 30, gpu_room(gpu_memory) - answer.use.gpu_bytes)
    now_s, found = answer.estimate.step_s, []
    for what, nbytes, budgets, faster in changes(plan, machine.rates, host_bytes, gpu_bytes):
        try:
            rates = rank_rates(scenario.at_rates(faster))
            saved_s = now_s - estimate(choose_plan(plan.layout, budgets, rates, scenario.placement), rates).step_s
        except (ConfigError, InfeasiblePlanError):  # there is no GPU
            continue
        if saved_s > LEAST_SAVED * now_s:
            second = "a second path like this one" if what == ONE_MORE and len(machine.rates.paths) == 1 else what
            found.append((f"{what} budget +{format_bytes(nbytes)} a rank" if nbytes else second, saved_s))
    if answer.overlapped_s:
        setting = Setting.of(answer)
        if setting.overlap != "off":
            found.append((f'overlap="{setting.overlap}"', answer.iteration_s - setting.iteration_s))
    return sorted(found, key=lambda item: -item[1])

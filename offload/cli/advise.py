"""Chooses what a user of `offload plan` has left open: budgets that use idle memory, and the settings that pay.

`Choices` has the variants of a scenario and finds those that fit; `best_settings` and `cheapest_setting` search them.
`fitting_switches_text` names the switches that make a model fit, `advice` what would make an iteration shorter. The
rest says in words what was found, and writes it as lines to paste.
"""

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
    DOES_NOT_FIT,
    Answer,
    Scenario,
    ask,
    budget_text,
    check_fits,
    fits_text,
    gpu_room,
    lacking_bytes,
    lacks_drives,
    memory_use,
    misfit_text,
    missing_option_line,
    rank_rates,
    reserved_bytes,
)
from offload.cli.shapes import Model
from offload.cli.streamed import WEIGHT_BYTES, path_of
from offload.cli.values import in_columns, in_options, option_of
from offload.config import LEAST_BUDGET
from offload.errors import ConfigError, InfeasiblePlanError, PlanError
from offload.formats import EXACT, StateFormat
from offload.units import format_bytes, format_seconds

Report = Callable[[int, int, str], None]
"""Called with the number of settings that are done, the number of all, and "planned" or "simulated", as they are."""

FITTING_ROUNDS = 7
"""Most budgets that `_largest_fitting_budget` tries: 0, then more by what is left or less by what is too much. Other
memory (buffers, gradients of what is updated elsewhere) changes with the budget, so one round is not enough."""

HALVINGS = 7
"""Most steps of the bisection for the least host memory that meets a target: to 1/128 of what it begins with."""

ROUNDING_UNITS = (1 << 30, 1 << 27, 1 << 20)
"""A computed budget is a multiple of the largest of these units that is at most an eighth of the budget."""

SPARE_DIVISOR = 64
"""A budget for known state has 1/64 more than the state takes."""

GPU_UPDATE_SHARES = (0.5, 0.25, 0.125)
"""Fractions of the updates on the GPU, tried in turn if the GPU has no room for the gradients of the best one."""

MOST_SHOWN = 3
"""Settings that `--advise` shows."""
MOST_LESSENED = 4
"""How often, at most, host memory for state is lessened to make room for hidden steps. Once may not be enough: the
state that is streamed instead has new weights, which take some of the memory again."""
MOST_SIMULATED = 5
"""Settings that are simulated because the closed form finds them best. The best `MOST_SHOWN` with exact state are
simulated, too, if they are not among them."""

WORTH_HIDING = 0.02
"""Fraction of an iteration that hiding the step has to save, to be worth its setting."""

MORE_HOST_SHARE = 0.25
"""Fraction of the state by which host memory is raised to see what that would save."""

WORTH_MEMORY = 0.01
"""Fraction of an iteration below which the setting that takes less memory is the better one."""

RECOMPUTE_ASKS = 3
"""How much recomputation asks of the user, on the scale of `offload.config.Tried.asks`: variants that ask least come
first."""
PLACE_ASKS = {"host": 8, "path": 200}
"""How much weights in host memory, or in a file on a path, ask of the user, on the same scale."""

MOST_GPU_BYTES_MORE = 10 << 30
"""Most bytes by which GPU memory for state is raised to see what that would save."""

GPU_SETTINGS = frozenset(name for name, one in ADVISED.items() if one.metadata["advised"].weights_on == "gpu")
"""Settings for weights on a GPU: whoever gives one wants the weights there."""

COMPUTED_SETTINGS = frozenset(name for name, one in ADVISED.items() if not one.metadata["advised"].values)
"""Settings whose values are computed, and not tried."""


FRAMEWORKS = {
    "torch": "Python",
    "json": "JSON",
    "deepspeed": "DeepSpeed, in its config",
    "transformers": "Trainer",
}
"""What lines to paste are written for: the words of `--for`, each with the title of its lines."""


TRAINER_DEEPSPEED = {
    **dict.fromkeys(("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"), "auto"),
    "zero_force_ds_cpu_optimizer": False,
}
"""What else DeepSpeed's config has for the Trainer: "auto" for what the Trainer says. Accelerate would compile
DeepSpeed's Adam for the CPU, which is not used."""


OPTIMIZERS = {
    "adam": ("AdamW(model.named_parameters(), lr=1e-5", 'optim="offload_adamw"'),
    "lion": ("Lion(model.named_parameters(), lr=1e-5", 'optim="offload_lion"'),
    "adagrad": ("Adagrad(model.named_parameters(), lr=1e-3", 'optim="offload_adagrad"'),
    "sgd": (
        "SGD(model.named_parameters(), lr=1e-3, momentum=0.9",
        'optim="offload_sgd", optim_args="momentum=0.9"',
    ),
}
"""By rule, in code to paste: how the call begins that makes the optimizer, and the Trainer's arguments for it."""


_NO_MODEL_FILE = (
    "    # checkpoint-N: DeepSpeed's files alone; for model.safetensors, too, gathered in rank 0's memory, give "
    '"zero_optimization" "stage3_gather_16bit_weights_on_model_save": True'
)
"""A comment among the Trainer's lines for ZeRO-3, whose checkpoints have no file of the whole model."""


def can_have_weights(framework: str | None, place: str, ranks: int) -> bool:
    """Return whether a framework can train with the weights in a place.

    All can, with one exception: the Trainer of one rank cannot have weights in a file. With several ranks the Trainer
    shards by DeepSpeed, which can.

    Args:
        framework: One of `FRAMEWORKS`; None for any.
        place: A value of `Model.weights_on`.
        ranks: Number of all ranks.
    """
    return framework != "transformers" or ranks > 1 or place != "path"


@dataclass(frozen=True, slots=True)
class Choices:
    """What the user has left open, to be computed or tried.

    Attributes:
        computed: Settings that are to be computed: budgets, and what the GPU updates.
        given: Settings that stay as they are.
        recompute: Values to be tried of `Model.recompute`.
        places: Values to be tried of `Model.weights_on`.
        framework: One of `FRAMEWORKS` that has to be able to have what is tried; None for any.
    """

    computed: frozenset[str]
    given: frozenset[str]
    recompute: tuple[bool, ...]
    places: tuple[str, ...]
    framework: str | None = None

    @classmethod
    def of(
        cls,
        scenario: Scenario,
        given: Mapping[str, Any],
        weights_on: str | None = None,
        framework: str | None = None,
    ) -> Choices:
        """Return what the user has left open.

        Args:
            scenario: The scenario of the user's options.
            given: The settings among these options.
            weights_on: Where the user wants the weights; None if that is left open.
            framework: See `Choices`.
        """
        computed = {name for name in COMPUTED_SETTINGS if given.get(name, "auto") == "auto"}
        # What recomputation saves is known only if the bytes of activations are.
        can_recompute = bool(scenario.forward_backward_bytes) and not scenario.model.recompute
        places = [scenario.model.weights_on]
        # Other places are tried only for one rank, at the usual stage (streamed weights refuse others), and only if
        # no given setting says that weights lie on the GPU.
        is_open = weights_on is None and scenario.machine.all_ranks == 1 and scenario.model.stage == 3
        if is_open and not GPU_SETTINGS & given.keys():
            if scenario.machine.rates.gpu.lanes:  # without a GPU there are none
                places.append("host")
            if scenario.machine.rates.paths and can_have_weights(framework, "path", ranks=1):
                places.append("path")
        return cls(
            computed=frozenset(computed - scenario.implied_settings),
            given=frozenset(given),
            recompute=(False, True) if can_recompute else (scenario.model.recompute,),
            places=tuple(places),
            framework=framework,
        )

    def _values_to_try(self, scenario: Scenario) -> dict[str, tuple[Any, ...]]:
        """Return by name the values to try of each setting that `offload plan` tries, and does not compute.

        A setting that the user has given, or that is not worth trying here, keeps the scenario's value.
        """
        values = {}
        for name, field in ADVISED.items():
            if name in COMPUTED_SETTINGS:
                continue
            values[name] = (scenario.value(name),)
            if name not in self.given and scenario.is_worth_trying(name):
                tried = field.metadata["advised"].values
                values[name] = tuple(value for value in tried if scenario.is_valid(name, value))
        return values

    def variants(self, scenario: Scenario) -> list[Scenario]:
        """Return the scenario with every combination of values to try, first those that ask least of the user."""
        asks_and_variants = []
        for place in self.places:
            moved = scenario.with_weights_on(place)
            values = self._values_to_try(moved)
            # A combination has a value of each setting, in the order of `values`, and last whether to recompute.
            for *chosen, recompute in itertools.product(*values.values(), self.recompute):
                settings = dict(zip(values, chosen, strict=True))
                asks = PLACE_ASKS.get(place, 0) + (RECOMPUTE_ASKS if recompute else 0)
                for name, value in settings.items():  # the first value asks nothing, each further one as much again
                    asks += ADVISED[name].metadata["advised"].asks * values[name].index(value)
                variant = replace(moved, model=replace(moved.model, recompute=recompute))
                asks_and_variants.append((asks, variant.with_settings(**settings)))
        return [variant for _, variant in sorted(asks_and_variants, key=lambda each: each[0])]

    def fitting_answers(
        self, scenario: Scenario, report: Report = lambda done, total, words: None, *, leaves: bool = True
    ) -> Iterator[Answer]:
        """Yield the answer, by the closed form, about every variant that fits, with its budgets computed.

        Those that ask least of the user come first.

        Args:
            scenario: What is asked.
            report: Called with the number of variants that are done, and of all.
            leaves: Whether a variant fits only if it leaves free what a plan should: `reserved_bytes` of the host,
                all but `gpu_room` of a GPU.

        Raises:
            PlanError: None fits; it says what is lacking for the variant that lacks fewest bytes.
            ConfigError: None can be planned.
        """
        variants = self.variants(scenario)
        misfits: list[tuple[InfeasiblePlanError, Scenario]] = []
        fitting: list[StateFormat] = []
        for number, variant in enumerate(variants):
            report(number, len(variants), "planned")
            # The larger a format's `code`, the more it rounds; exact state's is 0.
            least_rounding = min((state_format.code for state_format in fitting), default=math.inf)
            # Weights in a file are slower and wear a drive: only if nothing fits yet that rounds state as little.
            if variant.model.weights_on == "path" and least_rounding <= variant.config.format.code:
                continue
            planned = variant  # named by the error below if no budgets can be computed
            try:
                planned = self.fix_budgets(variant)
                answer = self._fitting_answer(planned, leaves=leaves)
            except InfeasiblePlanError as error:
                misfits.append((error, planned))
            else:
                fitting.append(variant.config.format)
                yield answer
        if not fitting:
            why, nearest = min(misfits, key=lambda misfit: lacking_bytes(misfit[0]))
            framework = f" for {self.framework}" if self.framework else ""
            text = f"{misfit_text(why)} with the settings{framework} that lack least ({nearest})"
            if any(lacks_drives(error) for error, _ in misfits):
                text += self._drives_text(scenario, leaves=leaves)
            # `fitting_switches_text` reads this text up to its first "; ", and the cause.
            raise PlanError(f"{text}; {in_options(str(why), 'plan')}") from why

    def _fitting_answer(self, planned: Scenario, *, leaves: bool) -> Answer:
        """Return the answer, by the closed form, about a variant whose budgets are computed.

        Raises:
            InfeasiblePlanError: It does not fit, or with `leaves` leaves too little memory free.
        """
        answer = ask(planned, simulate=False)  # raises if it does not fit at all
        check_fits(planned, self._limit_of_host(planned, leaves=leaves), answer.use, leaves=leaves)
        return answer

    def _drives_text(self, scenario: Scenario, *, leaves: bool) -> str:
        """Return in words the least size of drives with which a variant fits, and that variant; "" if none ever does.

        Variants are planned with endless drives, to see how much of these each needs.
        """
        fitting: list[Answer] = []
        for variant in self.variants(scenario.with_room_on_paths()):
            with contextlib.suppress(InfeasiblePlanError):
                fitting.append(self._fitting_answer(self.fix_budgets(variant), leaves=leaves))
        if not fitting:
            return ""
        least = min(fitting, key=lambda answer: answer.path_bytes)
        size = budget_text(_with_spare(scenario.machine.ranks * least.path_bytes))
        return f", or drives of {size} in all with these ({least.scenario})"

    def _limit_of_host(self, scenario: Scenario, *, leaves: bool) -> int | None:
        """Return the bytes of the node's memory for `check_fits`; None for no limit.

        There is no limit if the node's memory is unknown, or if the user has given the budget of host memory: how
        much that leaves free is the user's choice. Else it is all of the node's memory, of which `check_fits` keeps
        the system's part (`reserved_bytes`) free with `leaves`.

        Without paths that part has to stay free without `leaves`, too, so it is then taken off here. With paths the
        computed budget leaves it free, as far as a smaller budget can; without paths the budget is that of all state.
        """
        if "host_memory" not in self.computed or scenario.machine.memory_bytes is None:
            return None
        memory_bytes = scenario.machine.memory_bytes
        if leaves or scenario.machine.rates.paths:
            return memory_bytes
        return memory_bytes - reserved_bytes(memory_bytes, scenario.machine.ranks)

    def fix_budgets(self, scenario: Scenario) -> Scenario:
        """Return the scenario with the settings of `computed`: budgets that use idle memory, and a placement.

        Gradients of what the GPU updates stay there until the step, so fewer updates there need less of its memory.
        If the placement is computed, less and less is updated on the GPU until its memory suffices.
        """
        gpu_memory = scenario.machine.rates.gpu.memory_bytes
        # Without a GPU that computes, or if its size is unknown (0), there is no limit that a placement has to meet.
        if not (gpu_memory and scenario.computes_on_gpu):
            return self._with_budgets(scenario)
        # Nothing fits the GPU. Return the settings that need least, as the caller's error says how much is lacking.
        if gpu_memory < scenario.least_gpu_bytes:
            least = 0 if scenario.machine.rates.paths else scenario.state_bytes  # without paths all state lies there
            if "placement" in self.computed:
                scenario = scenario.with_settings(placement="cpu")
            return scenario.with_settings(host_memory=least) if "host_memory" in self.computed else scenario
        by_gpu_bytes: dict[int, Scenario] = {}  # in the order in which placements are tried
        placements: list[Any] = [scenario.config.placement]
        if "placement" in self.computed and scenario.model.weights_on_gpu:
            placements += [*GPU_UPDATE_SHARES, "cpu"]
        for placement in placements:
            candidate = self._with_budgets(scenario.with_settings(placement=placement))
            try:
                gpu_bytes = memory_use(candidate).gpu_bytes
            except (ConfigError, InfeasiblePlanError):
                return candidate  # the caller's `ask` raises the same
            if gpu_bytes <= gpu_room(gpu_memory):
                return candidate
            by_gpu_bytes.setdefault(gpu_bytes, candidate)
        # No candidate leaves enough of the GPU free: take the first that fits at all, else the one that lacks least.
        fitting = (candidate for gpu_bytes, candidate in by_gpu_bytes.items() if gpu_bytes <= gpu_memory)
        return next(fitting, by_gpu_bytes[min(by_gpu_bytes)])

    def _with_budgets(self, scenario: Scenario) -> Scenario:
        """Return a scenario whose computed budgets for state use all memory of host and GPU that need not stay free.

        Without paths the budget of host memory is what the state takes, as in a session. GPU memory is chosen after
        host memory. Host memory is then chosen again, as state on the GPU needs no gradients in host memory.
        """
        gpu_memory = scenario.machine.rates.gpu.memory_bytes
        host_room = self._host_room(scenario)
        chooses_host = "host_memory" in self.computed
        chooses_gpu = "gpu_memory" in self.computed
        if chooses_gpu:  # host memory is chosen first, as if no state were at home on the GPU
            scenario = scenario.with_settings(gpu_memory=0)
        # Without paths all state has to lie in memory. If a rank may take no host memory, or it is unknown how much
        # (`host_room` is 0), the budget becomes 0 below.
        if chooses_host and host_room and not scenario.machine.rates.paths:
            scenario = scenario.with_settings(host_memory=_with_spare(scenario.state_bytes))
            chooses_host = False  # chosen for good
        if chooses_host:
            scenario = _with_largest_host_memory(scenario, host_room)
        # Without the model's shape, or without tokens, it is unknown what activations leave of the GPU.
        if chooses_gpu and gpu_memory and scenario.model.weights_on_gpu and scenario.forward_backward_bytes:
            budget = _largest_fitting_budget(scenario, "gpu_memory", gpu_room(gpu_memory))
            scenario = scenario.with_settings(gpu_memory=budget)
            if chooses_host and budget:  # gradients of what is at home on the GPU have left host memory
                scenario = _with_largest_host_memory(scenario, host_room)
        return scenario

    def _host_room(self, scenario: Scenario) -> int:
        """Return the host memory that a rank may take; 0 if the node's is unknown."""
        memory, ranks = scenario.machine.memory_bytes, scenario.machine.ranks
        return 0 if memory is None else max(0, memory - reserved_bytes(memory, ranks)) // ranks


def _with_largest_host_memory(scenario: Scenario, room: int) -> Scenario:
    """Return a scenario with the most host memory for state with which a rank takes no more than `room`."""
    return scenario.with_settings(host_memory=_largest_fitting_budget(scenario, "host_memory", room))


def _largest_fitting_budget(scenario: Scenario, field: str, room: int) -> int:
    """Return about the largest budget for state with which a rank takes at most `room` bytes in all.

    If there is none, it is 0, or a budget with which planning fails. The budget is searched for, as other uses of the
    memory (buffers, gradients) depend on it. Each round plans with a budget, which is then corrected by what is left
    of the room, or by what is too much, as if other uses stayed the same. If the corrected budget is known not to
    fit, or nothing can be planned, the middle of the interval in which the answer lies is next.

    Args:
        scenario: The scenario to plan.
        field: The budget: "host_memory" or "gpu_memory".
        room: Bytes of that memory that a rank may take for all uses.
    """
    # The answer lies between. `lower`: fits, or is too small for a plan. `too_much`: does not fit.
    lower, too_much = 0, room + 1
    most = room // LEAST_BUDGET * LEAST_BUDGET
    budget = 0
    last_state_bytes = -1  # what state took of the budget before; -1: none was planned
    for _ in range(FITTING_ROUNDS):
        try:
            use = memory_use(scenario.with_settings(**{field: budget}))
        except InfeasiblePlanError:  # too small for what has to lie there: try all of the room, then the middle
            if budget >= most:  # not even all of the room is enough
                return 0
            lower = budget
            budget = _round_down((lower + too_much) // 2) if budget else most
            continue
        bytes_by_purpose = use.host if field == "host_memory" else use.gpu
        excess = sum(bytes_by_purpose.values()) - room
        if excess > 0:
            too_much = budget
        else:
            lower = budget
        state_bytes = bytes_by_purpose["state"]
        # From what state takes of the budget: less by what is too much, or more by what is left (`excess` below 0).
        corrected = _round_down(max(0, min(budget, state_bytes) - excess))
        if corrected <= lower or state_bytes == last_state_bytes:  # nothing more fits, or more budget has no effect
            break
        last_state_bytes = state_bytes
        budget = corrected if corrected < too_much else _round_down((lower + too_much) // 2)
    return _round_down(lower)


def _round_down(budget: int) -> int:
    """Return a budget rounded down to a multiple of its `_rounding_unit`."""
    unit = _rounding_unit(budget)
    return budget // unit * unit


def _with_spare(state_bytes: int, most: int = 1 << 62) -> int:
    """Return a budget for so much state: with 1/64 to spare, but at most `most` bytes, then rounded up."""
    nbytes = min(state_bytes + state_bytes // SPARE_DIVISOR, most)
    unit = _rounding_unit(nbytes)
    return (nbytes + unit - 1) // unit * unit


def _rounding_unit(budget: int) -> int:
    """Return the unit of `ROUNDING_UNITS` that a budget is a multiple of; `LEAST_BUDGET` for small ones."""
    return next((unit for unit in ROUNDING_UNITS if budget >= 8 * unit), LEAST_BUDGET)


def fitting_switches_text(scenario: Scenario, choices: Choices) -> tuple[str, bool]:
    """Say what would make a model fit that does not: the switches that ask least of the user.

    A switch is another value of a setting, of recomputation, or of the place of weights. If what the user has left
    open does not help, the user's own budgets and placement are given up, too.

    Returns:
        The switches in words, or what is lacking with all of them, or "" if nothing can be planned; and whether the
        model fits with these switches.
    """
    all_computed = replace(choices, computed=COMPUTED_SETTINGS - scenario.implied_settings)
    lacking = ""
    for tried_choices in dict.fromkeys((choices, all_computed)):  # once if they are the same
        try:
            first = next(tried_choices.fitting_answers(scenario, leaves=False))
        except PlanError as error:  # none fits: try more; the text before the first "; " says what is lacking
            lacking = str(error).partition("; ")[0].removeprefix(f"{DOES_NOT_FIT} ")
            if isinstance(error.__cause__, InfeasiblePlanError):
                lacking += f"; to have these fit, {in_options(error.__cause__.advice, 'plan')}"
        except ConfigError:  # nothing can be planned; the next choices may have a plan
            pass
        else:
            return f"it fits with {' and '.join(switch_texts(scenario, first.scenario, choices))}", True
    return f"no settings help: {lacking}" if lacking else "", False


def switch_texts(before: Scenario, after: Scenario, choices: Choices) -> list[str]:
    """Return texts that say what differs between two scenarios, each with the setting and its option.

    Budgets and placement that were computed anyway are left out.
    """
    # Numbers order the texts: settings by their `asks`, weights elsewhere (98) and recomputation (99) just before
    # rounded state (100), and last budgets and placement that the user has given.
    asks_and_texts: list[tuple[int, str]] = []
    if after.model.weights_on != before.model.weights_on:
        where = {"host": "host memory", "path": "a file on a drive"}[after.model.weights_on]
        text = f"weights in {where} (--weights-on {after.model.weights_on}, docs/weights.md)"
        asks_and_texts.append((98, text))
    if after.model.recompute != before.model.recompute:
        asks_and_texts.append((99, "recomputation of activations (--recompute, gradient checkpointing)"))
    for name, field in ADVISED.items():
        value = after.value(name)
        if value == before.value(name) or name in choices.computed:
            continue
        if name in COMPUTED_SETTINGS:  # the user's own, given up
            own = budget_text(value) if isinstance(value, int) else value
            asks_and_texts.append((1000, f"{name}={own} ({option_of(name)} {own})"))
            continue
        advised = field.metadata["advised"]
        written = json.dumps(value) if isinstance(value, str) else value
        why = f", {advised.why}" if advised.why else ""
        asks_and_texts.append((advised.asks, f"{name}={written} ({_option_with_value(name, value)}{why})"))
    return [text for _, text in sorted(asks_and_texts, key=lambda each: each[0])]


def _option_with_value(name: str, value: Any) -> str:
    """Return how the option of a setting is written on the command line to give this value."""
    option = option_of(name)
    if isinstance(value, bool):
        return option if value else option.replace("--", "--no-", 1)
    return f"{option} {value}"


# Settings


@dataclass(frozen=True, slots=True)
class Setting:
    """A choice of all settings, and how long an iteration takes with it.

    Attributes:
        answer: Its plan and prediction.
        overlap: Where the step is hidden: a value of `OffloadConfig.overlap`, "off" if hiding it does not pay.
        iteration_s: Seconds of an iteration with the step hidden there.
    """

    answer: Answer
    overlap: str
    iteration_s: float

    @classmethod
    def of(cls, answer: Answer) -> Setting:
        """Return an answer's settings, with the step hidden where the iteration is shortest; not if that hardly pays.

        Hiding in backward is left out if host memory has no room for it.
        """
        worthwhile_s = (1 - WORTH_HIDING) * answer.iteration_s
        scenario = answer.scenario
        hidden_s = dict(answer.overlapped_s)  # seconds of an iteration by where its step is hidden
        if scenario.machine.all_ranks > 1 and scenario.model.weights_on_gpu:
            hidden_s = {}  # what ranks exchange meanwhile is not predicted
        # "both" may seem to pay even if "backward" does not: where little is streamed, it is predicted to hide what
        # waits for the norm.
        backward_pays = hidden_s.get("backward", math.inf) <= worthwhile_s
        if not backward_pays or _lacking_for_hiding(answer):
            hidden_s = {where: seconds for where, seconds in hidden_s.items() if where == "forward"}
        overlap = min(hidden_s, key=lambda where: hidden_s[where], default="off")
        if overlap != "off" and hidden_s[overlap] < worthwhile_s:
            return cls(answer, overlap, iteration_s=hidden_s[overlap])
        return cls(answer, overlap="off", iteration_s=answer.iteration_s)

    @classmethod
    def best_of(cls, answer: Answer, choices: Choices) -> Setting:
        """Return the answer's setting (see `of`), or one with less state in host memory, if that is faster.

        Less state is tried if hiding steps in backward lacks host memory, and the budget is among what is computed.
        """
        setting = cls.of(answer)
        if "host_memory" not in choices.computed or not _lacking_for_hiding(answer):
            return setting
        roomy = _with_room_for_hiding(answer)
        return setting if roomy is None else min(setting, cls.of(roomy), key=lambda each: each.iteration_s)

    @property
    def rounds(self) -> bool:
        """Whether its state is rounded."""
        return self.answer.scenario.config.format.rounds

    @property
    def config(self) -> dict[str, Any]:
        """Fields of an `OffloadConfig`, as JSON has them; what is the default is left out."""
        return config_of(self.answer, self.overlap)

    def __str__(self) -> str:
        """Return the settings that matter, in words."""
        return str(self.answer.scenario) + (f", overlap {self.overlap}" if self.overlap != "off" else "")


def _lacking_for_hiding(answer: Answer) -> int:
    """Return the bytes that a rank lacks in host memory for steps that are hidden in backward; 0 if it has room."""
    machine = answer.scenario.machine
    if machine.memory_bytes is None:
        return 0
    hiding_bytes, _storage_bytes = answer.hiding_bytes
    free_bytes = (machine.memory_bytes - reserved_bytes(machine.memory_bytes, machine.ranks)) // machine.ranks
    return max(0, answer.use.host_bytes + hiding_bytes - free_bytes)


def _with_room_for_hiding(answer: Answer) -> Answer | None:
    """Return an answer with less state in host memory, so that steps can be hidden in backward; None if none can.

    The bytes that are lacking are taken off the budget, up to `MOST_LESSENED` times: what is streamed instead needs
    some memory, too.
    """
    scenario = answer.scenario
    for _ in range(MOST_LESSENED):
        lacking = _lacking_for_hiding(answer)
        if not lacking:
            return ask(scenario)  # simulated; `answer`, by the closed form, has only told the bytes
        if scenario.host_memory < lacking:
            return None
        scenario = scenario.with_host_memory(_round_down(scenario.host_memory - lacking))
        try:
            answer = ask(scenario, simulate=False)
        except InfeasiblePlanError:
            return None
    return None


def config_of(answer: Answer, overlap: str = "off") -> dict[str, Any]:
    """Return an answer's settings as fields of an `OffloadConfig`, as a user would write them; without defaults.

    Budgets are what the plan's state takes of them, with a little to spare: the rest would stay unused.
    """
    scenario = answer.scenario
    host_bytes = _used_of_budget(answer, home="HOST", budget=scenario.host_memory, used=answer.use.host_bytes)
    gpu_bytes = _used_of_budget(answer, home="GPU", budget=scenario.gpu_memory, used=answer.use.gpu_bytes)
    # Empty unless the user has given a size for each memory node; these sizes are written as they are.
    nodes = {f"node{number}": budget_text(nbytes) for number, nbytes in scenario.config.node_bytes.items()}
    chosen = {
        "host_memory": nodes or budget_text(host_bytes),
        "gpu_memory": budget_text(gpu_bytes),
        "overlap": overlap,
    }
    config = {}
    for name, field in ADVISED.items():
        value = chosen[name] if name in chosen else scenario.value_to_paste(name)
        if value != field.default and scenario.can_be_given(name):
            config[name] = value
    return config


def _used_of_budget(answer: Answer, *, home: str, budget: int, used: int) -> int:
    """Return how much of a budget to give: what a plan's state takes of it, with a little to spare, rounded up.

    The spare is for the padding of a model's own tensors, which is not known here.

    Args:
        answer: The answer with the plan.
        home: Name of the `Home` that the budget is for.
        budget: The budget that the plan was made with; the result is no more.
        used: All bytes that the plan uses of that memory: state with the spare takes no more, before it is rounded.
    """
    from offload.plan import Home

    return min(budget, _with_spare(answer.plan.home_bytes[Home[home]], most=used))


def best_settings(scenario: Scenario, choices: Choices, report: Report) -> list[Setting]:
    """Return the best settings, `MOST_SHOWN` at most: one with exact state, if that fits, then the fastest others.

    Those that another beats (as good in every way, and better in one) come last. All variants are compared by the
    closed form; the best of them are then simulated, which takes longer.

    Raises:
        PlanError: None fits.
        ConfigError: None can be planned.
    """
    answers = sorted(choices.fitting_answers(scenario, report), key=lambda answer: answer.iteration_s)
    exact = [answer for answer in answers if not answer.scenario.config.format.rounds]
    to_simulate = answers[:MOST_SIMULATED]
    to_simulate += [answer for answer in exact[:MOST_SHOWN] if all(answer is not other for other in to_simulate)]
    settings = []
    for number, answer in enumerate(to_simulate):
        report(number, len(to_simulate), "simulated")
        settings.append(Setting.best_of(ask(answer.scenario), choices))
    settings.sort(key=lambda setting: (setting.iteration_s, setting.answer.use.host_bytes))
    first = next((setting for setting in settings if not setting.rounds), settings[0])
    others = [setting for setting in settings if setting is not first]
    beaten = [one for one in others if any(_beats(other, one) for other in settings if other is not one)]
    unbeaten = [setting for setting in others if setting not in beaten]
    return [first, *unbeaten, *beaten][:MOST_SHOWN]


def _beats(one: Setting, other: Setting) -> bool:
    """Return whether a setting is about as fast as another, takes no more memory, and rounds state no more."""
    one_bytes = one.answer.use.host_bytes
    other_bytes = other.answer.use.host_bytes
    is_as_good = (
        one.iteration_s <= (1 + WORTH_MEMORY) * other.iteration_s
        and one_bytes <= other_bytes
        and one.answer.scenario.config.format.code <= other.answer.scenario.config.format.code
    )
    return is_as_good and (one.iteration_s, one_bytes) < (other.iteration_s, other_bytes)


def cheapest_setting(scenario: Scenario, choices: Choices, target_s: float, report: Report) -> Setting:
    """Return the setting that asks least of the user and whose iteration takes at most `target_s` seconds.

    If host memory is among what is computed, it is about the least that meets the target.

    Raises:
        PlanError: None is so fast, or none fits.
        ConfigError: None can be planned.
    """
    too_slow: list[Setting] = []
    hopeless: list[Answer] = []
    for answer in choices.fitting_answers(scenario, report):  # those that ask least come first
        # Not worth a simulation: hiding a step does not make an iteration a quarter of it.
        if answer.iteration_s > 4 * target_s:
            hopeless.append(answer)
            continue
        setting = Setting.best_of(ask(answer.scenario), choices)
        if setting.iteration_s <= target_s:
            return _with_least_memory(setting, target_s) if "host_memory" in choices.computed else setting
        too_slow.append(setting)
    # No setting is fast enough: the error names the fastest.
    hopeless.sort(key=lambda answer: answer.iteration_s)
    too_slow += [Setting.best_of(ask(answer.scenario), choices) for answer in hopeless[:MOST_SHOWN]]
    fastest = min(too_slow, key=lambda setting: setting.iteration_s)
    answer = fastest.answer
    mark = answer.scenario.guess_mark
    why = f"; * {answer.scenario.guess_warning}" if answer.scenario.guess_warning else ""
    raise PlanError(
        f"no setting takes {format_seconds(target_s)} or less: the shortest iteration is "
        f"{format_seconds(fastest.iteration_s)}{mark} ({fastest}), of which the step is "
        f"{format_seconds(answer.step_s)}{mark}, bound by {answer.estimate.bound_by}{why}"
    )


def _with_least_memory(setting: Setting, target_s: float) -> Setting:
    """Return a setting that meets a target (seconds of an iteration) with about the least host memory that does.

    First a bisection finds that memory by the closed form, which is cheap. Its seconds are scaled by the ratio of the
    given setting's iteration, which was simulated, to the closed form's. Then simulations confirm it. Each time that
    one misses the target, half of the difference to the given setting's memory is added.
    """
    scenario = setting.answer.scenario
    simulated_to_closed_form = setting.iteration_s / ask(scenario, simulate=False).iteration_s

    def meets_target(host_memory: int) -> bool:
        """Return whether the scaled closed form meets the target with this budget."""
        try:
            answer = ask(scenario.with_settings(host_memory=host_memory), simulate=False)
        except InfeasiblePlanError:
            return False
        return simulated_to_closed_form * answer.iteration_s <= target_s

    too_little, enough = 0, scenario.host_memory
    for _ in range(HALVINGS):
        middle = _round_down((too_little + enough) // 2)
        if not too_little < middle < enough:  # rounding leaves nothing between
            break
        if meets_target(middle):
            enough = middle
        else:
            too_little = middle
    while enough < scenario.host_memory:
        with contextlib.suppress(InfeasiblePlanError):  # more is tried then
            candidate = Setting.of(ask(scenario.with_settings(host_memory=enough)))
            if candidate.iteration_s <= target_s:
                return candidate
        enough += (scenario.host_memory - enough + 1) // 2
        if scenario.host_memory - enough < ROUNDING_UNITS[-1]:  # too little to save
            break
    return setting


# In words


def settings_table(settings: list[Setting]) -> str:
    """Return settings as aligned lines, the best first."""
    rows = [("", "setting", "iteration", "step", "host memory", "GPU memory", "bound by")]
    for number, setting in enumerate(settings, start=1):
        answer = setting.answer
        mark = answer.scenario.guess_mark
        iteration = "-" if answer.forward_s is None else f"{format_seconds(setting.iteration_s)}{mark}"
        step = f"{format_seconds(answer.step_s)}{mark}"
        # Host memory of all ranks of a node, which share it; GPU memory of one rank, as each has a GPU of its own.
        host = format_bytes(answer.scenario.machine.ranks * answer.use.host_bytes)
        gpu = format_bytes(answer.use.gpu_bytes) if answer.use.gpu_bytes else "-"
        rows.append((f"{number}", str(setting), iteration, step, host, gpu, answer.estimate.bound_by))
    return in_columns(rows, right=(2, 3, 4, 5))  # the figures


def to_paste(setting: Setting, framework: str | None = None) -> str:
    """Return the lines that give a setting in one of `FRAMEWORKS`; None: in each that can have the setting.

    For one that cannot, it is a line that says why.
    """
    lines_by_framework = _lines_to_paste(setting)
    if framework is None:
        return "\n".join(itertools.chain.from_iterable(lines_by_framework.values()))
    if framework not in lines_by_framework:
        # Why `_lines_to_paste` has left it out. The first reason is that of the Trainer of one rank.
        reason = "with weights in a file (docs/weights.md)"
        scenario = setting.answer.scenario
        by_deepspeed = framework == "deepspeed" or (framework == "transformers" and scenario.machine.all_ranks > 1)
        if by_deepspeed and scenario.model.rule != "adam":
            reason = f"with --rule {scenario.model.rule}"
        if framework == "torch":
            reason = "so: --stage 3 is FSDP2, --stage 1 DDP with shard=True, under which gradients do not leave"
        return f"{FRAMEWORKS[framework]}: not {reason}"
    return "\n".join(lines_by_framework[framework])


def _lines_to_paste(setting: Setting) -> dict[str, list[str]]:
    """Return, for each of `FRAMEWORKS` that can have a setting, the lines that give it there: a title, then the text.

    "torch" is code for a training loop of one's own, "json" the fields of an `OffloadConfig`, "deepspeed" entries of
    DeepSpeed's config, "transformers" code for the Trainer.

    Some have no lines: "torch" at stage 2, and under DDP if gradients leave; "deepspeed" for rules other than Adam's
    and Lion's, which DeepSpeed's integration does not run; "transformers" of one rank where `can_have_weights` is
    false, and of several ranks, where DeepSpeed has the optimizer, for rules other than Adam's.
    """
    scenario, config = setting.answer.scenario, setting.config
    model, machine = scenario.model, scenario.machine
    in_host = model.weights_on == "host"
    on_gpu = ", for weights on a GPU" if {"gpu_memory", "placement"} & config.keys() else ""
    uses_ddp = machine.all_ranks > 1 and model.stage == 1
    own_config = {**config, "shard": True} if uses_ddp else config  # for a loop of one's own
    settings = ", ".join(f"{name}={value!r}" for name, value in own_config.items()).replace("'", '"')
    recompute = f"model.{_checkpointing_name()}_enable()"
    # Where lines are settings and no code, their title says what the script has to do besides.
    after = f", after {recompute} in the script" if model.recompute else ""
    launcher = ""
    if machine.all_ranks > 1:
        nodes = f"--nnodes {machine.nodes} " if machine.nodes > 1 else ""
        launcher = f", run by torchrun {nodes}--nproc-per-node {machine.ranks}"
    lines: dict[str, list[str]] = {}
    lines["torch"] = [
        f"{FRAMEWORKS['torch']}{on_gpu}:",
        *([f"    {recompute}"] if model.recompute else []),
        *_weight_lines(setting.answer),
        f"    optimizer = offload.{OPTIMIZERS[model.rule][0]}, offload=dict({settings}))",
    ]
    if uses_ddp:
        # Gradients that are views of DDP's buckets take no memory beside these. But no step is hidden in forward with
        # `gradient_as_bucket_view`, so a setting that hides it there goes without.
        views = "" if setting.overlap in ("forward", "both") else ", gradient_as_bucket_view=True"
        lines["torch"].append(f"    model = torch.nn.parallel.DistributedDataParallel(model{views})")
    if setting.overlap in ("forward", "both"):
        lines["torch"] += [
            "    optimizer.overlap_forward(model)",
            "    # optimizer.finish() before you read weights outside the model: an EMA, a save of your own",
        ]
    if "gradient_memory" in config or not config.get("keep_grads", True):
        lines["torch"].append("    # clip with optimizer.clip_grad_norm_: torch's own finds no gradients any more")
    # Torch has nothing like ZeRO's stage 2, and under DDP gradients cannot leave: no lines then.
    if machine.all_ranks > 1 and (model.stage == 2 or (uses_ddp and "gradient_memory" in config)):
        del lines["torch"]
    lines["json"] = [f"{FRAMEWORKS['json']}{after}:", f"    {json.dumps(own_config)}"]
    zero: dict[str, Any] = {"stage": model.stage, "offload_optimizer": {"device": "cpu"}, **_deepspeed_buffers(model)}
    if in_host:
        zero["offload_param"] = {"device": "cpu", "pin_memory": True}
    elif model.weights_on == "path":
        zero["offload_param"] = {
            "device": "nvme",
            "nvme_path": machine.path_place(path_of(setting.answer.rates)),
        }
    by_deepspeed = {"zero_optimization": zero, "multi_tier_offload": _deepspeed_fields(config)}
    if model.rule == "lion":  # torch has no Lion that a script could give to DeepSpeed, as it may give an AdamW
        by_deepspeed["optimizer"] = {"type": "Lion", "params": {"lr": 1e-5}}
    module = " -m offload.integrations.deepspeed" if launcher else ""
    if model.rule in ("adam", "lion"):
        lines["deepspeed"] = [
            f"{FRAMEWORKS['deepspeed']}{on_gpu}{after}{launcher}{module}:",
            *",\n".join(f'    "{name}": {json.dumps(value)}' for name, value in by_deepspeed.items()).splitlines(),
        ]
    if machine.all_ranks > 1 and model.rule == "adam":
        lines["transformers"] = [
            f"{FRAMEWORKS['transformers']}{on_gpu}, by DeepSpeed, as its FSDP goes with one process alone{launcher}:",
            "    import offload.integrations.deepspeed as offload_deepspeed",
            "    offload_deepspeed.enable()",
            f"    config = {_python_dict({**by_deepspeed, **TRAINER_DEEPSPEED})}",
            f"    arguments = TrainingArguments({_trainer_arguments(setting.answer)})",
            *([_NO_MODEL_FILE] if model.stage == 3 else []),
        ]
    elif machine.all_ranks == 1 and can_have_weights("transformers", model.weights_on, ranks=1):
        # Weights in host memory are FSDP's there, which the Trainer takes only where a launcher has started it.
        launcher = ", run by torchrun --nproc-per-node 1" if in_host else ""
        lines["transformers"] = [
            f"{FRAMEWORKS['transformers']}{on_gpu}{launcher}:",
            "    import offload.integrations.transformers as offload_transformers",
            f"    offload_transformers.enable({_python_dict(config)})",
            f"    arguments = TrainingArguments({_trainer_arguments(setting.answer)})",
        ]
    return lines


def _trainer_arguments(answer: Answer) -> str:
    """Return the arguments of the Trainer's `TrainingArguments`, as text.

    `save_total_limit`: without a limit each checkpoint would be a copy of all state; where the paths have no room for
    a checkpoint beside the state, it has to be one. `per_device_train_batch_size`: the Trainer's default is 8 rows.
    With several ranks, optimizer and checkpoints are DeepSpeed's.
    """
    scenario = answer.scenario
    model = scenario.model
    by_deepspeed = scenario.machine.all_ranks > 1
    arguments = ['output_dir="out"', "deepspeed=config, bf16=True" if by_deepspeed else OPTIMIZERS[model.rule][1]]
    if answer.plan.has_room_for_checkpoints and not by_deepspeed:
        arguments.append("save_total_limit=1")
    if not scenario.computes_on_gpu:
        arguments.append("use_cpu=True")
    if model.recompute:
        arguments.append(f"{_checkpointing_name()}=True")
    if model.weights_on == "host" and not by_deepspeed:
        arguments.append('fsdp=True, fsdp_config={"cpu_offload": True}')
    if model.tokens is not None:
        arguments.append("per_device_train_batch_size=1")
        if model.accumulate > 1:
            arguments.append(f"gradient_accumulation_steps={model.accumulate}")
    return ", ".join(arguments)


def _weight_lines(answer: Answer) -> list[str]:
    """Return the lines of Python that shard weights over ranks, or put them in host memory or a file; [] for neither.

    FSDP2 gathers the weights of one module at a time. So layers are sharded one by one, and the embedding and the
    output layer apart, as the plan counts only one tensor of these on the GPU at a time. If the two are one (tied)
    tensor, or the model's shape is unknown, they are sharded with the rest of the model.
    """
    scenario = answer.scenario
    model, machine = scenario.model, scenario.machine
    is_sharded = machine.all_ranks > 1 and model.stage == 3
    place = json.dumps(machine.path_place(path_of(answer.rates))) if model.weights_on == "path" else ""
    if not is_sharded and model.is_streamed and scenario.computes_on_gpu:
        return [f"    offload.weights_in_host_memory(model{f', path={place}' if place else ''})"]
    lines = []
    if is_sharded:
        policy, imports = "", "fully_shard"
        if model.is_streamed and scenario.computes_on_gpu:
            pinned = "pin_memory=False" if place else ""  # pinned memory cannot be a file's
            policy, imports = f", offload_policy=CPUOffloadPolicy({pinned})", "CPUOffloadPolicy, fully_shard"
        outer_layers = "" if model.shape is None or model.shape.tied else "model.model.embed_tokens, model.lm_head, "
        lines = [
            f"    from torch.distributed.fsdp import {imports}",
            f"    for module in (*model.model.layers, {outer_layers}model):",
            f"        fully_shard(module{policy})",
        ]
        if not place:
            lines.append(f"    # or, with Accelerate, in their place: {_accelerate_command(scenario)}")
    return [*lines, f"    offload.weights_in_file(model, {place})"] if place else lines


def _accelerate_command(scenario: Scenario) -> str:
    """Return the command by which Accelerate shards the weights of several ranks as FSDP2 does."""
    machine = scenario.machine
    words = ["accelerate launch", f"--num_processes {machine.all_ranks}"]
    if machine.nodes > 1:
        words.append(f"--num_machines {machine.nodes}")
    words += ["--use_fsdp", "--fsdp_version 2", "--fsdp_auto_wrap_policy TRANSFORMER_BASED_WRAP"]
    if scenario.model.weights_on == "host":
        words.append("--fsdp_offload_params true")
    return " ".join(words)


def _checkpointing_name() -> str:
    """Return transformers' word for recomputation: the installed version's; without one, the newest version's."""
    with contextlib.suppress(PackageNotFoundError, ValueError):  # ValueError: its first two parts are no numbers
        major, minor = map(int, version("transformers").split(".")[:2])
        if (major, minor) < (5, 24):
            return "gradient_checkpointing"
    return "activation_checkpointing"


def _assumption_lines(answer: Answer) -> list[str]:
    """Return lines of text about what was assumed, and what the reader has to change before pasting a setting."""
    scenario, model = answer.scenario, answer.scenario.model
    lines = [missing_option_line(scenario)] if answer.forward_s is None else []
    assumptions = ["weights of 16 bits (dtype=torch.bfloat16)"]
    if scenario.sharding_text:
        assumptions.append(scenario.sharding_text)
    if model.tokens is not None:
        micro_steps = f", in {model.accumulate} micro-steps" if model.accumulate > 1 else ""
        tokens = math.ceil(model.tokens / model.accumulate)
        assumptions.append(
            f"{model.tokens:,} tokens of each rank in an iteration{micro_steps}: "
            f"batch size times length is {tokens:,}"
        )
    if model.weights_on_gpu and not scenario.forward_backward_bytes:
        assumptions.append("activations take GPU memory on top (known with --model or --config, and --tokens)")
    lines.append(f"assumed: {'; '.join(assumptions)}")
    stand_ins = [path.path for path in scenario.config.path_configs if path.path.startswith(STAND_IN)]
    if stand_ins:
        lines.append(f"write directories on your drives in place of {', '.join(stand_ins)}")
    return lines


def _deepspeed_buffers(model: Model) -> dict[str, int]:
    """Return the sizes, in elements, of DeepSpeed's own buffers that a plan counts; empty without a shape.

    By default they are of up to a billion elements, whatever the model's size.
    """
    shape = model.shape
    if shape is None:
        return {}
    a_layer = shape.layer_params
    if model.stage != 3:
        return {"reduce_bucket_size": a_layer}
    return {
        "reduce_bucket_size": a_layer,
        "stage3_prefetch_bucket_size": a_layer,
        "stage3_max_live_parameters": shape.gathered_bytes // WEIGHT_BYTES,
        "stage3_max_reuse_distance": a_layer,
    }


def _deepspeed_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a config that DeepSpeed's object takes: not `keep_grads`, which DeepSpeed decides."""
    # A setting's metadata has the row of `offload.combinations` by which DeepSpeed refuses it, or None.
    return {name: value for name, value in config.items() if ADVISED[name].metadata["deepspeed"] is None}


def _python_dict(config: Mapping[str, Any]) -> str:
    """Return a config as a dict in Python, with double quotes."""
    return "{" + ", ".join(f'"{name}": {value!r}' for name, value in config.items()).replace("'", '"') + "}"


def _rounding_lines(settings: list[Setting], without_exact: str) -> list[str]:
    """Return a line about the state formats among the settings that round state; [] if none does.

    If a setting with exact state is shown, too, the line says how many bytes state takes in each format.

    Args:
        settings: The settings that are shown.
        without_exact: See `describe`.
    """
    state_bytes = {}
    for setting in settings:
        scenario = setting.answer.scenario
        state_bytes[scenario.config.format] = scenario.machine.ranks * setting.answer.plan.state_bytes
    rounding = [state_format for state_format in state_bytes if state_format.rounds]
    if not rounding:
        return []
    verb = "rounds" if len(rounding) == 1 else "round"
    names = f"{' and '.join(state_format.name for state_format in rounding)} {verb}"
    if EXACT in state_bytes:
        sizes = " and ".join(format_bytes(state_bytes[state_format]) for state_format in rounding)
        exact = f"exact keeps every bit of state, {format_bytes(state_bytes[EXACT])}"
        return [f"{exact}; {names} it to {sizes}, so that less has to be moved (docs/formats.md)"]
    exact = f"{without_exact}; " if without_exact else ""
    return [f"{exact}{names} state (docs/formats.md)"]


def as_dict(setting: Setting) -> dict[str, Any]:
    """Return a setting for `--json`; "computes": whether "iteration_s" has the seconds of forward and backward."""
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
        "guessed": answer.scenario.guess_warning,
        **answer.figures,
    }


def describe(settings: list[Setting], framework: str | None = None, without_exact: str = "") -> str:
    """Return settings as a table, and each as the config to paste for a framework, or for all.

    Args:
        settings: The best first.
        framework: One of `FRAMEWORKS`; None for all.
        without_exact: What to say if all settings round state, such as that exact state does not fit; "" for nothing.
    """
    scenarios = [setting.answer.scenario for setting in settings]
    lines = [fits_text(settings[0].answer), settings_table(settings), *_rounding_lines(settings, without_exact)]
    lines += dict.fromkeys(f"* {scenario.guess_warning}" for scenario in scenarios if scenario.guess_warning)
    without_room = {n: setting.answer.checkpoint_warning for n, setting in enumerate(settings, start=1)}
    lines += [f"setting {number}: {text}" for number, text in without_room.items() if text]
    if any(setting.overlap in ("backward", "both") for setting in settings):
        lines.append(
            "overlap backward, both: as long as few steps clip gradients (the Trainer's max_grad_norm is 1.0); with "
            "--clip, plans are for steps that all do"
        )
    # Of the settings the best one stands for all: what is assumed hardly depends on them. But the line about
    # activations is there only if the best one has its weights on a GPU.
    lines += _assumption_lines(settings[0].answer)
    for number, setting in enumerate(settings, start=1):
        lines += ["", f"{number}. {setting}", to_paste(setting, framework)]
    return "\n".join(lines)


# What would help


def advice(answer: Answer) -> list[tuple[str, float]]:
    """Return what would make the iteration shorter, in words, and by how many seconds; what saves most comes first.

    Changes of budgets and machine are judged by the closed form, hiding the step by the simulated step.
    """
    changes_and_saved_s = _faster_machines(answer)
    if answer.overlapped_s:
        setting = Setting.of(answer)
        if setting.overlap != "off":
            changes_and_saved_s.append((f'overlap="{setting.overlap}"', answer.iteration_s - setting.iteration_s))
    return sorted(changes_and_saved_s, key=lambda what_and_saved_s: -what_and_saved_s[1])


def _faster_machines(answer: Answer) -> list[tuple[str, float]]:
    """Return larger budgets and changes of the machine that would make the step shorter, and by how many seconds.

    Budgets are raised by what is worth trying, and by no more than the machine has left.
    """
    from offload.plan import choose_plan, estimate
    from offload.predict.explanation import LEAST_SAVED, ONE_MORE, changes

    scenario, plan, machine = answer.scenario, answer.plan, answer.scenario.machine
    host_memory = machine.memory_bytes or 1 << 60  # unknown: no limit
    gpu_memory = machine.rates.gpu.memory_bytes or 1 << 60
    host_left = (host_memory - reserved_bytes(host_memory, machine.ranks)) // machine.ranks - answer.use.host_bytes
    worth_trying = max(1 << 30, int(MORE_HOST_SHARE * plan.state_bytes))
    # `changes` leaves out the memory of which nothing is left: 0 bytes, or less.
    more_host = min(worth_trying, host_left)
    more_gpu = min(MOST_GPU_BYTES_MORE, gpu_room(gpu_memory) - answer.use.gpu_bytes)
    now_s = answer.estimate.step_s
    changes_and_saved_s = []
    for change in changes(plan, machine.rates, more_host, more_gpu):
        try:
            rates = rank_rates(scenario.at_rates(change.rates))
            changed_plan = choose_plan(plan.layout, change.budgets, rates, scenario.placement)
            saved_s = now_s - estimate(changed_plan, rates).step_s
        except (ConfigError, InfeasiblePlanError):  # more GPU memory without a GPU; or the change allows no plan
            continue
        if saved_s <= LEAST_SAVED * now_s:
            continue
        what = change.what
        if change.nbytes:  # `what` is "host" or "GPU"
            what = f"{what} budget +{format_bytes(change.nbytes)} a rank"
        elif what == ONE_MORE and len(machine.rates.paths) == 1:
            what = "a second path like this one"
        changes_and_saved_s.append((what, saved_s))
    return changes_and_saved_s

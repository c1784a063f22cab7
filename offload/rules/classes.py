"""Classes like `torch.optim`'s as update rules: a visit runs the class on views of the state.

The state that a class keeps of a parameter is packed (`offload.optim.packing` knows how); layout and checkpoints know
its size alone. Nothing here imports a class: a manifest names one, which need not be installed to read the manifest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

from offload.dtypes import DtypeCode
from offload.errors import ConfigError, known
from offload.rules.rule import UpdateRule, WholeRule


class Runner(Protocol):
    """Runs a class on packed state: `offload.optim.runner.ClassRunner`."""

    def update(self, piece: Any, group: int, values: Mapping[str, Any]) -> None:
        """Update one whole parameter; see `UpdateRule.update`."""

    def trial(self, shape: tuple[int, ...], dtype: Any, group: int, name: str) -> Callable[[], None]:
        """Return a function that makes a step of the class on a new tensor, to be timed.

        Args:
            shape: The tensor's shape.
            dtype: The dtype of weights; the tensor's own, unless masters are kept in fp32.
            group: Number of the group whose hyperparameters the step has.
            name: The tensor stands for the parameter of this name: it gets the parameter's attributes.
        """


@dataclass(frozen=True)
class ClassRule(WholeRule):
    """The rule of those parameters of a class whose packed state has the same size: one class may have several rules.

    Attributes:
        name: The class's qualified name.
        packed_words: See `UpdateRule`, as for `master_dtype`.
        runner: Runs the class; None if state is only read.
    """

    name: str
    packed_words: int
    master_dtype: DtypeCode = DtypeCode.FLOAT32
    runner: Runner | None = field(default=None, compare=False, repr=False)

    state: ClassVar[tuple[str, ...]] = ()
    defaults: ClassVar[Mapping[str, Any]] = {}
    scratch_item_bytes: ClassVar[int] = 16  # the gradient in fp32, and three tensors of the class's

    def values(self, group: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a copy of the group's hyperparameters, without its parameters and their names."""
        return {name: deepcopy(value) for name, value in group.items() if name not in ("params", "param_names")}

    def update(self, piece: Any, group: int, values: Mapping[str, Any]) -> None:
        known(self.runner, f"{self.name} is only read, and is to run").update(piece, group, values)

    def trial(self, shape: tuple[int, ...], dtype: Any, group: int, name: str) -> Callable[[], None]:
        """Return a function that makes a step of the class, to be timed; see `Runner.trial`."""
        return known(self.runner, f"{self.name} is only read, and is to run").trial(shape, dtype, group, name)


def described(rules: Mapping[str, UpdateRule], name: str, words: int, master_dtype: DtypeCode) -> UpdateRule:
    """Return the rule that a manifest describes: a class's if `words` is not 0, else one of `rules` by its name.

    Args:
        rules: The rules that are no class's, by name.
        name: The name in the manifest.
        words: `UpdateRule.packed_words`.
        master_dtype: `UpdateRule.master_dtype` of a class's rule.

    Raises:
        ConfigError: There is no such rule.
    """
    if words:
        return ClassRule(name, words, master_dtype)
    if name not in rules:
        raise ConfigError("rule", name, f"this version of offload knows {', '.join(rules)}")
    return rules[name]

"""`optimizer.state`: the dict of dicts that torch's own optimizers have, over state that lives elsewhere.

Reading gives copies. An assignment is written to where the state lives. A change in place reaches the copy alone, so
it is found by the copy's version counter, and refused when the optimizer is next used.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, MutableMapping
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from offload.errors import ConfigError

if TYPE_CHECKING:
    from offload.optim.adam import OffloadedAdam


class Copies:
    """Copies of state that were handed out, to find those that somebody has changed in place."""

    def __init__(self) -> None:
        self._watched: dict[int, tuple[weakref.ref[torch.Tensor], torch.Tensor, int, str]] = {}

    def watch(self, copy: torch.Tensor, name: str) -> None:
        """Note a copy as it is now."""
        # Shares the copy's version counter, and none of its memory: it can tell of a copy that is gone.
        witness = copy.detach()
        witness.data = torch.empty(0, dtype=copy.dtype, device="cpu")
        self._watched[id(witness)] = weakref.ref(copy), witness, witness._version, name

    def is_as_watched(self, copy: torch.Tensor) -> bool:
        """Return whether a copy has not changed since `watch`."""
        return any(ref() is copy and now._version == then for ref, now, then, _ in self._watched.values())

    def forget(self, copy: torch.Tensor | None = None) -> None:
        """Forget a copy, or all."""
        self._watched = {
            key: entry for key, entry in self._watched.items() if copy is not None and entry[0]() is not copy
        }

    def check(self) -> None:
        """Forget the copies that nobody has any more.

        Raises:
            ConfigError: One was changed in place; said once.
        """
        changed = [name for _, now, then, name in self._watched.values() if now._version != then]
        if changed:
            self.forget()
            raise ConfigError(
                "state",
                f"{changed[0]}{f' and {len(changed) - 1} more' if len(changed) > 1 else ''}, changed in place",
                "what optimizer.state gives are copies: assign instead (state[p][name] = tensor), or use reset_state "
                "or load_state_dict; state_for gives copies to work on",
            )
        self._watched = {key: entry for key, entry in self._watched.items() if entry[0]() is not None}


class StateEntry(dict[str, torch.Tensor]):
    """One parameter's state as it was read; what is assigned to its items is written to where the state lives."""

    def __init__(self, optimizer: OffloadedAdam, parameter: torch.Tensor, values: Mapping[str, torch.Tensor]) -> None:
        super().__init__(values)
        self._optimizer = optimizer
        self._parameter = parameter
        self._changes = optimizer._changes
        for name, copy in values.items():
            optimizer._copies.watch(copy, name)

    def _is_there(self, name: str, value: object) -> bool:
        """Return whether a value is what was read, perhaps moved to another device, and still lies there."""
        copy = self.get(name)
        return (
            isinstance(value, torch.Tensor)
            and copy is not None
            and self._changes == self._optimizer._changes
            and self._optimizer._copies.is_as_watched(copy)
            and (value.dtype, value.shape) == (copy.dtype, copy.shape)
            and bool((value.detach().cpu().view(torch.int32) == copy.view(torch.int32)).all())
        )

    def __setitem__(self, name: str, value: Any) -> None:
        """Write `step`, `exp_avg`, `exp_avg_sq` or `master`.

        Raises:
            ConfigError: It is none of these, or not of the parameter's shape.
        """
        if self._is_there(name, value):
            return
        copies = self._optimizer._copies
        if name in self:
            copies.forget(self[name])  # `state[p][name] *= 2` has changed it and assigns it
        written = self._optimizer._assign(self._parameter, name, value)
        super().__setitem__(name, written)
        copies.watch(written, name)
        self._changes = self._optimizer._changes

    def update(self, *others: Any, **values: Any) -> None:
        """Assign several items."""
        for name, value in dict(*others, **values).items():
            self[name] = value

    def __ior__(self, other: Any) -> StateEntry:  # type: ignore[override,misc]
        self.update(other)
        return self

    def clear(self) -> None:
        """See `OffloadedAdam.reset_state`."""
        self._optimizer.reset_state([self._parameter])
        super().clear()

    def _refuse(self, *arguments: Any) -> NoReturn:
        raise ConfigError("state", "a missing item", "use reset_state: an updated parameter has all of its state")

    __delitem__ = pop = popitem = setdefault = _refuse

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)


class StateView(MutableMapping[torch.Tensor, dict[str, torch.Tensor]]):
    """State of all parameters that have been updated, read from wherever it lives when it is asked for.

    Args:
        optimizer: Whose state.
        plain: Whether entries are plain dicts, for a `state_dict`, which is the caller's to change.
    """

    def __init__(self, optimizer: OffloadedAdam, plain: bool = False) -> None:
        self._optimizer = optimizer
        self._plain = plain

    def _updated(self) -> list[torch.Tensor]:
        if self._optimizer._engine is None:  # before the first step; the engine need not be opened for that
            return []
        engine, positions = self._optimizer.engine, self._optimizer._positions
        return [parameter for parameter, position in positions.items() if engine.step_count(position) > 0]

    def _read(self, parameters: list[torch.Tensor]) -> list[dict[str, torch.Tensor]]:
        found = self._optimizer._read(parameters)
        if self._plain:
            return found
        return [StateEntry(self._optimizer, p, entry) for p, entry in zip(parameters, found, strict=True)]

    def __contains__(self, parameter: object) -> bool:
        position = self._optimizer._positions.get(parameter) if isinstance(parameter, torch.Tensor) else None
        if self._optimizer._engine is None:
            return False
        return position is not None and self._optimizer.engine.step_count(position) > 0

    def __getitem__(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        if parameter not in self:
            raise KeyError(parameter)
        return self._read([parameter])[0]

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(self._updated())

    def __len__(self) -> int:
        return len(self._updated())

    def items(self) -> Any:
        """Return all (parameter, state) pairs, read in one sweep over all tiers."""
        updated = self._updated()
        return dict(zip(updated, self._read(updated), strict=True)).items()

    def __setitem__(self, parameter: torch.Tensor, entry: Mapping[str, Any]) -> None:
        """Replace a parameter's state, as `load_state_dict` does; an empty mapping resets it.

        Raises:
            ConfigError: It is not a parameter's whole state.
        """
        if not isinstance(entry, Mapping):
            raise ConfigError("state", type(entry).__name__, "assign a mapping of step, exp_avg and exp_avg_sq")
        if entry:
            self._optimizer._replace(parameter, entry)
        else:
            self._optimizer.reset_state([parameter])

    def __delitem__(self, parameter: torch.Tensor) -> None:
        if parameter not in self:
            raise KeyError(parameter)
        self._optimizer.reset_state([parameter])

    def clear(self) -> None:
        """See `OffloadedAdam.reset_state`."""
        self._optimizer.reset_state()

    def setdefault(self, parameter: torch.Tensor, default: Any = None) -> Any:
        """Return a parameter's state; there is nothing to be made for one that has none.

        Raises:
            KeyError: It has not been updated.
        """
        return self[parameter]

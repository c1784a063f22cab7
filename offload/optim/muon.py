"""`Muon`: whole matrices by Muon, all else by AdamW, in one optimizer."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Unpack

import torch

from offload import combinations
from offload.config import OffloadConfig
from offload.errors import ConfigError
from offload.layout import named_like
from offload.optim import shards
from offload.optim.dealt import fail_together
from offload.optim.groups import Group, TorchOptions, names
from offload.optim.optimizer import OffloadedOptimizer
from offload.rules import ADAMW, MUON, UpdateRule, flag, not_negative

log = logging.getLogger("offload")

KINDS = (MUON, ADAMW)
"""The rules of a group's parameters: the engine has a group for each."""


class Muon(OffloadedOptimizer):
    """Muon with offloaded state, as torch's (Jordan et al. 2024), and AdamW for parameters that are no hidden matrix.

    A parameter with two dimensions is updated by Muon, whole. AdamW updates all others (vectors, convolutions), those
    whose names match `OffloadConfig.exact_names` (embeddings, the output layer), and groups with `use_muon=False`.
    Masters of matrices have the bits of `torch.optim.Muon` over fp32 weights, on this CPU and number of threads;
    16-bit weights are their roundings. Newton-Schulz works in bfloat16.

    Args:
        params: As for `AdamW`; with names, or embeddings cannot be told from other matrices. A group may have
            `use_muon`.
        lr: Learning rate of Muon.
        weight_decay: Decoupled decay, of both.
        momentum: Momentum of matrices.
        nesterov: Nesterov's momentum.
        ns_coefficients: Coefficients of the Newton-Schulz polynomial.
        eps: Added to the norm that Newton-Schulz divides by.
        ns_steps: Iterations of Newton-Schulz.
        adjust_lr_fn: How the rate follows a matrix's shape: "original" (as None), or "match_rms_adamw", with which
            one rate suits both.
        adamw_lr_ratio: AdamW's rate over `lr` in groups of Muon, so that schedules move both; other groups have their
            `lr`.
        betas: AdamW's.
        adamw_eps: AdamW's `eps`.
        offload: Where state may live; None for host memory.
        options: As for `AdamW`.

    Raises:
        ConfigError: If an argument or parameter cannot be used; raised before any file is touched.
        InfeasiblePlanError: If the state does not fit into the tiers.
    """

    rule, kind = MUON, "Muon"

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | torch.Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        *,
        adamw_lr_ratio: float = 1.0,
        betas: tuple[float, float] = (0.9, 0.999),
        adamw_eps: float = 1e-8,
        offload: OffloadConfig | Mapping[str, Any] | None = None,
        **options: Unpack[TorchOptions],
    ) -> None:
        if not hasattr(torch.optim, "Muon"):
            raise ConfigError("torch", torch.__version__, "use one that has torch.optim.Muon, as 2.9 and later")
        own: dict[str, Any] = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "nesterov": nesterov}
        own |= {"ns_coefficients": ns_coefficients, "eps": eps, "ns_steps": ns_steps, "adjust_lr_fn": adjust_lr_fn}
        adamw = {"adamw_lr_ratio": adamw_lr_ratio, "betas": betas, "adamw_eps": adamw_eps}
        self._is_told = False  # whether it was logged that parameters have no names
        self._exact_named: tuple[int, frozenset[str]] = (0, frozenset())  # number of parameters, matching names
        super().__init__(params, {**own, **adamw, "use_muon": True}, offload, options)

    def _open(self, config: OffloadConfig) -> None:
        with self._on_all_ranks():
            self._deal(parameter for parameter in self._parameters() if parameter.requires_grad)
            super()._open(config)

    def _add(self, parameters: list[torch.Tensor]) -> None:
        """Deal matrices, then add and bind all; undo the dealing if that fails."""
        try:
            with self._on_all_ranks():
                self._deal(parameters)
                super()._add(parameters)
        except BaseException:
            engine = self._holder.engine_if_open
            # An interrupted addition may have reached the engine: then the next call binds the parameters.
            if engine is None or len(engine.plan.layout.parameters) == len(self._weights.bound):
                self._weights.undo_deal(parameters)
            raise

    @contextlib.contextmanager
    def _on_all_ranks(self) -> Iterator[None]:
        """For a block that may fail on some ranks only (for want of room, say): then close the optimizer on all.

        Ranks that failed raise their own errors, the others name the first that failed. A collective over the ranks
        to which matrices are dealt.
        """
        error: Exception | None = None
        try:
            yield
        except Exception as caught:
            error = caught
        error = fail_together(self._weights.dealt.values(), error, self._holder.close)
        if error is not None:
            raise error

    def _bind_new_parameters(self) -> None:
        """Bind thawed parameters; refuse sharded ones with gradients on some ranks only: all ranks deal them."""
        self._holder.check_open()
        bound = self._weights.bound
        new = [p for p in self._parameters() if p.requires_grad and p not in bound and shards.is_dtensor(p)]
        name_of = {parameter: name for parameter, name, _ in names(self.param_groups)} if new else {}
        by_group: dict[str, tuple[Any, list[torch.Tensor]]] = {}
        for parameter in new:
            mesh = self._mesh_of(parameter, name_of[parameter])
            if mesh is not None:
                by_group.setdefault(mesh.get_group().group_name, (mesh, []))[1].append(parameter)
        for mesh, parameters in by_group.values():
            answers: list[Any] = [None] * mesh.size()
            have_gradients = [parameter.grad is not None for parameter in parameters]
            torch.distributed.all_gather_object(answers, have_gradients, group=mesh.get_group())
            for parameter, on_ranks in zip(parameters, zip(*answers, strict=True), strict=True):
                if len({*on_ranks}) > 1:
                    name, allowed = name_of[parameter], "have one on each rank, or on none"
                    raise ConfigError(f"gradient of {name}", "not on all ranks", allowed)
        super()._bind_new_parameters()

    def _deal(self, parameters: Iterable[torch.Tensor]) -> None:
        """Deal matrices that are cut over ranks to these ranks, by the work of their updates."""
        given = {parameter: (name, group) for parameter, name, group in names(self.param_groups)}
        meshes: dict[str, Any] = {}
        works: dict[str, dict[torch.Tensor, float]] = {}
        for parameter in parameters:
            mesh = self._weights.rows_over
            if not self._is_matrix(parameter, *given[parameter]) or self._weights.is_dealt(parameter):
                continue
            if shards.is_dtensor(parameter):
                mesh = self._mesh_of(parameter, given[parameter][0])
            if mesh is not None:
                key = mesh.get_group().group_name
                meshes[key] = mesh
                works.setdefault(key, {})[parameter] = MUON.work(parameter.shape)
        for key, mesh in meshes.items():
            self._weights.deal(mesh, works[key], {parameter: name for parameter, (name, _) in given.items()})

    def _mesh_of(self, parameter: Any, name: str) -> Any:
        """Return the mesh over which a `DTensor` is dealt; None if each rank has all of it."""
        if parameter.device_mesh.size() == 1 or all(kind.is_replicate() for kind in parameter.placements):
            return None
        self._given_config.check_dealt()
        combinations.DEALT_FORWARD.check("overlap", overlap := self._holder.config.overlap)
        if self._overlap.models:
            combinations.DEALT_FORWARD.refuse("overlap", overlap)
        return shards.dealing_mesh(parameter.device_mesh, name)

    def _kept_as(self, parameter: torch.Tensor, name: str, group: int) -> tuple[int, UpdateRule]:
        rule = MUON if self._is_matrix(parameter, name, group) else ADAMW
        return len(KINDS) * group + KINDS.index(rule), rule

    def _is_matrix(self, parameter: torch.Tensor, name: str, group: int) -> bool:
        """Return whether Muon updates a parameter."""
        if parameter.dim() != 2 or not flag(self.param_groups[group], "use_muon"):
            return False
        patterns = self._holder.config.exact_names
        if patterns and name.startswith("param_groups[") and not self._is_told:
            self._is_told = True
            log.warning(
                "parameters have no names, so embeddings cannot be told from other matrices and are updated by Muon, "
                "too; make the optimizer from named_parameters(), or give them in a group with use_muon=False"
            )
        count = sum(len(each["params"]) for each in self.param_groups)
        if self._exact_named[0] != count:  # computed once for all parameters: there may be thousands
            all_names = [each for _, each, _ in names(self.param_groups)]
            self._exact_named = count, frozenset(named_like(all_names, patterns))
        return name not in self._exact_named[1]

    def _values(self) -> list[Any]:
        return [values for group in self.param_groups for values in self._values_of(group)]

    def _values_of(self, group: Group) -> tuple[Any, Any]:
        """Return the hyperparameters of a group's matrices, and of its other parameters."""
        has_muon = flag({"use_muon": True, **group}, "use_muon")
        ratio, eps = not_negative({**self.defaults, **group}, "adamw_lr_ratio", "adamw_eps")
        (lr,) = not_negative(group, "lr")
        adamw = {**self.defaults, **group, "lr": lr * ratio if has_muon else lr, "eps": eps}
        return MUON.values(group), ADAMW.values({**adamw, "maximize": False})

    def _check_group(self, group: Group) -> None:
        super()._check_group(group)
        _, adamw = self._values_of(group)
        self._check_values(ADAMW, adamw)
        ADAMW.check({**self.defaults, **group})

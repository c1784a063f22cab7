"""`Muon`: whole matrices by Muon, all else by AdamW, in one optimizer."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
"""The two rules of a group's parameters. For each of the optimizer's groups the engine has two, one for each rule."""


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
        muon: dict[str, Any] = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "nesterov": nesterov}
        muon |= {"ns_coefficients": ns_coefficients, "eps": eps, "ns_steps": ns_steps, "adjust_lr_fn": adjust_lr_fn}
        adamw = {"adamw_lr_ratio": adamw_lr_ratio, "betas": betas, "adamw_eps": adamw_eps}
        # Before the base's constructor, which uses these.
        self._has_warned_of_names = False
        self._exact_names: frozenset[str] = frozenset()  # parameters whose names match `exact_names`
        self._matched_count = 0  # how many parameters there were when that was computed
        defaults = {**muon, **adamw, "use_muon": True}
        super().__init__(params, defaults, offload, options)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; see `OffloadedOptimizer.add_param_group`."""
        try:
            super().add_param_group(param_group)
        except BaseException:
            self._matched_count = 0  # it may have counted names of the group that is not there any more
            raise

    def _open(self, config: OffloadConfig) -> None:
        """Deal matrices, then open the engine."""
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
            # If the engine has more parameters than are bound, it has these, and an interrupt came before they were
            # bound: they stay dealt, for the next call.
            if engine is None or len(engine.plan.layout.parameters) == len(self._weights.bound):
                self._weights.undo_deal(parameters)
            raise

    @contextlib.contextmanager
    def _on_all_ranks(self) -> Iterator[None]:
        """Make a `with` block that fails on one rank fail on all of them.

        A rank whose block failed raises its own error, the others one that names the first rank that failed. If the
        block failed on some ranks only (for want of room, say), the optimizer is closed on all of them, as ranks go
        on together or not at all. The end of the block is a collective over the ranks to which matrices are dealt.
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
        """Bind parameters that were frozen before, and have a gradient.

        Sharded ones are dealt by all ranks together, so one with a gradient on some ranks only is refused.
        """
        self._holder.check_open()  # a closed rank must not begin a collective that others take for another one
        bound = self._weights.bound
        new = [p for p in self._parameters() if p.requires_grad and p not in bound and shards.is_dtensor(p)]
        if new:
            self._check_gradients_on_all_ranks(new)
        super()._bind_new_parameters()

    def _check_gradients_on_all_ranks(self, parameters: Sequence[torch.Tensor]) -> None:
        """Refuse `DTensor`s that are to be dealt and have gradients on some of their ranks only. Collective."""
        name_of = {parameter: name for parameter, name, _ in names(self.param_groups)}
        meshes: dict[str, Any] = {}
        by_mesh: dict[str, list[torch.Tensor]] = {}
        for parameter in parameters:
            mesh = self._mesh_of(parameter, name_of[parameter])
            if mesh is not None:  # else each rank has all of it
                group_name = mesh.get_group().group_name
                meshes.setdefault(group_name, mesh)
                by_mesh.setdefault(group_name, []).append(parameter)
        for group_name, dealt in by_mesh.items():
            mesh = meshes[group_name]
            answers: list[Any] = [None] * mesh.size()
            have_gradients = [parameter.grad is not None for parameter in dealt]
            torch.distributed.all_gather_object(answers, have_gradients, group=mesh.get_group())
            by_parameter = zip(*answers, strict=True)  # each rank has answered for all parameters
            for parameter, on_ranks in zip(dealt, by_parameter, strict=True):
                if len({*on_ranks}) > 1:
                    advice = "have one on each rank, or on none"
                    raise ConfigError(f"gradient of {name_of[parameter]}", "not on all ranks", advice)

    def _deal(self, parameters: Iterable[torch.Tensor]) -> None:
        """Deal the matrices among these parameters to ranks, mesh by mesh, so that ranks have about the same work.

        A matrix is dealt if ranks share it: a `DTensor` over its own mesh, a plain one with `shard` over all ranks.
        """
        labels = names(self.param_groups)
        name_of = {parameter: name for parameter, name, _ in labels}
        group_of = {parameter: group for parameter, _, group in labels}
        # By name of the mesh's process group: the mesh, and the work of the update of each matrix dealt over it.
        meshes: dict[str, Any] = {}
        works: dict[str, dict[torch.Tensor, float]] = {}
        for parameter in parameters:
            name = name_of[parameter]
            if not self._is_matrix(parameter, name, group_of[parameter]) or self._weights.is_dealt(parameter):
                continue
            is_dtensor = shards.is_dtensor(parameter)
            mesh = self._mesh_of(parameter, name) if is_dtensor else self._weights.rows_over
            if mesh is not None:  # None, too, for a plain one without `shard`
                group_name = mesh.get_group().group_name
                meshes[group_name] = mesh
                works.setdefault(group_name, {})[parameter] = MUON.work(parameter.shape)
        for group_name, mesh in meshes.items():
            self._weights.deal(mesh, works[group_name], name_of)

    def _mesh_of(self, parameter: Any, name: str) -> Any:
        """Return the mesh over which a `DTensor` is dealt; None if each rank has all of it, so that it is not dealt.

        Refuses settings and hooked models that dealt matrices do not go with.
        """
        if parameter.device_mesh.size() == 1 or all(kind.is_replicate() for kind in parameter.placements):
            return None
        self._given_config.check_dealt()
        overlap = self._holder.config.overlap
        combinations.DEALT_FORWARD.check("overlap", overlap)
        if self._overlap.models:  # `overlap_forward` hooks a model with any `overlap`
            combinations.DEALT_FORWARD.refuse("overlap", overlap)
        return shards.dealing_mesh(parameter.device_mesh, name)

    def _kept_as(self, parameter: torch.Tensor, name: str, group: int) -> tuple[int, UpdateRule]:
        """Return the number of a parameter's group in the engine, and its rule.

        The optimizer's group `group` is the engine's groups `2 * group` (matrices) and `2 * group + 1` (all else).
        """
        rule = MUON if self._is_matrix(parameter, name, group) else ADAMW
        return len(KINDS) * group + KINDS.index(rule), rule

    def _is_matrix(self, parameter: torch.Tensor, name: str, group: int) -> bool:
        """Return whether Muon updates a parameter: if it has two dimensions, unless its group or name says otherwise.

        Warn, once, if parameters have no names by which embeddings could be told.
        """
        if parameter.dim() != 2 or not flag(self.param_groups[group], "use_muon"):
            return False
        patterns = self._holder.config.exact_names
        has_made_up_name = name.startswith("param_groups[")
        if patterns and has_made_up_name and not self._has_warned_of_names:
            self._has_warned_of_names = True
            log.warning(
                "parameters have no names, so embeddings cannot be told from other matrices and are updated by Muon, "
                "too; make the optimizer from named_parameters(), or give them in a group with use_muon=False"
            )
        count = sum(len(each["params"]) for each in self.param_groups)
        if self._matched_count != count:  # names are matched once for all parameters: there may be thousands
            all_names = [each for _, each, _ in names(self.param_groups)]
            self._exact_names = frozenset(named_like(all_names, patterns))
            self._matched_count = count
        return name not in self._exact_names

    def _values(self) -> list[Any]:
        """Return the hyperparameters of the engine's groups: for each of the optimizer's, Muon's and then AdamW's."""
        return [values for group in self.param_groups for values in self._values_of(group)]

    def _values_of(self, group: Group) -> tuple[Any, Any]:
        """Return the hyperparameters of a group's matrices, and of its other parameters."""
        has_muon = flag({"use_muon": True, **group}, "use_muon")
        ratio, eps = not_negative({**self.defaults, **group}, "adamw_lr_ratio", "adamw_eps")
        (lr,) = not_negative(group, "lr")
        adamw_lr = lr * ratio if has_muon else lr
        adamw = {**self.defaults, **group, "lr": adamw_lr, "eps": eps}
        return MUON.values(group), ADAMW.values({**adamw, "maximize": False})  # an option that Muon lacks

    def _check_group(self, group: Group) -> None:
        """Check a group's hyperparameters: Muon's, and AdamW's, too."""
        super()._check_group(group)
        _, adamw = self._values_of(group)
        self._check_values(ADAMW, adamw)
        # Betas that no training should begin with: callers ask that of the optimizer's rule alone, which is Muon's.
        ADAMW.check({**self.defaults, **group})

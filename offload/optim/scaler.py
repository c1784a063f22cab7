"""`GradScaler`: torch's, but it leaves the gradients of this package's optimizers as they are."""

from __future__ import annotations

from typing import Any

import torch
from torch.amp.grad_scaler import OptState

from offload.optim.optimizer import OffloadedOptimizer


class GradScaler(torch.amp.GradScaler):
    """`torch.amp.GradScaler` whose `unscale_` and overflow check write no gradient of this package's optimizers.

    Gradients keep their scale: the update divides by it. The overflow check looks at their norm, which is taken as
    they arrive, and anew for gradients that have changed since in any way. So it also works if gradients have left
    the GPU (`keep_grads=False`). For any other optimizer this is torch's own.
    `optimizer.clip_grad_norm_` after `unscale_` clips unscaled gradients. When a step is skipped, gradients that have
    left the GPU are forgotten, as `model.zero_grad()` would not find them.

    Arguments are those of `torch.amp.GradScaler`.
    """

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Check gradients for overflow, and let `step` divide them by the scale; see `torch.amp.GradScaler.unscale_`.

        Raises:
            RuntimeError: It was called already since the last `update`, or after `step`.
        """
        if not self._enabled or not isinstance(optimizer, OffloadedOptimizer):
            super().unscale_(optimizer)
            return
        self._check_scale_growth_tracker("unscale_")
        state = self._per_optimizer_states[id(optimizer)]
        if state["stage"] is OptState.UNSCALED:
            raise RuntimeError("unscale_() has already been called on this optimizer since the last update().")
        if state["stage"] is OptState.STEPPED:
            raise RuntimeError("unscale_() is being called after step().")
        is_finite = optimizer.unscale(self.get_scale())
        # `_check_scale_growth_tracker` has raised where `_scale` is None, which type checkers do not know.
        device = self._scale.device if self._scale is not None else torch.device("cpu")
        # torch reads this: in `step`, to skip, and in `update`, to lower the scale.
        found_inf = torch.full((), float(not is_finite), dtype=torch.float32, device=device)
        state["found_inf_per_device"] = {device: found_inf}
        state["stage"] = OptState.UNSCALED

    def _maybe_opt_step(
        self, optimizer: torch.optim.Optimizer, optimizer_state: dict[str, Any], *args: Any, **kwargs: Any
    ) -> float | None:
        """Step the optimizer unless a gradient overflowed, and tell ours of a skipped step; `step` calls this."""
        returned = super()._maybe_opt_step(optimizer, optimizer_state, *args, **kwargs)
        is_skipped = any(found_inf.item() for found_inf in optimizer_state["found_inf_per_device"].values())
        if is_skipped and isinstance(optimizer, OffloadedOptimizer):
            optimizer.skip_step()
        return returned

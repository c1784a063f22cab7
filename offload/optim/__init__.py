"""`torch.optim.Optimizer` classes whose state is offloaded."""

from offload.optim.adam import Adam, AdamW

__all__ = ["Adam", "AdamW"]

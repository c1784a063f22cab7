"""`torch.optim.Optimizer` classes whose state is offloaded."""

from offload.optim.adam import Adam, AdamW
from offload.optim.scaler import GradScaler

__all__ = ["Adam", "AdamW", "GradScaler"]

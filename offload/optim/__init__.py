"""`torch.optim.Optimizer` classes whose state is offloaded."""

from offload.optim.adam import Adam, AdamW
from offload.optim.scaler import GradScaler
from offload.optim.simple import SGD, Adagrad, Lion

__all__ = ["SGD", "Adagrad", "Adam", "AdamW", "GradScaler", "Lion"]

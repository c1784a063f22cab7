"""`torch.optim.Optimizer` classes whose state is offloaded."""

from offload.optim.adam import Adam, AdamW
from offload.optim.muon import Muon
from offload.optim.scaler import GradScaler
from offload.optim.simple import SGD, Adagrad, Lion
from offload.optim.wrapped import wrap

__all__ = ["SGD", "Adagrad", "Adam", "AdamW", "GradScaler", "Lion", "Muon", "wrap"]

"""Lightning's `Trainer` with optimizer state wherever `offload` keeps it.

    from offload.integrations.lightning import OffloadCallback
    Trainer(callbacks=[OffloadCallback()], gradient_clip_val=1.0, ...).fit(module)

where the module's `configure_optimizers` returns one of our optimizers. The `Trainer`, of `lightning.pytorch` or of
`pytorch_lightning`, then clips in the update itself. Its checkpoints name a folder beside them instead of holding all
state, and it resumes from them exactly.
"""

from offload.integrations.lightning.callback import OffloadCallback

__all__ = ["OffloadCallback"]

"""Lightning's Trainer with the optimizer state on disk: python lightning_fit.py [FOLDER]; again, it resumes."""

import os
import sys
import tempfile

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

import offload
from offload.integrations.lightning import OffloadCallback

folder = sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp()
config = offload.OffloadConfig(
    host_memory=0,
    staging_memory="1MiB",
    paths=[folder],
    subgroup_numel=16384,
    checkpoints_kept=2,  # save_top_k and the next one: their state stays on the path
)


class Module(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(256, 1024), torch.nn.GELU(), torch.nn.Linear(1024, 1))

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        loss = (self.layers(batch[0]) - batch[0][:, :1]).square().mean()
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return offload.AdamW(self.named_parameters(), lr=1e-3, offload=config)


torch.manual_seed(0)
rows = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(640, 256)), batch_size=64)
checkpoints = ModelCheckpoint(f"{folder}/run", filename="last", enable_version_counter=False)
last = f"{folder}/run/last.ckpt" if os.path.exists(f"{folder}/run/last.ckpt") else None
trainer = Trainer(
    max_epochs=4 if last else 2,
    gradient_clip_val=1.0,
    default_root_dir=folder,
    log_every_n_steps=5,
    callbacks=[OffloadCallback(), checkpoints],
)
trainer.fit(Module(), rows, ckpt_path=last)
print(f"{trainer.global_step} steps, loss {trainer.callback_metrics['loss']:.3f}")

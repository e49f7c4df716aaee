"""Lightning's Trainer, with tritonddp as its strategy.

torchrun --standalone --nproc-per-node 2 examples/lightning_trainer.py
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from beside_stock import Trained, run
from tasks import Task
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from train import batch_loss

try:
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.strategies import DDPStrategy
except ImportError:
    from pytorch_lightning import LightningModule, Trainer
    from pytorch_lightning.strategies import DDPStrategy

from tritonddp.integrations.lightning import TritonDDPStrategy


class Classifier(LightningModule):
    """The model of a task as a LightningModule."""

    def __init__(self, task: Task) -> None:
        super().__init__()
        self.model = task.make_model()
        self.lr = task.lr
        self.wrapper: type = nn.Module

    def on_train_start(self) -> None:
        self.wrapper = type(self.trainer.model)

    def training_step(self, batch: Any, _: int) -> Tensor:
        inputs, targets = batch
        return batch_loss(self.model(inputs), targets)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


def train(task: Task, use_tritonddp: bool, steps: int) -> Trained:
    classifier = Classifier(task)
    dataset = TensorDataset(task.inputs, task.targets)
    trainer = Trainer(
        strategy=TritonDDPStrategy() if use_tritonddp else DDPStrategy(),
        accelerator="cpu",
        devices=dist.get_world_size(),
        max_steps=steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(classifier, DataLoader(dataset, task.batch_size, shuffle=True, drop_last=True))
    return Trained(classifier.model, classifier.wrapper)


if __name__ == "__main__":
    sys.exit(run("digits", train))

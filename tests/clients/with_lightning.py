"""Lightning's Trainer, with gradient accumulation, clipping and a metric of torchmetrics."""

from typing import Any

import torch
import torch.nn.functional as F
from client import Client, images
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset


def main() -> None:
    client = Client()
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.strategies import DDPStrategy
    from torchmetrics import Accuracy

    class Classifier(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network = client.network()
            self.accuracy = Accuracy("multiclass", num_classes=10)

        def training_step(self, batch: Any, _: int) -> Tensor:
            inputs, labels = batch
            logits = self.network(inputs)
            self.accuracy(logits, labels)
            self.log("accuracy", self.accuracy, on_epoch=True)
            return F.cross_entropy(logits, labels)

        def on_train_batch_end(self, *_: Any) -> None:
            client.step_ended()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

        def on_train_end(self) -> None:
            wrappers.append(self.trainer.model)

    wrappers: list[Any] = []  # the model itself must not hold what holds it
    strategy = DDPStrategy()
    if client.triton:
        from tritonddp.integrations.lightning import TritonDDPStrategy

        strategy = TritonDDPStrategy()
    trainer = Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=client.world_size,
        max_epochs=1,
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    classifier = Classifier()
    trainer.fit(classifier, DataLoader(TensorDataset(*images(16 * 24)), 8, shuffle=True))
    accuracy = trainer.callback_metrics["accuracy_epoch"].item()
    client.report(wrappers[0], classifier.network, accuracy=accuracy)


if __name__ == "__main__":
    main()

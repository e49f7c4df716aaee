"""Trains some steps with a trainer whose callback logs ``metrics()``: rank 0 prints what it logs.

    torchrun --standalone --nproc-per-node 2 tests/integrations/logging_metrics.py lightning on

Instead of ``on`` say ``in_place`` for a module that is replicated, ``off`` for a wrapper without
metrics, ``stock`` for torch's own.
"""

import json
import logging
import os
import sys
import tempfile
import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

STEPS, EVERY, ACCUMULATED = 12, 4, 2
WITH_METRICS = ("on", "in_place")


def with_lightning(wrapper: str) -> list[Any]:
    try:
        from lightning.pytorch import LightningModule, Trainer
        from lightning.pytorch.loggers import CSVLogger
    except ImportError:
        from pytorch_lightning import LightningModule, Trainer
        from pytorch_lightning.loggers import CSVLogger

    from tritonddp.integrations.lightning import MetricsCallback, TritonDDPStrategy

    logged = []
    options = {"metrics": wrapper in WITH_METRICS, "in_place": wrapper == "in_place"}
    strategy = "ddp" if wrapper == "stock" else TritonDDPStrategy(**options)

    class Recorder(CSVLogger):
        def log_metrics(self, metrics: Any, step: Any = None) -> None:
            logged.append([step, metrics])

    class Model(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 1)

        def training_step(self, batch: Any, _: int) -> Tensor:
            return F.mse_loss(self.layer(batch[0]), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.01)

    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            strategy=strategy,
            accelerator="cpu",
            devices=int(os.environ["WORLD_SIZE"]),
            max_steps=STEPS,
            accumulate_grad_batches=ACCUMULATED,
            logger=Recorder(folder),
            callbacks=[MetricsCallback(every=EVERY)],
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(Model(), DataLoader(TensorDataset(torch.randn(200, 8), torch.randn(200, 1)), 2))
    return logged


def with_transformers(wrapper: str) -> list[Any]:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from tritonddp.integrations.accelerate import use_tritonddp
    from tritonddp.integrations.transformers import MetricsCallback

    logged = []

    class Recorder(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any, **_: Any) -> None:
            logged.append([state.global_step, dict(logs)])

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 1)

        def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
            output = self.layer(x)
            return {"loss": F.mse_loss(output, labels), "logits": output}

    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            Model(),
            TrainingArguments(
                folder,
                use_cpu=True,
                per_device_train_batch_size=2,
                gradient_accumulation_steps=ACCUMULATED,
                max_steps=STEPS,
                logging_steps=EVERY,
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
                dataloader_pin_memory=False,
            ),
            train_dataset=[{"x": torch.randn(8), "labels": torch.randn(1)} for _ in range(200)],
            callbacks=[Recorder()],
        )
        trainer.add_callback(MetricsCallback(trainer, every=EVERY))
        if wrapper != "stock":
            options = {"metrics": True} if wrapper in WITH_METRICS else {}
            use_tritonddp(trainer.accelerator, in_place=wrapper == "in_place", **options)
        trainer.train()
    return logged


def main() -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    trained = {"lightning": with_lightning, "transformers": with_transformers}[sys.argv[1]]
    logged = trained(sys.argv[2])
    ours = [each for each in logged if any(name.startswith("ddp/") for name in each[1])]
    if os.environ["RANK"] != "0":
        assert not ours, ours
        return
    losses = [step for step, found in logged if "loss" in found]
    print(json.dumps({"logged": ours, "losses": losses}))


if __name__ == "__main__":
    main()

"""Trains with a trainer whose callback stops all ranks: one of them gets SIGTERM in a step.

    torchrun --standalone --nproc-per-node 2 tests/integrations/stop_callbacks.py lightning FOLDER

Each rank prints where it stopped, what the second training began with, and the end of that.
"""

import json
import logging
import os
import signal
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

STEPS, ACCUMULATED, STRUCK = 12, 2, 5
INPUTS, TARGETS = torch.randn(2, 200, 4, generator=torch.Generator().manual_seed(0))


def strike(step: int) -> None:
    """In this step of the optimizer the last rank gets SIGTERM."""
    if step == STRUCK and os.environ["RANK"] == str(int(os.environ["WORLD_SIZE"]) - 1):
        os.kill(os.getpid(), signal.SIGTERM)


def with_lightning(folder: Path) -> dict[str, Any]:
    try:
        from lightning.pytorch import LightningModule, Trainer
    except ImportError:
        from pytorch_lightning import LightningModule, Trainer

    from tritonddp.integrations.lightning import StopCallback, TritonDDPStrategy

    begins: list[int] = []

    class Model(LightningModule):
        def __init__(self, strikes: bool) -> None:
            super().__init__()
            self.layer, self.strikes = nn.Linear(4, 4), strikes

        def training_step(self, batch: Any, index: int) -> Tensor:
            begins.append(self.trainer.global_step)
            if self.strikes and index % ACCUMULATED == 0:
                strike(self.trainer.global_step)
            return F.mse_loss(self.layer(batch[0]), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.01)

    path = folder / "preempted.ckpt"

    def train(strikes: bool, ckpt_path: Path | None) -> Any:
        begins.clear()
        trainer = Trainer(
            strategy=TritonDDPStrategy(),
            accelerator="cpu",
            devices=int(os.environ["WORLD_SIZE"]),
            min_epochs=1,
            max_steps=STEPS,
            accumulate_grad_batches=ACCUMULATED,
            logger=False,
            callbacks=[StopCallback(path=str(path))],
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        model = Model(strikes)
        trainer.fit(model, DataLoader(TensorDataset(INPUTS, TARGETS), 2), ckpt_path=ckpt_path)
        return trainer

    stopped = train(True, None)
    assert path.exists(), "it is saved by all ranks together"
    assert stopped.fit_loop.min_epochs == 1, "it is the user's again"
    stopped_at = stopped.global_step
    ended = train(False, path)
    return {"stopped": stopped_at, "resumed": begins[0], "ended": ended.global_step}


def with_transformers(folder: Path) -> dict[str, Any]:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from tritonddp.integrations.accelerate import use_tritonddp
    from tritonddp.integrations.transformers import StopCallback

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
            output = self.layer(x)
            return {"loss": F.mse_loss(output, labels), "logits": output}

    begins: list[int] = []

    class Striking(TrainerCallback):
        def __init__(self, strikes: bool) -> None:
            self.strikes = strikes

        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            begins.append(state.global_step)
            if self.strikes:
                strike(state.global_step)

    def train(strikes: bool, resumes: bool) -> Any:
        begins.clear()
        trainer = Trainer(
            Model(),
            TrainingArguments(
                str(folder),
                use_cpu=True,
                per_device_train_batch_size=2,
                gradient_accumulation_steps=ACCUMULATED,
                max_steps=STEPS,
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
                dataloader_pin_memory=False,
            ),
            train_dataset=[{"x": x, "labels": y} for x, y in zip(INPUTS, TARGETS, strict=True)],
            callbacks=[Striking(strikes)],
        )
        trainer.add_callback(StopCallback(trainer))
        use_tritonddp(trainer.accelerator)
        trainer.train(resume_from_checkpoint=resumes)
        return trainer

    stopped = train(True, False).state.global_step
    ended = train(False, True).state.global_step
    return {"stopped": stopped, "resumed": begins[0], "ended": ended}


def main() -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    before = signal.getsignal(signal.SIGTERM)
    run = {"lightning": with_lightning, "transformers": with_transformers}[sys.argv[1]]
    found = run(Path(sys.argv[2]))
    assert signal.getsignal(signal.SIGTERM) == before
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()

"""Train with a trainer whose callback stops all ranks: the last rank gets SIGTERM in a step.

    torchrun --standalone --nproc-per-node 2 tests/integrations/stop_callbacks.py lightning FOLDER

Each rank prints the step in which it stopped, the first step of the second training, and its last.
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
begins: list[int] = []  # steps of the optimizer, of both trainings


def begin(step: int) -> None:
    """A step of the optimizer begins; the first training is struck in one."""
    is_last_rank = os.environ["RANK"] == str(int(os.environ["WORLD_SIZE"]) - 1)
    if step == STRUCK and STRUCK not in begins and is_last_rank:
        os.kill(os.getpid(), signal.SIGTERM)
    begins.append(step)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)


def with_lightning(folder: Path) -> list[int]:
    try:
        from lightning.pytorch import LightningModule, Trainer
    except ImportError:
        from pytorch_lightning import LightningModule, Trainer

    from tritonddp.integrations.lightning import StopCallback, TritonDDPStrategy

    class Model(LightningModule, Layer):
        def training_step(self, batch: Any, index: int) -> Tensor:
            if index % ACCUMULATED == 0:
                begin(self.trainer.global_step)
            return F.mse_loss(self.layer(batch[0]), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.01)

    path = folder / "preempted.ckpt"
    ends = []
    for ckpt_path in (None, path):
        options = {"accelerator": "cpu", "devices": int(os.environ["WORLD_SIZE"])}
        options |= {"max_steps": STEPS, "accumulate_grad_batches": ACCUMULATED, "min_epochs": 1}
        outputs = ("checkpointing", "progress_bar", "model_summary")
        options |= {"logger": False, **{f"enable_{each}": False for each in outputs}}
        callbacks = [StopCallback(path=str(path))]
        trainer = Trainer(strategy=TritonDDPStrategy(), callbacks=callbacks, **options)
        trainer.fit(Model(), DataLoader(TensorDataset(INPUTS, TARGETS), 2), ckpt_path=ckpt_path)
        ends.append(trainer.global_step)
        assert path.exists(), "all ranks save it together"
        assert trainer.fit_loop.min_epochs == 1, "the setting of the user is restored"
    return ends


def with_transformers(folder: Path) -> list[int]:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from tritonddp.integrations.accelerate import use_tritonddp
    from tritonddp.integrations.transformers import StopCallback

    class Model(Layer):
        def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
            output = self.layer(x)
            return {"loss": F.mse_loss(output, labels), "logits": output}

    class Begin(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            begin(state.global_step)

    ends = []
    for resumes in (False, True):
        options = {"max_steps": STEPS, "gradient_accumulation_steps": ACCUMULATED}
        options |= {"per_device_train_batch_size": 2, "use_cpu": True, "save_strategy": "no"}
        options |= {"report_to": "none", "disable_tqdm": True, "dataloader_pin_memory": False}
        rows = [{"x": x, "labels": y} for x, y in zip(INPUTS, TARGETS, strict=True)]
        arguments = TrainingArguments(str(folder), **options)
        trainer = Trainer(Model(), arguments, train_dataset=rows, callbacks=[Begin()])
        trainer.add_callback(StopCallback(trainer))
        use_tritonddp(trainer.accelerator)
        trainer.train(resume_from_checkpoint=resumes)
        ends.append(trainer.state.global_step)
    return ends


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    before = signal.getsignal(signal.SIGTERM)
    run = {"lightning": with_lightning, "transformers": with_transformers}[sys.argv[1]]
    stopped, ended = run(Path(sys.argv[2]))
    assert signal.getsignal(signal.SIGTERM) == before
    found = {"stopped": stopped, "resumed": begins[stopped], "ended": ended}
    print(json.dumps(found), flush=True)

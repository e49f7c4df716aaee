"""A training loop with Accelerate, which wraps with tritonddp.

    torchrun --standalone --nproc-per-node 2 examples/accelerate_script.py

Gradients of two batches are accumulated for each step of the optimizer.
"""

from __future__ import annotations

import sys

import torch
from accelerate import Accelerator
from beside_stock import Trained, run
from tasks import Task
from torch.utils.data import DataLoader, TensorDataset
from train import batch_loss

from tritonddp.integrations.accelerate import use_tritonddp as wrap_with_tritonddp


def train(task: Task, use_tritonddp: bool, steps: int) -> Trained:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    if use_tritonddp:
        wrap_with_tritonddp(accelerator)
    model = task.make_model()
    dataset = TensorDataset(task.inputs, task.targets)
    model, optimizer, loader = accelerator.prepare(
        model,
        torch.optim.AdamW(model.parameters(), lr=task.lr),
        DataLoader(dataset, task.batch_size, shuffle=True, drop_last=True),
    )
    done = 0
    while done < steps:
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                accelerator.backward(batch_loss(model(inputs), targets))
                optimizer.step()
                optimizer.zero_grad()
            done += accelerator.sync_gradients
            if done == steps:
                break
    return Trained(accelerator.unwrap_model(model), type(model))


if __name__ == "__main__":
    sys.exit(run("digits", train))

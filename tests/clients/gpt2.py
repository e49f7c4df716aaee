"""A small GPT-2 of random weights, trained by Trainer of transformers."""

from typing import Any

import torch
from client import Client
from torch import nn


def network() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(vocab_size=32, n_positions=16, n_embd=32, n_layer=2, n_head=2, use_cache=False)
    )


def trained(client: Client, model: nn.Module, folder: str, **arguments: Any) -> Any:
    """Its trainer, behind the last step."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class AfterEachStep(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            client.step_ended()

    windows = torch.randint(32, (256, 16), generator=torch.Generator().manual_seed(1))
    trainer = Trainer(
        client.altered(model),
        TrainingArguments(
            folder,
            use_cpu=True,
            per_device_train_batch_size=4,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            logging_strategy="no",
            dataloader_pin_memory=False,
            seed=0,
            **arguments,
        ),
        train_dataset=[{"input_ids": window, "labels": window} for window in windows],
        callbacks=[AfterEachStep()],
    )
    if client.triton:
        from tritonddp.integrations.accelerate import use_tritonddp

        use_tritonddp(trainer.accelerator)
    trainer.train()
    return trainer

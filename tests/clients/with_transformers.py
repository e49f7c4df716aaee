"""Trainer of transformers, with a small GPT-2 of random weights, accumulation and checkpointing."""

import tempfile
from typing import Any

import torch
from client import Client


def main() -> None:
    client = Client()
    from transformers import (
        GPT2Config,
        GPT2LMHeadModel,
        Trainer,
        TrainerCallback,
        TrainingArguments,
    )

    class AfterEachStep(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            client.step_ended()

    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=32, n_positions=16, n_embd=32, n_layer=2, n_head=2, use_cache=False)
    )
    client.altered(model)
    windows = torch.randint(32, (256, 16), generator=torch.Generator().manual_seed(1))
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            model,
            TrainingArguments(
                folder,
                use_cpu=True,
                per_device_train_batch_size=4,
                gradient_accumulation_steps=2,
                gradient_checkpointing=True,
                max_steps=12,
                learning_rate=1e-3,
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
                logging_strategy="no",
                dataloader_pin_memory=False,
                seed=0,
            ),
            train_dataset=[{"input_ids": window, "labels": window} for window in windows],
            callbacks=[AfterEachStep()],
        )
        if client.triton:
            from tritonddp.integrations.accelerate import use_tritonddp

            use_tritonddp(trainer.accelerator)
        trainer.train()
    model_wrapped = trainer.model_wrapped
    client.report(model_wrapped, model, find_unused_parameters=model_wrapped.find_unused_parameters)


if __name__ == "__main__":
    main()

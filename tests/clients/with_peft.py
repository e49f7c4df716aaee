"""PEFT: LoRA adapters on a frozen GPT-2 of random weights, trained by Trainer of transformers."""

import tempfile
from pathlib import Path
from typing import Any

import torch
from client import Client


def main() -> None:
    client = Client()
    from peft import LoraConfig, get_peft_model
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

    base = GPT2LMHeadModel(
        GPT2Config(vocab_size=32, n_positions=16, n_embd=32, n_layer=2, n_head=2, use_cache=False)
    )
    model = get_peft_model(base, LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True))
    client.altered(model)
    windows = torch.randint(32, (256, 16), generator=torch.Generator().manual_seed(1))
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            model,
            TrainingArguments(
                folder,
                use_cpu=True,
                per_device_train_batch_size=4,
                max_steps=16,
                learning_rate=1e-2,
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
        trainer.save_model(folder)
        saved = sorted(path.name for path in Path(folder).glob("adapter_*"))
    client.report(trainer.model_wrapped, model, saved=saved)


if __name__ == "__main__":
    main()

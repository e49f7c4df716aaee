"""Trainer of Hugging Face transformers, which wraps with tritonddp through Accelerate.

    torchrun --standalone --nproc-per-node 2 examples/huggingface_trainer.py

The model is a small Llama with random weights on characters; nothing is downloaded.
"""

from __future__ import annotations

import sys
import tempfile
from typing import Any

from beside_stock import Trained, run
from tasks import CONTEXT, VOCABULARY, Task
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from tritonddp.integrations.accelerate import use_tritonddp as wrap_with_tritonddp


class Logits(nn.Module):
    """The model with the interface of the other examples: characters to logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, numbers: Tensor) -> Tensor:
        return self.model(input_ids=numbers).logits


def train(task: Task, use_tritonddp: bool, steps: int) -> Trained:
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            max_position_embeddings=CONTEXT,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            pad_token_id=None,
            bos_token_id=None,
            eos_token_id=None,
        )
    )
    # The model itself shifts the labels by one.
    samples: list[dict[str, Any]] = [
        {"input_ids": window, "labels": window} for window in task.inputs[: 16 * 2 * steps]
    ]
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            model,
            TrainingArguments(
                folder,
                use_cpu=True,
                per_device_train_batch_size=task.batch_size,
                max_steps=steps,
                learning_rate=task.lr,
                lr_scheduler_type="cosine",
                warmup_steps=max(1, steps // 10),
                save_strategy="no",
                logging_strategy="no",
                report_to="none",
                disable_tqdm=True,
                dataloader_pin_memory=False,
            ),
            train_dataset=samples,
        )
        if use_tritonddp:
            wrap_with_tritonddp(trainer.accelerator)
        trainer.train()
    return Trained(Logits(model), type(trainer.model_wrapped))


if __name__ == "__main__":
    sys.exit(run("text", train))

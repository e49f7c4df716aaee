"""TRL: supervised fine-tuning of a GPT-2 of random weights, on conversations of ids."""

import tempfile
from typing import Any

import gpt2
import torch
from client import Client


def main() -> None:
    client = Client()
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import SFTConfig, SFTTrainer

    class AfterEachStep(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            client.step_ended()

    model = client.altered(gpt2.network())
    rows = torch.randint(1, 32, (128, 12), generator=torch.Generator().manual_seed(1)).tolist()
    masks = [[0] * (3 + number % 4) + [1] * (9 - number % 4) for number in range(len(rows))]
    with tempfile.TemporaryDirectory() as folder:
        trainer = SFTTrainer(
            model,
            SFTConfig(
                folder,
                use_cpu=True,
                bf16=False,
                per_device_train_batch_size=4,
                gradient_accumulation_steps=2,
                max_steps=12,
                learning_rate=1e-3,
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
                logging_strategy="no",
                dataloader_pin_memory=False,
            ),
            train_dataset=Dataset.from_dict({"input_ids": rows, "completion_mask": masks}),
            processing_class=tokenizer(),
            callbacks=[AfterEachStep()],
        )
        if client.triton:
            from tritonddp.integrations.accelerate import use_tritonddp

            use_tritonddp(trainer.accelerator)
        trainer.train()
    client.report(trainer.model_wrapped, model)


def tokenizer() -> Any:
    """One that knows numbers, and is never asked: the rows have ids already."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = WordLevel({str(number): number for number in range(32)}, unk_token="0")
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(words), unk_token="0", pad_token="0", eos_token="31"
    )


if __name__ == "__main__":
    main()

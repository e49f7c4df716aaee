"""sentence-transformers: a cached loss, whose backward runs the wrapper again; a static graph."""

import random
import tempfile
from pathlib import Path
from typing import Any

import torch
from client import Client

WORDS = [f"w{number}" for number in range(40)]


def main() -> None:
    client = Client()
    from datasets import Dataset
    from sentence_transformers import (
        SentenceTransformer,
        SentenceTransformerTrainer,
        SentenceTransformerTrainingArguments,
    )
    from sentence_transformers.losses import CachedMultipleNegativesRankingLoss
    from sentence_transformers.models import Pooling, Transformer
    from transformers import TrainerCallback

    class AfterEachStep(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            client.step_ended()

    generator = random.Random(1)
    pairs = [[" ".join(generator.choices(WORDS, k=6)) for _ in range(2)] for _ in range(160)]
    with tempfile.TemporaryDirectory() as folder:
        save_bert(folder)
        torch.manual_seed(0)
        bert = Transformer(folder)
        model = SentenceTransformer(modules=[bert, Pooling(32)], device="cpu")
        client.altered(model)
        trainer = SentenceTransformerTrainer(
            model,
            SentenceTransformerTrainingArguments(
                folder,
                use_cpu=True,
                per_device_train_batch_size=8,
                max_steps=10,
                learning_rate=1e-3,
                ddp_static_graph=True,
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
                logging_strategy="no",
                dataloader_pin_memory=False,
            ),
            train_dataset=Dataset.from_list([{"anchor": a, "positive": b} for a, b in pairs]),
            loss=CachedMultipleNegativesRankingLoss(model, mini_batch_size=2),
            callbacks=[AfterEachStep()],
        )
        if client.triton:
            from tritonddp.integrations.accelerate import use_tritonddp

            use_tritonddp(trainer.accelerator)
        trainer.train()
    client.report(trainer.model_wrapped, model)


def save_bert(folder: str) -> None:
    """A small BERT of random weights, with a tokenizer of few words."""
    from transformers import BertConfig, BertModel, BertTokenizerFast

    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    Path(folder, "vocab.txt").write_text("\n".join([*special, *WORDS]))
    BertTokenizerFast(str(Path(folder, "vocab.txt"))).save_pretrained(folder)
    torch.manual_seed(0)
    BertModel(
        BertConfig(
            vocab_size=len(WORDS) + len(special),
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=64,
            max_position_embeddings=16,
        )
    ).save_pretrained(folder)


if __name__ == "__main__":
    main()

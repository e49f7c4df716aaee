"""Trainer of transformers, with a small GPT-2 of random weights, accumulation and checkpointing."""

import tempfile

import gpt2
from client import Client


def main() -> None:
    client = Client()
    model = gpt2.network()
    with tempfile.TemporaryDirectory() as folder:
        trainer = gpt2.trained(
            client,
            model,
            folder,
            gradient_accumulation_steps=2,
            gradient_checkpointing=True,
            max_steps=12,
            learning_rate=1e-3,
        )
    wrapped = trainer.model_wrapped
    client.report(wrapped, model, find_unused_parameters=wrapped.find_unused_parameters)


if __name__ == "__main__":
    main()

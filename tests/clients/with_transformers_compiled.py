"""Trainer of transformers with ``torch_compile=True``, and a small GPT-2 of random weights."""

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
            torch_compile=True,
            torch_compile_backend="aot_eager",  # inductor takes minutes
            max_steps=12,
            learning_rate=1e-3,
        )
    wrapped = trainer.model_wrapped
    client.report(getattr(wrapped, "_orig_mod", wrapped), model)


if __name__ == "__main__":
    main()

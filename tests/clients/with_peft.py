"""PEFT: LoRA adapters on a frozen GPT-2 of random weights, trained by Trainer of transformers."""

import tempfile
from pathlib import Path

import gpt2
from client import Client


def main() -> None:
    client = Client()
    from peft import LoraConfig, get_peft_model

    adapters = LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True)
    model = get_peft_model(gpt2.network(), adapters)
    with tempfile.TemporaryDirectory() as folder:
        trainer = gpt2.trained(client, model, folder, max_steps=16, learning_rate=1e-2)
        trainer.save_model(folder)
        saved = sorted(path.name for path in Path(folder).glob("adapter_*"))
    client.report(trainer.model_wrapped, model, saved=saved)


if __name__ == "__main__":
    main()

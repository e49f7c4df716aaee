"""Trainers on top of transformers, with models of random weights."""

import random
import tempfile
from pathlib import Path
from typing import Any

import torch
from client import Client
from torch import nn

# The arguments that all trainers share.
ARGUMENTS = {
    "use_cpu": True,
    "per_device_train_batch_size": 4,
    "max_steps": 12,
    "learning_rate": 1e-3,
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
    "logging_strategy": "no",
    "dataloader_pin_memory": False,
}


def train(client: Client, trainer: Any) -> None:
    from transformers import TrainerCallback

    class AfterEachStep(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            client.step_ended()

    trainer.add_callback(AfterEachStep())
    if client.triton:
        from tritonddp.integrations.accelerate import use_tritonddp

        use_tritonddp(trainer.accelerator)
    trainer.train()


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    size = {"n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(vocab_size=32, use_cache=False, **size))


def trained(client: Client, model: nn.Module, **arguments: Any) -> Any:
    """A trainer of a language model, after the last step."""
    from transformers import Trainer, TrainingArguments

    windows = torch.randint(32, (256, 16), generator=torch.Generator().manual_seed(1))
    rows = [{"input_ids": window, "labels": window} for window in windows]
    with tempfile.TemporaryDirectory() as folder:
        options = TrainingArguments(folder, **ARGUMENTS, **arguments)
        trainer = Trainer(model, options, train_dataset=rows)
        train(client, trainer)
    return trainer


def with_transformers(client: Client) -> None:
    """Trainer, with accumulation and activation checkpointing."""
    model = gpt2()
    trainer = trained(client, model, gradient_accumulation_steps=2, gradient_checkpointing=True)
    client.report(trainer.model_wrapped, model)


def with_transformers_compiled(client: Client) -> None:
    """Trainer with ``torch_compile=True``. Its default backend, inductor, takes minutes."""
    model = gpt2()
    trainer = trained(client, model, torch_compile=True, torch_compile_backend="aot_eager")
    wrapped = trainer.model_wrapped
    client.report(getattr(wrapped, "_orig_mod", wrapped), model)


def with_peft(client: Client) -> None:
    """LoRA adapters on a frozen GPT-2."""
    from peft import LoraConfig, get_peft_model

    adapters = LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True)
    model = get_peft_model(gpt2(), adapters)
    trainer = trained(client, model)
    with tempfile.TemporaryDirectory() as folder:
        trainer.save_model(folder)
        saved = sorted(path.name for path in Path(folder).glob("adapter_*"))
    client.report(trainer.model_wrapped, model, saved=saved)


def with_trl(client: Client) -> None:
    """Supervised fine-tuning on conversations of token ids."""
    from datasets import Dataset
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    model = gpt2()
    tokens = torch.randint(1, 32, (128, 12), generator=torch.Generator().manual_seed(1))
    masks = [[0] * (3 + number % 4) + [1] * (9 - number % 4) for number in range(len(tokens))]
    rows = Dataset.from_dict({"input_ids": tokens.tolist(), "completion_mask": masks})
    # The trainer requires a tokenizer, but does not call it: the rows have ids.
    words = Tokenizer(WordLevel({str(number): number for number in range(32)}, unk_token="0"))
    ends = {"unk_token": "0", "pad_token": "0", "eos_token": "31"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, **ends)
    with tempfile.TemporaryDirectory() as folder:
        options = SFTConfig(folder, bf16=False, gradient_accumulation_steps=2, **ARGUMENTS)
        trainer = SFTTrainer(model, options, train_dataset=rows, processing_class=tokenizer)
        train(client, trainer)
    client.report(trainer.model_wrapped, model)


def with_sentence_transformers(client: Client) -> None:
    """A cached loss, whose backward calls the wrapper again, and a static graph."""
    import sentence_transformers as st
    from datasets import Dataset
    from sentence_transformers.losses import CachedMultipleNegativesRankingLoss
    from sentence_transformers.models import Pooling, Transformer

    words = [f"w{number}" for number in range(40)]
    generator = random.Random(1)
    pairs = [[" ".join(generator.choices(words, k=6)) for _ in range(2)] for _ in range(160)]
    with tempfile.TemporaryDirectory() as folder:
        save_bert(folder, words)
        torch.manual_seed(0)
        bert = Transformer(folder)
        model = st.SentenceTransformer(modules=[bert, Pooling(32)], device="cpu")
        trainer = st.SentenceTransformerTrainer(
            model,
            st.SentenceTransformerTrainingArguments(folder, ddp_static_graph=True, **ARGUMENTS),
            train_dataset=Dataset.from_list([{"anchor": a, "positive": b} for a, b in pairs]),
            loss=CachedMultipleNegativesRankingLoss(model, mini_batch_size=2),
        )
        train(client, trainer)
    client.report(trainer.model_wrapped, model)


def save_bert(folder: str, words: list[str]) -> None:
    """A small BERT, with a tokenizer of few words."""
    from transformers import BertConfig, BertModel, BertTokenizerFast

    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]
    Path(folder, "vocab.txt").write_text("\n".join(vocabulary))
    BertTokenizerFast(str(Path(folder, "vocab.txt"))).save_pretrained(folder)
    torch.manual_seed(0)
    size = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    size |= {"intermediate_size": 64, "max_position_embeddings": 16}
    BertModel(BertConfig(vocab_size=len(vocabulary), **size)).save_pretrained(folder)

"""Libraries with their own models: OpenCLIP and torchao."""

import contextlib

import torch
import torch.nn.functional as F
from client import Client
from torch import nn


def with_open_clip(client: Client) -> None:
    """A small CLIP, with the loss of its training script on the features of all ranks."""
    from open_clip import CLIP, ClipLoss
    from open_clip_train.train import unwrap_model

    client.init_process_group()
    size = {"width": 32, "layers": 2}
    module = CLIP(
        16,
        vision_cfg={"image_size": 16, "patch_size": 8, "head_width": 16, **size},
        text_cfg={"context_length": 8, "vocab_size": 64, "heads": 2, **size},
        output_dict=True,
    )
    module.set_grad_checkpointing()
    model = client.wrap(module)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loss_of = ClipLoss(
        local_loss=True, gather_with_grad=True, rank=client.rank, world_size=client.world_size
    )
    generator = torch.Generator().manual_seed(1 + client.rank)
    for _ in range(16):
        images = torch.randn(8, 3, 16, 16, generator=generator)
        texts = torch.randint(1, 64, (8, 8), generator=generator)
        loss = loss_of(**model(images, texts))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            unwrap_model(model).logit_scale.clamp_(0, 4.6)
        client.step_ended()
    client.report(model, module, loss=loss.item())


WIDTH, TOKENS = 256, 32  # more than a first bucket holds, so stock splits graphs


def block() -> nn.Sequential:
    return nn.Sequential(
        nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
    )


def with_torchao(client: Client) -> None:
    """float8 linear layers, tensorwise and rowwise, in a compiled model that accumulates.

    Float8Linear calls torch._scaled_mm, which multiplies float8 tensors on a CPU too.
    """
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    from torchao.optim import AdamW8bit

    client.init_process_group()
    layers = nn.Embedding(TOKENS, WIDTH), block(), block(), nn.Linear(WIDTH, TOKENS)
    module = nn.Sequential(*layers).bfloat16()
    for number, recipe in (1, "tensorwise"), (2, "rowwise"):
        config = Float8LinearConfig.from_recipe_name(recipe)
        convert_to_float8_training(module[number], config=config)
    float8 = [name for name, each in module.named_modules() if "Float8" in type(each).__name__]
    wrapper = client.wrap(module)
    model = torch.compile(wrapper, backend="aot_eager")
    optimizer = AdamW8bit(module.parameters(), lr=1e-3)
    losses = []
    for step in range(12):
        for is_last in (False, True):
            # Each token determines the next one.
            first = torch.arange(client.rank, TOKENS, client.world_size) + step + is_last
            tokens = (first[:, None] + 5 * torch.arange(9)) % TOKENS
            with contextlib.nullcontext() if is_last else wrapper.no_sync():
                logits = model(tokens[:, :-1]).float()
                loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
                (loss / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        client.step_ended()
    assert losses[-1] < losses[0] / 2, losses
    client.report(wrapper, module, losses=losses, float8=float8)

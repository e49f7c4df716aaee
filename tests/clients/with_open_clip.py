"""OpenCLIP: a small CLIP, with the loss of its training script on the features of all ranks."""

import torch
from client import Client

WIDTH = {"width": 32, "layers": 2}


def main() -> None:
    client = Client()
    from open_clip import CLIP, ClipLoss
    from open_clip_train.train import unwrap_model

    client.init_process_group()
    module = client.altered(
        CLIP(
            16,
            vision_cfg={"image_size": 16, "patch_size": 8, "head_width": 16, **WIDTH},
            text_cfg={"context_length": 8, "vocab_size": 64, "heads": 2, **WIDTH},
            output_dict=True,
        )
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
        features = model(images, texts)
        loss = loss_of(**features)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            unwrap_model(model).logit_scale.clamp_(0, 4.6)
        client.step_ended()
    client.report(model, module, loss=loss.item())


if __name__ == "__main__":
    main()

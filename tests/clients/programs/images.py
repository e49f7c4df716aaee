"""Classifiers of images, as in torch's own ImageNet script."""

import io
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from programs.table import Results, program, state


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x + self.layers(x))


def resnet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        Residual(8),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 5),
    ).to(memory_format=torch.channels_last)


def dummy_images(count: int, seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(5, (count,), generator=generator)
    return TensorDataset(torch.randn(count, 3, 8, 8, generator=generator), labels)


@torch.no_grad()
def validate(model: nn.Module, criterion: nn.Module) -> Tensor:
    """Loss and hits, summed over the ranks."""
    model.eval()
    dataset = dummy_images(16, seed=1)
    total = torch.zeros(2)
    for images, target in DataLoader(dataset, 4, sampler=DistributedSampler(dataset)):
        output = model(images)
        hits = (output.argmax(1) == target).sum()
        total += torch.stack([criterion(output, target), hits])
    dist.all_reduce(total)
    return total


def train(DDP: Any, dtype: torch.dtype | None, **options: Any) -> Results:
    torch.manual_seed(dist.get_rank())
    model = DDP(resnet(), **options)
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    optimizer = torch.optim.SGD(
        model.parameters(), 0.1, momentum=0.9, weight_decay=1e-4, nesterov=True
    )
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    dataset = dummy_images(32, seed=0)
    sampler = DistributedSampler(dataset, shuffle=True)
    loader = DataLoader(dataset, batch_size=4, sampler=sampler, drop_last=True)
    best, saved, found = 0.0, io.BytesIO(), []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        model.train()
        for images, target in loader:
            images = images.to(memory_format=torch.channels_last)
            with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
                loss = criterion(model(images), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        scheduler.step()
        total = validate(model, criterion)
        found += [loss.item(), *total.tolist()]
        if total[1] >= best:
            best, saved = total[1].item(), io.BytesIO()
            torch.save({"epoch": epoch, "state_dict": model.state_dict()}, saved)
    saved.seek(0)
    reloaded = torch.load(saved, weights_only=True)["state_dict"]
    return state(model=model) | {"found": found, "best": reloaded, "keys": list(reloaded)}


@program
def images_with_batch_norm(DDP: Any) -> Results:
    return train(DDP, None)


@program
def images_with_batch_norm_in_bfloat16(DDP: Any) -> Results:
    return train(DDP, torch.bfloat16)


@program
def images_whose_buffers_each_rank_keeps(DDP: Any) -> Results:
    return train(DDP, None, broadcast_buffers=False, bucket_cap_mb=0.001)


@program
def images_with_a_scaler_accumulation_and_clipping(DDP: Any) -> Results:
    torch.manual_seed(dist.get_rank())
    model = DDP(resnet(), bucket_cap_mb=0.001)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)
    scales = []
    for step in range(4):
        for micro_step in range(2):
            images, target = torch.randn(4, 3, 8, 8), torch.randint(5, (4,))
            # The backward of the first one is inside, as it has to be.
            with model.no_sync() if micro_step == 0 else torch.enable_grad():
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    loss = nn.functional.cross_entropy(model(images), target) / 2
                # In the third step one rank alone overflows.
                poisoned = step == 2 and dist.get_rank() == 1
                scaler.scale(loss * float("inf") if poisoned else loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        scales.append(scaler.get_scale())
    return state(model=model) | {"scales": scales}

"""A script as people write them for torchrun: DataLoader, BatchNorm, a scheduler.

It knows nothing of tritonddp.
"""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Block(nn.Module):
    def __init__(self, channels_in, channels_out, stride):
        super().__init__()
        self.conv = nn.Conv2d(channels_in, channels_out, 3, stride, 1, bias=False)
        self.norm = nn.BatchNorm2d(channels_out)

    def forward(self, x):
        return F.relu(self.norm(self.conv(x)))


class Net(nn.Module):
    def __init__(self, width, classes):
        super().__init__()
        self.blocks = nn.Sequential(
            Block(3, width, 1), Block(width, 2 * width, 2), Block(2 * width, 4 * width, 2)
        )
        self.head = nn.Linear(4 * width, classes)

    def forward(self, x):
        return self.head(self.blocks(x).mean((2, 3)))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--samples", type=int, default=512)
    parser.add_argument("--workers", type=int, default=0)
    args = parser.parse_args()

    use_cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if use_cuda else "gloo")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if use_cuda else "cpu"
    dataset = TensorDataset(
        torch.randn(args.samples, 3, 16, 16), torch.randint(10, (args.samples,))
    )
    sampler = DistributedSampler(dataset)
    loader = DataLoader(
        dataset, args.batch_size, sampler=sampler, num_workers=args.workers, drop_last=True
    )
    model = DDP(Net(args.width, 10).to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    scheduler = CosineAnnealingLR(optimizer, args.epochs)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images.to(device)), labels.to(device))
            loss.backward()
            optimizer.step()
        scheduler.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {loss.item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""A finished program does not exit: it waits forever after ``destroy_process_group()``.

pytorch/pytorch#182083 (2026): a thread of gloo needs the interpreter lock to release the last
backward's context. The main thread holds this lock while the destructor of DDP's reducer waits for
the thread to end. With torch 2.13, one exit of a few hangs, so this script repeats the exit.
"""

import faulthandler

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

EXITS = 60


def train(store: dist.Store, rank: int, world_size: int) -> None:
    """A whole program, as in PyTorch's DDP tutorial: the model is freed last."""
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(100, 300), nn.Linear(300, 10)))
    for _ in range(8):
        model(torch.randn(8, 100)).sum().backward()
    dist.destroy_process_group()


def main() -> None:
    store, *places = next(dist.rendezvous("env://"))
    for number in range(EXITS):
        faulthandler.dump_traceback_later(15, exit=True)  # a thread that needs no lock
        train(dist.PrefixStore(str(number), store), *places)
    faulthandler.cancel_dump_traceback_later()
    print(f"verdict: right: {EXITS} programs ended", flush=True)


if __name__ == "__main__":
    main()

"""One rank is asked to stop and leaves after its step; the others wait for it in the next step.

Lightning-AI/pytorch-lightning#20806 (2025, still open): SIGTERM of a preemption reaches one rank
first. This rank leaves the loop to save a checkpoint while the others run the next backward.
Lightning's solution, #20825, adds a collective to each step.
"""

import os
import signal
from datetime import timedelta

import torch

# tritonddp: import torch.distributed as dist, tritonddp
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

asked = False


def remember(signum: int, frame: object) -> None:
    global asked
    asked = True


def main() -> None:
    # The default timeout is 30 minutes.
    dist.init_process_group("gloo", timeout=timedelta(seconds=15))
    rank = dist.get_rank()
    # tritonddp: tritonddp.stop_on_signal(signal.SIGTERM)
    signal.signal(signal.SIGTERM, remember)
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(64, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    steps = 0
    while steps < 100:
        if rank == 1 and steps == 5:
            os.kill(os.getpid(), signal.SIGTERM)  # as Slurm, Kubernetes or a spot machine does
        optimizer.zero_grad()
        model(torch.randn(8, 64)).square().mean().backward()
        optimizer.step()
        steps += 1
        # tritonddp: if model.should_stop():
        if asked:
            break
    dist.barrier()  # all ranks save a checkpoint
    low, high = torch.tensor(steps), torch.tensor(steps)
    dist.all_reduce(low, dist.ReduceOp.MIN)
    dist.all_reduce(high, dist.ReduceOp.MAX)
    if rank == 0:
        word = "right" if low == high and steps < 100 else "wrong"
        print(f"verdict: {word}: the ranks save after steps {low} and {high} of 100")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

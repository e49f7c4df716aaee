"""PowerSGD resumes from a checkpoint, and adds its residuals to the wrong parameters.

pytorch/pytorch#75666 (2022): checkpoints need the state of a hook. It can be saved now, by bucket
index. However, buckets follow the order of registration until the first backward.
"""

import copy

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel


class Net(nn.Module):  # registers its layers in a different order than it calls them
    def __init__(self) -> None:
        super().__init__()
        self.head, self.body, self.stem = (nn.Linear(64, 64) for _ in range(3))

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.body(self.stem(images).tanh()).tanh())


def trained(steps: range, saved: list | None) -> list:
    """Return a checkpoint after these steps, starting from the checkpoint ``saved``."""
    torch.manual_seed(0)
    model = DistributedDataParallel(Net())
    state = saved[2] if saved else PowerSGDState(None, start_powerSGD_iter=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if saved:
        # tritonddp: model.module.load_state_dict(saved[0]); model.load_comm_state_dict(saved[3])
        model.module.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
    model.register_comm_hook(state, powerSGD_hook)
    for step in steps:
        torch.manual_seed(2 * step + dist.get_rank())
        optimizer.zero_grad()
        (model(torch.randn(16, 64)) - 1).square().mean().backward()
        optimizer.step()
    # tritonddp: more = [model.comm_state_dict()]
    more: list = []
    return copy.deepcopy([model.module.state_dict(), optimizer.state_dict(), state, *more])


def main() -> None:
    dist.init_process_group("gloo")
    found = trained(range(12), None), trained(range(6, 12), trained(range(6), None))
    whole, resumed = (torch.cat([each.flatten() for each in state[0].values()]) for state in found)
    off = 100 * ((resumed - whole).norm() / whole.norm()).item()
    if dist.get_rank() == 0:
        word = "right" if off == 0 else "wrong"
        print(
            f"verdict: {word}: resumed, the parameters differ from those of one run by {off:.2g} %"
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

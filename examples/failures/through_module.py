"""A trainer bypasses the wrapper through .module, and gradients are silently not averaged.

jingyaogong/minimind#854 (2026): three reinforcement learning trainers run their loss through
`model.module`. Each rank trains on its local data only, and rank 0's model is saved.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    good_action = nn.Linear(16, 8)  # the rewarded action, the same on all ranks
    net = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 8))
    # tritonddp: import tritonddp; model = tritonddp.replicate(net)
    model = DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(1 + dist.get_rank())  # from here on, different prompts on each rank
    for _ in range(100):
        prompts = torch.randn(32, 16)
        policy = model.module if isinstance(model, DistributedDataParallel) else model
        distribution = torch.distributions.Categorical(logits=policy(prompts))
        actions = distribution.sample((8,))
        rewards = (actions == good_action(prompts).argmax(1)).float()
        advantages = rewards - rewards.mean(0)
        loss = -(advantages * distribution.log_prob(actions)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    low, high = (nn.utils.parameters_to_vector(model.parameters()).detach() for _ in range(2))
    size = low.norm().item()
    dist.all_reduce(low, dist.ReduceOp.MIN)
    dist.all_reduce(high, dist.ReduceOp.MAX)
    spread = 100 * (high - low).norm().item() / size
    if dist.get_rank() == 0:
        word = "right" if spread == 0 else "wrong"
        print(f"verdict: {word}: after 100 steps the ranks' parameters differ by {spread:.2g} %")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

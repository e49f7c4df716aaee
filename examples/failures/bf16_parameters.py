"""bf16 parameters lose small optimizer updates, and the loss stops falling.

TensorAuto/OpenTau#181 (2026): the policy is cast to bf16 and passed to AdamW. DeepSpeed keeps fp32
copies of the parameters, and 94 % of the tasks succeeded; DDP keeps none, and 0 % did.
Here, one network learns from another, in fp32 and in bf16, with the same initial state and batches.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

# tritonddp: from torch.optim import AdamW; from tritonddp import ZeroRedundancyOptimizer
from torch.optim import AdamW

STEPS, LR = 600, 1e-4


def train(dtype: torch.dtype) -> list[float]:
    """Return the loss on this rank after each step."""
    torch.manual_seed(0)
    teacher = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 1))
    policy = nn.Sequential(nn.Linear(32, 128), nn.Tanh(), nn.Linear(128, 1)).to(dtype)
    model = DistributedDataParallel(policy)
    params = list(model.parameters())
    # tritonddp: optimizer = ZeroRedundancyOptimizer(params, AdamW, lr=LR, master_weights=True)
    optimizer = AdamW(params, lr=LR)
    torch.manual_seed(1 + dist.get_rank())
    losses = []
    for _ in range(STEPS):
        inputs = torch.randn(64, 32)
        optimizer.zero_grad()
        outputs = model(inputs.to(dtype)).float()
        loss = nn.functional.mse_loss(outputs, teacher(inputs).detach())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    dist.init_process_group("gloo")
    fp32, bf16 = train(torch.float32), train(torch.bfloat16)
    start, *ends = (sum(losses) / 100 for losses in (bf16[:100], fp32[-100:], bf16[-100:]))
    if dist.get_rank() == 0:
        word = "right" if ends[1] < 1.1 * ends[0] else "wrong"
        print(
            f"verdict: {word}: from {start:.3f} the loss falls to {ends[1]:.4f} in bf16, "
            f"to {ends[0]:.4f} in fp32"
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

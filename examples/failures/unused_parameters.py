"""A batch without objects leaves the box head unused on one rank, and training hangs.

ultralytics/ultralytics#24536 (2026): YOLO26 on several GPUs stopped before the first validation.
If no target is assigned, the loss omits the boxes. That rank finishes its epoch; the other ranks
wait for its gradients of the box head, which never arrive. The forward computes the loss.
"""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


class Detector(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(32, 64), nn.ReLU())
        self.boxes, self.scores = nn.Linear(64, 4), nn.Linear(64, 1)

    def forward(self, images: Tensor, has_object: Tensor, targets: Tensor) -> Tensor:
        features = self.backbone(images)
        boxes, scores = self.boxes(features), self.scores(features).squeeze(1)
        loss = nn.functional.binary_cross_entropy_with_logits(scores, has_object.float())
        if has_object.any():
            loss = loss + (boxes - targets)[has_object].abs().mean()
        return loss


def main() -> None:
    # The default timeout is 30 minutes.
    dist.init_process_group("gloo", timeout=timedelta(seconds=15))
    rank = dist.get_rank()
    torch.manual_seed(rank)
    model = DistributedDataParallel(Detector())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    steps = 10
    for step in range(steps):
        images, targets = torch.randn(8, 32), torch.randn(8, 4)
        is_empty = rank == 1 and step == steps - 1  # no image of this batch has an object
        has_object = torch.zeros(8, dtype=torch.bool) if is_empty else torch.rand(8) < 0.7
        optimizer.zero_grad()
        model(images, has_object, targets).backward()
        optimizer.step()
    dist.barrier()  # the epoch has ended: validation
    low, high = (nn.utils.parameters_to_vector(model.parameters()).detach() for _ in range(2))
    dist.all_reduce(low, dist.ReduceOp.MIN)
    dist.all_reduce(high, dist.ReduceOp.MAX)
    spread = (high - low).max().item()
    if rank == 0:
        word = "right" if spread == 0 else "wrong"
        print(f"verdict: {word}: {steps} steps and validation, ranks differ by {spread:.2g}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

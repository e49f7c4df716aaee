"""No flag of DDP supports checkpointed layers with a head that only some batches use.

roboflow/rf-detr#1489 (2026) sets `static_graph=True` after a probe in which the same parameter was
unused in all batches, and expects DDP to fail if that changes. Here it changes: some batches have
masks. `find_unused_parameters` fails with reentrant checkpoints only (pytorch/pytorch#24005).
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

FLAGS: list[dict] = [{}, {"find_unused_parameters": True}, {"static_graph": True}]


class Segmenter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))
        self.boxes, self.masks = nn.Linear(32, 4), nn.Linear(32, 16)

    def forward(self, x: Tensor, has_masks: bool) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=True).relu()
        loss = self.boxes(x).square().mean()
        return loss + self.masks(x).square().mean() if has_masks else loss


def train(flags: dict | None, ranks: slice) -> Tensor:
    """Return the parameters after training on batches of ``ranks``, without DDP if no flags."""
    torch.manual_seed(0)
    net = Segmenter()
    model = net if flags is None else DistributedDataParallel(net, **flags)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(6):
        images = torch.randn(2, 8, 32)[ranks].flatten(0, 1).requires_grad_()
        optimizer.zero_grad()
        model(images, has_masks=step % 3 == 1).backward()
        optimizer.step()
    return nn.utils.parameters_to_vector(net.parameters()).detach()


def main() -> None:
    dist.init_process_group("gloo")
    rank, expected, found = dist.get_rank(), train(None, slice(2)), []
    for flags in FLAGS:
        try:
            off = (train(flags, slice(rank, rank + 1)) - expected).abs().max().item()
            found.append("trains" if off < 1e-6 else f"off one process by {off:.0e}")
        except RuntimeError as error:
            found.append(f"'{str(error)[:45]} ...'")
    if rank == 0:
        word = "right" if set(found) == {"trains"} else "wrong"
        print(f"verdict: {word}: no flag: {found[0]}; unused: {found[1]}; static: {found[2]}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

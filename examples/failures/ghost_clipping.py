"""Ghost clipping runs two backwards for one forward, and stock DDP averages only the first.

meta-pytorch/opacus#734 (2025): ghost clipping computes the norms of the samples in a first
backward, and sums the clipped gradients in a second backward with scaled losses. Stock DDP averages
the first, whose gradients are dropped; the second stays local. (#734 adds no_sync().)
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

CLIP = 0.1


class GhostNorms:  # for a linear layer: |gradient| = |output's gradient| * |(input, 1)|
    def __init__(self, net: nn.Sequential) -> None:
        self.squares: list[Tensor] = []
        for layer in net:
            if isinstance(layer, nn.Linear):
                layer.register_forward_hook(self.forward)

    def forward(self, layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        size = inputs[0].detach().square().sum(1) + 1
        output.register_hook(lambda grad: self.squares.append(grad.square().sum(1) * size))


def losses_of(model: nn.Module, images: Tensor) -> Tensor:
    return (model(images) - images.sum(1, keepdim=True)).square().sum(1)


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    params, batches = list(net.parameters()), torch.randn(2, 16, 8)
    alone = torch.cat([losses_of(net, batch) for batch in batches])
    each = [torch.autograd.grad(loss, params, retain_graph=True) for loss in alone]
    flat = torch.stack([torch.cat([grad.flatten() for grad in grads]) for grads in each])
    expected = (flat * (CLIP / flat.norm(dim=1, keepdim=True)).clamp(max=1)).sum(0) / 2
    norms, model = GhostNorms(net), DistributedDataParallel(net)
    losses = losses_of(model, batches[rank])
    losses.sum().backward(retain_graph=True)
    scales = (CLIP / torch.stack(norms.squares).sum(0).sqrt()).clamp(max=1)
    model.zero_grad()
    (losses * scales).sum().backward()
    found = torch.cat([param.grad.flatten() for param in params if param.grad is not None])
    off = 100 * ((found - expected).norm() / expected.norm()).item()
    if rank == 0:
        word = "right" if off < 0.01 else "wrong"
        print(f"verdict: {word}: the clipped gradient is off by {off:.2g} %")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

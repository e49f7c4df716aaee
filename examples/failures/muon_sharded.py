"""Muon needs whole matrices; with state in flat shards, its updates are silently wrong.

deepspeedai/DeepSpeed#8090, #7807 (2026): ZeRO-1 averages only the part of the gradients that a rank
owns, so a matrix across a boundary is orthogonalized from averaged and local values. Here, such
shards in plain torch are compared with Muon on averages. DeepSpeed#8141 fixes it.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parameters_to_vector, vector_to_parameters

# tritonddp: from torch.optim import Muon; from tritonddp import ZeroRedundancyOptimizer
from torch.optim import Muon


class FlatShards:  # all matrices as one vector; each of two ranks averages and sends one half
    def __init__(self, model: DistributedDataParallel, lr: float) -> None:
        self.params = list(model.parameters())
        self.muon = Muon(self.params, lr=lr)
        done = torch.futures.collect_all([])  # DDP averages nothing; step() does
        model.register_comm_hook(None, lambda _, bucket: done.then(lambda _: bucket.buffer()))

    def step(self) -> None:
        gradients = [param.grad for param in self.params if param.grad is not None]
        halves, rank = list(parameters_to_vector(gradients).chunk(2)), dist.get_rank()
        dist.reduce_scatter(own := torch.empty_like(halves[0]), halves)
        halves[rank].copy_(own / 2)
        vector_to_parameters(torch.cat(halves), gradients)
        self.muon.step()
        own.copy_(parameters_to_vector(self.params).chunk(2)[rank])
        dist.all_gather(halves, own)
        vector_to_parameters(torch.cat(halves), self.params)


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    net, alone = (nn.Sequential(*(nn.Linear(64, 64, False) for _ in range(3))) for _ in range(2))
    alone.load_state_dict(net.state_dict())
    before, batches = parameters_to_vector(net.parameters()), torch.randn(2, 16, 64)
    (torch.stack([alone(batch).square().mean() for batch in batches]).sum() / 2).backward()
    Muon(alone.parameters(), lr=0.02).step()
    model = DistributedDataParallel(net)
    # tritonddp: optimizer = ZeroRedundancyOptimizer(model.parameters(), Muon, lr=0.02)
    optimizer = FlatShards(model, lr=0.02)
    model(batches[dist.get_rank()]).square().mean().backward()
    optimizer.step()
    found, true = (parameters_to_vector(each.parameters()) - before for each in (net, alone))
    off = (100 * (found - true).view(3, -1).norm(dim=1) / true.view(3, -1).norm(dim=1)).tolist()
    if dist.get_rank() == 0:
        word = "right" if max(off) < 0.1 else "wrong"
        each = ", ".join(f"{share:.2g} %" for share in off)
        print(f"verdict: {word}: steps of three matrices differ from Muon's by {each}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

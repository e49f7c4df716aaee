"""Each rank averages over its local tokens, so tokens in short batches count more.

modelscope/ms-swift#10165, #10076 (2026), vllm-project/speculators#942: the loss is a mean over the
tokens of a microbatch, and these means are averaged over microbatches and ranks. Here, the gradient
is compared with the gradient of the mean over all tokens, which each rank computes locally.
"""

from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

VOCABULARY, LENGTH = 64, 100
# Number of answer tokens in each microbatch, which the loss covers, by rank.
ANSWERS = [[90, 60], [5, 20]]


def microbatch(rank: int, number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(10 * rank + number)
    tokens = torch.randint(VOCABULARY, (2, LENGTH), generator=generator)
    tokens[1, : LENGTH - ANSWERS[rank][number]] = -100  # the prompt is masked
    return tokens[0], tokens[1]


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(VOCABULARY, 32), nn.GELU(), nn.Linear(32, VOCABULARY))
    everything = [microbatch(rank, number) for rank in range(2) for number in range(2)]
    inputs, targets = (torch.cat(parts) for parts in zip(*everything, strict=True))
    params = list(net.parameters())
    true = torch.autograd.grad(nn.functional.cross_entropy(net(inputs), targets), params)
    model = DistributedDataParallel(net)
    for number in range(2):
        inputs, targets = microbatch(dist.get_rank(), number)
        n = int((targets != -100).sum())
        with nullcontext() if number == 1 else model.no_sync():
            loss = nn.functional.cross_entropy(model(inputs), targets, reduction="sum") / n
            # tritonddp: with model.weighted(n): loss.backward()
            (loss / 2).backward()
    expected = torch.cat([each.flatten() for each in true])
    found = torch.cat([param.grad.flatten() for param in params if param.grad is not None])
    off = ((found - expected).norm() / expected.norm()).item()
    if dist.get_rank() == 0:
        word = "right" if off < 1e-5 else "wrong"
        print(f"verdict: {word}: the gradient differs from the token mean's by {100 * off:.3g} %")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

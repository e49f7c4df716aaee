"""DDP cannot wrap a module with a frozen weight that is a quantized tensor subclass.

modelscope/DiffSynth-Studio#1674 (2026): a LoRA on quantized layers trains on one GPU. On two GPUs,
DDP broadcasts the frozen weights as if they were plain tensors, and copies the result into them.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map_only


class Int8(Tensor):
    @staticmethod
    def __new__(cls, bits: Tensor, scale: Tensor) -> Any:
        return Tensor._make_wrapper_subclass(cls, bits.shape, dtype=scale.dtype)

    def __init__(self, bits: Tensor, scale: Tensor) -> None:
        self.bits, self.scale = bits, scale

    def __tensor_flatten__(self) -> Any:
        return ["bits", "scale"], None

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore
        if func is torch.ops.aten.detach.default:
            return cls(args[0].bits, args[0].scale)
        if func is torch.ops.aten.copy_.default:
            raise TypeError(f"Cannot copy {type(args[1]).__name__} to {type(args[0]).__name__}")
        return func(*tree_map_only(cls, lambda each: each.bits * each.scale, args), **kwargs or {})


class Lora(nn.Linear):
    def __init__(self) -> None:
        super().__init__(32, 32)
        bits = torch.randint(-99, 99, (32, 32), dtype=torch.int8)
        self.weight = nn.Parameter(Int8(bits, torch.full((32, 1), 0.01)), requires_grad=False)
        self.adapter = nn.Sequential(nn.Linear(32, 4), nn.Linear(4, 32))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.adapter(x)


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())  # rank 0 has the weights
    model = DistributedDataParallel(Lora())
    model(torch.ones(8, 32)).square().mean().backward()
    every = [torch.empty_like(model.module.weight.bits) for _ in range(2)]
    dist.all_gather(every, model.module.weight.bits)
    word = "right" if torch.equal(*every) else "wrong"
    if dist.get_rank() == 0:
        print(f"verdict: {word}: it trains, and the ranks' weights are those of rank 0")


if __name__ == "__main__":
    main()

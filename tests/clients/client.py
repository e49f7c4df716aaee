"""The parts of all trainings: the class that wraps, the same seed, and the report at the end."""

import hashlib
import json
import logging
import os
import random
import sys
import warnings
from collections.abc import Iterable, Iterator
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

_NAME = "DistributedDataParallel"
_WARM_UP = 5  # steps


class Client:
    """One run: its arguments, its steps, its report.

    Attributes:
        in_place: ``tritonddp.replicate`` is called instead of a wrapper.
        triton: tritonddp wraps or replicates; otherwise torch's class wraps.
    """

    def __init__(self, ddp: str) -> None:
        self.in_place, self.triton = ddp == "in_place", ddp != "stock"
        self.rank, self.world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        # torch's class, even if its names are replaced later.
        self._stock = nn.parallel.DistributedDataParallel
        self._collectives: list[int] = []
        torch.set_num_threads(1)
        torch.manual_seed(0)
        random.seed(0)  # fastai shuffles with it
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)

    def replace_stock(self) -> None:
        """Call this before the import of a library that imports torch's class by name."""
        if self.triton:
            import tritonddp

            with warnings.catch_warnings():
                warnings.simplefilter("error")  # a module has imported torch's class before
                tritonddp.replace_stock()

    def wrap(self, module: nn.Module, **options: Any) -> nn.Module:
        """For libraries whose users wrap the model themselves."""
        if not self.triton:
            return self._stock(module, **options)
        import tritonddp

        make = tritonddp.replicate if self.in_place else tritonddp.DistributedDataParallel
        return make(module, **options)

    def init_process_group(self) -> None:
        """For libraries that leave it to their users."""
        dist.init_process_group("gloo", timeout=timedelta(seconds=60))

    def network(self) -> nn.Module:
        """A small classifier of images of one channel, eight pixels wide."""
        return nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Conv2d(8, 8, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(128, 10),
        )

    def batches(self, size: int = 16) -> Iterator[tuple[Tensor, Tensor]]:
        """The part of this rank of 16 batches; a step ends when the next batch is requested."""
        for inputs, labels in DataLoader(images(16 * size), size):
            yield inputs[self.rank :: self.world_size], labels[self.rank :: self.world_size]
            self.step_ended()

    def step_ended(self, *_: Any, **__: Any) -> None:
        """Call this after each step of the optimizer; it can be the callback of a library."""
        self._collectives.append(_collectives())

    def report(self, model: nn.Module, module: nn.Module, **found: Any) -> NoReturn:
        """Compare the ranks, print the result of the training, and end the process.

        Args:
            model: as the library holds it during the training: the wrapper, or the module itself.
            module: the underlying module, at the end of the training.
            found: other results, which must be the same with stock DDP and tritonddp.
        """
        bits: list[Any] = [None] * self.world_size
        dist.all_gather_object(bits, (_bits(module.parameters()), _bits(module.buffers())))
        counts = [b - a for a, b in zip(self._collectives, self._collectives[1:], strict=False)]
        wrapper = model
        if self.in_place:
            import tritonddp
            from tritonddp.in_place import ReplicatedModule

            wrapper = tritonddp.ddp(model)
            found["in place"] = isinstance(wrapper.module, ReplicatedModule)
        # The last class of that name: those of torchft and MMEngine are subclasses.
        *_, base = (kind for kind in type(wrapper).__mro__ if kind.__name__ == _NAME)
        found |= {
            "wrapped by": base.__module__.partition(".")[0],
            "find_unused_parameters": wrapper.find_unused_parameters,
            "is stock's": isinstance(wrapper, self._stock),
            "bits": bits,  # of parameters and buffers, rank by rank
            "same on all ranks": len({parameters for parameters, _ in bits}) == 1,
            "collectives": counts[_WARM_UP:],
        }
        if self.rank == 0:
            print(json.dumps(found), flush=True)
        dist.barrier()
        # Skip the interpreter's exit: a thread of gloo that still holds its last tensors then waits
        # for itself or aborts the process, with stock DDP too.
        sys.stdout.flush()
        os._exit(0)


def images(count: int) -> TensorDataset:
    """Random images with labels, the same on all ranks."""
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(count, 1, 8, 8, generator=generator), torch.arange(count) % 10)


def _bits(tensors: Iterable[Tensor]) -> str:
    """A hash of dtypes, shapes and contents."""
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(f"{tensor.dtype} {tuple(tensor.shape)} ".encode())
        flat = tensor.detach().cpu().contiguous().view(-1)
        found.update(flat.view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


def _collectives() -> int:
    """The number of collectives of the default group on this rank."""
    group: Any = dist.group.WORLD
    issued: int = group._get_sequence_number_for_group()
    # Each exchange through memory replaces a collective.
    groups = sys.modules.get("tritonddp.coordination.group")
    sums = groups and getattr(groups.Group(group).peers, "background", None)
    return issued if sums is None else issued + sums.launched

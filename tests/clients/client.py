"""What the scripts of this folder share: which class wraps, the same seed, and what is reported.

Each script trains a small model with one library, as its users do:

    torchrun --standalone --nproc-per-node 2 tests/clients/with_ignite.py --ddp triton

Rank 0 prints a line of JSON at the end. ``--ddp stock`` must print the same ``bits``, and so must
``--ddp in_place``, for which no class wraps: ``tritonddp.replicate`` is called here.
"""

import argparse
import hashlib
import json
import logging
import os
import random
import statistics
import sys
import time
import warnings
from collections.abc import Iterable
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

_NAME = "DistributedDataParallel"
_WARM_UP = 5  # steps


class Client:
    """One run of a script: its arguments, its steps, its report.

    Attributes:
        triton: whether tritonddp is to wrap or to replicate, and not torch's own class to wrap.
        in_place: whether it is to replicate.
    """

    def __init__(self) -> None:
        if "RANK" not in os.environ:
            sys.exit(f"start it with torchrun --standalone --nproc-per-node 2 {sys.argv[0]}")
        parser = argparse.ArgumentParser()
        parser.add_argument("--ddp", choices=["stock", "triton", "in_place"], required=True)
        parser.add_argument("--unused", action="store_true", help="give the model a parameter more")
        arguments = parser.parse_args()
        self.triton, self._unused = arguments.ddp != "stock", arguments.unused
        self.in_place = arguments.ddp == "in_place"
        self.rank, self.world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        # What torch itself calls so, whatever its names stand for later.
        self._stock = nn.parallel.DistributedDataParallel
        self._ends: list[float] = []
        self._collectives: list[int] = []
        torch.set_num_threads(1)
        torch.manual_seed(0)
        random.seed(0)  # what fastai shuffles with
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)

    def replace_stock(self) -> None:
        """Before the library is imported, if it takes torch's class by its name."""
        if self.triton:
            import tritonddp

            with warnings.catch_warnings():
                warnings.simplefilter("error")  # somebody has imported torch's class before
                tritonddp.replace_stock()

    def wrap(self, module: nn.Module, **options: Any) -> nn.Module:
        """What users of a library do themselves, if that does not wrap."""
        if self.in_place:
            import tritonddp

            return tritonddp.replicate(module, **options)
        if self.triton:
            from tritonddp import DistributedDataParallel

            return DistributedDataParallel(module, **options)
        return self._stock(module, **options)

    def init_process_group(self) -> None:
        """Where the library leaves it to its users."""
        dist.init_process_group("gloo", timeout=timedelta(seconds=60))

    def network(self) -> nn.Module:
        """A small classifier of images of one channel, eight pixels wide."""
        return self.altered(
            nn.Sequential(
                nn.Conv2d(1, 8, 3, padding=1),
                nn.BatchNorm2d(8),
                nn.ReLU(),
                nn.Conv2d(8, 8, 3, stride=2, padding=1),
                nn.ReLU(),
                nn.Flatten(),
                nn.Linear(128, 10),
            )
        )

    def altered(self, model: nn.Module) -> nn.Module:
        """With ``--unused``, it gets a parameter that nothing uses."""
        if self._unused:
            model.register_parameter("unused", nn.Parameter(torch.zeros(3)))
        return model

    def step_ended(self) -> None:
        """To be called after each step of the optimizer, or of its attempts."""
        self._ends.append(time.perf_counter())
        self._collectives.append(_collectives())

    def report(self, model: nn.Module, module: nn.Module, **found: Any) -> NoReturn:
        """Compare the ranks, print what came of the training, and end the process.

        Args:
            model: as the library holds it while it trains: the wrapper, or the module itself.
            module: the one inside, at the end of the training.
            found: what else the test looks at.
        """
        bits: list[Any] = [None] * self.world_size
        dist.all_gather_object(bits, (_bits(module.parameters()), _bits(module.buffers())))
        times = [1e3 * (b - a) for a, b in zip(self._ends, self._ends[1:], strict=False)]
        counts = [b - a for a, b in zip(self._collectives, self._collectives[1:], strict=False)]
        wrapper = model
        if self.in_place:
            import tritonddp
            from tritonddp.in_place import ReplicatedModule

            wrapper = tritonddp.ddp(model)
            found["in place"] = isinstance(wrapper.module, ReplicatedModule)
        # The last one of that name: torchft's and MMEngine's are subclasses.
        *_, base = (kind for kind in type(wrapper).__mro__ if kind.__name__ == _NAME)
        found |= {
            "model": _name(type(model)),
            "wrapped by": base.__module__.partition(".")[0],
            "is stock's": isinstance(wrapper, self._stock),
            "bits": bits,  # of parameters and buffers, rank by rank
            "same on all ranks": len({parameters for parameters, _ in bits}) == 1,
            "steps": len(self._ends),
            "ms": round(statistics.median(times[_WARM_UP:]), 2),
            "collectives": counts[_WARM_UP:],
        }
        if self.rank == 0:
            print(json.dumps(found), flush=True)
        dist.barrier()
        # Not the interpreter's way out: a thread of gloo that has not let go of its last tensors
        # by then waits for itself or aborts the process, with stock too.
        sys.stdout.flush()
        os._exit(0)


def images(count: int) -> tuple[Tensor, Tensor]:
    """Random ones with labels, the same on all ranks."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(count, 1, 8, 8, generator=generator), torch.arange(count) % 10


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _bits(tensors: Iterable[Tensor]) -> str:
    """A hash of dtypes, shapes and contents."""
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(f"{tensor.dtype} {tuple(tensor.shape)} ".encode())
        flat = tensor.detach().cpu().contiguous().view(-1)
        found.update(flat.view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


def _collectives() -> int:
    """How many the default group has run on this rank, whoever called them."""
    group: Any = dist.group.WORLD
    issued: int = group._get_sequence_number_for_group()
    # Exchanges through memory take the place of as many.
    groups = sys.modules.get("tritonddp.coordination.group")
    sums = groups and getattr(groups.Group(group).peers, "background", None)
    return issued if sums is None else issued + sums.launched

"""Planted faults, one at a time: what a comparison of programs has to find.

Each names the function of the package that it replaces, and is what is called in its place, with
the original in front of its arguments. A name that is not there any more is an error when the fault
is planted.
"""

import contextlib
import pkgutil
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

# What is planted: the module or class, its attribute, and what is called in the place of that.
MUTATIONS: dict[str, tuple[str, str, Callable[..., Any]]] = {}
# Those that programs with a sharded optimizer find.
OF_SHARDED = {"means_that_count_on_one_rank"}

_kept: dict[Any, Tensor] = {}  # what faults keep from call to call


def mutation(owner: str, attribute: str) -> Callable[..., Any]:
    """Decorator of what is called in the place of an attribute of ``room.module:Class``."""

    def note(fault: Callable[..., Any]) -> Callable[..., Any]:
        MUTATIONS[fault.__name__] = owner, attribute, fault
        return fault

    return note


@contextlib.contextmanager
def planted(mutation: str) -> Iterator[None]:
    """Context: the fault is there.

    Raises:
        AttributeError, ImportError: the package has nothing of this name.
    """
    name, attribute, fault = MUTATIONS[mutation]
    _kept.clear()
    owner = pkgutil.resolve_name(f"tritonddp.{name}")
    original = getattr(owner, attribute)
    with patch.object(owner, attribute, lambda *args, **named: fault(original, *args, **named)):
        yield


def is_broken(what: str) -> bool:
    """Whether a traceback says that a fault does not fit the package: it ends in this file."""
    *_, last = what.partition("\nTo play it again")[0].rpartition('  File "')
    return "mutations.py" in last and "Error" in last


@mutation("comm.reduction:Reduction", "_make_header")
def no_average(original: Any, self: Any, *args: Any) -> None:
    """Gradients are summed."""
    original(self, *args)
    self.scale = 1.0


class _Done:
    def wait(self) -> None:
        pass


@mutation("comm.all_reduce:AllReduce", "launch")
def forgotten_bucket(original: Any, self: Any, bucket: Any, *args: Any) -> Any:
    """The second bucket stays at home."""
    return _Done() if bucket.index == 1 else original(self, bucket, *args)


@mutation("comm.all_reduce:AllReduce", "launch")
def stale_gradient(original: Any, self: Any, bucket: Any, *args: Any) -> Any:
    """What a bucket's first parameter sends is its gradient of the reduction before."""
    view = bucket.flat.views[0]
    before, _kept[id(view)] = _kept.get(id(view)), view.clone()
    if before is not None and before.shape == view.shape:
        view.copy_(before)
    return original(self, bucket, *args)


@mutation("buckets.bucket", "gradient_strides")
def wrong_strides(original: Any, param: Tensor) -> tuple[int, ...]:
    """Gradients lie row by row in their bucket, whatever their parameters do."""
    return torch.empty(param.shape, device="meta").stride()


@mutation("wrapper:DistributedDataParallel", "no_sync")
def ignored_no_sync(original: Any, *args: Any) -> Any:
    """``no_sync`` does nothing."""
    return contextlib.nullcontext()


@mutation("wrapper:DistributedDataParallel", "_sync_buffers")
def skipped_buffers(original: Any, self: Any) -> None:
    """Forwards broadcast no buffers."""


@mutation("reducer.earlier_means:EarlierMeans", "set_aside")
def means_that_count_on_one_rank(original: Any, self: Any, *args: Any) -> None:
    """A mean that is in ``.grad`` already is reduced as this rank's gradient."""

"""Planted faults, one at a time, which the comparison of programs must find.

A fault is called instead of a function of the package, with the original as the first argument. It
is an error if the package has no function of this name.
"""

import contextlib
import pkgutil
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

# By name: the module or class, its attribute, and the fault that replaces it.
MUTATIONS: dict[str, tuple[str, str, Callable[..., Any]]] = {}
# The faults that programs with a sharded optimizer find.
OF_SHARDED = {"means_that_count_on_one_rank"}

_kept: dict[Any, Tensor] = {}  # what faults keep between calls


def mutation(owner: str, attribute: str) -> Callable[..., Any]:
    """Decorator of a function that replaces an attribute of ``room.module:Class``."""

    def note(fault: Callable[..., Any]) -> Callable[..., Any]:
        MUTATIONS[fault.__name__] = owner, attribute, fault
        return fault

    return note


@contextlib.contextmanager
def planted(mutation: str) -> Iterator[None]:
    """Context: the fault is planted.

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
    """Return True if a traceback ends in this file: the fault does not fit the package."""
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
    """The second bucket is not sent."""
    return _Done() if bucket.index == 1 else original(self, bucket, *args)


@mutation("comm.all_reduce:AllReduce", "launch")
def stale_gradient(original: Any, self: Any, bucket: Any, *args: Any) -> Any:
    """The first parameter of a bucket sends its gradient of the previous reduction."""
    view = bucket.flat.views[0]
    before, _kept[id(view)] = _kept.get(id(view)), view.clone()
    if before is not None and before.shape == view.shape:
        view.copy_(before)
    return original(self, bucket, *args)


@mutation("buckets.bucket", "gradient_strides")
def wrong_strides(original: Any, param: Tensor) -> tuple[int, ...]:
    """Gradients are row-major in their bucket, no matter how their parameters are stored."""
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
    """A mean in ``.grad`` is reduced as this rank's gradient."""

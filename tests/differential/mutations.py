"""Planted faults, one at a time: what a comparison of scenarios has to find.

Each names the functions of the package that it replaces, and is what is called in their place, with
the original in front of its arguments. A name that is not there any more is an error when the fault
is planted.
"""

import contextlib
import importlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

# What is planted: the names, as "room.module:Class.method", and what is called in their place.
MUTATIONS: dict[str, tuple[tuple[str, ...], Callable[..., Any]]] = {}
# Those that scenarios with a sharded optimizer find.
OF_SHARDED = {"means_that_count_on_one_rank"}

_WRAPPER = "wrapper:DistributedDataParallel"


def mutation(*names: str) -> Callable[..., Any]:
    """Decorator of what is called in the place of each of the names."""

    def note(fault: Callable[..., Any]) -> Callable[..., Any]:
        MUTATIONS[fault.__name__] = names, fault
        return fault

    return note


@contextlib.contextmanager
def planted(mutation: str) -> Iterator[None]:
    """Context: the fault is there.

    Raises:
        AttributeError, ImportError: the package has nothing of this name.
    """
    names, fault = MUTATIONS[mutation]
    _kept.clear()
    with contextlib.ExitStack() as stack:
        for name in names:
            owner, attribute = _find(name)
            call = _in_place_of(getattr(owner, attribute), fault)
            stack.enter_context(patch.object(owner, attribute, call))
        yield


def _in_place_of(original: Any, fault: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: fault(original, *args, **kwargs)


# What faults keep from call to call.
_kept: dict[Any, Tensor] = {}


def _find(name: str) -> tuple[Any, str]:
    module, _, path = name.partition(":")
    *owners, attribute = path.split(".")
    owner = importlib.import_module(f"tritonddp.{module}")
    for each in owners:
        owner = getattr(owner, each)
    if not hasattr(owner, attribute):
        raise AttributeError(f"a planted fault is for {name}, which tritonddp does not define")
    return owner, attribute


def is_broken(what: str) -> bool:
    """Whether a traceback says that a fault does not fit the package: it ends in this file."""
    *_, last = what.partition("\nTo play it again")[0].rpartition('  File "')
    return "mutations.py" in last and "Error" in last


@mutation("comm.reduction:Reduction._make_header")
def no_average(original: Any, self: Any, *args: Any) -> None:
    """Gradients are summed."""
    original(self, *args)
    self.scale = 1.0


class _Done:
    def wait(self) -> None:
        pass


@mutation("comm.all_reduce:AllReduce.launch")
def forgotten_bucket(original: Any, self: Any, bucket: Any, *args: Any) -> Any:
    """The second bucket stays at home."""
    return _Done() if bucket.index == 1 else original(self, bucket, *args)


@mutation("comm.all_reduce:AllReduce.launch")
def stale_gradient(original: Any, self: Any, bucket: Any, *args: Any) -> Any:
    """What a bucket's first parameter sends is its gradient of the reduction before."""
    view = bucket.flat.views[0]
    before, _kept[id(view)] = _kept.get(id(view)), view.clone()
    if before is not None and before.shape == view.shape:
        view.copy_(before)
    return original(self, bucket, *args)


@mutation("buckets.bucket:gradient_strides")
def wrong_strides(original: Any, param: Tensor) -> tuple[int, ...]:
    """Gradients lie row by row in their bucket, whatever their parameters do."""
    return torch.empty(param.shape, device="meta").stride()


@mutation(f"{_WRAPPER}.no_sync")
def ignored_no_sync(original: Any, *args: Any) -> Any:
    """``no_sync`` does nothing."""
    return contextlib.nullcontext()


@mutation(f"{_WRAPPER}._sync_buffers")
def skipped_buffers(original: Any, self: Any) -> None:
    """Forwards broadcast no buffers."""


@mutation("reducer.earlier_means:EarlierMeans.set_aside")
def means_that_count_on_one_rank(original: Any, self: Any, *args: Any) -> None:
    """A mean that is in ``.grad`` already is reduced as this rank's gradient."""

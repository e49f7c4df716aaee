"""Communication hooks as users give them: stock's checks, in stock's words."""

from __future__ import annotations

import inspect
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist

from tritonddp.comm.grad_bucket import GradBucket


def check_hook(hook: Any) -> None:
    """Stock's conditions; ``DistributedDataParallel.register_comm_hook`` tells what it raises."""
    if not callable(hook):
        raise TypeError(f"Communication hook must be callable. Got {hook!r}.")
    signature = inspect.Signature()  # of what is written in C, and has none
    with suppress(ValueError, TypeError):
        signature = inspect.signature(hook)
    with suppress(Exception):  # an annotation that only type checkers can read
        signature = inspect.signature(hook, eval_str=True)
    bucket = signature.parameters.get("bucket")
    if bucket is not None and bucket.annotation not in (bucket.empty, dist.GradBucket, GradBucket):
        raise ValueError(
            "Communication hook: bucket annotation should be dist.GradBucket. It is "
            f"{bucket.annotation}."
        )
    returned = signature.return_annotation
    if returned not in (inspect.Signature.empty, torch.futures.Future[torch.Tensor]):
        raise ValueError(
            "Communication hook: return annotation should be torch.futures.Future[torch.Tensor]. "
            f"It is {returned}."
        )
    if getattr(hook, "__name__", "") in ("bf16_compress_hook", "bf16_compress_wrapper_hook"):
        nccl = dist.is_nccl_available() and torch.cuda.is_available()
        if not (nccl and torch.cuda.nccl.version() >= (2, 10)):
            raise TypeError(
                "BF16 all reduce communication hook required CUDA 11+ and NCCL 2.10+ or XPU and "
                "XCCL"
            )


def builtin_hook(comm_hook_type: Any) -> Any:
    """The hook in Python that does what one of torch's in C++ does."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    if not isinstance(comm_hook_type, dist.BuiltinCommHookType):
        raise TypeError(
            "comm_hook_type should be dist.BuiltinCommHookType.ALLREDUCE or FP16_COMPRESS, got "
            f"{comm_hook_type!r}"
        )
    if comm_hook_type == dist.BuiltinCommHookType.ALLREDUCE:
        return default_hooks.allreduce_hook
    return default_hooks.fp16_compress_hook

"""How a user registers communication hooks, with stock's checks and stock's words."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tritonddp._torch import overlapped_optimizer
from tritonddp.comm.grad_bucket import GradBucket
from tritonddp.diagnostics.logging_data import Logger
from tritonddp.reducer.reducer import Reducer


class TakesHooks(nn.Module):
    """The methods of a wrapped module that register hooks."""

    reducer: Reducer
    logger: Logger
    process_group: dist.ProcessGroup
    _builtin_hook: dist.BuiltinCommHookType | None = None

    def register_comm_hook(self, state: Any, hook: Callable[..., Any]) -> None:
        """Let ``hook`` decide how gradients are reduced, bucket by bucket.

        The hook replaces the mean over ranks: whatever it returns ends up in ``.grad``. All hooks
        of ``torch.distributed.algorithms.ddp_comm_hooks`` work. It is called once for each bucket
        of a backward, in the same order on every rank. To be registered on all ranks between the
        same two steps, and once for each wrapped module. :meth:`reduce_gradients` does without it.

        Args:
            state: handed to each call.
            hook: ``hook(state, bucket)``. ``bucket`` has the methods of
                ``torch.distributed.GradBucket`` (see :mod:`tritonddp.comm.grad_bucket`). Its
                gradients are not divided by the number of ranks: that is up to the hook. It returns
                a ``torch.futures.Future`` of one tensor like ``bucket.buffer()``.

        Raises:
            RuntimeError: a hook is registered already, or a backward is under way; and in
                ``backward()``, naming rank, step and bucket, if the hook fails.
            TypeError: ``hook`` is not callable, or is one for bfloat16 where torch allows none.
            ValueError: its annotations are of other types.

        Example::

            state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=10)
            model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        """
        self.logger.noting(check_hook, hook)
        self.reducer.register_comm_hook(state, hook)
        self._comm_hooks.append((hook, state))

    def _register_builtin_comm_hook(self, comm_hook_type: dist.BuiltinCommHookType) -> None:
        """Register ``ALLREDUCE`` or ``FP16_COMPRESS``; see :meth:`register_comm_hook`.

        Raises:
            RuntimeError: as there.
            TypeError: it is none of the two.
        """
        self._use_builtin_hook(comm_hook_type)
        self._builtin_hook = comm_hook_type

    def _use_builtin_hook(self, comm_hook_type: dist.BuiltinCommHookType) -> None:
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

        hooks: dict[dist.BuiltinCommHookType, Any] = {
            dist.BuiltinCommHookType.ALLREDUCE: default_hooks.allreduce_hook,
            dist.BuiltinCommHookType.FP16_COMPRESS: default_hooks.fp16_compress_hook,
        }
        if not isinstance(comm_hook_type, dist.BuiltinCommHookType):
            raise TypeError(
                "comm_hook_type should be dist.BuiltinCommHookType.ALLREDUCE or FP16_COMPRESS, got "
                f"{comm_hook_type!r}"
            )
        self.reducer.register_comm_hook(self.process_group, hooks[comm_hook_type])

    def _register_fused_optim(
        self, optim: type, *args: Any, optim_params: Any = None, **kwargs: Any
    ) -> None:
        """Have an optimizer step for each bucket once its gradients are the means.

        Args:
            optim: a class of ``torch.optim`` that has a functional twin in torch.
            args, kwargs: of its constructor, without the parameters.
            optim_params: which parameters it steps, by default all.

        Raises:
            RuntimeError: torch has no such twin that steps here, or a hook is registered already.
            TypeError: ``optim`` is no class.
            ValueError: torch has no such twin at all.
        """
        if not isinstance(optim, type):
            raise TypeError(f"optim should be a class of torch.optim, got {optim!r}")
        try:
            optimizer = overlapped_optimizer(optim, optim_params, args, kwargs)
        except ValueError as error:
            raise ValueError(f"{error} Step it after the backward.") from error
        try:
            optimizer.register_ddp(self)
        except NotImplementedError as error:
            raise RuntimeError(
                f"{optim} does not support overlapped DDP. Please file an issue to PyTorch or the "
                f"respective owner of {optim}."
            ) from error

    @property
    def _comm_hooks(self) -> list[tuple[Callable[..., Any], Any]]:
        """The hook that was registered, and its state."""
        return self.__dict__.setdefault("_registered_hooks", [])

    def _register_hooks_again(self) -> None:
        """The reducer is a new one: of a copy, or in another process group.

        As in stock, a group that the state of a hook holds stays as it is.
        """
        for hook, state in self._comm_hooks:
            self.reducer.register_comm_hook(state, hook)
        if self._builtin_hook is not None:
            self._use_builtin_hook(self._builtin_hook)


def check_hook(hook: Any) -> None:
    """Stock's conditions.

    Raises:
        TypeError: see :meth:`TakesHooks.register_comm_hook`.
        ValueError: likewise.
    """
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

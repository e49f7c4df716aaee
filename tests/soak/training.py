"""What a rank does: it trains by the plan, in one wrapper after the other."""

from __future__ import annotations

import contextlib
import copy
import io
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

import tritonddp
from soak.network import Data, Network, Struck, loss_of, optimizer_of, replace, toggle
from soak.plan import Kind, Life, Step
from tritonddp.features.drift import DriftCheck


class Trained:
    """What is trained of one kind: it outlives its wrappers, but for those of a checkpoint.

    Args:
        kind: of it.
    """

    def __init__(self, kind: Kind) -> None:
        self.network = new_network(kind)
        self.optimizer = optimizer_of(self.network)
        self.saved: bytes | None = None  # when its last wrapper ended


def new_network(kind: Kind) -> Network:
    """The same whenever it is made."""
    torch.default_generator.manual_seed(0)
    return Network(getattr(torch, kind.dtype))


class Training:
    """One life.

    Args:
        life: the plan.
        trained: by it.
        data: of the soak.
        leak: called after each step of the library's; for leaks that are planted.
    """

    def __init__(self, life: Life, trained: Trained, data: Data, leak: Callable[[], None]) -> None:
        self._life, self._trained, self._data, self._leak = life, trained, data, leak
        self._rank = dist.get_rank()
        saved = trained.saved if life.begins == "checkpoint" else None
        state = None if saved is None else torch.load(io.BytesIO(saved), weights_only=True)
        if state is not None:
            trained.network = new_network(life.kind)
            trained.network.load_state_dict(state["module"])
            for param, is_trained in zip(
                trained.network.parameters(), state["trains"], strict=True
            ):
                param.requires_grad_(is_trained)
            trained.optimizer = optimizer_of(trained.network)
            trained.optimizer.load_state_dict(state["optimizer"])
        self._ddp = tritonddp.DistributedDataParallel(
            trained.network,
            bucket_cap_mb=life.bucket_cap_mb,
            gradient_as_bucket_view=life.views,
            lazy_bucket_allocation=life.lazy,
            reduce_dtype=life.wire and getattr(torch, life.wire),
            compression=life.kind.compression,
            check_drift="raise" if life.check_drift else None,
        )
        _register(self._ddp, life.hook)
        if state is not None:
            self._ddp.load_comm_state_dict(state["comm"])
        if life.begins == "copy":
            self._ddp = copy.deepcopy(self._ddp)
            kept = trained.optimizer.state_dict()
            trained.network = self._ddp.module
            trained.optimizer = optimizer_of(trained.network)
            trained.optimizer.load_state_dict(kept)
        self._ddp.require_manual_backward_finalization = life.manual

    def step(self, step: Step) -> None:
        """The gradients of a step, and the optimizer's."""
        ddp, optimizer = self._ddp, self._trained.optimizer
        if step.toggles is not None:
            toggle(ddp.module, step.toggles)
        if step.replaces is not None:
            replace(ddp.module, optimizer, step.replaces)
        if step.evaluates:
            ddp.eval()
            with torch.no_grad():
                ddp(self._batch(step, -1), (0, 1))
            ddp.train()
        try:
            with tritonddp.trace(ddp) if step.traced else contextlib.nullcontext():
                self._backwards(step)
        except Struck:
            assert self._rank in step.fails
        if not step.fails:
            optimizer.step()
        optimizer.zero_grad()
        self._leak()

    @property
    def trained(self) -> int:
        """How many parameters have gradients."""
        return sum(param.requires_grad for param in self._ddp.parameters())

    def forget_views(self) -> None:
        """Those that ``check_drift`` makes again, one slice a step: they would pass for a leak."""
        check = self._ddp._ddp_state.core.events.of(DriftCheck)
        if check is not None:
            check._lay_out()

    def end(self) -> None:
        """The wrapper goes."""
        state = {
            "module": self._ddp.module.state_dict(),
            "trains": [param.requires_grad for param in self._ddp.module.parameters()],
            "optimizer": self._trained.optimizer.state_dict(),
            "comm": self._ddp.comm_state_dict(),
        }
        file = io.BytesIO()
        torch.save(state, file)
        self._trained.saved = file.getvalue()
        del self._ddp

    def _batch(self, step: Step, micro: int) -> Tensor:
        return self._data.batch(step.number, micro, self._rank, self._dtype)

    @property
    def _dtype(self) -> torch.dtype:
        return getattr(torch, self._life.kind.dtype)

    def _backwards(self, step: Step) -> None:
        last = len(step.blocks) - 1
        for micro in range(last + 1):
            fails = bool(step.fails) and micro == (0 if step.fails_early else last)
            is_local = micro < last or step.on_request
            with contextlib.ExitStack() as stack:
                if is_local:
                    stack.enter_context(self._ddp.no_sync())
                if step.weights is not None:
                    weight = step.weights[micro][self._rank]
                    stack.enter_context(self._ddp.weighted(weight, step.reduction))
                batch = self._batch(step, micro)
                used = step.blocks[micro][self._rank]
                output = self._ddp(batch, used, fails and self._rank in step.fails)
                loss_of(output, batch, step.reduction).backward()
            if self._life.manual and not is_local:
                self._ddp.finalize_backward()
            if fails:
                return
        if step.on_request:
            self._ddp.reduce_gradients()


# Their annotations are looked at, and those of this module are strings.


def _sum_hook(_: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """The sum, not the mean, in a tensor of its own."""
    total = bucket.buffer().clone()
    work = dist.all_reduce(total, async_op=True)
    return work.get_future().then(lambda done: done.value()[0])


def _bf16_hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """torch's, under another name, since without a GPU it is refused by its own."""
    return default_hooks.bf16_compress_hook(state, bucket)


_HOOKS = {
    "allreduce": default_hooks.allreduce_hook,
    "fp16": default_hooks.fp16_compress_hook,
    "bf16": _bf16_hook,
    "sum": _sum_hook,
}


def _register(ddp: nn.Module, hook: str | None) -> None:
    if hook == "builtin":
        ddp._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
    elif hook is not None:
        ddp.register_comm_hook(None, _HOOKS[hook])

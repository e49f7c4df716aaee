"""A rank process: plays a program with several classes, and returns what it saw."""

import contextlib
import gc
import inspect
import logging
import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from logged import logged
from on_hosts import on_hosts
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import debugging_hooks, default_hooks
from torch.nn.parallel import DistributedDataParallel as Stock
from torch.nn.utils.parametrize import is_parametrized
from training import delayed

import tritonddp
from differential.actions.probes import Probe
from differential.actions.tensors import STEPS
from differential.kinds import program_of
from differential.networks import Network, build
from differential.player import Player
from differential.program import Program
from differential.trace import Trace
from differential.wrappers import OURS, WRAPPERS
from tritonddp import DistributedDataParallel
from tritonddp.buckets import formats
from tritonddp.comm.host import memory_exchange, rank_buffers
from tritonddp.features import metrics
from tritonddp.kernels import reference

Played = dict[str, Trace]
STOCK = "stock DDP"
PLAIN = "tritonddp with a plain optimizer"
IN_PLACE = "tritonddp in place"

# Of torch 2.13 or newer. Older ones lack options, and fail where two forwards see one buffer.
STOCK_DEFINES = "forward_sync_buffers" in inspect.signature(Stock.__init__).parameters

COMMUNICATION_HOOKS: dict[str, Callable[[Any], None]] = {
    "allreduce_hook": lambda ddp: ddp.register_comm_hook(None, default_hooks.allreduce_hook),
    "noop_hook": lambda ddp: ddp.register_comm_hook(None, debugging_hooks.noop_hook),
    "ALLREDUCE": lambda ddp: ddp._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE),
}


def play_program(kind: str, seed: int, wrapper: str) -> Played:
    """What this rank saw of a program in all ways in which it is played."""
    program = program_of(kind, seed, dist.get_world_size())
    ways = {"hostile": _play_hostile, "sharded": _play_sharded}
    logging.getLogger("tritonddp").setLevel(logging.ERROR)  # failed backwards are logged
    with warnings.catch_warnings(), configured(program.seed, program.thresholds):
        warnings.simplefilter("ignore")
        return ways.get(kind, _play_usual)(program, wrapper)


def play_recorded(seeds: Sequence[int], per_host: int = 0) -> None:
    """Play usual programs on the recorded device, see :mod:`recording`.

    Args:
        seeds: of the programs.
        per_host: if it is not 0, the number of ranks that share a host. Gradients are quantized
            between hosts, small ones too. Within a host they are summed in bf16 if the seed is odd.

    Raises:
        RuntimeError: a GPU might compute something else.
    """
    import torch._dynamo  # torch would import it in the first program, whose tensors it would keep
    from recording.device import recording  # and Triton, which no other program needs

    logging.getLogger("tritonddp").setLevel(logging.ERROR)
    gc.freeze()  # torch and Triton: each recording collects
    for seed in seeds:
        program = program_of("usual", seed, dist.get_world_size())
        with warnings.catch_warnings(), contextlib.ExitStack() as stack:
            warnings.simplefilter("ignore")
            options = program.options
            if per_host and not program.communication_hook:
                within = {"reduce_dtype": torch.bfloat16} if seed % 2 else {}
                options = {**options, "compression": "int8", **within}
                stack.enter_context(on_hosts(per_host))
                stack.enter_context(patch.object(formats, "_SMALL", 8))
            recorder = stack.enter_context(recording(everywhere=True))
            play(program, "the recorded device", DistributedDataParallel, options)
            torch.cuda.synchronize()
        if recorder.races:
            raise RuntimeError(f"seed {seed}: {recorder.report()[:4000]}")


def _play_usual(program: Program, wrapper: str) -> Played:
    # For more than two ranks only one transport: transports add in different orders.
    first, second = transports(program)
    second = second if program.world_size == 2 else first
    played = {OURS: play(program, OURS, partial(WRAPPERS[wrapper], transport=first))}
    if wrapper == OURS:
        played[IN_PLACE] = play(program, IN_PLACE, partial(tritonddp.replicate, transport=second))
    if program.stock is not None and STOCK_DEFINES:
        played[STOCK] = play(program, STOCK, Stock, program.stock)
    return played


def _play_sharded(program: Program, wrapper: str) -> Played:
    """With a sharded and with a plain optimizer, both of a wrapper or both in place."""
    transport, _ = transports(program)
    cls, plain_cls = WRAPPERS[wrapper], DistributedDataParallel
    if wrapper == OURS and program.seed % 3 == 0:
        cls = plain_cls = tritonddp.replicate
    plain = replace(program, kind="usual")
    return {
        OURS: play(program, OURS, partial(cls, transport=transport)),
        PLAIN: play(plain, PLAIN, partial(plain_cls, transport=transport)),
    }


def _play_hostile(program: Program, wrapper: str) -> Played:
    """With stock and with the wrapper, which must not warn without a reason."""
    played = {STOCK: play(program, STOCK, Stock)}
    through_the_group = {} if program.seed % 3 else {"TRITONDDP_PEER_MEMORY": "0"}
    with patch.dict(os.environ, through_the_group), logged(logging.WARNING) as log:
        played[OURS] = play(program, wrapper, WRAPPERS[wrapper])
    steps = any(hook == STEPS for _, hook, _ in program.hooks)
    leaves = any(isinstance(each, Probe) and each.end == "left" for each in program.actions)
    found, unreduced = (log.lines(name) for name in ("hooked_steps", "unreduced"))
    if (found and not steps) or (steps and not found and wrapper == OURS):
        raise RuntimeError(f"an optimizer steps in a hook: {steps}, but the log says {found}")
    if unreduced and not leaves:
        raise RuntimeError(f"a warning without reason: {unreduced}")
    return played


def transports(program: Program) -> list[str]:
    return ["auto", "process_group"] if program.seed % 2 else ["process_group", "auto"]


def play(
    program: Program,
    title: str,
    wrap: Callable[..., nn.Module],
    options: dict[str, Any] | None = None,
) -> Trace:
    """What this rank saw, by default with the options of the program. An error names the action."""
    arguments = program.options if options is None else options

    def wrapped(network: Network) -> nn.Module:
        later = {}
        if program.delays:
            until = next(network.blocks["b0"].parameters())
            later = delayed(network, "heads.0.weight", "heads.0.bias", until=until)
        net = wrap(network, **arguments, **later)
        if program.communication_hook:
            ddp = net if title == STOCK else tritonddp.ddp(net)
            COMMUNICATION_HOOKS[program.communication_hook](ddp)
        return net

    rank, where = dist.get_rank(), "when it is wrapped"
    gc.disable()
    try:
        player = Player(program, rank, build(program, rank), wrapped)
        counts = program.counts or (len(program.actions),) * program.world_size
        context: Any = contextlib.nullcontext()
        if program.counts:
            context = player.net.join(divide_by_initial_world_size=not program.over_present)
        with context:
            for number in range(counts[rank]):
                where = f"in action {number}: {program.actions[number]}"
                player.perform(number)
            where = "while it follows the other ranks inside join()"
        player.finish()
        makes_cycles = any(getattr(each, "in_a_cycle", False) for each in program.actions)
        if not (makes_cycles or title == STOCK):
            _check_cycles()
    except Exception as error:
        raise RuntimeError(f"seed {program.seed}: {title} raised {error!r} {where}") from error
    finally:
        gc.enable()
    trace = player.trace
    del player
    gc.collect()  # remains of one program must not help the next one
    return trace


def _check_cycles() -> None:
    """Raise a RuntimeError if tensors are in cycles of references, while nothing was collected.

    Such a tensor and its graph keep their memory until Python collects garbage.
    """
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        gc.collect()
        found = [each for each in gc.garbage if isinstance(each, Tensor)]
        # torch puts a parametrized layer into a cycle with its class.
        layers = [each for each in gc.garbage if isinstance(each, nn.Module)]
        theirs = {p for each in filter(is_parametrized, layers) for p in each.parameters()}
        if found := [each for each in found if each not in theirs]:
            raise RuntimeError(f"{len(found)} tensors are left in cycles, as {found[0]}")
    finally:
        gc.set_debug(0)
        gc.garbage.clear()


def configured(
    seed: int, thresholds: tuple[int, int] | None = None
) -> contextlib.AbstractContextManager[Any]:
    """Context: small gradients are reduced as large ones, and times are gathered in each step.

    By the seed, buckets are exchanged directly or not, and through memory in one shot or in two.
    """
    stack = contextlib.ExitStack()
    stack.enter_context(patch.object(metrics, "EVERY", 1))
    if thresholds:
        sizes = dict(zip(("_SMALL", "_SEGMENT"), thresholds, strict=True))
        stack.enter_context(patch.multiple(reference, **sizes))
    stack.enter_context(patch("tritonddp.coordination.group._DIRECT", (0, 400, 2**20)[seed % 3]))
    if seed % 4 < 2:
        shares = {"_RANKS_OF_SHARES": 2, "_BYTES_OF_SHARES": 200}
        stack.enter_context(patch.multiple(memory_exchange, **shares))
        stack.enter_context(patch.object(rank_buffers, "_PIECE", 64))
    return stack

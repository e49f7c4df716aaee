"""A rank process: plays programs with several classes, and returns what it saw."""

import contextlib
import gc
import inspect
import logging
import os
import pickle
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from distributed import give_up_after
from logged import Kept, logged
from on_hosts import on_hosts
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import debugging_hooks, default_hooks
from torch.nn.parallel import DistributedDataParallel as Stock
from torch.nn.utils.parametrize import is_parametrized

import tritonddp
from differential.actions.gradients import STEPS
from differential.actions.probes import Probe
from differential.kinds import program_of
from differential.networks import Network
from differential.player import TIMEOUT, Player, networks_of, wrapper_of
from differential.program import Options, Program
from differential.trace import Entry, Trace
from differential.wrappers import FAULTS
from tritonddp import DistributedDataParallel
from tritonddp.buckets import formats
from tritonddp.comm.host import memory_exchange, rank_buffers
from tritonddp.features import metrics
from tritonddp.kernels import reference

Played = dict[str, Trace]
RECORDED = "tritonddp on the recorded device"
ALARM = "the log of tritonddp"
OURS, STOCK = "tritonddp", "stock DDP"
OTHER = "tritonddp through the other transport"
PLAIN = "tritonddp with a plain optimizer"
IN_PLACE = "tritonddp in place"

# Of torch 2.13 or newer. Older ones lack options, and fail where two forwards see one buffer.
STOCK_DEFINES = "forward_sync_buffers" in inspect.signature(Stock.__init__).parameters

COMMUNICATION_HOOKS: dict[str, Callable[[Any], None]] = {
    "allreduce_hook": lambda ddp: ddp.register_comm_hook(None, default_hooks.allreduce_hook),
    "noop_hook": lambda ddp: ddp.register_comm_hook(None, debugging_hooks.noop_hook),
    "ALLREDUCE": lambda ddp: ddp._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE),
}

# What plays a program. A difference of "stock" in a hostile or short program is a fault of the
# generator.
WRAPPERS: dict[str, Any] = {
    OURS: DistributedDataParallel,
    "stock": Stock,
    **FAULTS,
}


def play_all(seeds: Sequence[int], folder: str, kind: str, wrapper: str) -> None:
    """Play programs. What this rank saw of each is written to the file ``SEED.RANK`` in a folder.

    So the results of earlier programs are not lost if a process dies or hangs.

    Args:
        seeds: of the programs.
        folder: an existing folder.
        kind: of the programs.
        wrapper: the class that plays them, of :data:`WRAPPERS`.

    Raises:
        RuntimeError: something was raised; the message says in which program, and where.
    """
    dist.barrier()  # one rank may have taken seconds to import all this
    if kind == "hostile":  # a program that differs may hang
        give_up_after(TIMEOUT, dist.group.WORLD)
    gc.collect()
    gc.freeze()  # or each collection would look at all of torch
    log = logging.getLogger("tritonddp")
    log.setLevel(logging.ERROR)  # failed backwards are logged
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for seed in seeds:
            program = program_of(kind, seed, dist.get_world_size())
            ways = {"hostile": _play_hostile, "sharded": _play_sharded}
            played = ways.get(kind, _play_all_ways)(program, wrapper)
            path, part = (Path(folder, f"{seed}.{dist.get_rank()}{end}") for end in ("", ".new"))
            part.write_bytes(pickle.dumps(played))
            part.replace(path)


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
            if per_host and not program.communication_hook:
                within = "bfloat16" if seed % 2 else None
                options = replace(program.options, compression="int8", reduce_dtype=within)
                program = replace(program, options=options)
                stack.enter_context(on_hosts(per_host))
                stack.enter_context(patch.object(formats, "_SMALL", 8))
            recorder = stack.enter_context(recording(everywhere=True))
            play(program, RECORDED, DistributedDataParallel, program.options)
            torch.cuda.synchronize()
        if recorder.races:
            raise RuntimeError(f"seed {seed}, {RECORDED}: {recorder.report()[:4000]}")


def _play_all_ways(program: Program, wrapper: str) -> Played:
    first, second = _transports(program)
    wrap = partial(WRAPPERS[wrapper], transport=first)
    played = {}
    with configured(program.seed, program.thresholds):
        played[OURS] = play(program, OURS, wrap, program.options)
        if wrapper == OURS:
            title, cls = IN_PLACE, tritonddp.replicate
            if program.named:  # its steps use the wrapper
                title, cls = OTHER, DistributedDataParallel
            played[title] = play(program, title, partial(cls, transport=second), program.options)
    if program.stock is not None and STOCK_DEFINES:
        played[STOCK] = play(program, STOCK, Stock, program.stock)
    return played


def _play_sharded(program: Program, wrapper: str) -> Played:
    """With a sharded and with a plain optimizer, both of a wrapper or both in place."""
    transport, _ = _transports(program)
    cls, plain_cls = WRAPPERS[wrapper], DistributedDataParallel
    if wrapper == OURS and program.seed % 3 == 0:
        cls = plain_cls = tritonddp.replicate
    plain = replace(program, kind="usual")
    with configured(program.seed, program.thresholds):
        return {
            OURS: play(program, OURS, partial(cls, transport=transport), program.options),
            PLAIN: play(plain, PLAIN, partial(plain_cls, transport=transport), program.options),
        }


def _play_hostile(program: Program, wrapper: str) -> Played:
    played = {STOCK: play(program, STOCK, Stock, program.options)}
    through_the_group = {} if program.seed % 3 else {"TRITONDDP_PEER_MEMORY": "0"}
    with (
        configured(program.seed, program.thresholds),
        patch.dict(os.environ, through_the_group),
        logged(logging.WARNING) as log,
    ):
        played[OURS] = play(program, wrapper, WRAPPERS[wrapper], program.options)
    alarm = _false_alarm(program, log, wrapper == OURS)
    return played | ({ALARM: [Entry(0, "value", "said", alarm)]} if alarm else {})


def _false_alarm(program: Program, log: Kept, is_ours: bool) -> str:
    """A warning without a reason, or the reason of a missing warning."""
    steps = any(hook == STEPS for _, hook, _ in program.hooks)
    logged_steps = log.lines("hooked_steps")
    if bool(logged_steps) != steps and (logged_steps or is_ours):
        return f"an optimizer in a hook, {steps}: the log says {logged_steps}"
    unreduced = log.lines("unreduced")
    leaves = any(isinstance(each, Probe) and each.end == "left" for each in program.actions)
    return f"without reason: {unreduced}" if unreduced and not leaves else ""


def _transports(program: Program) -> list[str]:
    """Both transports for two ranks; for more ranks one, since they add in different orders."""
    through = ["auto", "process_group"] if program.seed % 2 else ["process_group", "auto"]
    return through if program.world_size == 2 else [through[0]] * 2


def play(
    program: Program,
    title: str,
    wrap: Callable[..., nn.Module],
    options: Options,
    after: Callable[[Player, int], None] = lambda player, number: None,
) -> Trace:
    """What this rank saw. ``after`` is called after each of its actions, and at the end.

    Raises:
        RuntimeError: something was raised; the message says in which program, and where.
    """
    # In the log of this process, which is shown where it hangs.
    print(f"seed {program.seed}, {title}", flush=True)
    rank, where = dist.get_rank(), "when it is wrapped"
    gc.disable()
    try:

        def wrapped(network: Network) -> nn.Module:
            net = wrap(network, **arguments_of(options), **_delayed(program, network))
            if program.communication_hook:
                COMMUNICATION_HOOKS[program.communication_hook](wrapper_of(net) or net)
            return net

        player = Player(program, rank, networks_of(program, rank), wrapped)
        counts = program.counts or (len(program.actions),) * program.world_size
        with _joining(program, player):
            for number in range(counts[rank]):
                where = f"in action {number}: {program.actions[number]}"
                player.perform(number)
                after(player, number)
            where = "while it follows the other ranks inside join()"
        player.finish()
        after(player, len(program.actions))
        makes_cycles = any(getattr(each, "in_a_cycle", False) for each in program.actions)
        if not (makes_cycles or title == STOCK):
            _check_cycles()
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        message = f"seed {program.seed}: {title} raised {type(error).__name__} ({error}) {where}"
        raise RuntimeError(f"{message}, {last.filename}:{last.lineno}") from error
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


def _joining(program: Program, player: Player) -> contextlib.AbstractContextManager[Any]:
    if not program.counts:
        return contextlib.nullcontext()
    return player.net.join(divide_by_initial_world_size=not program.over_present)


def _delayed(program: Program, network: Network) -> dict[str, Any]:
    if not program.delays:
        return {}
    return {
        "delay_all_reduce_named_params": [
            (f"heads.0.{name}", param) for name, param in network.heads[0].named_parameters()
        ],
        "param_to_hook_all_reduce": next(network.blocks["b0"].parameters()),
    }


def arguments_of(options: Options) -> dict[str, Any]:
    """The arguments of the wrapper."""
    arguments = options.given
    if options.reduce_dtype:
        arguments["reduce_dtype"] = getattr(torch, options.reduce_dtype)
    return arguments


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

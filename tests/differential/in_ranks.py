"""What a rank process does: it plays programs with several classes and says what it saw."""

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
import torch._dynamo
import torch._functorch.config
import torch.distributed as dist
from distributed import give_up_after
from hosts import emulated_hosts
from logged import Kept, logged
from modules import forwarding
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import debugging_hooks, default_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel as Stock
from torch.nn.utils.parametrize import is_parametrized

import tritonddp
from differential.actions.gradients import STEPS
from differential.actions.probes import Probe
from differential.actions.training import Forward, Renew, Replace
from differential.kinds import program_of
from differential.mutations import planted
from differential.named import PROGRAMS
from differential.networks import Network
from differential.paths import nothing_prepared
from differential.player import TIMEOUT, Player, behind, networks_of
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
LONG = "tritonddp with nothing prepared"
PLAIN = "tritonddp with a plain optimizer"
IN_PLACE = "tritonddp in place"
BESIDE = "tritonddp, as it is played in place"

# Of torch 2.13 or newer. Older ones lack options, and fail where two forwards see one buffer.
_STOCK_DEFINES = "forward_sync_buffers" in inspect.signature(Stock.__init__).parameters

COMMUNICATION_HOOKS: dict[str, Callable[[Any], None]] = {
    "allreduce_hook": lambda ddp: ddp.register_comm_hook(None, default_hooks.allreduce_hook),
    "fp16_compress_hook": lambda ddp: ddp.register_comm_hook(
        None, default_hooks.fp16_compress_hook
    ),
    "noop_hook": lambda ddp: ddp.register_comm_hook(None, debugging_hooks.noop_hook),
    "ALLREDUCE": lambda ddp: ddp._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE),
}

# What stock is compared with in hostile programs. With itself only their generator can be wrong,
# with a fault it has to show.
WRAPPERS: dict[str, Any] = {
    OURS: DistributedDataParallel,
    "stock": Stock,
    "in-place": tritonddp.replicate,
    **FAULTS,
}

groups: dict[Any, Any] = {}  # of the programs, made once; to be cleared with the default one


def play_all(
    seeds: Sequence[int], folder: str, kind: str, mutation: str | None, compiled: bool, wrapper: str
) -> None:
    """Play programs; what this rank saw of each goes into a file of the folder, ``SEED.RANK``.

    What is found before a process dies, or waits for ever, is not lost so.

    Args:
        seeds: of the programs.
        folder: that is there.
        kind: of the programs.
        mutation: the fault that is planted in tritonddp, if any.
        compiled: whether ours is compiled: as one graph, and the network alone.
        wrapper: which class plays hostile programs beside stock, of :data:`WRAPPERS`.

    Raises:
        RuntimeError: something was raised; the message says in which program, and where.
    """
    dist.barrier()  # one rank may have taken seconds to import all this
    if kind == "hostile":  # one that differs may end in a wait
        give_up_after(TIMEOUT, dist.group.WORLD)
    groups.clear()
    gc.collect()
    gc.freeze()  # or each collection would look at all of torch
    log = logging.getLogger("tritonddp")
    log.setLevel(logging.ERROR)  # of backwards that break off
    with warnings.catch_warnings(), planted(mutation) if mutation else contextlib.nullcontext():
        warnings.simplefilter("ignore")
        for seed in seeds:
            program = program_of(kind, seed, dist.get_world_size())
            if program.is_hostile:
                played = _play_hostile(program, wrapper)
            elif compiled:
                played = _play_compiled(program) if compiles(program) else {}
            else:
                played = _play_all_ways(program, mutation is not None)
            path, part = (Path(folder, f"{seed}.{dist.get_rank()}{end}") for end in ("", ".new"))
            part.write_bytes(pickle.dumps(played))
            part.replace(path)


def play_recorded(seeds: Sequence[int], per_host: int = 0) -> list[Played]:
    """Likewise on the recorded device alone, see :mod:`recording`, and with large gradients.

    (Which are reduced where they lie, to the same bits.)

    Args:
        seeds: of the programs.
        per_host: if it is not 0, so many ranks share a host, and gradients are quantized between
            hosts, small ones too. Within a host they are summed in bf16 if the seed is odd.

    Raises:
        RuntimeError: also where a GPU might do something else, or where large gradients do.
    """
    from recording.device import recording  # and Triton, which no other program needs

    groups.clear()
    logging.getLogger("tritonddp").setLevel(logging.ERROR)
    gc.freeze()  # torch and Triton: each recording collects
    found = []
    for seed in seeds:
        program = program_of("usual", seed, dist.get_world_size())
        with warnings.catch_warnings(), contextlib.ExitStack() as stack:
            warnings.simplefilter("ignore")
            if per_host and not program.communication_hook:
                within = "bfloat16" if seed % 2 else None
                options = replace(program.options, compression="int8", reduce_dtype=within)
                program = replace(program, options=options)
                stack.enter_context(emulated_hosts(per_host))
                stack.enter_context(patch.object(formats, "_SMALL", 8))
            recorder = stack.enter_context(recording(everywhere=True))
            trace = play(program, RECORDED, DistributedDataParallel, program.options)
            torch.cuda.synchronize()
        if recorder.races:
            raise RuntimeError(f"seed {seed}, {RECORDED}: {recorder.report()[:4000]}")
        found.append({RECORDED: trace})
    return found


def _play_all_ways(program: Program, is_mutated: bool) -> Played:
    played = {}
    through = _transports(program)
    ways = [partial(DistributedDataParallel, transport=each) for each in through]
    with configured(program.seed, program.thresholds):
        played[OURS] = play(program, OURS, ways[0], program.options)
        if not is_mutated:
            with nothing_prepared():
                played[LONG] = play(program, LONG, ways[1], program.options)
            if not program.named:  # they ask for the wrapper
                played |= _play_in_place(program, ways)
        plain = replace(program, kind="usual")
        if program.is_sharded and program.world_size > 2:
            if through[0] == "auto":  # gloo adds three numbers in another order
                played[PLAIN] = play(plain, PLAIN, ways[0], program.options)
            return played
        if program.is_sharded and program.stock is None:
            played[PLAIN] = play(plain, PLAIN, ways[0], program.options)
    if program.stock is not None and _STOCK_DEFINES:
        played[STOCK] = play(plain, STOCK, Stock, program.stock)
    return played


def _play_hostile(program: Program, wrapper: str) -> Played:
    played = {STOCK: play(program, STOCK, Stock, program.options)}
    through_the_group = {} if program.seed % 3 else {"TRITONDDP_PEER_MEMORY": "0"}
    with (
        configured(program.seed, program.thresholds),
        patch.dict(os.environ, through_the_group),
        logged(logging.WARNING) as log,
    ):
        played[OURS] = play(program, wrapper, WRAPPERS[wrapper], program.options)
    alarm = _false_alarm(program, log, wrapper in (OURS, "in-place"))
    return played | ({ALARM: [Entry(0, "value", "said", alarm)]} if alarm else {})


def _false_alarm(program: Program, log: Kept, is_ours: bool) -> str:
    """What the log says without reason, or leaves out."""
    steps = any(hook == STEPS for _, hook, _ in program.hooks)
    said = log.lines("hooked_steps")
    # (With a group of one rank there is nothing to say.)
    if bool(said) != steps and (said or is_ours) and program.wrappers != "local and global":
        return f"an optimizer in a hook, {steps}: the log says {said}"
    wraps = 1 + sum("WrapAgain" in str(each) for each in program.actions)
    if len(said) > wraps and program.wrappers == "one network":
        return f"more than once for a wrapper: {said}"
    added = log.lines("unreduced")
    leaves = any(isinstance(each, Probe) and each.end == "left" for each in program.actions)
    return f"without reason: {added}" if added and not leaves else ""


def is_of(wrapper: str, program: Program) -> bool:
    """Whether stock's contract is that of ``wrapper`` too.

    In place there is no other wrapper, none that has names, no backward past it, and buffers travel
    at another time. A part of two modules is reduced with both, whichever is under ``no_sync``.
    """
    if wrapper != "in-place" or not program.is_hostile:
        return True
    keeps_buffers = program.options.broadcast_buffers is False
    has_others = {*program.roots} & {"backwards", "wrappers", "names"}
    is_shared = program.wrappers == "shared encoder"
    return not is_shared and not has_others and (keeps_buffers or not program.network.has_buffers)


def _transports(program: Program) -> list[str]:
    """Two numbers have one sum, more of them one for each order: that of memory, or of gloo."""
    through = ["auto", "process_group"] if program.seed % 2 else ["process_group", "auto"]
    return through if program.world_size == 2 else [through[0]] * 2


def as_in_place(program: Program) -> Program:
    """The same without copies that go on: those of a replicated module are plain ones.

    Another one that has loaded a checkpoint does.
    """
    actions = tuple(
        Renew("checkpoint") if action == Renew("copy") else action for action in program.actions
    )
    return replace(program, actions=actions)


def _play_in_place(program: Program, ways: Sequence[partial[Any]]) -> Played:
    """Replicated in place; and once more wrapped, if that must be another program."""
    in_place = as_in_place(program)
    replicate = partial(tritonddp.replicate, **ways[1].keywords)
    played = {IN_PLACE: play(in_place, IN_PLACE, replicate, program.options)}
    if in_place != program:
        played[BESIDE] = play(in_place, BESIDE, ways[0], program.options)
    return played


def compiles(program: Program) -> bool:
    """Whether torch.compile runs such a program at all, also without a wrapper.

    Where forwards change buffers, no two of them may come before their backwards; and it fails
    where a custom function in a checkpoint returns no gradient. Where torch splits a graph for a
    wrapper around it, a buffer that the forward changes and reads may be read too late.
    """
    later = (action.kind for action in program.actions if isinstance(action, Replace))
    blocks = " ".join([*program.network.blocks, *later])
    changes = any(each in blocks for each in ("convolution", "functional", "normed"))
    slots = {action.slot for action in program.actions if isinstance(action, Forward)}
    fails = "buffered" in blocks or ("withholding" in blocks and program.network.checkpoint)
    # (What is used outside of a graph is an error once.)
    decays = any(getattr(each, "decayed", "") for each in program.actions)
    return not ((changes and len(slots) > 1) or fails or decays)


def _play_compiled(program: Program) -> Played:
    """As one graph, and with the network alone compiled, inside of the wrapper.

    Not beside the oracle: what is compiled gives zeros where a loss leaves an output out, and runs
    what is in a checkpoint once.
    """

    def of_the_wrapper(network: nn.Module, **options: Any) -> nn.Module:
        net = DistributedDataParallel(network, **options)
        net.compile(backend="aot_eager", dynamic=False)
        return net

    def of_the_module(network: nn.Module, **options: Any) -> nn.Module:
        network.compile(backend="aot_eager", dynamic=False)
        return DistributedDataParallel(network, **options)

    played = {}
    # Each path through the network, and each set of parameters, is another graph.
    room = torch._dynamo.config.patch(recompile_limit=64, accumulated_recompile_limit=512)
    retains = torch._functorch.config.patch(donated_buffer=False)
    for title, wrap in ((OURS, of_the_wrapper), (LONG, of_the_module)):
        torch._dynamo.reset()
        with room, retains, configured(program.seed, program.thresholds):
            played[title] = play(program, title, wrap, program.options, may_leave_cycles=True)
    return played


def play(
    program: Program,
    title: str,
    wrap: Callable[..., nn.Module],
    options: Options,
    after: Callable[[Player, int], None] = lambda player, number: None,
    may_leave_cycles: bool = False,
) -> Trace:
    """What this rank saw. ``after`` is called after each of its actions, and at the end.

    If it may leave cycles of references, as dynamo does, they may hold tensors.

    Raises:
        RuntimeError: something was raised; the message says in which program, and where.
    """
    # In the log of this process, which is shown where it hangs.
    print(f"seed {program.seed}, {title}", flush=True)
    rank, where = dist.get_rank(), "when it is wrapped"
    gc.disable()
    try:

        def wrapped(network: Network, **more: Any) -> nn.Module:
            options_of_it = arguments_of(options) | _delayed(program, network) | more
            net = (forwarding(wrap) if program.forwards_names else wrap)(network, **options_of_it)
            if program.communication_hook:
                COMMUNICATION_HOOKS[program.communication_hook](behind(net) or net)
            return net

        player = Player(program, rank, networks_of(program, rank), wrapped, groups)
        counts = program.counts or (len(program.actions),) * program.world_size
        with _joining(program, player):
            for number in range(counts[rank]):
                where = f"in action {number}: {program.actions[number]}"
                player.perform(number)
                after(player, number)
            where = "while it follows the others inside join()"
        player.finish()
        after(player, len(program.actions))
        if player.has_metrics:
            _compare_metrics(player, is_joined=program.counts is not None)
        actions = [getattr(each, "action", each) for each in program.actions]  # inside Under(), too
        makes_cycles = any(getattr(each, "in_a_cycle", False) for each in actions)
        makes_cycles |= bool(program.named) and PROGRAMS[program.named].makes_cycles
        if not (may_leave_cycles or makes_cycles or title == STOCK):
            _check_cycles()
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        message = f"seed {program.seed}: {title} raised {type(error).__name__} ({error}) {where}"
        raise RuntimeError(f"{message}, {last.filename}:{last.lineno}") from error
    finally:
        gc.enable()
    trace = player.trace
    del player
    gc.collect()  # what is left of one program may not help the next one
    return trace


def _check_cycles() -> None:
    """Raise a RuntimeError if tensors are in cycles of references, while nothing was collected.

    Such a tensor, and the graph behind it, keeps its memory until Python collects garbage.
    """
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        gc.collect()
        found = [each for each in gc.garbage if isinstance(each, Tensor)]
        # (A parametrised layer is in a cycle of torch's own, with its class.)
        layers = [each for each in gc.garbage if isinstance(each, nn.Module)]
        theirs = {p for each in filter(is_parametrized, layers) for p in each.parameters()}
        if found := [each for each in found if each not in theirs]:
            raise RuntimeError(f"{len(found)} tensors are left in cycles, as {found[0]}")
    finally:
        gc.set_debug(0)
        gc.garbage.clear()


def _compare_metrics(player: Player, is_joined: bool) -> None:
    """All ranks have been told the same, after each step, or inside ``join()`` in the end."""
    player.ask_metrics()
    everyones: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, player.metrics[-1:] if is_joined else player.metrics)
    assert all(each == everyones[0] for each in everyones), f"metrics() differ: {everyones}"


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
    """Of the wrapper."""
    arguments = options.given
    if options.reduce_dtype:
        arguments["reduce_dtype"] = getattr(torch, options.reduce_dtype)
    if options.process_group:
        arguments["process_group"] = _made_once("group", lambda: dist.new_group(backend="gloo"))
    if options.device_mesh:
        arguments["device_mesh"] = _made_once(
            "mesh", lambda: init_device_mesh("cpu", (dist.get_world_size(),))
        )
    return arguments


def _made_once(name: str, make: Callable[[], Any]) -> Any:
    if name not in groups:
        groups[name] = make()
    return groups[name]


def configured(
    seed: int, thresholds: tuple[int, int] | None = None
) -> contextlib.AbstractContextManager[Any]:
    """Context: small gradients go the ways of large ones, and times are gathered in each step.

    No bucket is exchanged directly, or the smallest ones are, or all. Through memory, in one shot,
    or in two.
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

"""What a rank process does: it plays scenarios with both classes and says what it saw."""

import contextlib
import gc
import inspect
import logging
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch._dynamo
import torch._functorch.config
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import debugging_hooks, default_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel as Stock

import tritonddp
from differential.generator import scenario_of
from differential.mutations import planted
from differential.networks import Network
from differential.paths import nothing_prepared
from differential.player import Player
from differential.scenario import Forward, Options, Renew, Replace, Scenario
from differential.trace import Trace
from tritonddp import DistributedDataParallel
from tritonddp.buckets.memory import in_place_bucket
from tritonddp.comm import process_group
from tritonddp.comm.host import memory_exchange, rank_buffers
from tritonddp.integrations.in_place import behind
from tritonddp.kernels import reference

Played = dict[str, Trace]
RECORDED = "tritonddp on the recorded device"
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

# In which ways a scenario is played: beside the oracle and stock; ours by torch.compile, as one
# graph and with the network alone compiled; in place beside wrapped, and nothing else.
WAYS = ALL, COMPILED, IN_PLACE_ALONE = "all", "compiled", "in place"

groups: dict[str, Any] = {}  # of the scenarios, made once; to be cleared with the default one


def play_all(
    seeds: Sequence[int],
    mutation: str | None = None,
    ways: str = ALL,
    kind: str = "usual",
) -> list[Played]:
    """For each seed, what this rank saw with each class, or in other :data:`WAYS`.

    Raises:
        RuntimeError: something was raised; the message says in which scenario, and where.
    """
    groups.clear()
    logging.getLogger("tritonddp").setLevel(logging.ERROR)  # of backwards that break off
    with warnings.catch_warnings(), planted(mutation) if mutation else contextlib.nullcontext():
        warnings.simplefilter("ignore")
        scenarios = [scenario_of(seed, dist.get_world_size(), kind=kind) for seed in seeds]
        if ways == IN_PLACE_ALONE:
            return [_play_in_place_alone(each) for each in scenarios]
        if ways == COMPILED:
            return [_play_compiled(each) if compiles(each) else {} for each in scenarios]
        return [_play_all_ways(each, mutation is not None) for each in scenarios]


def play_recorded(seeds: Sequence[int]) -> list[Played]:
    """Likewise on the recorded device alone, see :mod:`recording`, and with large gradients.

    (Which are reduced where they lie, to the same bits.)

    Raises:
        RuntimeError: also where a GPU might do something else, or where large gradients do.
    """
    from recording.device import recording  # and Triton, which no other scenario needs

    groups.clear()
    logging.getLogger("tritonddp").setLevel(logging.ERROR)
    found = []
    for seed in seeds:
        scenario = scenario_of(seed, dist.get_world_size())
        traces = []
        defaults = DistributedDataParallel.__init__.__kwdefaults__
        for in_place in (False, True):
            with (
                warnings.catch_warnings(),
                patch.object(in_place_bucket, "LARGE", 100),
                patch.dict(defaults, reduce_in_place=in_place),
                recording(everywhere=True) as recorder,
            ):
                warnings.simplefilter("ignore")
                traces.append(play(scenario, RECORDED, DistributedDataParallel, scenario.options))
                torch.cuda.synchronize()
            if recorder.races:
                raise RuntimeError(f"seed {seed}, {RECORDED}: {recorder.report()[:4000]}")
        trace, with_large = traces
        for one, other in zip(trace, with_large, strict=True):
            if one != other:
                raise RuntimeError(f"seed {seed}, {one.place}: {other.seen}, and not {one.seen}")
        found.append({RECORDED: trace})
    return found


def build(scenario: Scenario, rank: int) -> Network:
    """The network as ``rank`` makes it: others at first, where wrapping makes them alike."""
    alike = scenario.options.init_sync is False or scenario.options.broadcast_buffers is False
    torch.default_generator.manual_seed(scenario.seed * 10 + (0 if alike else rank))
    return Network(scenario.network)


def _play_all_ways(scenario: Scenario, is_mutated: bool) -> Played:
    played = {}
    through = _transports(scenario)
    ways = [partial(DistributedDataParallel, transport=each) for each in through]
    with configured(scenario.seed, scenario.thresholds):
        played[OURS] = play(scenario, OURS, ways[0], scenario.options)
        if not is_mutated:
            with nothing_prepared():
                played[LONG] = play(scenario, LONG, ways[1], scenario.options)
            played |= _play_in_place(scenario, ways)
        plain = replace(scenario, is_sharded=False)
        if scenario.is_sharded and scenario.world_size > 2:
            if through[0] == "auto":  # gloo adds three numbers in another order
                played[PLAIN] = play(plain, PLAIN, ways[0], scenario.options)
            return played
        if scenario.is_sharded and scenario.stock is None:
            played[PLAIN] = play(plain, PLAIN, ways[0], scenario.options)
    if scenario.stock is not None and _STOCK_DEFINES:
        played[STOCK] = play(plain, STOCK, Stock, scenario.stock)
    return played


def _play_in_place_alone(scenario: Scenario) -> Played:
    ways = [partial(DistributedDataParallel, transport=each) for each in _transports(scenario)]
    with configured(scenario.seed, scenario.thresholds):
        played = {OURS: play(scenario, OURS, ways[0], scenario.options)}
        return played | _play_in_place(scenario, ways)


def _transports(scenario: Scenario) -> list[str]:
    """Two numbers have one sum, more of them one for each order: that of memory, or of gloo."""
    through = ["auto", "process_group"] if scenario.seed % 2 else ["process_group", "auto"]
    return through if scenario.world_size == 2 else [through[0]] * 2


def as_in_place(scenario: Scenario) -> Scenario:
    """The same without copies that go on: those of a replicated module are plain ones.

    Another one that has loaded a checkpoint does.
    """
    actions = tuple(
        Renew("checkpoint") if action == Renew("copy") else action for action in scenario.actions
    )
    return replace(scenario, actions=actions)


def _play_in_place(scenario: Scenario, ways: Sequence[partial[Any]]) -> Played:
    """Replicated in place; and once more wrapped, if that must be another program."""
    in_place = as_in_place(scenario)
    replicate = partial(tritonddp.replicate, **ways[1].keywords)
    played = {IN_PLACE: play(in_place, IN_PLACE, replicate, scenario.options)}
    if in_place != scenario:
        played[BESIDE] = play(in_place, BESIDE, ways[0], scenario.options)
    return played


def compiles(scenario: Scenario) -> bool:
    """Whether torch.compile runs such a program at all, also without a wrapper.

    Where forwards change buffers, no two of them may come before their backwards; and it fails
    where a custom function in a checkpoint returns no gradient. Where torch splits a graph for a
    wrapper around it, a buffer that the forward changes and reads may be read too late.
    """
    later = (action.kind for action in scenario.actions if isinstance(action, Replace))
    blocks = " ".join([*scenario.network.blocks, *later])
    changes = any(each in blocks for each in ("convolution", "functional", "normed"))
    slots = {action.slot for action in scenario.actions if isinstance(action, Forward)}
    fails = "buffered" in blocks or ("withholding" in blocks and scenario.network.checkpoint)
    return not (changes and len(slots) > 1) and not fails


def _play_compiled(scenario: Scenario) -> Played:
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
        with room, retains, configured(scenario.seed, scenario.thresholds):
            played[title] = play(scenario, title, wrap, scenario.options)
    return played


def play(
    scenario: Scenario,
    title: str,
    wrap: Callable[..., nn.Module],
    options: Options,
    after: Callable[[Player, int], None] = lambda player, number: None,
) -> Trace:
    """What this rank saw. ``after`` is called after each of its actions, and at the end.

    Raises:
        RuntimeError: something was raised; the message says in which scenario, and where.
    """
    # In the log of this process, which is shown where it hangs.
    print(f"seed {scenario.seed}, {title}", flush=True)
    where = "when it is wrapped"
    try:

        def wrapped(network: Network) -> nn.Module:
            net = wrap(network, **arguments_of(options), **_delayed(scenario, network))
            if scenario.communication_hook:
                COMMUNICATION_HOOKS[scenario.communication_hook](behind(net) or net)
            return net

        player = Player(scenario, dist.get_rank(), build(scenario, dist.get_rank()), wrapped)
        counts = scenario.counts or (len(scenario.actions),) * scenario.world_size
        with _joining(scenario, player.net):
            for number in range(counts[player.rank]):
                where = f"in action {number}: {scenario.actions[number]}"
                player.perform(number)
                after(player, number)
            where = "while it follows the others inside join()"
        player.finish()
        after(player, len(scenario.actions))
        if options.metrics:
            _compare_metrics(player, is_joined=scenario.counts is not None)
    except Exception as error:
        message = f"seed {scenario.seed}: {title} raised {type(error).__name__} {where}"
        raise RuntimeError(message) from error
    trace = player.trace
    del player
    gc.collect()  # what is left of one scenario may not help the next one
    return trace


def _compare_metrics(player: Player, is_joined: bool) -> None:
    """All ranks have been told the same, after each step, or inside ``join()`` in the end."""
    player.ask_metrics()
    everyones: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, player.metrics[-1:] if is_joined else player.metrics)
    assert all(each == everyones[0] for each in everyones), f"metrics() differ: {everyones}"


def _joining(scenario: Scenario, net: Any) -> contextlib.AbstractContextManager[Any]:
    if not scenario.counts:
        return contextlib.nullcontext()
    return net.join(divide_by_initial_world_size=not scenario.over_present)


def _delayed(scenario: Scenario, network: Network) -> dict[str, Any]:
    if not scenario.delays:
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
    """Context: small gradients go the ways of large ones.

    No bucket is exchanged directly, or the smallest ones are, or all. Through memory, in one shot,
    or in two.
    """
    stack = contextlib.ExitStack()
    if thresholds:
        sizes = dict(zip(("_SMALL", "_SEGMENT"), thresholds, strict=True))
        stack.enter_context(patch.multiple(reference, **sizes))
    stack.enter_context(patch.object(process_group, "_DIRECT", (0, 400, 2**20)[seed % 3]))
    if seed % 4 < 2:
        shares = {"_RANKS_OF_SHARES": 2, "_BYTES_OF_SHARES": 200}
        stack.enter_context(patch.multiple(memory_exchange, **shares))
        stack.enter_context(patch.object(rank_buffers, "_PIECE", 64))
    return stack

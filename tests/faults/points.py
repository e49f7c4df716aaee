"""Where a fault strikes, and in which kind of training loop.

A fault strikes right before a call of the library, in a hook that a user could have put there, or
between the lines of the loop. The first two are patched into the process of each rank, which plays
one fault and ends.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Point:
    """A place in the life of a rank.

    Attributes:
        loop: the kind of training loop, see ``program.py``.
        before: ``"module:Class.method"``: right before this is called; or the name of a line of
            the loop.
        call: which call of a step it is, the first is 0.
        step: in which step it strikes, -1 when the module is wrapped; ``None`` in any.
    """

    loop: str
    before: str
    call: int = 0
    step: int | None = 2  # STRUCK_AT


STRUCK_AT = 2  # the step of most faults, counted from 0
RUN = "tritonddp.comm.reduction:Reduction"
# Through the process group, or through memory.
MEMORY = "tritonddp.comm.host.memory_exchange:MemoryExchange"
_ALL_REDUCE = "tritonddp.comm.all_reduce"
TRANSPORT = f"{_ALL_REDUCE}:AllReduce|{_ALL_REDUCE}:DirectSum|{MEMORY}"
OWNERS = f"tritonddp.comm.reduce_to_owners:ReduceToOwners|{MEMORY}"
OPTIMIZER = "tritonddp.zero.zero_redundancy_optimizer"
VALUES = "tritonddp.zero.values:OwnedValues"
HOST = "tritonddp.coordination.host"
SHARED = "tritonddp.comm.host.shared_broadcast:SharedBroadcast"
CROSS_HOST = "tritonddp.comm.host.cross_host:CrossHost"

POINTS = {
    "before wrapping": Point("plain", "wrap", step=-1),
    "between comparison and initial broadcast": Point(
        "plain", "tritonddp.comm.broadcast:StateBroadcast.send", step=-1
    ),
    "before the forward": Point("plain", "forward"),
    "inside the forward": Point("plain", "module forward"),
    "buffer broadcast": Point("buffers", "tritonddp.ddp:DistributedDataParallel._sync_buffers"),
    "buffers in memory": Point("buffers", f"{SHARED}._show", step=3),
    "loan of memory": Point("buffers", f"{SHARED}._lend", step=1),
    "wait for buffers": Point("buffers", f"{SHARED}._take", step=3),
    "loss": Point("plain", "loss"),
    "first gradient": Point("plain", "gradient of the last layer"),
    "between buckets": Point("plain", "gradient of a layer in the middle"),
    "last gradient": Point("plain", "gradient of the first layer"),
    "flatten": Point("plain", f"{RUN}.pack", call=2),
    "launch": Point("plain", f"{TRANSPORT}.launch", call=1),
    "end of backward": Point("plain", f"{TRANSPORT}.wait"),
    "between two results": Point("plain", f"{TRANSPORT}.wait", call=2),
    "order of gradients": Point(
        "plain", "tritonddp.buckets.manager:BucketManager.agree_on_order", step=0
    ),
    "after the order of gradients": Point(
        "plain", "tritonddp.buckets.manager:BucketManager.renew", step=0
    ),
    "optimizer step": Point("plain", "optimizer"),
    "no_sync": Point("no_sync", "microbatch"),
    "weighted": Point("weighted", "gradient of a layer in the middle"),
    "reduce_gradients": Point("request", "request"),
    "inside reduce_gradients": Point("request", f"{TRANSPORT}.launch", call=1),
    "communication hook": Point("hook", "hook", call=1),
    "flags behind the hooks": Point("hook", "tritonddp.comm.comm_hook:CommHook._send"),
    "broadcast of added parameters": Point("added", "tritonddp.comm.broadcast:StateBroadcast.send"),
    "bucket of added parameters": Point("added", f"{RUN}.reduce_now"),
    "exchange of compressed gradients": Point("plain", "tritonddp.comm.quantized:send", call=2),
    "sum of compressed gradients": Point("plain", "tritonddp.comm.quantized:_Messages.go_on"),
    "rows of sparse gradients": Point("sparse", "tritonddp.comm.reduction:exchange_rows"),
    "finalize_backward": Point("finalize", "finalize"),
    "inside finalize_backward": Point("finalize", f"{TRANSPORT}.wait", call=1),
    "meeting of a host's ranks": Point("plain", f"{HOST}.connect:_meet", step=0),
    "memory of buckets": Point("plain", f"{HOST}.memory:Memory.create", step=0),
    "handing memory over": Point(
        "plain", "tritonddp.comm.host.peer_memory:PeerMemory._hand_over", step=0
    ),
    "message through memory": Point("plain", f"{MEMORY}.launch", call=2),
    "wait for a message": Point("plain", f"{HOST}.peers:WaitPoint.wait_for", call=2),
    "sum in memory": Point("plain", f"{MEMORY}._sum", call=1),
    "sum in gradients": Point(
        "large", "tritonddp.comm.host.rank_buffers:RankBuffers.sum_into", call=1
    ),
    "share of a sum": Point("shares", f"{MEMORY}.sum_share", call=1),
    "word of a share": Point("shares", f"{MEMORY}._say_summed", call=1),
    "line between hosts": Point("hosts", f"{CROSS_HOST}.start", call=1),
    "sum over hosts": Point("hosts", f"{CROSS_HOST}.finish", call=1),
    "making an optimizer": Point("sharded", "make", step=-1),
    "comparison of optimizers": Point("sharded", f"{OPTIMIZER}:verify_same", step=-1),
    "gradients of owners": Point("sharded", "gradient of a layer in the middle"),
    "gradients to owners": Point("sharded", f"{OWNERS}.launch", call=1),
    "sum at an owner": Point("sharded", f"{OWNERS}.wait", call=1),
    "before a sharded step": Point("sharded", "optimizer"),
    "step of owners": Point("sharded", "owned"),
    "between step and values": Point("sharded", f"{VALUES}.exchange"),
    "loan of memory for values": Point("sharded", f"{SHARED}._lend", step=0),
    "values in memory": Point("sharded", f"{SHARED}._show", step=3),
    "wait for values": Point("sharded", f"{SHARED}._take", step=3),
    "arrival of values": Point("sharded", f"{VALUES}._wait", call=1),
    "norms of owners": Point("clipped", f"{OPTIMIZER}:ZeroRedundancyOptimizer.norms"),
    "before consolidate_state_dict": Point("consolidated", "consolidate"),
    "gather of the state": Point("consolidated", "tritonddp.coordination.collectives:broadcast"),
    "check_sync": Point("check", "check"),
    "checksums": Point("check", "tritonddp.diagnostics.check_sync:checksums"),
    "forward inside join": Point("join", "tritonddp.ddp:announce_forward"),
    "announcement inside join": Point("join", "tritonddp.features.join:JoinProtocol.announce"),
    "backward inside join": Point("join", "gradient of a layer in the middle"),
    "follower": Point("join", "tritonddp.features.join:JoinProtocol.receive", step=None),
    "follower's backward": Point(
        "join", "tritonddp.reducer.reductions:Reductions.shadow_backward", step=None
    ),
    "end of join": Point("join", "tritonddp.features.join:JoinProtocol.agree_on_last", step=None),
}

# Where a rank that does something else than the others is told apart by the loop alone.
_NOWHERE = {
    "no_sync inside join on one rank": Point("join", ""),
    "longer buffer": Point("buffers", ""),
    **{f"another {what}": Point("check", "") for what in ("parameter", "buffer", "gradient")},
}


def point_of(at: str) -> Point:
    """Where a fault strikes."""
    return POINTS.get(at) or _NOWHERE.get(at) or Point("plain", "")


def strike_before(target: str, strike: Callable[[], None]) -> None:
    """Have ``strike`` called before each call of ``"module:name"`` or ``"module:Class.name"``.

    ``"module:Class|module:Class.name"`` are methods of this name of all these classes.
    """
    *others, target = target.split("|")
    for each in others:
        strike_before(f"{each}.{target.rpartition('.')[2]}", strike)
    module, _, path = target.partition(":")
    *classes, name = path.split(".")
    owner: Any = importlib.import_module(module)
    for each in classes:
        owner = getattr(owner, each)
    function = getattr(owner, name)

    def struck(*args: Any, **kwargs: Any) -> Any:
        strike()
        return function(*args, **kwargs)

    setattr(owner, name, struck)

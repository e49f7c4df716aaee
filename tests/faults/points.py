"""The places where faults occur, and the training loop of each.

A fault occurs before a call of a function of the package, in a hook of the user, or between two
lines of the loop. Functions are patched: the process of a rank plays one fault and ends.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

STRUCK_AT = 2  # the step of most faults, counted from 0


@dataclass(frozen=True)
class Point:
    """A place in the program of a rank.

    Attributes:
        before: ``"module:Class.method"`` for a place before a call of this method of the package,
            or the name of a line of the loop.
        strikes: the faults, separated by commas. Each is a kind (see :class:`faults.table.Fault`),
            ``victim/ranks``, and :attr:`faults.table.Fault.words`.
        loop: the training loop, see program.py.
        call: the index of the call within a step.
        step: the step of the fault; -1 when the module is wrapped, ``None`` for any step.
    """

    before: str = ""
    strikes: str = ""
    loop: str = "plain"
    call: int = 0
    step: int | None = STRUCK_AT


# Through the process group, or through memory.
MEMORY = "comm.host.memory_exchange:MemoryExchange"
TRANSPORT = f"comm.all_reduce:AllReduce|{MEMORY}"
OWNERS = f"comm.all_reduce:ReduceToOwners|{MEMORY}"
PARTS = "comm.parts:PartsExchange"  # between hosts, or between ranks with compression

POINTS = {
    "before wrapping": Point("wrap", "kill 1/3, stop 1/2", step=-1),
    "between comparison and initial broadcast": Point(
        "comm.broadcast:StateBroadcast.send", "kill 2/4, loop 0/2", step=-1
    ),
    "before the forward": Point("forward", "kill 1/2, behind 1/3, leave 2/3"),
    "inside the forward": Point("module forward", "kill 0/3, kill 0/3 host, loop 0/2, behind 0/2"),
    "buffer broadcast": Point(
        "wrapper:DistributedDataParallel._sync_buffers", "kill 2/3, stop 0/3", loop="buffers"
    ),
    "buffers in memory": Point(
        "comm.host.shared_broadcast:SharedBroadcast._show",
        "kill 0/3, stop 0/2",
        loop="buffers",
        step=3,
    ),
    "loss": Point("loss", "kill 0/2, behind 2/3, orphan 2/3, orphan 2/3 group"),
    "first gradient": Point(
        "gradient of last layer", "kill 3/4, stop 2/3 int8, loop 1/3, raise 0/2, nan 0/2 views"
    ),
    "between buckets": Point(
        "gradient of second layer",
        "kill 1/3, kill 0/3 int8, stop 2/3 views, raise 1/3 views, raise 1/2 int8, interrupt 0/2, "
        "nan 1/3, nan 1/3 int8, nan 1/3 checked, nan 0/2 checked views",
    ),
    "last gradient": Point("gradient of first layer", "kill 1/2 views, raise 1/2"),
    "launch": Point(f"{TRANSPORT}.launch", "kill 0/4, stop 0/2", call=1),
    "end of backward": Point(f"{TRANSPORT}.wait", "kill 1/3 views, kill 0/2 detail, stop 1/4"),
    "order of gradients": Point(
        "buckets.manager:BucketManager.agree_on_order", "kill 1/3, stop 0/2", step=0
    ),
    "optimizer step": Point("optimizer", "kill 0/3, stop 1/2, loop 2/3, leave 0/2"),
    "exchange of compressed gradients": Point(
        "coordination.collectives:send", "kill 1/3 int8", call=2
    ),
    "sum of compressed gradients": Point(f"{PARTS}.go_on", "kill 0/3 int8, stop 1/3 int8"),
    "rows of sparse gradients": Point(
        "comm.reduction:exchange_rows", "kill 2/3, stop 1/2", loop="sparse"
    ),
    "meeting of a host's ranks": Point("coordination.host.connect:_meet", "kill 1/3", step=0),
    "handing memory over": Point(
        "comm.host.peer_memory:PeerMemory._hand_over", "kill 1/4, stop 1/2, loop 0/3", step=0
    ),
    "wait for a message": Point(
        "coordination.host.peers:WaitPoint.wait_for", "kill 1/2, stop 3/4, leave 1/3", call=2
    ),
    "sum in memory": Point("comm.host.rank_buffers:RankBuffers.sum", "kill 0/3, stop 2/3", call=1),
    "gradients between hosts": Point(
        "gradient of second layer",
        "raise 1/4 int8, raise 0/4, interrupt 4/6 int8, nan 2/4 int8, nan 3/6, "
        "nan 3/6 checked int8",
        loop="hosts",
    ),
    "line between hosts": Point(
        f"{PARTS}.__init__", "kill 3/4, stop 1/4, kill 2/4 int8", loop="hosts", call=1
    ),
    "sum over hosts": Point(
        f"{PARTS}.wait", "kill 0/4, stop 2/4, stop 3/4 int8, kill 4/6 int8", loop="hosts", call=1
    ),
    "result over hosts": Point(
        f"{MEMORY}._say_summed", "kill 1/4 int8, loop 2/4 int8, stop 3/6 int8", loop="hosts", call=1
    ),
    "comparison of optimizers": Point(
        "zero.zero_redundancy_optimizer:verify_same", "kill 0/2, stop 2/3", loop="sharded", step=-1
    ),
    "gradients of owners": Point(
        "gradient of second layer",
        "kill 2/3, raise 0/2, raise 1/3 group, interrupt 1/2",
        loop="sharded",
    ),
    "gradients to owners": Point(
        f"{OWNERS}.launch", "kill 1/3, kill 0/2 group, stop 1/2", loop="sharded", call=1
    ),
    "before a sharded step": Point(
        "optimizer", "kill 0/3, kill 1/2 group, stop 1/3, leave 2/3, raise 1/2", loop="sharded"
    ),
    "step of owners": Point("owned", "kill 0/2, loop 1/3, raise 1/3", loop="sharded"),
    "between step and values": Point(
        "zero.values:OwnedValues.exchange",
        "kill 2/3, kill 0/3 group, stop 0/2 group, raise 1/2, interrupt 0/3",
        loop="sharded",
    ),
    "checksums": Point("diagnostics.check_sync:checksums", "kill 0/2", loop="check"),
    "forward inside join": Point(
        "features.join:JoinProtocol.announce", "kill 1/3, stop 0/2", loop="join"
    ),
    "backward inside join": Point(
        "gradient of second layer", "kill 0/3, raise 0/3, nan 0/2", loop="join"
    ),
    "follower": Point(
        "features.join:JoinProtocol.receive", "kill 2/3, stop 1/3", loop="join", step=None
    ),
}


def point_of(at: str) -> Point:
    """The place of a fault. The ranks of other keys run different programs."""
    return POINTS.get(at) or Point(loop="check" if at == "another parameter" else "plain")


def strike_before(target: str, strike: Callable[[], None]) -> None:
    """Call ``strike`` before each call of ``"module:name"`` or ``"module:Class.name"``.

    ``"module:Class|module:Class.name"`` names the same method of several classes.
    """
    *others, target = target.split("|")
    for each in others:
        strike_before(f"{each}.{target.rpartition('.')[2]}", strike)
    module, _, path = target.partition(":")
    *classes, name = path.split(".")
    owner: Any = importlib.import_module(f"tritonddp.{module}")
    for each in classes:
        owner = getattr(owner, each)
    function = getattr(owner, name)

    def struck(*args: Any, **kwargs: Any) -> Any:
        strike()
        return function(*args, **kwargs)

    setattr(owner, name, struck)

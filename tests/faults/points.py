"""The places where faults occur, and the training loop of each.

A fault occurs before a call of a function of the package, in a hook of the user, or between two
lines of the loop. Functions are patched: the process of a rank plays one fault and ends.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Point:
    """A place in the program of a rank.

    Attributes:
        loop: the training loop, see program.py.
        before: ``"module:Class.method"`` for a place before a call of this method, or the name of a
            line of the loop.
        strikes: the faults, separated by commas. Each is a kind (see :class:`faults.table.Fault`),
            ``victim/ranks``, and names of options in :data:`faults.table.WORDS`.
        call: the index of the call within a step.
        step: the step of the fault; -1 when the module is wrapped, ``None`` for any step.
    """

    loop: str
    before: str
    strikes: str = ""
    call: int = 0
    step: int | None = 2  # STRUCK_AT


STRUCK_AT = 2  # the step of most faults, counted from 0
# Through the process group, or through memory.
MEMORY = "tritonddp.comm.host.memory_exchange:MemoryExchange"
_ALL_REDUCE = "tritonddp.comm.all_reduce"
TRANSPORT = f"{_ALL_REDUCE}:AllReduce|{MEMORY}"
SUM = "tritonddp.comm.host.rank_buffers:RankBuffers.sum"
OWNERS = f"{_ALL_REDUCE}:ReduceToOwners|{MEMORY}"
OPTIMIZER = "tritonddp.zero.zero_redundancy_optimizer"
VALUES = "tritonddp.zero.values:OwnedValues"
HOST = "tritonddp.coordination.host"
# Between hosts, or between ranks with compression.
PARTS = "tritonddp.comm.parts:PartsExchange"

POINTS = {
    "before wrapping": Point("plain", "wrap", "kill 1/3, stop 1/2", step=-1),
    "between comparison and initial broadcast": Point(
        "plain", "tritonddp.comm.broadcast:StateBroadcast.send", "kill 2/4, loop 0/2", step=-1
    ),
    "before the forward": Point("plain", "forward", "kill 1/2, behind 1/3, leave 2/3"),
    "inside the forward": Point("plain", "module forward", "kill 0/3, loop 0/2, behind 0/2"),
    "buffer broadcast": Point(
        "buffers", "tritonddp.wrapper:DistributedDataParallel._sync_buffers", "kill 2/3, stop 0/3"
    ),
    "buffers in memory": Point(
        "buffers",
        "tritonddp.comm.host.shared_broadcast:SharedBroadcast._show",
        "kill 0/3, stop 0/2",
        step=3,
    ),
    "loss": Point("plain", "loss", "kill 0/2, behind 2/3, orphan 2/3, orphan 2/3 group"),
    "first gradient": Point(
        "plain",
        "gradient of the last layer",
        "kill 3/4, stop 2/3 int8, loop 1/3, raise 0/2, nan 0/2 views",
    ),
    "between buckets": Point(
        "plain",
        "gradient of a layer in the middle",
        "kill 1/3, kill 0/3 int8, stop 2/3 views, raise 1/3 views, raise 1/2 int8, interrupt 0/2, "
        "nan 1/3, nan 1/3 int8",
    ),
    "last gradient": Point("plain", "gradient of the first layer", "kill 1/2 views, raise 1/2"),
    "launch": Point("plain", f"{TRANSPORT}.launch", "kill 0/4, stop 0/2", call=1),
    "end of backward": Point("plain", f"{TRANSPORT}.wait", "kill 1/3 views, stop 1/4"),
    "order of gradients": Point(
        "plain",
        "tritonddp.buckets.manager:BucketManager.agree_on_order",
        "kill 1/3, stop 0/2",
        step=0,
    ),
    "optimizer step": Point("plain", "optimizer", "kill 0/3, stop 1/2, loop 2/3, leave 0/2"),
    "exchange of compressed gradients": Point(
        "plain", "tritonddp.coordination.collectives:send", "kill 1/3 int8", call=2
    ),
    "sum of compressed gradients": Point("plain", f"{PARTS}.go_on", "kill 0/3 int8, stop 1/3 int8"),
    "rows of sparse gradients": Point(
        "sparse", "tritonddp.comm.reduction:exchange_rows", "kill 2/3, stop 1/2"
    ),
    "meeting of a host's ranks": Point("plain", f"{HOST}.connect:_meet", "kill 1/3", step=0),
    "handing memory over": Point(
        "plain",
        "tritonddp.comm.host.peer_memory:PeerMemory._hand_over",
        "kill 1/4, stop 1/2, loop 0/3",
        step=0,
    ),
    "wait for a message": Point(
        "plain", f"{HOST}.peers:WaitPoint.wait_for", "kill 1/2, stop 3/4, leave 1/3", call=2
    ),
    "sum in memory": Point("plain", SUM, "kill 0/3, stop 2/3", call=1),
    "gradients between hosts": Point(
        "hosts",
        "gradient of a layer in the middle",
        "raise 1/4 int8, interrupt 4/6 int8, nan 2/4 int8, nan 3/6, raise 0/4",
    ),
    "line between hosts": Point(
        "hosts", f"{PARTS}.__init__", "kill 3/4, stop 1/4, kill 2/4 int8", call=1
    ),
    "sum over hosts": Point(
        "hosts", f"{PARTS}.wait", "kill 0/4, stop 2/4, stop 3/4 int8, kill 4/6 int8", call=1
    ),
    "result over hosts": Point(
        "hosts", f"{MEMORY}._say_summed", "kill 1/4 int8, loop 2/4 int8, stop 3/6 int8", call=1
    ),
    "comparison of optimizers": Point(
        "sharded", f"{OPTIMIZER}:verify_same", "kill 0/2, stop 2/3", step=-1
    ),
    "gradients of owners": Point(
        "sharded",
        "gradient of a layer in the middle",
        "kill 2/3, raise 0/2, raise 1/3 group, interrupt 1/2",
    ),
    "gradients to owners": Point(
        "sharded", f"{OWNERS}.launch", "kill 1/3, kill 0/2 group, stop 1/2", call=1
    ),
    "before a sharded step": Point(
        "sharded", "optimizer", "kill 0/3, kill 1/2 group, stop 1/3, leave 2/3, raise 1/2"
    ),
    "step of owners": Point("sharded", "owned", "kill 0/2, loop 1/3, raise 1/3"),
    "between step and values": Point(
        "sharded",
        f"{VALUES}.exchange",
        "kill 2/3, kill 0/3 group, stop 0/2 group, raise 1/2, interrupt 0/3",
    ),
    "checksums": Point("check", "tritonddp.diagnostics.check_sync:checksums", "kill 0/2"),
    "forward inside join": Point(
        "join", "tritonddp.features.join:JoinProtocol.announce", "kill 1/3, stop 0/2"
    ),
    "backward inside join": Point(
        "join", "gradient of a layer in the middle", "kill 0/3, raise 0/3, nan 0/2"
    ),
    "follower": Point(
        "join", "tritonddp.features.join:JoinProtocol.receive", "kill 2/3, stop 1/3", step=None
    ),
}


def point_of(at: str) -> Point:
    """The place of a fault. The ranks of other keys run different programs, see differences.py."""
    return POINTS.get(at) or Point("check" if at == "another parameter" else "plain", "")


def strike_before(target: str, strike: Callable[[], None]) -> None:
    """Call ``strike`` before each call of ``"module:name"`` or ``"module:Class.name"``.

    ``"module:Class|module:Class.name"`` names the same method of several classes.
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

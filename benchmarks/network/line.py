"""What a line of limited rate allows: the shortest time that a training step can take on it.

A step cannot end before every bucket has been all-reduced, a bucket cannot leave before its
gradients are ready, and a host cannot send faster than its token bucket lets it. So the limit has
two parts: the line at work, and the line idle because nothing is ready, which is the compute that
cannot overlap: the forward, the backward up to the first full bucket, and gaps between buckets.
Copies into and out of buckets are not in it: they are what an implementation adds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# The token bucket counts Ethernet frames without preamble, checksum and gap (qdisc_pkt_len), and
# those of a packet of many segments one by one. The rest is IPv4, TCP and TCP's timestamps.
MTU = 1500
FRAME_BYTES = 14 + MTU
FRAME_PAYLOAD = MTU - 20 - 20 - 12


@dataclass(frozen=True)
class Limit:
    """The shortest time of a step, in seconds, and its parts.

    Attributes:
        line: the line is at work.
        compute: the line waits for gradients.
    """

    line: float
    compute: float

    @property
    def seconds(self) -> float:
        return self.line + self.compute


def ring_bytes(payload: float, hosts: int) -> float:
    """What each host must send to all-reduce ``payload`` bytes, without headers.

    The least that any algorithm can do whose hosts send equally much: reduce-scatter and
    all-gather, ``(hosts - 1) / hosts`` of the payload each. gloo's ring sends just that.
    """
    return 2 * (hosts - 1) / hosts * payload


def frame_bytes(payload: float) -> float:
    """What a token bucket counts for this many bytes of TCP payload in full frames.

    Acknowledgements of what comes the other way are left out: about 0.1% with segmentation
    offload.
    """
    return payload * FRAME_BYTES / FRAME_PAYLOAD


def step_limit(
    ready: Sequence[float], payloads: Sequence[float], hosts: int, rate: float | None, burst: int
) -> Limit:
    """The limit of a step whose buckets are sent one behind the other.

    Args:
        ready: when the last gradient of each bucket is there, in seconds from the start of the
            step, in the order of sending.
        payloads: bytes of each bucket.
        hosts: that take part, with one rank each.
        rate: bits per second of each host's line; ``None`` takes no time at all.
        burst: bytes that a line which was idle for long lets through in no time.
    """
    if rate is None:
        return Limit(0.0, ready[-1])
    now = line = 0.0
    tokens = float(burst)
    for start, payload in zip(ready, payloads, strict=True):
        idle = max(0.0, start - now)
        tokens = min(burst, tokens + idle * rate / 8)
        count = frame_bytes(ring_bytes(payload, hosts))
        busy = max(0.0, count - tokens) * 8 / rate
        tokens = max(0.0, tokens - count)
        now += idle + busy
        line += busy
    return Limit(line, now - line)

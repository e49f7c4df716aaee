"""The result of network.py for one number of hosts, one line rate and one model.

A step cannot end before every bucket has been all-reduced, a bucket cannot be sent before its
gradients are ready, and a host cannot send faster than its token bucket allows. So the shortest
time has two parts: the line is busy, or the line is idle because nothing is ready. The second part
is compute that cannot overlap: the forward, the backward up to the first full bucket, and gaps
between buckets. Copies into and out of buckets are not included, because they depend on the
implementation.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from benchmarks.base.paired import Spread, paired_ratio
from benchmarks.models.configurations import UNWRAPPED, Configuration, Family, families, once, wires
from benchmarks.network.namespaces import burst_bytes

# The token bucket counts Ethernet frames without preamble, checksum and gap (qdisc_pkt_len); it
# counts the frames of a segmented packet individually. The rest is IPv4, TCP and TCP timestamps.
MTU = 1500
FRAME_BYTES = 14 + MTU
FRAME_PAYLOAD = MTU - 20 - 20 - 12


@dataclass(frozen=True)
class Limit:
    """The shortest time of a step, in seconds, and its parts."""

    line: float  # the line is busy
    compute: float  # the line waits for gradients

    @property
    def seconds(self) -> float:
        return self.line + self.compute


def ring_bytes(payload: float, hosts: int) -> float:
    """Return the bytes that each host must send to all-reduce ``payload`` bytes, without headers.

    This is the minimum of all algorithms in which every host sends equally much: a reduce-scatter
    and an all-gather, ``(hosts - 1) / hosts`` of the payload each. gloo's ring sends exactly that.
    """
    return 2 * (hosts - 1) / hosts * payload


def frame_bytes(payload: float) -> float:
    """Return the bytes that a token bucket counts for a TCP payload in full frames.

    Acknowledgements of the opposite direction are omitted: about 0.1% with segmentation offload.
    """
    return payload * FRAME_BYTES / FRAME_PAYLOAD


def step_limit(
    ready: Sequence[float], payloads: Sequence[float], hosts: int, rate: float | None, burst: int
) -> Limit:
    """Return the limit of a step whose buckets are sent one after the other.

    Args:
        ready: when the last gradient of each bucket is ready, in seconds from the start of the
            step, in sending order.
        payloads: bytes of each bucket.
        hosts: number of hosts, with one rank each.
        rate: bits per second of each host's line; with ``None``, sending takes no time.
        burst: bytes that an idle line sends without delay.
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


def families_at(rate: float | None, by_wire: bool) -> tuple[Family, ...]:
    """Return the families to compare on a line of this rate.

    By wire: formats with fewer bytes. Otherwise copies and views in full precision. Below 1 Gbit/s
    only stock's default and ours: there a step takes seconds, of which other ways to copy
    gradients, and views of buckets, could save at most a few milliseconds.
    """
    if by_wire:
        return wires()
    copies, views = families()
    if rate is None or rate >= 1e9:
        return copies, views
    return (replace(copies, stock=copies.stock[:1]),)


def contenders_of(groups: Sequence[Family]) -> tuple[Configuration, ...]:
    """Return each configuration once."""
    return once(each for group in groups for each in (*group.stock, group.ours))


def evaluate(
    ranks: Sequence[dict[str, Any]], by_wire: bool = False, ranks_per_host: int = 1
) -> dict[str, Any]:
    """Return an entry of the result file.

    It contains the steps, and the limit of the line with every gradient sent as soon as it is
    ready. The excess of a step over the limit is the wait for full buckets, the wrapper's own work,
    and the slowdown from computing and sending at the same time.

    Args:
        ranks: for each rank the result of :func:`network_rank.measure`, and the model's facts.
        by_wire: configurations send different numbers of bytes; each gets the limit of its bytes.
        ranks_per_host: limits are nevertheless those of a ring over all ranks, which crosses each
            line once.
    """
    hosts, first = len(ranks), ranks[0]
    rate, sizes, counts = first["rate"], first["gradient_bytes"], first["bucket_counts"]
    payload = sum(sizes)
    ends = list(itertools.accumulate(counts))
    buckets = [sum(sizes[end - count : end]) for end, count in zip(ends, counts, strict=True)]
    slowest = {
        name: _largest([rank["seconds"][name] for rank in ranks]) for name in first["seconds"]
    }
    # When the gradients were ready on all ranks, in the median round.
    rounds = zip(*(rank["ready_seconds"] for rank in ranks), strict=True)
    latest = [_largest(of_ranks) for of_ranks in rounds]
    ready = [statistics.median(gradient) for gradient in zip(*latest, strict=True)]
    burst = 0 if rate is None else burst_bytes(rate)

    def limit_of(share: float = 1.0) -> Limit:
        """Return the limit of steps that send this share of the gradients' bytes."""
        return step_limit(ready, [share * size for size in sizes], hosts, rate, burst)

    limit = limit_of()

    def contender(name: str) -> dict[str, Any]:
        median = statistics.median(slowest[name])
        sent = statistics.median(_largest([rank["tx_bytes"][name] for rank in ranks]))
        own = limit
        if by_wire and name != UNWRAPPED.name:
            own = limit_of(sent / ring_bytes(payload, hosts))
        return {
            "seconds": asdict(Spread.of(slowest[name])),
            "over": {"limit": median / own.seconds if own.seconds else None},
            "tx_bytes": sent,
            "sent_bytes": first["sent_bytes"].get(name),
            "raw_seconds_per_rank": [rank["seconds"][name] for rank in ranks],
        }

    return {
        "hosts": hosts,
        "ranks_per_host": ranks_per_host,
        "rate_bits_per_s": rate,
        **{name: first[name] for name in ("model", "parameters", "gradients")},
        "payload_bytes": payload,
        "ring_bytes": ring_bytes(payload, hosts),
        "burst_bytes": burst,
        "rounds": len(latest),
        "bucket_bytes": buckets,
        "gradient_bytes": sizes,
        "gradient_ready_seconds": ready,
        "limit_seconds": limit.seconds,
        "limit_parts": {"limit": asdict(limit)},
        "contenders": {name: contender(name) for name in slowest},
        "comparisons": _comparisons(rate, slowest, by_wire),
    }


def _largest(of_ranks: Sequence[Sequence[float]]) -> list[float]:
    """Return the elementwise maximum over the ranks."""
    return [max(each) for each in zip(*of_ranks, strict=True)]


def _comparisons(
    rate: float | None, seconds: dict[str, list[float]], by_wire: bool
) -> dict[str, Any]:
    """Compare ours in each family with the stock configuration that has the lowest median."""

    def median(configuration: Configuration) -> float:
        return statistics.median(seconds[configuration.name])

    found = {}
    for family in families_at(rate, by_wire):
        best = min(family.stock, key=median).name
        ratio = paired_ratio(seconds[family.ours.name], seconds[best])
        found[family.name] = {"contender": family.ours.name, "best": best, "ours": asdict(ratio)}
    return found

"""What the ranks have found, as sections of the report, and what follows for a model."""

from __future__ import annotations

import os
import statistics
from collections import Counter
from collections.abc import Sequence
from typing import Any

from tritonddp.cli.checks.launch import Plan, RankReport
from tritonddp.cli.checks.machine import numa_nodes
from tritonddp.cli.checks.report import Section, amount, duration, rate

# An all-reduce of one element that takes longer than this, in seconds: on one host, on several.
_SLOW = {True: 5e-3, False: 20e-3}
# A pair of ranks whose line has less than this share of the median's is named.
_SHARE = 0.5
# Lines on which int8 pays, in bytes per second of a rank: see docs/fewer-bytes.md.
_INT8_PAYS = 1e9 / 8
# Of packets, in bytes: smaller ones cost more headers and more work.
_MTU = 1500


def ranks(section: Section, plan: Plan, reports: Sequence[RankReport], shows_names: bool) -> None:
    """Fill the section about the ranks: failures, hosts, and differences between them."""
    hosts = f" on {plan.nnodes} hosts" if plan.nnodes > 1 else ""
    section.fact("ranks", f"{plan.world_size}{hosts}, {plan.backend}, tensors on {plan.device}")
    section.fact("started by", "torchrun" if plan.is_launched else "tritonddp doctor")
    failures = [each for each in reports if each.failure]
    for each in failures:
        section.fact(f"rank {each.rank} failed", each.failure)
    if failures:
        first = next((f for f in failures if "it was ended after" not in f.failure), failures[0])
        memory = "MemoryError" in first.failure or "out of memory" in first.failure
        section.broken(
            f"the group failed. Rank {first.rank}, {first.failure}"
            + (" It has not the memory that it needs: see the limits." if memory else "")
        )
        _check_names(section, plan, first.failure)
    found = _found(reports, "ranks")
    if found is None:
        return
    by_host: dict[str, list[int]] = {}
    for rank, each in enumerate(found):
        by_host.setdefault(each["host"], []).append(rank)
    for number, (host, members) in enumerate(by_host.items()):
        name = next(each["name"] for each in found if each["host"] == host)
        called = f"host {number}" + (f" ({name})" if shows_names else "")
        cards = Counter(found[rank]["card"] for rank in members if found[rank]["card"])
        with_cards = "".join(f", {count} x {card}" for card, count in cards.items())
        section.fact(called, f"rank {', '.join(map(str, members))}{with_cards}")
    _check_binding(section, found)
    _check_interfaces(section, plan, found, len(by_host))
    for name in found[0]["versions"]:
        first, *others = (each["versions"][name] for each in found)
        differing = [rank for rank, version in enumerate(others, 1) if version != first]
        if differing:
            section.broken(
                f"the ranks have not the same {name}: rank 0 has {first}, rank {differing[0]} has "
                f"{others[differing[0] - 1]}: install the same one everywhere"
            )


def _found(reports: Sequence[RankReport], name: str) -> Any:
    """The entry ``name`` of the first rank that has it; it is alike on all ranks."""
    return next((each.found[name] for each in reports if name in each.found), None)


def _check_names(section: Section, plan: Plan, failure: str) -> None:
    if plan.backend == "gloo" and "127." in failure and plan.nnodes > 1:
        section.broken(
            "gloo has taken the loopback of a host, which other hosts cannot reach: set "
            "GLOO_SOCKET_IFNAME to the network interface between the hosts (`ip address`)"
        )
    elif "gloo" in failure and "GLOO_SOCKET_IFNAME" not in os.environ:
        section.note(
            "gloo takes the address for which this host's name stands: if that cannot be reached "
            "set GLOO_SOCKET_IFNAME to a network interface (`ip address`), lo for one host"
        )


def _check_binding(section: Section, found: Sequence[dict[str, Any]]) -> None:
    counts = [len(each["cores"]) for each in found]
    if not all(counts):
        return
    bound = [len(each["cores"]) < each["all_cores"] for each in found]
    apart = len({tuple(each["cores"]) for each in found}) > 1
    many = ", ".join(sorted({str(count) for count in counts}))
    section.fact(
        "cores of a rank",
        f"{many}, "
        + ("bound to its own" if all(bound) and apart else "the same for all ranks")
        + f"; {found[0]['threads']} threads",
    )
    if len(numa_nodes()) > 1 and not any(bound):
        section.slow(
            f"{len(numa_nodes())} NUMA nodes, and ranks are not bound to one: start them with "
            "torchrun --numa-binding=node, or numactl"
        )


def _check_interfaces(
    section: Section, plan: Plan, found: Sequence[dict[str, Any]], hosts: int
) -> None:
    if plan.backend != "gloo":
        return
    kinds = Counter(text for each in found for _, _, text in each["interfaces"])
    if kinds:
        section.fact("interface of gloo", "; ".join(kinds))
    for rank, each in enumerate(found):
        for name, mtu, _ in each["interfaces"]:
            if hosts > 1 and mtu is not None and mtu < _MTU:
                section.slow(
                    f"packets of {name} on rank {rank} have {mtu} bytes: with an MTU of {_MTU} or "
                    "more there are fewer of them"
                )


def transport(section: Section, reports: Sequence[RankReport]) -> None:
    """Fill the section about the transport that ``transport="auto"`` takes."""
    found = _found(reports, "transport")
    if found is None:
        section.fact("not known", "the group failed before")
        return
    if found["taken"] == "peer_memory":
        where = "of each host" if found["hosts"] > 1 else "of this host"
        section.fact("taken by default", f"memory that the ranks {where} share")
        return
    section.fact("taken by default", "the process group")
    section.fact("why", found["why"] or "nothing else can be had")
    if found["is_failure"]:
        section.slow(
            f"ranks of a host do not exchange gradients through memory: {found['why']}; they go "
            "through gloo, which takes longer"
        )


def line(section: Section, reports: Sequence[RankReport]) -> None:
    """Fill the section about the measured line."""
    found = _found(reports, "line")
    if found is None:
        section.fact("not measured", "the group failed before")
        return
    section.fact("all-reduce, 1 element", duration(found["latency"]))
    section.fact(
        f"all-reduce, {amount(found['nbytes'])}",
        f"{duration(found['seconds'])}: each rank sends {rate(found['rate'])}",
    )
    section.fact("rounds", f"{found['rounds']}, each figure the median of the slowest rank's")
    hosts = [each["host"] for each in _found(reports, "ranks")]
    pairs = found["pairs"]
    shares = len(set(hosts)) < 2
    if found["latency"] > _SLOW[shares]:
        section.slow(
            f"an all-reduce of one element takes {duration(found['latency'])}: the line's latency "
            "is long, or the cores have too much to do"
        )
    for where, same in (("on a host", True), ("between hosts", False)):
        alike = [each for each in pairs if (hosts[each[0]] == hosts[each[1]]) is same]
        if not alike:
            continue
        usual = statistics.median(each[2] for each in alike)
        sender, receiver, least = min(alike, key=lambda each: each[2])
        section.fact(
            f"messages {where}",
            f"{rate(usual)} in the median of {len(alike)} pairs; slowest rank {sender} to "
            f"{receiver}, {rate(least)}",
        )
        if least < _SHARE * usual:
            section.slow(
                f"rank {sender} sends {rate(least)} to rank {receiver}, and pairs like it "
                f"{rate(usual)} in the median: look at the line between them"
            )


def consequences(section: Section, plan: Plan, reports: Sequence[RankReport]) -> None:
    """Fill the section about a model of the given size."""
    taken, found = _found(reports, "transport"), _found(reports, "line")
    model = f"{plan.model_bytes / 1e6:g} MB"
    state = 2 * plan.model_bytes / 1e6  # two moments
    section.fact(
        "optimizer state",
        f"{state:.4g} MB a rank with AdamW and parameters of {model} in fp32, "
        f"{state / plan.world_size:.4g} with tritonddp.ZeroRedundancyOptimizer",
    )
    if taken is None or found is None:
        section.fact("not known", "the group failed before")
        return
    if taken["taken"] == "peer_memory" and taken["hosts"] == 1:
        section.fact(
            "wire", "fp32: no byte leaves this host, and what is quantised would go by gloo"
        )
        return
    share = 2 * (plan.world_size - 1) / plan.world_size
    exchange = share * plan.model_bytes / found["rate"]
    section.fact("to exchange all", f"{duration(exchange)} for {model} in fp32, see --model-mb")
    if found["rate"] <= _INT8_PAYS:
        section.slow(
            f"the gradients of {model} take {duration(exchange)} on this line in fp32, and a "
            'quarter of the bytes in int8: unless backwards are longer, try compression="int8"'
        )

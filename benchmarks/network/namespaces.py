"""Hosts on this machine: network namespaces on one switch, connected by lines of limited rate.

    with network(2, rate=1e9) as hosts:
        processes = [host.start([sys.executable, "rank.py"], env=...) for host in hosts]

A host is a namespace with a loopback interface and one ``eth0``, the end of a veth pair whose other
end is a port of a bridge. The bridge also has a namespace, so the machine's own network is not
affected. A token bucket limits what a host sends (``tc qdisc ... tbf``); what it receives is
limited by the senders' lines. There is no added latency and no packet loss. TCP's congestion
control is Linux's default, regardless of this machine's setting: BBR, for example, left 5 to 10% of
100 Mbit/s unused, and sent 1% twice at 10 Gbit/s.

All of this is removed if an exception, Ctrl-C or SIGTERM ends the context. After a SIGKILL, use
``ip netns delete`` to remove the namespaces whose names contain the ID of a process that is gone.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

INTERFACE = "eth0"
CONGESTION_CONTROL = "cubic"

_NETNS = Path("/run/netns")
_PREFIX = 24  # bits of the network prefix that all hosts share
_SUBNET = f"10.0.0.0/{_PREFIX}"
_numbers = itertools.count()


class NetworkUnavailableError(RuntimeError):
    """Hosts cannot be created on this machine; the message has the reason and the remedy."""


class Host:
    """One host of a :func:`network`.

    Its methods work anywhere on the machine. A process on the host can create an equal object from
    ``namespace`` and ``address``, for example to change the rate of its host.
    """

    def __init__(self, namespace: str, address: str) -> None:
        self.namespace = namespace  # name for `ip netns`
        self.address = address  # IPv4 address of eth0, reachable from all hosts of the network
        self._started: list[subprocess.Popen[Any]] = []

    def command(self, arguments: Sequence[str]) -> list[str]:
        """Return the command line that runs a command on this host; ``ip`` execs it."""
        return ["ip", "netns", "exec", self.namespace, *arguments]

    def start(self, arguments: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Start a process on this host. It ends with the network at the latest.

        It runs in a separate session, so Ctrl-C reaches only the process that created the network,
        which then ends this one.

        Args:
            arguments: the command line.
            options: options of :class:`subprocess.Popen`.
        """
        process = subprocess.Popen(self.command(arguments), start_new_session=True, **options)
        self._started.append(process)
        return process

    def limit(self, rate: float | None) -> None:
        """Limit this host to sending ``rate`` bits per second; ``None`` removes the limit.

        A rate counts frames with their Ethernet header, without preamble, checksum and gap.
        """
        if rate is None:
            # Fails if there is nothing to delete.
            subprocess.run(
                ["tc", "-n", self.namespace, "qdisc", "del", "dev", INTERFACE, "root"],
                stderr=subprocess.DEVNULL,
            )
            return
        # The queue is longer than what TCP lets sockets queue at their local interface
        # (tcp_limit_output_bytes, 4 MiB each): a network card makes senders wait and drops nothing.
        _run(
            *("tc", "-n", self.namespace, "qdisc", "replace", "dev", INTERFACE, "root", "tbf"),
            *("rate", f"{rate:.0f}bit", "burst", f"{burst_bytes(rate)}", "limit", f"{64 << 20}"),
        )

    def kill(self) -> None:
        """Kill all processes of this host immediately, as a power failure would."""
        for process in self._started:
            process.kill()  # separately: it may still be `ip`, before it enters the namespace
        _kill_all(self.namespace)
        for process in self._started:
            process.wait()
        self._started.clear()


def burst_bytes(rate: float) -> int:
    """Return how many bytes an idle line of ``rate`` bits per second sends without delay.

    The bytes of 1 ms. With fewer bytes, late timers reduce the bandwidth at 10 Gbit/s. But at least
    128 KiB: if the bucket is smaller than a packet with 64 KiB of payload, it must split the packet
    into frames itself, which is so expensive that 1 Gbit/s is not reached.
    """
    return max(128 << 10, int(rate / 8 * 1e-3))


def tx_bytes() -> int:
    """Return the bytes that ``eth0`` of the calling host has sent."""
    return int(Path(f"/sys/class/net/{INTERFACE}/statistics/tx_bytes").read_text())


@contextlib.contextmanager
def network(count: int, rate: float | None = None) -> Iterator[list[Host]]:
    """Create ``count`` connected hosts; remove them and their processes at the end.

    Several networks may exist at the same time, also in one process. While one exists, SIGTERM and
    SIGHUP raise ``SystemExit`` in the main thread, unless the program handles them itself.

    Args:
        count: number of hosts, 2 to 250.
        rate: bits per second that each host may send, see :meth:`Host.limit`.

    Raises:
        NetworkUnavailableError: not root, no ``ip`` or ``tc``, or the kernel refuses.
    """
    _check_privileges()
    prefix = f"tritonddp-{os.getpid()}-{next(_numbers)}-"
    hosts = [Host(f"{prefix}host{number}", f"10.0.0.{number + 1}") for number in range(count)]
    with _signals(signal.SIG_DFL, _exit, signal.SIGTERM, signal.SIGHUP):
        try:
            _build(f"{prefix}switch", hosts)
            for host in hosts:
                host.limit(rate)
            yield hosts
        finally:
            # A second Ctrl-C must not interrupt the cleanup.
            with _signals(None, signal.SIG_IGN, signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                # All together, so that survivors do not report the others as failed.
                for process in itertools.chain(*(host._started for host in hosts)):
                    process.kill()
                for host in hosts:
                    host.kill()
                for path in _NETNS.glob(f"{prefix}*"):
                    _delete(path.name)


def rank_environment(hosts: Sequence[Host], rank: int, ranks_per_host: int = 1) -> dict[str, str]:
    """Return torchrun's variables for a rank; ranks are numbered host by host."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(len(hosts) * ranks_per_host),
        "LOCAL_RANK": str(rank % ranks_per_host),
        "LOCAL_WORLD_SIZE": str(ranks_per_host),
        "MASTER_ADDR": hosts[0].address,
        "MASTER_PORT": "29500",  # any port is free on a new host
        "GLOO_SOCKET_IFNAME": INTERFACE,
        "OMP_NUM_THREADS": "1",
        "TORCH_CPP_LOG_LEVEL": "ERROR",  # no warning that addresses have no names
    }


def run_on(
    hosts: Sequence[Host], commands: Sequence[Sequence[str]], ranks_per_host: int = 1
) -> list[int | None]:
    """Run a command per rank on its host until all end or one fails. Return the exit statuses."""
    ranks = [
        hosts[rank // ranks_per_host].start(
            command, env=os.environ | rank_environment(hosts, rank, ranks_per_host)
        )
        for rank, command in enumerate(commands)
    ]
    while None in (codes := [rank.poll() for rank in ranks]) and not any(codes):
        time.sleep(0.1)
    return codes


def _build(switch: str, hosts: Sequence[Host]) -> None:
    _run("ip", "netns", "add", switch)
    _run("ip", "-n", switch, "link", "add", "bridge", "type", "bridge")
    _run("ip", "-n", switch, "link", "set", "bridge", "up")
    for number, host in enumerate(hosts):
        inside, port = ("ip", "-n", host.namespace), f"port{number}"
        _run("ip", "netns", "add", host.namespace)
        _run(
            *(*inside, "link", "add", INTERFACE, "type", "veth"),
            *("peer", "name", port, "netns", switch),
        )
        # No IPv6 address: its discovery traffic would be counted.
        _run(*inside, "link", "set", INTERFACE, "addrgenmode", "none")
        _run("ip", "-n", switch, "link", "set", port, "addrgenmode", "none")
        _run("ip", "-n", switch, "link", "set", port, "master", "bridge", "up")
        _run(*inside, "address", "add", f"{host.address}/{_PREFIX}", "dev", INTERFACE)
        _run(*inside, "link", "set", INTERFACE, "up")
        _run(*inside, "link", "set", "lo", "up")
        # A namespace cannot select every congestion control, but a route can.
        _run(
            *(*inside, "route", "replace", _SUBNET, "dev", INTERFACE, "proto", "kernel"),
            *("scope", "link", "src", host.address, "congctl", CONGESTION_CONTROL),
        )


def _check_privileges() -> None:
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            raise NetworkUnavailableError(
                f"network namespaces need the command `{tool}`: install iproute2"
            )
    if os.geteuid() != 0:
        raise NetworkUnavailableError(
            "network namespaces need root: run this with sudo, or in a container that was started "
            "with --privileged"
        )


def _run(*arguments: str) -> str:
    """Run a command of iproute2, shielded from the terminal's Ctrl-C. Return its output."""
    done = subprocess.run(arguments, capture_output=True, text=True, start_new_session=True)
    if done.returncode != 0:
        raise NetworkUnavailableError(
            f"`{' '.join(arguments)}` failed: {done.stderr.strip() or done.returncode}. It needs "
            "the rights CAP_SYS_ADMIN and CAP_NET_ADMIN (in a container: --privileged), and the "
            "kernel's modules veth, bridge and sch_tbf"
        )
    return done.stdout


def _delete(name: str) -> None:
    """Delete a namespace, with its interfaces and their peers; it may already be gone."""
    subprocess.run(["ip", "netns", "delete", name], stderr=subprocess.DEVNULL)


def _kill_all(namespace: str) -> None:
    """Send SIGKILL to the processes of a namespace until none is left."""
    while pids := _pids(namespace):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _pids(namespace: str) -> list[int]:
    """Return the processes of a namespace; empty if it does not exist."""
    done = subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True)
    return list(map(int, done.stdout.split()))


def _exit(number: int, _: Any) -> None:
    raise SystemExit(128 + number)


@contextlib.contextmanager
def _signals(only: Any, handler: Any, *numbers: signal.Signals) -> Iterator[None]:
    """Handle the signals whose handler is ``only`` (``None``: any), if in the main thread."""
    former = {}
    if threading.current_thread() is threading.main_thread():
        for number in numbers:
            if only is None or signal.getsignal(number) == only:
                former[number] = signal.signal(number, handler)
    try:
        yield
    finally:
        for number, previous in former.items():
            signal.signal(number, previous)

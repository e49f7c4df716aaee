"""Hosts on this machine: network namespaces on one switch, each behind a line of limited rate.

    with network(2, rate=1e9) as hosts:
        processes = [host.start([sys.executable, "rank.py"], env=...) for host in hosts]

A host is a namespace with a loopback interface and one ``eth0``, the end of a veth pair whose
other end is a port of a bridge. The bridge has a namespace too, so that the machine's own network
sees nothing of all this. A token bucket limits what a host sends (``tc qdisc ... tbf``); what it
receives is limited by the lines of the others. There is no added latency and no loss. TCP's
congestion control is Linux's default, whatever this machine's is: BBR, for one, has been seen to
leave 5 to 10% of 100 Mbit/s unused, and to send 1% twice at 10 Gbit/s.

Nothing stays behind if an exception, Ctrl-C or SIGTERM ends the context. After a SIGKILL
``ip netns delete`` removes namespaces whose names have the id of a process that is gone.
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
_PREFIX = 24  # bits of the addresses that all hosts share
_SUBNET = f"10.0.0.0/{_PREFIX}"
_numbers = itertools.count()


class NetworkUnavailableError(RuntimeError):
    """This machine does not let us make hosts; the message says why and what to do."""


class Host:
    """One host of a :func:`network`.

    Its methods work anywhere on the machine. A process on the host can make the object anew from
    ``namespace`` and ``address``, to change its own rate say.
    """

    def __init__(self, namespace: str, address: str) -> None:
        self.namespace = namespace  # as ip netns knows it
        self.address = address  # IPv4 address of eth0, in reach of all hosts of the network
        self._started: list[subprocess.Popen[Any]] = []

    def command(self, arguments: Sequence[str]) -> list[str]:
        """The command line that runs a command on this host; ``ip`` replaces itself by it."""
        return ["ip", "netns", "exec", self.namespace, *arguments]

    def start(self, arguments: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Start a process on this host, which lives no longer than the network.

        It gets a session of its own: Ctrl-C reaches who made the network, and who then ends it.

        Args:
            arguments: the command line.
            options: of :class:`subprocess.Popen`.
        """
        process = subprocess.Popen(self.command(arguments), start_new_session=True, **options)
        self._started.append(process)
        return process

    def limit(self, rate: float | None) -> None:
        """Let this host send ``rate`` bits per second, ``None``: as many as it can.

        A rate counts frames with their Ethernet header, without preamble, checksum and gap.
        """
        if rate is None:
            # Fails where there is nothing to delete.
            subprocess.run(
                ["tc", "-n", self.namespace, "qdisc", "del", "dev", INTERFACE, "root"],
                stderr=subprocess.DEVNULL,
            )
            return
        # The queue is longer than what TCP lets its sockets queue at their own interface
        # (tcp_limit_output_bytes, 4 MiB each): a network card makes senders wait, it drops nothing.
        _run(
            *("tc", "-n", self.namespace, "qdisc", "replace", "dev", INTERFACE, "root", "tbf"),
            *("rate", f"{rate:.0f}bit", "burst", f"{burst_bytes(rate)}", "limit", f"{64 << 20}"),
        )

    def kill(self) -> None:
        """End all processes of this host at once, as a power failure would."""
        for process in self._started:
            process.kill()  # by itself: it may still be `ip`, on its way to the namespace
        _kill_all(self.namespace)
        for process in self._started:
            process.wait()
        self._started.clear()


def burst_bytes(rate: float) -> int:
    """How much a line of ``rate`` bits per second that was idle lets through in no time.

    1 ms of the rate. Less, and a timer that fires late costs bandwidth at 10 Gbit/s; but at least
    128 KiB: a bucket smaller than one packet of 64 KiB of payload has to cut it into frames by
    itself, which costs this machine so much that 1 Gbit/s is not reached.
    """
    return max(128 << 10, int(rate / 8 * 1e-3))


def tx_bytes() -> int:
    """Bytes that ``eth0`` of the host on which this is called has sent."""
    return int(Path(f"/sys/class/net/{INTERFACE}/statistics/tx_bytes").read_text())


@contextlib.contextmanager
def network(count: int, rate: float | None = None) -> Iterator[list[Host]]:
    """Make ``count`` hosts that reach each other; remove them and their processes at the end.

    Several may exist at once, also of one process. While one exists, SIGTERM and SIGHUP raise
    ``SystemExit`` in the main thread, unless the program handles them itself.

    Args:
        count: of hosts, 2 to 250.
        rate: bits per second that each may send, see :meth:`Host.limit`.

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
            # A second Ctrl-C must not end the clean-up half-way.
            with _signals(None, signal.SIG_IGN, signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                # At once, or those that live longer complain about those that do not.
                for process in itertools.chain(*(host._started for host in hosts)):
                    process.kill()
                for host in hosts:
                    host.kill()
                for path in _NETNS.glob(f"{prefix}*"):
                    _delete(path.name)


def rank_environment(hosts: Sequence[Host], rank: int, ranks_per_host: int = 1) -> dict[str, str]:
    """What torchrun would set for a rank; they are numbered host by host."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(len(hosts) * ranks_per_host),
        "LOCAL_RANK": str(rank % ranks_per_host),
        "LOCAL_WORLD_SIZE": str(ranks_per_host),
        "MASTER_ADDR": hosts[0].address,
        "MASTER_PORT": "29500",  # a host has all ports for itself
        "GLOO_SOCKET_IFNAME": INTERFACE,
        "OMP_NUM_THREADS": "1",
        "TORCH_CPP_LOG_LEVEL": "ERROR",  # or it warns that the addresses have no names
    }


def run_on(
    hosts: Sequence[Host], commands: Sequence[Sequence[str]], ranks_per_host: int = 1
) -> list[int | None]:
    """Run a command a rank, on its host, until all have ended or one has failed; exit statuses."""
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
        # No IPv6 address: what its discovery sends would be counted.
        _run(*inside, "link", "set", INTERFACE, "addrgenmode", "none")
        _run("ip", "-n", switch, "link", "set", port, "addrgenmode", "none")
        _run("ip", "-n", switch, "link", "set", port, "master", "bridge", "up")
        _run(*inside, "address", "add", f"{host.address}/{_PREFIX}", "dev", INTERFACE)
        _run(*inside, "link", "set", INTERFACE, "up")
        _run(*inside, "link", "set", "lo", "up")
        # A namespace may not choose among all congestion controls, but a route may.
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
    """Run a command of iproute2, out of reach of the terminal's Ctrl-C; its output."""
    done = subprocess.run(arguments, capture_output=True, text=True, start_new_session=True)
    if done.returncode != 0:
        raise NetworkUnavailableError(
            f"`{' '.join(arguments)}` failed: {done.stderr.strip() or done.returncode}. It needs "
            "the rights CAP_SYS_ADMIN and CAP_NET_ADMIN (in a container: --privileged), and the "
            "kernel's modules veth, bridge and sch_tbf"
        )
    return done.stdout


def _delete(name: str) -> None:
    """Its interfaces go with it, and with them their other ends. Another may have been faster."""
    subprocess.run(["ip", "netns", "delete", name], stderr=subprocess.DEVNULL)


def _kill_all(namespace: str) -> None:
    """SIGKILL for the processes of a namespace, until there are none."""
    while pids := _pids(namespace):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _pids(namespace: str) -> list[int]:
    """None where the namespace does not exist."""
    done = subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True)
    return list(map(int, done.stdout.split()))


def _exit(number: int, _: Any) -> None:
    raise SystemExit(128 + number)


@contextlib.contextmanager
def _signals(only: Any, handler: Any, *numbers: signal.Signals) -> Iterator[None]:
    """Handle signals so whose handler is ``only`` (``None``: any), if this is the main thread."""
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

"""``tritonddp doctor``: what it finds is so, what fails is told, and nothing waits for ever."""

import argparse
import getpass
import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hosts import ROOT, hosts_or_skip

from tritonddp.cli import doctor
from tritonddp.cli.checks import group, interfaces, launch, limits, machine
from tritonddp.cli.checks.launch import Plan, RankReport
from tritonddp.cli.checks.report import (
    Section,
    Severity,
    advice_of,
    as_json,
    as_text,
    checked,
    exit_code,
    without_names,
)

COMMAND = [sys.executable, "-m", "tritonddp", "doctor", "--device", "cpu"]
CLEAN = ("RANK", "WORLD_SIZE", "TRITONDDP_PEER_MEMORY", "TORCH_DISTRIBUTED_DEBUG")


V1 = {"cpu.cfs_period_us": "100000"}  # of control groups of version 1


def environment(**others: str) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if name not in CLEAN}
    return {**inherited, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **others}


def report(*words: str, timeout: float = 150, **others: str):
    """Its exit code, and what it found, as JSON."""
    process = subprocess.Popen(
        [*COMMAND, *words, "--json"],
        env=environment(**others),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=timeout)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    assert out, err
    assert not err
    return process.returncode, json.loads(out)


def plan(**others) -> Plan:
    options = {"nproc": 2, "nnodes": 1, "node_rank": 0, "master_addr": "127.0.0.1"}
    options |= {"master_port": 0, "device": "cpu", "backend": "gloo"}
    return Plan(**options | {"timeout": 30.0, "model_bytes": 10**8} | others)


@pytest.fixture(scope="module")
def found():
    return report()


def test_the_report_says_what_is_here(found):
    code, content = found
    sections = content["sections"]
    assert code == content["exit_code"] == 0
    assert sections["versions"]["torch"].startswith(torch.__version__)
    assert re.search(r"this process may use [\d.]+", sections["processors"]["cores"])
    assert sections["limits"]["memory between ranks"].startswith("can be had")
    assert sections["group"]["host 0"] == "rank 0, 1"
    assert "MTU" in sections["group"]["interface of gloo"]


def test_it_tells_the_transport_that_the_wrapper_takes(found):
    _, content = found
    assert "share" in content["sections"]["transport"]["taken by default"]
    follows = content["sections"]["what follows"]
    assert follows["wire"].startswith("fp32")
    assert follows["optimizer state"].startswith("200 MB a rank with AdamW")
    assert "100 with tritonddp.ZeroRedundancyOptimizer" in follows["optimizer state"]


def test_the_line_is_measured(found):
    line = found[1]["sections"]["line"]
    assert re.fullmatch(r"[\d.e+]+ (us|ms|s)", line["all-reduce, 1 element"])
    assert "bit/s" in next(value for name, value in line.items() if "iB" in name)
    assert "2 pairs" in line["messages on a host"]


@pytest.mark.thorough
def test_what_leaves_memory_off_is_the_reason_that_is_told():
    code, content = report(TRITONDDP_PEER_MEMORY="0")
    sections = content["sections"]
    assert code == 0
    assert sections["transport"]["taken by default"] == "the process group"
    assert "TRITONDDP_PEER_MEMORY is 0" in sections["transport"]["why"]
    assert sections["what follows"]["model"].startswith("100 MB")
    assert "fp32" in sections["what follows"]["to exchange all"]


@pytest.mark.long
def test_a_rank_that_does_not_come_is_named_and_the_rest_is_reported():
    started = time.monotonic()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    words = ["--nnodes", "2", "--nproc-per-node", "1", "--timeout", "3", "--master-port", port]
    code, content = report(*words)
    assert code == 1
    (broken,) = [each for each in content["advice"] if each["severity"] == "broken"]
    assert "rank 1 of 2 has not come within 3 s" in broken["text"]
    assert content["sections"]["versions"]["Python"]
    assert content["sections"]["line"] == {"not measured": "the group failed before"}
    assert time.monotonic() - started < 100


def test_a_process_that_dies_is_told_with_its_last_words(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    reports = launch.run(plan())
    assert [each.failure for each in reports] == [
        "starting: its process ended with exit code 1"
    ] * 2
    section = Section("group")
    group.ranks(section, plan(), reports, shows_names=False)
    assert section.advice[0].severity is Severity.BROKEN


def test_one_rank_needs_no_group(capsys):
    parser = argparse.ArgumentParser()
    doctor.add_arguments(parser)
    assert doctor.main(parser.parse_args(["--nproc-per-node", "1", "--device", "cpu"])) == 0
    out = capsys.readouterr().out
    assert "1: nothing is exchanged" in out
    assert "all-reduce" not in out


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU needs it")
def test_without_triton_a_cpu_misses_nothing(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)  # as if it were not installed
    section = checked("versions", machine.versions)
    assert dict(section.facts)["Triton"] == "not installed; only a GPU's kernels need it"
    assert not section.advice


def test_cards_are_told_with_their_links(monkeypatch):
    """With a faked driver; on real cards nobody has looked at this report yet."""
    place = {"pci_domain_id": 0, "pci_bus_id": 0xFE, "pci_device_id": 0}
    properties = SimpleNamespace(name="NVIDIA X", total_memory=80 << 30, major=9, minor=0, **place)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: b != 2)
    monkeypatch.setattr(machine, "nvlinks", lambda device: [0, 4, 0])
    section = checked("cards", machine.cards)
    facts = dict(section.facts)
    assert facts["cuda:1"] == "NVIDIA X, 80 GiB, compute capability 9.0"
    assert facts["links of cuda:0"] == "cuda:1 NVLink x4, cuda:2 through the host"
    assert facts["links of cuda:2"] == "cuda:0 PCIe, cuda:1 NVLink x4"


@pytest.mark.parametrize(
    "line",
    [
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023",
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  535.104.05  Release Build",
    ],
)
def test_the_driver_tells_its_version(line, tmp_path, monkeypatch):
    (tmp_path / "version").write_text(f"{line}\nGCC version: gcc 12.2.0\n")
    monkeypatch.setattr(machine, "_DRIVER", tmp_path / "version")
    section = checked("versions", machine.versions)
    assert dict(section.facts)["NVIDIA driver"] == "535.104.05"


def test_a_check_that_fails_leaves_the_others():
    def check(section):
        section.fact("first", 1)
        raise OSError("there is none")

    failed, fine = checked("bad", check), checked("good", lambda section: section.fact("a", "b"))
    assert failed.facts == [("first", "1"), ("this check failed", "OSError: there is none")]
    assert exit_code([failed, fine]) == 0
    assert "the check of bad failed" in as_text([failed, fine], shows_names=False)


def test_the_worst_comes_first_and_once():
    section = Section("x")
    section.note("third")
    section.slow("second")
    section.broken("first")
    section.note("third")
    assert [each.text for each in advice_of([section])] == ["first", "second", "third"]
    assert exit_code([section]) == 1
    assert json.loads(as_json([section], False))["exit_code"] == 1


def test_no_names_are_told_unless_asked(monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "secret-host")
    monkeypatch.setattr(getpass, "getuser", lambda: "jane")
    home = Path.home() / "data"
    text = f"{home} secret-host jane 10.1.2.3:29500 127.0.0.1 fe80::1:2:3:4 janet 2.13.0"
    assert without_names(text) == (
        "~/data <host> <user> <address>:29500 127.0.0.1 <address> janet 2.13.0"
    )
    monkeypatch.setattr(socket, "gethostname", lambda: "secret-host.lab.org")
    text = "secret-host.lab.org secret-host node0.lab.org 2001:db8::1 c10d::Backend"
    assert without_names(text, "node0.lab.org") == "<host> <host> <host 0> <address> c10d::Backend"
    assert without_names("on 127.0.0.1", "127.0.0.1") == "on 127.0.0.1"
    section = Section("x", [("host", "secret-host")])
    assert "secret-host" not in as_text([section], shows_names=False)
    assert "secret-host" in as_text([section], shows_names=True)


def test_limits_that_are_too_low_are_told(monkeypatch):
    values = {resource.RLIMIT_MEMLOCK: 64 << 10, resource.RLIMIT_NOFILE: 256}
    values[resource.RLIMIT_AS] = 1 << 30
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (values[kind], values[kind]))
    monkeypatch.setattr(limits, "cores_with_time", lambda: 2)
    monkeypatch.setattr(limits, "available_memory", lambda: 1 << 30)
    section = checked("limits", partial(limits.limits, ranks=4, model_bytes=10**9))
    told = " ".join(each.text for each in section.advice)
    assert "only 2 cores for 4 ranks" in told
    assert "only 256 files" in told
    assert "address space of a process is limited to 1 GiB" in told
    assert "4 ranks with 6 copies of a model of 1000 MB" in told
    assert dict(section.facts)["locked memory"] == "64 KiB"


@pytest.mark.parametrize(
    ("files", "cores", "memory"),
    [
        ({"cpu.max": "150000 100000\n", "memory.max": "1073741824\n"}, 1.5, 1 << 30),
        ({"cpu.max": "max 100000\n", "memory.max": "max\n"}, None, None),
        ({**V1, "cpu.cfs_quota_us": "50000", "memory.limit_in_bytes": "2048"}, 0.5, 2048),
        ({**V1, "cpu.cfs_quota_us": "-1"}, None, None),
        ({"memory.limit_in_bytes": str(2**63 - 4096)}, None, None),
    ],
)
def test_limits_of_a_control_group_are_read(files, cores, memory, tmp_path, monkeypatch):
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    monkeypatch.setattr(machine, "_control_groups", lambda controller: [tmp_path])
    assert machine.cpu_quota() == cores
    assert machine.memory_limit() == memory


def test_the_interface_is_that_of_the_socket():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert "lo" in {name for name, *_ in interfaces.listening(besides=0)}
        others = {name for name, *_ in interfaces.listening(besides=port)}
    assert others == {name for name, *_ in interfaces.listening(besides=0)}


def ranks_of(*, hosts=("a", "a"), versions=("1", "1"), interface="lo"):
    return [
        {
            "host": host,
            "name": host,
            "versions": {"torch": version},
            "cores": [0, 1],
            "all_cores": 2,
            "threads": 1,
            "card": None,
            "interfaces": [[interface, 1400, f"{interface}, MTU 1400"]],
        }
        for host, version in zip(hosts, versions, strict=True)
    ]


def test_ranks_that_differ_are_told():
    section = Section("group")
    told = ranks_of(hosts=("a", "b"), versions=("1", "2"), interface="eth7")
    group.ranks(section, plan(nnodes=2, nproc=1), [RankReport(0, {"ranks": told})], False)
    words = [each.text for each in section.advice]
    assert any("not the same torch: rank 0 has 1, rank 1 has 2" in each for each in words)
    assert any("packets of eth7 on rank 0 have 1400 bytes" in each for each in words)


def test_a_slow_pair_is_named():
    ranks = ranks_of(hosts="abcd", versions="1111")
    pairs = [[a, b, 1e8] for a in range(4) for b in range(4) if a != b]
    pairs[4][2] = 1e7  # rank 1 to rank 2
    line = {"latency": 1e-4, "nbytes": 1 << 24, "seconds": 0.1, "rate": 1e8, "rounds": 3}
    section = Section("line")
    group.line(section, [RankReport(0, {"ranks": ranks, "line": line | {"pairs": pairs}})])
    (advice,) = section.advice
    assert advice.text.startswith("rank 1 sends 80 Mbit/s to rank 2")


@pytest.mark.parametrize(
    ("rate", "seconds"), [(12.5e6, "8.0 s"), (118e6, "847 ms"), (1e9, "100 ms")]
)
def test_a_slow_line_asks_for_fewer_bytes_and_a_fast_one_does_not(rate, seconds):
    found = {"transport": {"taken": "process_group"}, "line": {"rate": rate}}
    section = Section("what follows")
    group.consequences(section, plan(nnodes=2, nproc=1), [RankReport(0, found)])
    assert dict(section.facts)["to exchange all"].startswith(seconds)
    assert ['compression="int8"' in each.text for each in section.advice] == [True] * (rate < 1e9)


@pytest.mark.long
@pytest.mark.parametrize("rate", [100e6, pytest.param(1e9, marks=pytest.mark.thorough)])
def test_between_two_hosts_the_line_is_that_of_the_line(rate):
    with hosts_or_skip(2, rate) as hosts:
        words = ["--nnodes", "2", "--nproc-per-node", "1", "--master-addr", hosts[0].address]
        processes = [
            host.start(
                [*COMMAND, *words, "--node-rank", str(number), "--json"],
                env=environment(GLOO_SOCKET_IFNAME="eth0"),
                stdout=subprocess.PIPE,
                text=True,
            )
            for number, host in enumerate(hosts)
        ]
        reports = [json.loads(each.communicate(timeout=250)[0]) for each in processes]
    for each in reports:
        sections = each["sections"]
        assert each["exit_code"] == 0
        assert sections["group"]["interface of gloo"].startswith("eth0, MTU 1500")
        assert "no two ranks share a host and a user" in sections["transport"]["why"]
        told = next(value for name, value in sections["line"].items() if "iB" in name)
        number, unit = re.findall(r"sends ([\d.]+) (\w)bit/s", told)[0]
        assert 0.7 * rate < float(number) * {"M": 1e6, "G": 1e9}[unit] <= 1.02 * rate
        if rate == 100e6:
            assert any('compression="int8"' in one["text"] for one in each["advice"])

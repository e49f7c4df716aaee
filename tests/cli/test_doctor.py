"""``tritonddp doctor``: what it shows is true, advice follows from it, and errors are named."""

import os
import re
import subprocess
import sys
from types import SimpleNamespace

import launched
import pytest
import torch
import torch.distributed as dist
from launched import ROOT
from versions import needs_quiet_gloo

from benchmarks.network import namespaces
from tritonddp.cli import doctor_ranks
from tritonddp.cli.doctor_wires import Lines
from tritonddp.cli.main import main
from tritonddp.coordination.host.connect import Refusal

COMMAND = ["-m", "tritonddp", "doctor", "--device", "cpu"]


def report(*words: str, path: str = str(ROOT)) -> tuple[int, list[str]]:
    """Run the command; return its exit code and its lines."""
    done = launched.run(*COMMAND, *words, nproc=None, env={"PYTHONPATH": path})
    return done.returncode, done.stdout.splitlines()


def value(lines: list[str], name: str) -> str:
    (found,) = (line for line in lines if re.match(rf"  {name} ", line))
    return found.split(maxsplit=1)[1]


def in_process(*words: str) -> int:
    return main(["doctor", *words])


@needs_quiet_gloo
def test_two_ranks_show_versions_devices_and_the_line():
    code, lines = report("--nproc-per-node", "2")
    assert code == 0
    assert value(lines, "torch") == torch.__version__
    assert "cores available to this process" in value(lines, "cpu")
    assert value(lines, "group") == "2 ranks on 1 host, gloo, cpu"
    assert value(lines, "transport") == "shared memory of the ranks of a host"
    line = r"1 element takes [\d.]+ (us|ms|s), .* of [\d.]+ MiB takes "
    assert re.search(line, value(lines, "network"))
    assert lines[lines.index("consequences for training") + 1].startswith("- Gradients do not")
    heads = ["versions", "devices", "ranks", "consequences for training"]
    assert [line for line in lines if line in heads] == heads


@pytest.mark.long
def test_a_rank_that_dies_is_named(tmp_path):
    dies = "import os\nif os.environ.get('RANK') == '1':\n    os.kill(os.getpid(), 9)\n"
    (tmp_path / "sitecustomize.py").write_text(dies)
    code, lines = report(path=f"{tmp_path}{os.pathsep}{ROOT}")
    assert code == 1
    assert lines[-1] == "broken: rank 1 ended with exit code -9"
    assert value(lines, "torch")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_one_rank_needs_no_group_a_cpu_no_triton_and_cuda_a_gpu(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)  # as if it were not installed
    assert in_process("--nproc-per-node", "1", "--device", "cpu") == 0
    out = capsys.readouterr().out
    assert "1 rank: nothing is exchanged" in out
    assert "not installed; needed on GPUs only" in out
    assert in_process("--device", "cuda") == 1
    assert capsys.readouterr().out.endswith("broken: kernels: torch finds no CUDA device\n")


ISLANDS = """\
\t\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\x1b[0m
GPU0\t X \tNV4\tSYS\tPIX\t0-15
GPU1\tNV4\t X \tSYS\tPIX\t0-15
GPU2\tSYS\tSYS\t X \tNODE\t16-31
NIC0\tPIX\tPIX\tNODE\t X

Legend:
  NV#  = Connection traversing a bonded set of # NVLinks
"""
LINKS = {
    ISLANDS: "NVLink between some GPUs",
    ISLANDS.replace("SYS", "NV4"): "NVLink between all GPUs",
    ISLANDS.replace("NV4", "PHB"): "no NVLink (nvidia-smi: PHB, SYS)",
    "No devices were found\n": "unknown: `nvidia-smi topo -m` reports nothing",
}


def test_gpus_and_their_links_are_listed(capsys, monkeypatch, tmp_path):
    """The driver and ``nvidia-smi`` are faked."""
    card = SimpleNamespace(name="NVIDIA X", total_memory=80 << 30, major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: card)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 9))
    command = tmp_path / "nvidia-smi"
    command.write_text(f"#!/bin/sh\n/bin/cat {tmp_path}/shown\n")
    command.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    for shown, links in LINKS.items():
        (tmp_path / "shown").write_text(shown)
        assert in_process("--nproc-per-node", "1", "--device", "cpu") == 0
        lines = capsys.readouterr().out.splitlines()
        assert value(lines, "cuda:1") == "NVIDIA X, 80 GiB, compute capability 9.0"
        assert value(lines, "NCCL") == "2.28.9"
        assert value(lines, "links") == links


GROUP = Refusal("no ranks share a host")
MODEL = (100e6, 50)  # parameters, and milliseconds of a backward


@pytest.mark.parametrize(
    ("refusal", "lines", "model", "expected"),
    [
        (None, Lines(4, 1, 1e9, 1e9, shares_memory=True), (0, 0), "no option needs"),
        (None, Lines(2, 2, 1e9, 25e6, shares_memory=True), (0, 0), "For your model"),
        (GROUP, None, (0, 0), "different numbers of ranks"),
        (Refusal("x", is_failure=True), Lines(4, 1, 1e9, 1e9), (0, 0), "cannot share memory"),
        (GROUP, Lines(1, 2, across=1e12), MODEL, "Keep the default"),
        (GROUP, Lines(1, 2, across=1e9), MODEL, "Try reduce_dtype"),
        (GROUP, Lines(1, 2, across=12.5e6), MODEL, 'Try compression="int8"'),
    ],
)
def test_the_advice_follows_from_the_lines(refusal, lines, model, expected):
    text = " ".join(doctor_ranks.consequences(refusal, lines, 4, model))
    assert expected in text
    assert "1/4 of the optimizer state" in text
    if model is MODEL:
        assert "100,000,000 parameters and a backward of 50 ms" in text
    else:
        assert "Try" not in text


@pytest.mark.parametrize(
    ("lines", "fp32", "int8"),
    [
        (Lines(8, 1, on_gpu=True), (7, 7), (1.75, 1.75)),  # int8 among all ranks
        (Lines(8, 2, on_gpu=True), (7.5, 7.5), (7, 1)),  # int8 between hosts
        (Lines(1, 4), (6, 6), (1.5, 1.5)),
    ],
)
def test_bytes_of_a_parameter_within_hosts_and_between_hosts(lines, fp32, int8):
    """The table in docs/try.md. The scales of int8 add 1/64."""
    within, between = int8
    within = within if lines.hosts > 1 < lines.ranks else within * 65 / 64
    assert lines.bytes_sent("fp32") == pytest.approx(fp32)
    assert lines.bytes_sent("bf16") == pytest.approx([each / 2 for each in fp32])
    assert lines.bytes_sent("int8") == pytest.approx((within, between * 65 / 64))


def test_the_exposed_time_exceeds_the_backward_or_is_the_last_bucket():
    gpus = Lines(2, 1, within=1e9, on_gpu=True)  # 100 million parameters: 400 MB, 400 ms
    assert gpus.times("fp32", 100e6, 0.3) == pytest.approx((0.4, 0, 0.1))
    last = 4 * 2**20 / 400e6  # a bucket of 4 MiB
    assert gpus.times("fp32", 100e6, 0.5) == pytest.approx((0.4, 0, 0.4 * last))
    # The ranks of a host share the quantization.
    one, two = (Lines(ranks, 2, 1e12, 1e12).times("int8", 100e6, 9.0) for ranks in (1, 2))
    assert (one[1], two[1]) == pytest.approx((0.8, 0.4))


def test_a_backward_without_parameters_is_refused(capsys):
    assert in_process("--backward-ms", "3") == 2
    assert "--backward-ms requires --parameters" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        in_process("--parameters", "0")


@pytest.fixture
def hosts():
    """Two emulated hosts, each sending up to 200 Mbit/s, if this machine supports them."""
    try:
        with namespaces.network(2, 200e6) as hosts:
            yield hosts
    except namespaces.NetworkUnavailableError as error:
        pytest.skip(str(error))


@pytest.mark.long
def test_two_hosts_show_the_rates_within_and_between_them(hosts):
    words = [sys.executable, *COMMAND, "--parameters", "10.5e6", "--backward-ms", "100"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    processes = []
    for rank in range(4):
        env = os.environ | {"PYTHONPATH": str(ROOT)} | namespaces.rank_environment(hosts, rank, 2)
        processes.append(hosts[rank // 2].start(words, env=env, **pipes))
    texts, errors = zip(*(each.communicate(timeout=400) for each in processes), strict=True)
    assert not any(each.returncode for each in processes), errors
    lines = texts[0].splitlines()
    assert value(lines, "group") == "4 ranks on 2 hosts, gloo, cpu"
    assert "gloo between" in value(lines, "transport")
    assert re.search(r"each rank sends [\d.]+ Gbit/s", value(lines, "within a host"))
    between = re.findall(r"each host sends ([\d.]+) Mbit/s", value(lines, "between hosts"))
    assert 100 < float(between[0]) <= 204
    assert any('Try compression="int8"' in line for line in lines)
    assert "ranks" in texts[2].splitlines()  # a report for each host
    assert not texts[1]


def test_a_name_is_shown_before_its_value_and_in_the_error(capsys, monkeypatch):
    shown, codes = [], []

    def init(*_, **__):
        shown.append(capsys.readouterr().out)
        raise TimeoutError("1/2 clients joined")

    monkeypatch.setattr(dist, "init_process_group", init)
    monkeypatch.setattr(doctor_ranks, "exit_now", codes.append)
    monkeypatch.setenv("RANK", "6")
    monkeypatch.setenv("LOCAL_RANK", "0")
    doctor_ranks.main("cpu", 3.0)
    assert shown[0].split() == ["group"]
    error = "\nbroken: rank 6: group: TimeoutError: 1/2 clients joined\n"
    assert (capsys.readouterr().out, codes) == (error, [1])

"""``tritonddp doctor``: what it shows is so, it shows where it is, and what fails is told."""

import argparse
import os
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from distributed import ranks
from hosts import ROOT, hosts_or_skip, outputs
from versions import needs_quiet_gloo

from tritonddp.cli import doctor, doctor_ranks
from tritonddp.cli.doctor_ranks import Line
from tritonddp.coordination.group import Group
from tritonddp.coordination.host.connect import Refusal

COMMAND = [sys.executable, "-m", "tritonddp", "doctor", "--device", "cpu"]
CLEAN = ("RANK", "WORLD_SIZE", "TRITONDDP_PEER_MEMORY", "TORCH_DISTRIBUTED_DEBUG")
GROUP = Refusal("no ranks share a host")


def report(*words: str, **others: str) -> tuple[int, list[str]]:
    """Its exit code, and its lines."""
    inherited = {name: value for name, value in os.environ.items() if name not in CLEAN}
    done = subprocess.run(
        [*COMMAND, *words],
        env={**inherited, "PYTHONPATH": str(ROOT), **others},
        stdout=subprocess.PIPE,
        text=True,
        timeout=400,
    )
    return done.returncode, done.stdout.splitlines()


def value(lines: list[str], name: str) -> str:
    (found,) = (line for line in lines if re.match(rf"  {name} ", line))
    return found.split(maxsplit=1)[1]


def in_process(*words: str) -> int:
    parser = argparse.ArgumentParser()
    doctor.add_arguments(parser)
    return doctor.main(parser.parse_args([*words]))


@needs_quiet_gloo
def test_two_ranks_show_what_is_here_and_what_follows():
    code, lines = report("--nproc-per-node", "2")
    assert code == 0
    assert value(lines, "torch") == torch.__version__
    assert "cores that this process may use" in value(lines, "cpu")
    assert value(lines, "group") == "2 ranks on 1 host, gloo, cpu"
    assert value(lines, "transport") == "memory that the ranks of a host share"
    assert re.search(r"1 element takes [\d.]+ (us|ms|s), of [\d.]+ MiB ", value(lines, "line"))
    assert lines[lines.index("what follows for training") + 1].startswith("- Gradients do not")
    heads = ["versions", "devices", "ranks", "what follows for training"]
    assert [line for line in lines if line in heads] == heads


@pytest.mark.thorough
def test_what_leaves_memory_off_is_the_reason_that_is_told():
    code, lines = report(TRITONDDP_PEER_MEMORY="0")
    assert code == 0
    assert "TRITONDDP_PEER_MEMORY is 0" in value(lines, "transport")
    assert any(line.startswith("- A million parameters in fp32 take") for line in lines)


@pytest.mark.long
def test_a_rank_that_dies_is_told(tmp_path):
    dies = "import os\nif os.environ.get('RANK') == '1':\n    os.kill(os.getpid(), 9)\n"
    (tmp_path / "sitecustomize.py").write_text(dies)
    code, lines = report(PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}")
    assert code == 1
    assert lines[-1] == "broken: rank 1 ended with exit code -9"
    assert value(lines, "torch")


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
    told = capsys.readouterr().out
    assert told == "\nbroken: rank 6: group: TimeoutError: 1/2 clients joined\n"
    assert codes == [1]


def test_one_rank_needs_no_group(capsys):
    assert in_process("--nproc-per-node", "1", "--device", "cpu") == 0
    out = capsys.readouterr().out
    assert "1 rank: nothing is exchanged" in out
    assert "line  " not in out


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card")
def test_without_a_card_cuda_is_broken(capsys):
    assert in_process("--device", "cuda") == 1
    assert capsys.readouterr().out.endswith("broken: kernels: torch sees no CUDA device here\n")


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU needs it")
def test_without_triton_a_cpu_misses_nothing(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)  # as if it were not installed
    assert in_process("--nproc-per-node", "1") == 0
    assert "not installed; only GPUs need it" in capsys.readouterr().out


def test_cards_are_told(capsys, monkeypatch):
    """With a faked driver."""
    card = SimpleNamespace(name="NVIDIA X", total_memory=80 << 30, major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: card)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 9))
    assert in_process("--nproc-per-node", "1", "--device", "cpu") == 0
    lines = capsys.readouterr().out.splitlines()
    assert value(lines, "cuda:1") == "NVIDIA X, 80 GiB, compute capability 9.0"
    assert value(lines, "NCCL") == "2.28.9"


@ranks(2)
def test_ranks_of_other_versions_are_an_error(rank):
    group, own = Group(dist.group.WORLD), {"torch": f"2.{12 + rank}", "Python": "3.11"}
    with pytest.raises(
        RuntimeError, match=r"(?s)the ranks differ:.*torch': rank 0 has 2\.12, rank 1 has 2\.13"
    ):
        doctor_ranks.check_versions(own, group, torch.device("cpu"))


@pytest.mark.parametrize(
    ("refusal", "hosts", "rate", "said", "unsaid"),
    [
        (None, 1, 1e9, "nothing to set", "int8"),
        (None, 2, 12.5e6, "take 480 ms to exchange", "leave it off"),
        (GROUP, 2, 118e6, 'try compression="int8"', "leave it off"),
        (GROUP, 2, 1e9, "leave it off", "try"),
        (Refusal("x", is_failure=True), 1, 1e9, "cannot share memory", "try"),
    ],
)
def test_what_follows_from_the_line(refusal, hosts, rate, said, unsaid):
    line = Line(latency=1e-4, nbytes=1 << 24, seconds=0.1, rate=rate)
    told = " ".join(doctor_ranks.consequences(refusal, line, 4, hosts))
    assert said in told
    assert unsaid not in told
    assert "1/4 of the optimizer's state" in told


@pytest.mark.long
def test_between_two_hosts_the_rate_is_that_of_the_line():
    with hosts_or_skip(2, 100e6) as hosts:
        texts = outputs(hosts, "-m", "tritonddp", "doctor", "--device", "cpu")
    lines = texts[0].splitlines()
    assert value(lines, "group") == "2 ranks on 2 hosts, gloo, cpu"
    assert "no two ranks share a host and a user" in value(lines, "transport")
    assert 30 < float(re.findall(r"sends ([\d.]+) Mbit/s", value(lines, "line"))[0]) <= 102
    assert any('try compression="int8"' in line for line in lines)

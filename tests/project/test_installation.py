"""Torch suffices to train on the CPU, and an import of the package is quick."""

import re
from pathlib import Path

import launched
from launched import ROOT
from versions import without_gloo

import tritonddp

# Two ranks train without Triton and without what Python lacks on macOS or Windows.
ELSEWHERE = """
import builtins, io, os, pathlib, select, signal, socket, sys, types
import torch.distributed.nn, torch.distributed.optim, torch.distributed.run
from torch import nn
from torch.nn.parallel import DistributedDataParallel as Stock
torch.set_num_threads(1)

fork, waitpid = os.fork, os.waitpid
for name in ("triton", "fcntl", "grp", "pwd", "resource", "termios"):
    sys.modules[name] = None  # an import of it is a ModuleNotFoundError
for name in (
    "os.fork os.geteuid os.getloadavg os.getpgid os.getpgrp os.killpg os.memfd_create "
    "os.posix_fallocate os.pread os.register_at_fork os.sched_getaffinity os.setpgid os.setsid "
    "os.sysconf os.uname select.poll select.epoll signal.SIGALRM signal.SIGBUS signal.SIGKILL "
    "signal.SIGSTOP signal.SIGUSR1 signal.SIGUSR2 signal.pthread_kill signal.setitimer "
    "socket.AF_UNIX socket.CMSG_SPACE socket.MSG_CMSG_CLOEXEC socket.MSG_DONTWAIT "
    "socket.SO_PEERCRED socket.send_fds"
).split():
    module, name = name.split(".")
    vars(sys.modules[module]).pop(name, None)

def without_proc(function):
    def found(path, *args, **kwargs):
        if str(path).startswith(("/proc", "/sys")):
            raise FileNotFoundError(path)
        return function(path, *args, **kwargs)
    return found

for module, name in (
    (builtins, "open"), (io, "open"), (os, "listdir"), (os, "open"), (os, "readlink"),
):
    setattr(module, name, without_proc(getattr(module, name)))

import tritonddp
from tritonddp.coordination.host import connect
connect.sys = types.SimpleNamespace(platform="win32")  # only there: torch reads it, too

def trained(wrap, kind=torch.optim.SGD, **options):
    torch.manual_seed(0)
    ddp = wrap(nn.Linear(4, 3), **options)
    optimizer = kind(ddp.parameters(), lr=0.1)
    for step in range(3):
        ddp(torch.full((2, 4), float(step + rank))).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return torch.cat([each.detach().flatten() for each in ddp.parameters()])

child = fork()  # torch is imported once for both ranks
rank = 0 if child else 1
torch.distributed.init_process_group("gloo", f"file://{sys.argv[1]}", rank=rank, world_size=2)
stock = trained(Stock)
assert stock.equal(trained(tritonddp.DistributedDataParallel, metrics=True))
assert stock.equal(trained(tritonddp.replicate))
def sharded(params, lr):
    return tritonddp.ZeroRedundancyOptimizer(params, torch.optim.SGD, lr=lr)
assert stock.equal(trained(tritonddp.DistributedDataParallel, sharded))
trained(tritonddp.DistributedDataParallel, compression="int8")
with tritonddp.stop_on_signal():
    model = tritonddp.DistributedDataParallel(nn.Linear(4, 3))
    if rank == 0:
        signal.raise_signal(signal.SIGTERM)
    steps = 0
    while not model.should_stop():
        model(torch.ones(2, 4)).sum().backward()
        steps += 1
    assert steps == 1
torch.distributed.destroy_process_group()
if child:
    from tritonddp.cli.main import main
    assert main(["run", "no such script"]) == 2
    print("compare:", main(["compare", __file__]))
    assert waitpid(child, 0)[1] == 0
"""


def test_the_changelog_and_the_citation_have_this_version() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text()
    (version, date), *_ = re.findall(r"^## \[(\d[^]]*)\] - ([\d-]+)$", changelog, re.MULTILINE)
    citation = (ROOT / "CITATION.cff").read_text()
    assert version == tritonddp.__version__
    assert f"\nversion: {version}\n" in citation
    assert f"\ndate-released: {date}\n" in citation


def test_without_triton_and_without_linux_it_trains_on_the_cpu(tmp_path: Path) -> None:
    """Simulated, not tested on macOS or Windows."""
    script = tmp_path / "train.py"
    script.write_text(ELSEWHERE)
    # torch 2.10 and 2.11 read the user name, which is in this variable on Windows.
    env = {"PYTHONPATH": str(ROOT), "USERNAME": "user"}
    done = launched.run(script, tmp_path / "store", nproc=None, env=env)
    assert done.returncode == 0, done.stderr
    assert without_gloo(done.stdout) == "compare: 2\n"
    assert "tritonddp compare: error: requires Linux or macOS" in done.stderr


IMPORTED = """
import sys, torch
from_torch = set(sys.modules)
from tritonddp import DistributedDataParallel, replicate, stop_on_signal
print(*sorted(set(sys.modules) - from_torch))
"""


def test_the_import_brings_nothing_large_that_only_some_programs_need() -> None:
    """Importing DTensor and SymPy would take 0.7 s of CPU time in every rank."""
    imported = launched.printed(IMPORTED).split()
    assert "tritonddp.wrapper" in imported
    large = {"sympy", "mpmath", "triton", "torch._dynamo", "torch._inductor", "torch.fx"}
    large |= {"torch.distributed.tensor", "torch.distributed.checkpoint"}
    assert not large & set(imported)

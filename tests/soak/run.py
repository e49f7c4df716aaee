"""Train for thousands of steps by a random plan, beside an oracle, and watch what piles up.

python tests/soak/run.py                          10,000 steps
python tests/soak/run.py --seed 3 --steps 500     of another plan, and fewer
python tests/soak/run.py --leak file              with a planted leak
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

# In front of the folder of this file, whose modules are those of a package.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from torch import Tensor

from soak.footprint import STEPS_FOR_MEMORY, Footprint, complaints, growth_of_memory
from soak.network import Data
from soak.oracle import Oracle
from soak.plan import KINDS, LONG, RANKS, lives
from soak.training import Trained, Training

STEPS = 10_000
# A long life is measured after so many of its steps, and at its end.
_SETTLED = 15
# Seconds that a rank waits for the other.
_TIMEOUT = 60
# Seconds that it is given to end when the other has failed.
_GRACE = 5


class Failed(Exception):
    """The soak has found something."""


@dataclass(frozen=True)
class Report:
    """What a soak saw on one rank.

    Attributes:
        taken: footprints.
        off: how far each kind was from the oracle at most.
        wrappers: how many there were.
        grown: what grew.
    """

    taken: list[Footprint]
    off: dict[str, float]
    wrappers: int
    grown: list[str]


# What a step may leak, to see that it is found.
_leaked: list[Any] = []
LEAKS: dict[str | None, Callable[[], None]] = {
    None: lambda: None,
    "tensor": lambda: _leaked.append(torch.zeros(8)),
    "memory": lambda: _leaked.append(os.urandom(4096)),
    "object": lambda: _leaked.append([]),
    "file": lambda: _leaked.append(os.open(os.devnull, os.O_RDONLY)),
}


def soak(
    seed: int,
    steps: int,
    leak: str | None = None,
    progress: Callable[[Footprint | None], None] = lambda _: None,
) -> Report:
    """Play the plan of ``seed`` on this rank, one of two.

    Args:
        seed, steps: of the plan.
        leak: a key of :data:`LEAKS`.
        progress: called after each step, with what was measured last.

    Raises:
        Failed: the ranks and the oracle have different parameters or buffers.
    """
    gc.collect()
    gc.freeze()  # measurements look at what the soak makes, not at all of torch
    data = Data(seed)
    trained = {kind: Trained(kind) for kind in KINDS}
    oracles = {kind: Oracle(kind, data) for kind in KINDS}
    taken: list[Footprint] = []
    off = dict.fromkeys((kind.name for kind in KINDS), 0.0)
    number = done = warm = 0
    for number, life in enumerate(lives(seed, steps), 1):
        training = Training(life, trained[life.kind], data, LEAKS[leak])
        oracle = oracles[life.kind]
        oracle.begin()
        is_long = len(life.steps) >= LONG
        for place, step in enumerate(life.steps, 1):
            training.step(step)
            oracle.step(step, life)
            where = f"step {step.number}, wrapper {number}, {life}: {step}"
            distance = _distance(trained[life.kind], oracle, where)
            off[life.kind.name] = max(off[life.kind.name], distance)
            if distance > life.kind.tolerance:
                raise Failed(
                    f"{where}: parameters are {distance:.3g} from the oracle's, of the largest; "
                    f"{life.kind.tolerance} is allowed"
                )
            if is_long and place in (_SETTLED, len(life.steps)):
                training.forget_views()
                taken.append(Footprint.now(step.number + 1, number, training.trained))
            progress(taken[-1] if taken else None)
        done += len(life.steps)
        training.end()
        _check_ranks(trained[life.kind], oracle, f"step {done - 1}, wrapper {number}, {life}")
        del training
        taken.append(Footprint.now(done))
        if number == len(KINDS):
            warm = max(done, steps // 4)
    found = [f"rank {dist.get_rank()}: {each}" for each in complaints(taken, warm, steps)]
    _leaked.clear()
    everywhere: list[Any] = [None] * RANKS
    dist.all_gather_object(everywhere, found)
    return Report(taken, off, number, [each for rank in everywhere for each in rank])


def _distance(trained: Trained, oracle: Oracle, where: str) -> float:
    """How far the parameters are from the oracle's at most, by the largest. NaN is an error."""
    mine = _flat(trained.network.parameters())
    wanted = _flat(oracle.network.parameters())
    if torch.equal(mine, wanted):
        return 0.0
    distance = ((mine - wanted).abs().max() / wanted.abs().max()).item()
    if distance != distance:
        raise Failed(f"{where}: parameters are NaN")
    return distance


def _check_ranks(trained: Trained, oracle: Oracle, where: str) -> None:
    """All ranks have the same bits, and each the buffers that the oracle has for it."""
    parameters = _flat(trained.network.parameters())
    others = [torch.empty_like(parameters) for _ in range(RANKS)]
    dist.all_gather(others, parameters)
    if not all(torch.equal(parameters, each) for each in others):
        raise Failed(f"{where}: the ranks have different parameters")
    pairs = zip(trained.network.buffers(), oracle.buffers[dist.get_rank()], strict=True)
    if not all(torch.equal(mine, wanted) for mine, wanted in pairs):
        raise Failed(f"{where}: rank {dist.get_rank()} has other buffers than the oracle")


def _flat(tensors: Iterator[Tensor]) -> Tensor:
    return torch.cat([each.detach().reshape(-1) for each in tensors])


# The command: starts two processes of itself, of which rank 0 tells how it goes.


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0, help="of the plan (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=STEPS, help="default: %(default)s")
    parser.add_argument("--leak", choices=[each for each in LEAKS if each], help="plant one")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--store", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank is None:
        return _start_ranks()
    return _run_rank(arguments)


def _start_ranks() -> int:
    with tempfile.TemporaryDirectory(prefix="tritonddp-soak-") as folder:
        command = [sys.executable, *sys.argv, "--store", os.path.join(folder, "store")]
        environment = {"OMP_NUM_THREADS": "1", **os.environ}
        ranks = [
            subprocess.Popen([*command, "--rank", str(rank)], env=environment)
            for rank in range(RANKS)
        ]
        try:
            while any(each.poll() is None for each in ranks):
                if any(each.poll() for each in ranks):
                    deadline = time.monotonic() + _GRACE
                    while any(e.poll() is None for e in ranks) and time.monotonic() < deadline:
                        time.sleep(0.1)
                    break
                time.sleep(0.1)
        finally:
            for each in ranks:
                if each.poll() is None:
                    each.kill()
                each.wait()
    return int(any(each.returncode for each in ranks))


def _run_rank(arguments: argparse.Namespace) -> int:
    torch.set_num_threads(1)
    logging.getLogger("tritonddp").setLevel(logging.ERROR)  # backwards break off on purpose
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(arguments.store, RANKS),
        rank=arguments.rank,
        world_size=RANKS,
        timeout=timedelta(seconds=_TIMEOUT),
    )
    start = time.monotonic()
    played = 0
    with _progress_bar(arguments.steps, quiet=arguments.rank > 0) as progress:

        def note(last: Footprint | None) -> None:
            nonlocal played
            played += 1
            progress(last)

        try:
            report = soak(arguments.seed, arguments.steps, arguments.leak, note)
        except Exception as error:
            print(
                f"\nsoak failed on rank {arguments.rank}: seed {arguments.seed}, step {played}: "
                f"{type(error).__name__}: {error}\n{_again(arguments, played + 1)}",
                file=sys.stderr,
                flush=True,
            )
            raise
    if arguments.rank == 0:
        print(_told(report, arguments, time.monotonic() - start), flush=True)
    dist.destroy_process_group()
    return int(bool(report.grown))


def _again(arguments: argparse.Namespace, steps: int) -> str:
    """How to see it once more. (A plan of fewer steps has other wrappers.)"""
    leak = f" --leak {arguments.leak}" if arguments.leak else ""
    return f"again: make soak ARGS='--seed {arguments.seed} --steps {steps}{leak}'"


@contextmanager
def _progress_bar(steps: int, quiet: bool) -> Iterator[Callable[[Footprint | None], None]]:
    """Steps per second and memory, on the terminal."""
    if quiet:
        yield lambda _: None
        return
    from tqdm import tqdm

    with tqdm(total=steps, unit="step", mininterval=1.0, smoothing=0.05) as bar:

        def step(last: Footprint | None) -> None:
            if last is not None:
                bar.set_postfix_str(f"{last.memory / 2**20:.1f} MiB", refresh=False)
            bar.update()

        yield step


def _told(report: Report, arguments: argparse.Namespace, seconds: float) -> str:
    """The figures of rank 0, and what grew on any."""
    taken = report.taken
    last = taken[-1]
    lines = [
        f"seed {arguments.seed}: {arguments.steps} steps in {seconds:.0f} s, "
        f"{report.wrappers} wrappers, {len(taken)} measurements",
        f"memory: {last.memory / 2**20:.1f} MiB, most in the last quarter against the second: "
        f"{growth_of_memory(taken, arguments.steps):+.2%}"
        + ("" if arguments.steps >= STEPS_FOR_MEMORY else " (too few steps to judge)"),
        f"file descriptors: {last.files}, threads: {last.threads}, tensors that outlive a "
        f"wrapper: {last.tensors}, objects: {last.objects}",
        "largest distance from the oracle: "
        + ", ".join(f"{name} {distance:.3g}" for name, distance in report.off.items()),
    ]
    if report.grown:
        lines += ["", *report.grown, _again(arguments, arguments.steps)]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())

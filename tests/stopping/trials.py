"""Send SIGTERM to ranks at any moment of a training, many times: all have to stop together.

python tests/stopping/trials.py                            1,000 trials on 3 ranks
python tests/stopping/trials.py --trials 50 --world 2      fewer
python tests/stopping/trials.py --recorded --trials 60     on the recorded GPU
python tests/stopping/trials.py --kill 5                   SIGKILL instead: all others get an error

The ranks are processes that live for all trials. In each a new model is wrapped, and one rank or
several get SIGTERM: from the outside at a random time, or from themselves at a place of their
program that is drawn: between two steps, in the forward, at a gradient of the backward, in the
optimizer, at an instruction of the function that makes headers.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

# In front of the folder of this file, whose modules are those of a package.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from distributed import gather, sequence_number
from modules import mlp

import tritonddp
from tritonddp import DistributedDataParallel
from tritonddp.coordination.agreement import Agreement

PLACES = ("outside", "between", "forward", "backward", "optimizer", "open")
# So many steps at most until the signal comes, and until all have stopped.
_STEPS, _LIMIT = 8, 3000
_TIMEOUT = 60.0
_SILENCE = 240.0  # seconds without a line of a rank: it hangs

OPTIONS: dict[str, dict[str, Any]] = {
    "memory": {},
    "process group": {"transport": "process_group"},
    "views": {"gradient_as_bucket_view": True},
    "int8": {"compression": "int8"},
    "fp16": {"reduce_dtype": torch.float16},
    "reports": {"grad_norm": True},
}


class Failed(Exception):
    """What a trial must not show."""


# A rank


class Striking:
    """Context in which ``Agreement.open`` is struck by SIGTERM before its n-th instruction."""

    def __init__(self, number: int) -> None:
        self._left = number

    def __enter__(self) -> None:
        sys.settrace(self)

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def __call__(self, frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code is not Agreement.open.__code__:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            self._left -= 1
            if self._left == -1:
                os.kill(os.getpid(), signal.SIGTERM)
        return self


def strike(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGTERM)


class Trial:
    """One of them, on this rank. What is drawn by ``alike`` is the same on all ranks."""

    def __init__(self, number: int, seed: int, recorded: bool) -> None:
        alike = random.Random(f"{seed} {number}")
        world_size = dist.get_world_size()
        self.name, options = alike.choice(list(OPTIONS.items()))
        self.accumulates = alike.random() < 0.3
        self.place = alike.choice(PLACES)
        self.struck = alike.sample(range(world_size), alike.randint(1, world_size))
        self.is_struck = dist.get_rank() in self.struck
        here = random.Random(f"{seed} {number} {dist.get_rank()}")
        # Of several that are struck one at least is struck early.
        self.at = alike.randrange(2, _STEPS) + here.randrange(2)
        self.moment = here.randrange(4)
        self.instruction = here.randrange(160)
        torch.manual_seed(number)
        self._device = "cuda" if recorded else "cpu"
        self.ddp = DistributedDataParallel(
            mlp(6, 24, 12, 4).to(self._device), bucket_cap_mb=0.0008, **options
        )
        self._optimizer = torch.optim.SGD(self.ddp.parameters(), lr=0.05, momentum=0.9)
        self.sent: list[tuple[int, ...]] = []

    def run(self) -> int:
        """Train until all shall stop; the number of steps."""
        for number in range(_LIMIT):
            strikes = self.is_struck and number == self.at and self.place != "outside"
            counters = self.ddp.reducer.counters
            before = counters.collectives, counters.wire_bytes, sequence_number()
            self._step(number, self.place if strikes else "")
            after = counters.collectives, counters.wire_bytes, sequence_number()
            self.sent.append(tuple(end - begin for begin, end in zip(before, after, strict=True)))
            if self.ddp.should_stop():
                return number + 1
        raise Failed(f"no stop in {_LIMIT} steps")

    def _step(self, number: int, struck_in: str) -> None:
        self._optimizer.zero_grad()
        x = torch.randn(4, 6).to(self._device) + dist.get_rank()
        if struck_in == "between":
            strike()
        if self.accumulates:
            with self.ddp.no_sync():
                self.ddp(x).square().mean().backward()
        handles: list[Any] = []
        if struck_in == "forward":
            layer = self.ddp.module[self.moment]
            handles.append(layer.register_forward_hook(strike))
        if struck_in == "backward":
            handles.append(list(self.ddp.parameters())[self.moment].register_hook(strike))
        if struck_in == "optimizer":
            handles.append(self._optimizer.register_step_pre_hook(strike))
        around: Any = contextlib.nullcontext()
        if struck_in == "open":
            self.ddp._ddp_state.core.agreement.key = None  # so that the header is made anew
            around = Striking(self.instruction)
        loss = self.ddp(x).square().mean()
        with around:
            loss.backward()
        self._optimizer.step()
        for handle in handles:
            handle.remove()
        if struck_in == "open" and around._left >= 0:
            strike()  # it has fewer instructions than that

    def judge(self, steps: int) -> tuple[int, int]:
        """Compare the ranks; returns the step of the request that came first, and the last step."""
        digest = hashlib.sha256()
        for param in self.ddp.parameters():
            digest.update(param.detach().cpu().numpy().tobytes())
        at = self.at if self.is_struck else _LIMIT
        everywhere = gather((steps, digest.hexdigest(), set(self.sent[2:-1]), self.sent[-1], at))
        what = f"{self.name}, {self.place}, ranks {self.struck}"
        if len({each[0] for each in everywhere}) > 1:
            raise Failed(f"{what}: ranks stop after steps {[each[0] for each in everywhere]}")
        if len({each[1] for each in everywhere}) > 1:
            raise Failed(f"{what}: parameters differ after step {steps}")
        # The first steps agree on the order of buckets. The request has been sent in the last one,
        # on a GPU in the one before.
        kinds = set().union(*(each[2] for each in everywhere), {each[3] for each in everywhere})
        if steps > 3 and len(kinds) > 1:
            raise Failed(f"{what}: steps send {kinds}")
        return min(each[4] for each in everywhere), steps


def of_rank(args: argparse.Namespace) -> None:
    """All trials on one rank; each line that it prints is for the parent."""
    torch.set_num_threads(1)
    late = 0

    def too_late(*_: object) -> None:
        nonlocal late
        late += 1  # the others had stopped the trial before this rank was struck

    signal.signal(signal.SIGTERM, too_late)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(args.store, args.world),
        rank=args.rank,
        world_size=args.world,
        timeout=timedelta(seconds=_TIMEOUT),
    )
    with contextlib.ExitStack() as stack:
        if args.recorded:
            from recording.device import recording

            stack.enter_context(recording())
        for number in range(args.trials):
            with tritonddp.stop_on_signal():
                trial = Trial(number, args.seed, args.recorded)
                is_outside = trial.place == "outside" and trial.is_struck
                print("trial", number, "strike" if is_outside else "-", flush=True)
                steps = trial.run()
                at, steps = trial.judge(steps)
            print("done", number, trial.place, at, steps, len(trial.struck), flush=True)
        if args.recorded:
            torch.cuda.synchronize()
    print("late", late, flush=True)
    dist.destroy_process_group()


def of_killed(args: argparse.Namespace) -> None:
    """Train until a rank is gone: the error that this rank gets."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(args.store, args.world),
        rank=args.rank,
        world_size=args.world,
        timeout=timedelta(seconds=10),
    )
    tritonddp.stop_on_signal()
    trial = Trial(args.trials, args.seed, recorded=False)
    trial.place = "outside"
    print("trial 0 strike", flush=True)
    try:
        trial.run()
    except RuntimeError as error:
        print("error", " ".join(str(error).split()), flush=True)
    sys.stdout.flush()
    os._exit(0)  # the group has lost a rank


# The parent


class Rank:
    """A process, and the lines that it prints."""

    def __init__(self, rank: int, store: str, args: argparse.Namespace, *more: str) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        if args.recorded:
            environment["TRITON_INTERPRET"] = "1"
        given = {"rank": rank, "store": store, "world": args.world, "seed": args.seed}
        self.rank, self.log = rank, tempfile.TemporaryFile("w+")  # noqa: SIM115  until it ends
        self.process = subprocess.Popen(
            [
                sys.executable,
                __file__,
                *(f"--{name}={value}" for name, value in given.items()),
                *(["--recorded"] if args.recorded else []),
                *more,
            ],
            stdout=subprocess.PIPE,
            stderr=self.log,
            env=environment,
        )
        self._pipe = self.process.stdout.fileno()  # type: ignore[union-attr]
        os.set_blocking(self._pipe, False)
        self._text = b""

    def lines(self) -> list[str]:
        """Those that have come since."""
        with contextlib.suppress(BlockingIOError):
            while content := os.read(self._pipe, 65536):
                self._text += content
        *whole, self._text = self._text.split(b"\n")
        return [line.decode() for line in whole]

    def errors(self) -> str:
        self.log.seek(0)
        return self.log.read()[-4000:]

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


@contextlib.contextmanager
def processes(args: argparse.Namespace, *more: str) -> Iterator[list[Rank]]:
    """Context: the ranks run; at its end they have ended."""
    with tempfile.TemporaryDirectory(prefix="tritonddp-trials-") as folder:
        ranks = [Rank(rank, f"{folder}/store", args, *more) for rank in range(args.world)]
        try:
            yield ranks
        finally:
            for each in ranks:
                each.end()


def watch(
    ranks: list[Rank],
    handle: Callable[[Rank, list[str]], object],
    meanwhile: Callable[[], object] = lambda: None,
) -> None:
    """Hand on the words of each line until all ranks have ended."""
    heard = time.monotonic()
    while True:
        running = [each for each in ranks if each.process.poll() is None]
        for each in ranks:
            for line in each.lines():
                heard = time.monotonic()
                handle(each, line.split())
        meanwhile()
        failed = [each for each in ranks if each.process.poll() not in (None, 0, -signal.SIGKILL)]
        if failed:
            time.sleep(1)
            raise Failed("\n".join(f"rank {each.rank}:\n{each.errors()}" for each in failed))
        if not running:
            return
        if time.monotonic() - heard > _SILENCE:
            raise Failed(f"ranks {[each.rank for each in running]} hang")
        time.sleep(0.001)


def play(args: argparse.Namespace) -> Counter[str]:
    """All trials: how many there were of each kind."""
    counts: Counter[str] = Counter()
    chance = random.Random(args.seed)
    due: dict[Rank, float] = {}  # when it is struck from the outside

    def handle(rank: Rank, words: list[str]) -> None:
        if words[0] == "trial" and words[2] == "strike":
            due[rank] = time.monotonic() + chance.uniform(0, args.within)
        elif words[0] == "done":
            due.pop(rank, None)
            if rank.rank == 0:
                count(*words[1:])
        elif words[0] == "late":
            counts["signals after the stop"] += int(words[1])

    def count(number: str, place: str, at: str, steps: str, struck: str) -> None:
        counts["trials"] += 1
        counts[f"trials: struck {place}"] += 1
        counts["trials: several ranks struck"] += int(struck) > 1
        if place != "outside":
            counts[f"trials: stopped {int(steps) - 1 - int(at)} steps after the request"] += 1
        counts["steps"] += int(steps)
        if args.verbose and (int(number) + 1) % 100 == 0:
            print(int(number) + 1, "trials", flush=True)

    def strike_due() -> None:
        now = time.monotonic()
        for rank in [rank for rank, at in due.items() if at <= now]:
            del due[rank]
            rank.process.send_signal(signal.SIGTERM)

    with processes(args, f"--trials={args.trials}") as ranks:
        watch(ranks, handle, strike_due)
    return counts


def kill(args: argparse.Namespace) -> list[str]:
    """SIGKILL for one rank while it trains; the errors of the others."""
    chance, errors = random.Random(args.seed), []
    for number in range(args.kill):
        found: dict[int, str] = {}
        began: list[int] = []
        victim = chance.randrange(args.world)

        def handle(rank: Rank, words: list[str], found: Any = found, began: Any = began) -> None:
            if words[0] == "trial":
                began.append(rank.rank)
            if words[0] == "error":
                found[rank.rank] = " ".join(words[1:])

        with processes(args, f"--trials={number}", "--killed") as ranks:
            deadline = time.monotonic() + _SILENCE
            while len(began) < args.world and time.monotonic() < deadline:
                for each in ranks:
                    for line in each.lines():
                        handle(each, line.split())
                time.sleep(0.01)
            time.sleep(chance.uniform(0, 0.3))
            ranks[victim].process.kill()
            watch(ranks, handle)
        others = set(range(args.world)) - {victim}
        if set(found) != others:
            raise Failed(f"rank {victim} was killed, and only {sorted(found)} got an error")
        for rank, error in found.items():
            if f"rank {victim}" not in error:
                raise Failed(f"rank {rank}: the error does not name rank {victim}: {error}")
        errors += found.values()
    return errors


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trials", type=int, default=1000)
    parser.add_argument("--world", type=int, default=3, help="ranks")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--within", type=float, default=0.08, help="seconds from the begin of a trial to a signal"
    )
    parser.add_argument("--recorded", action="store_true", help="on the recorded GPU")
    parser.add_argument("--kill", type=int, default=0, metavar="N", help="N times SIGKILL instead")
    parser.add_argument("--verbose", action="store_true")
    for name in ("--rank", "--store", "--killed"):  # of the processes
        more: dict[str, Any] = {"action": "store_true"} if name == "--killed" else {}
        parser.add_argument(name, help=argparse.SUPPRESS, **more)
    args = parser.parse_args(arguments)
    if args.rank is not None:
        args.rank = int(args.rank)
        (of_killed if args.killed else of_rank)(args)
        return 0
    began = time.monotonic()
    try:
        if args.kill:
            for error in kill(args):
                print(error)
            print(f"{args.kill} times SIGKILL for one of {args.world} ranks: all others ended")
            return 0
        counts = play(args)
    except Failed as failed:
        print(failed, file=sys.stderr)
        return 1
    for name, count in sorted(counts.items()):
        print(f"{count:7,} {name}")
    print(
        f"{args.world} ranks, seed {args.seed}, {time.monotonic() - began:.0f} s: in each trial "
        "all ranks stopped after the same step with the same parameters, and no step sent more"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The elastic example: killed anywhere, it goes on, and ends with the bits of an unharmed run."""

import os
import random
import re
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import launched
import pytest
import torch
import torch.distributed as dist
from distributed import assert_same_bits, gather, ranks, run_ranks
from launched import ROOT
from torch import Tensor, nn

pytest.importorskip("tqdm", reason="needs the extra [examples]")
sys.path.append(str(ROOT / "examples"))

import elastic
from checkpoints import MANIFEST, CheckpointError, Checkpoints
from tasks import Task

HERE = str(Path(__file__).parent)
STEPS = 12


class Model(nn.Module):
    """Gradients come in another order than that in which the layers were made."""

    def __init__(self, plain: bool) -> None:
        super().__init__()
        self.last = nn.Linear(180, 2)
        self.first = nn.Linear(6, 180)
        random_parts = nn.BatchNorm1d(180), nn.ReLU(), nn.Dropout(0.2)
        self.middle = nn.Tanh() if plain else nn.Sequential(*random_parts)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(self.first(x)))


def tiny(plain: bool = False) -> Task:
    """A task of milliseconds. What is random in its model belongs to ranks, unless it is plain."""
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(72, 6, generator=generator)
    targets = (inputs.sum(1) > 0).long()
    data = inputs[:60], targets[:60], inputs[60:], targets[60:]
    return Task("tiny", "sample", lambda: Model(plain), *data, {}, STEPS, 8, 0.01)


def arguments(folder: Path, *more: str) -> Any:
    always = "--steps", str(STEPS), "--every", "3", "--batch-size", "8", "--bucket-cap-mb", "0.003"
    return elastic.parse_arguments(["--checkpoints", str(folder), *always, *more])


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder in memory, where there is one: disks of busy machines take long to sync."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        yield Path(folder)


class Stopped(Exception):
    """Stands for the death of all ranks."""


def live(folder: Path, *more: str, stop_at: int | None = None, plain: bool = False) -> Any:
    """Train until the end, or until all ranks stop at a step. Batches are noted in ``seen``."""
    seen: list[list[int]] = []
    take_step, draw = elastic.Training.take_step, elastic.Batches.next

    def step(self: Any) -> None:
        if self.step == stop_at:
            raise Stopped
        take_step(self)

    def next_batch(self: Any, rank: int, world_size: int) -> Tensor:
        indices = draw(self, rank, world_size)
        seen.append(indices.tolist())
        return indices

    args = arguments(folder, *more)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(elastic.Training, "take_step", step)
        patch.setattr(elastic.Batches, "next", next_batch)
        try:
            checkpoints = Checkpoints(args.checkpoints, args.keep)
            training = elastic.train(tiny(plain), args, torch.device("cpu"), checkpoints)
        except Stopped:
            return None, seen
    return training, seen


def everything(training: Any) -> dict[str, Any]:
    """All that decides how the training would go on on this rank."""
    state = {f"module {name}": t for name, t in training.ddp.module.state_dict().items()}
    for number, each in training.optimizer.state_dict()["state"].items():
        state |= {f"optimizer {number} {name}": value for name, value in each.items()}
    communication = training.ddp.comm_state_dict()
    for kind in ("sent", "reduced"):
        state |= {f"left out {kind} {n}": left for n, left in communication[kind].items()}
    state["random numbers"] = torch.get_rng_state()
    rates = [group["lr"] for group in training.optimizer.param_groups]
    progress = [training.step, training.batches.epoch, training.batches.position]
    state["progress"] = torch.tensor([*rates, *progress], dtype=torch.float64)
    return state


@pytest.mark.long
@pytest.mark.parametrize("compression", [None, "int8"])
@ranks(2, 3)
def test_a_run_that_was_interrupted_ends_with_the_bits_of_one_that_was_not(
    compression: str | None, place: Path
) -> None:
    options = [] if compression is None else ["--compression", compression]
    expected = everything(live(place / "unharmed", *options)[0])
    folder = place / "interrupted"
    for stop_at in (2, 5, 11):  # before the first checkpoint, behind it, behind the last
        assert live(folder, *options, stop_at=stop_at)[0] is None
    found = everything(live(folder, *options)[0])
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert_same_bits(found[name], value, name)
    assert len(set(gather(expected["random numbers"].sum().item()))) > 1, "each rank has its own"
    assert any(name.startswith("left out") for name in expected) == (compression is not None)


def steps_of(folder: Path, stop_at: int | None) -> tuple[Any, list[Any]]:
    training, seen = live(folder, "--noise", "0", stop_at=stop_at, plain=True)
    if training is None:
        return None, seen
    return [parameter.detach().clone() for parameter in training.ddp.parameters()], seen


def test_other_numbers_of_ranks_go_on_with_the_same_training(place: Path) -> None:
    expected = run_ranks(steps_of, 3, place / "unharmed", None)
    batches = elastic.Batches(60, 8, seed=0)
    order = [sorted(batches.next(0, 1).tolist()) for _ in range(STEPS)]
    begins = 0
    for world_size, stop_at in ((3, 5), (2, 7), (1, 10), (3, None)):
        found = run_ranks(steps_of, world_size, place / "elastic", stop_at)
        parts = zip(*(seen for _, seen in found), strict=True)
        seen = [sorted(index for part in step for index in part) for step in parts]
        assert seen == order[begins : stop_at or STEPS], f"{world_size} ranks"
        begins = 3 * ((stop_at or 0) // 3)
    for rank, (parameters, _) in enumerate(found):
        for ours, first, theirs in zip(parameters, found[0][0], expected[rank][0], strict=True):
            assert_same_bits(ours, first, f"rank {rank}")
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


# Checkpoints


def put(checkpoints: Checkpoints, *steps: int) -> None:
    for step in steps:
        mine = f"rank {dist.get_rank()}"
        checkpoints.save(step, {"tensor": torch.full((50,), float(step)), mine: b"own"})


def tensor_of(checkpoints: Checkpoints) -> tuple[int, list[float]]:
    found = checkpoints.last_good()
    assert found is not None
    state = {"tensor": torch.zeros(50), f"rank {dist.get_rank()}": b""}
    found.load(state)
    assert state[f"rank {dist.get_rank()}"] == b"own"
    return found.step, state["tensor"].unique().tolist()


def truncate(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 1)


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def empty(file: Path) -> None:
    file.write_bytes(b"")


def garble(file: Path) -> None:
    file.write_text('{"files": {}, "world_size": "two"}')


TEARS: list[tuple[str, Callable[[Path], None]]] = [
    ("__0_0.distcp", truncate),
    ("__1_0.distcp", flip),
    ("__1_0.distcp", Path.unlink),
    (".metadata", empty),
    (MANIFEST, empty),
    (MANIFEST, truncate),
    (MANIFEST, garble),
    (MANIFEST, Path.unlink),
]


@ranks(2)
def test_torn_checkpoints_are_passed_over(place: Path) -> None:
    for number, (name, tear) in enumerate(TEARS):
        folder = place / str(number)
        checkpoints = Checkpoints(folder, keep=3)
        if number == 0:
            put(checkpoints, 1, 2, 3)
        elif dist.get_rank() == 0:
            shutil.copytree(place / "whole", folder, dirs_exist_ok=True)
        dist.barrier()
        if dist.get_rank() == 0:
            if number == 0:
                shutil.copytree(folder, place / "whole")
            tear(folder / "step-00000003" / name)
        dist.barrier()
        assert tensor_of(checkpoints) == (2, [2.0]), f"{tear.__name__} {name}"
    # The last folder: all of it is torn, and then the training comes to the torn step again.
    put(checkpoints, 3)
    assert tensor_of(checkpoints) == (3, [3.0])
    if dist.get_rank() == 0:
        for file in folder.glob(f"*/{MANIFEST}"):
            file.unlink()
    dist.barrier()
    with pytest.raises(CheckpointError, match="begin anew in another folder"):
        checkpoints.last_good()


@ranks(1)
def test_a_pointer_that_points_nowhere_is_no_harm(place: Path) -> None:
    checkpoints = Checkpoints(place, keep=3)
    assert checkpoints.last_good() is None
    put(checkpoints, 1, 2)
    pointer = place / "latest"
    assert pointer.read_text() == "step-00000002\n"
    for content in (b"", b"step-00000009\n", b"../elsewhere", b"\xff\xfe", None):
        pointer.unlink(missing_ok=True)
        if content is not None:
            pointer.write_bytes(content)
        assert tensor_of(checkpoints) == (2, [2.0])
    pointer.write_text("step-00000001\n")
    assert tensor_of(checkpoints) == (1, [1.0]), "it is what somebody wants"
    put(checkpoints, 2)  # which is there already
    assert tensor_of(checkpoints) == (2, [2.0])


@ranks(2)
def test_old_checkpoints_go_and_later_ones_of_another_past(place: Path) -> None:
    checkpoints = Checkpoints(place, keep=2)
    put(checkpoints, 1, 2, 3, 4)
    dist.barrier()
    assert sorted(os.listdir(place)) == ["latest", "step-00000003", "step-00000004"]
    dist.barrier()
    if dist.get_rank() == 0:
        (place / "step-00000009.tmp" / "deep").mkdir(parents=True)
        (place / "mine").write_text("of the user")
        shutil.copytree(place / "step-00000004", place / "step-00000020")
    put(checkpoints, 5)
    dist.barrier()
    assert sorted(os.listdir(place)) == ["latest", "mine", "step-00000004", "step-00000005"]
    assert tensor_of(checkpoints) == (5, [5.0])


@ranks(2)
def test_nobody_else_can_read_or_change_a_checkpoint(place: Path) -> None:
    before = os.umask(0)
    try:
        put(Checkpoints(place / "run"), 1)
        dist.barrier()
        for path in [place / "run", *(place / "run").rglob("*")]:
            expected = 0o700 if path.is_dir() else 0o600
            assert stat.S_IMODE(path.stat().st_mode) == expected, path
        assert os.umask(0) == 0, "it is put back"
        open_to_all = place / "open"
        open_to_all.mkdir(exist_ok=True)
        with pytest.raises(CheckpointError, match="would be run as code"):
            Checkpoints(open_to_all)
    finally:
        os.umask(before)


@ranks(2)
def test_a_checkpoint_has_its_name_when_all_of_it_is_on_the_disk(place: Path) -> None:
    calls: list[tuple[str, str]] = []
    sync, rename, replace = os.fsync, Path.rename, Path.replace

    def note_sync(descriptor: int) -> None:
        calls.append(("sync", Path(os.readlink(f"/proc/self/fd/{descriptor}")).name))
        sync(descriptor)

    def note_move(source: Path, target: Path) -> Path:
        calls.append(("move", Path(target).name))
        return (replace if Path(target).name == "latest" else rename)(source, target)

    checkpoints = Checkpoints(place / "run")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", note_sync)
        patch.setattr(Path, "rename", note_move)
        patch.setattr(Path, "replace", note_move)
        put(checkpoints, 7)
    written = [call for call in calls if call[1] not in (".metadata.tmp", ".metadata")]
    mine = ("sync", f"__{dist.get_rank()}_0.distcp")
    assert mine in written
    if dist.get_rank() == 0:
        assert ("sync", ".metadata.tmp") in calls
        written.remove(mine)
        assert written == [
            ("sync", MANIFEST),
            ("sync", "step-00000007.tmp"),
            ("move", "step-00000007"),
            ("sync", "run"),
            ("sync", "latest.tmp"),
            ("move", "latest"),
            ("sync", "run"),
        ]
        assert calls.index(mine) < calls.index(("sync", MANIFEST))


# Saves a second checkpoint again and again, in a process that is killed at its first, second, ...
# access to the folder, until one comes through; then another process goes on in each folder.
KILLED_WHILE_SAVING = """
import os, signal, sys, warnings
sys.path[:0] = sys.argv[1:4]
import torch, torch.distributed as dist
from pathlib import Path
from test_elastic import Checkpoints, put, tensor_of

torch.set_num_threads(1)
place = Path(sys.argv[4])
EVENTS = {"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "shutil.rmtree"}


def process(work):
    child = os.fork()
    if not child:
        store = dist.HashStore()
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        work()
        os._exit(0)
    return os.waitpid(child, 0)[1]


number, ended = 0, 1
while ended:
    number += 1
    folder = place / str(number)

    def save():
        checkpoints = Checkpoints(folder, keep=1)
        put(checkpoints, 1)
        accesses = 0

        def watch(event, args):
            nonlocal accesses
            if event in EVENTS and str(args[0]).startswith(str(folder)):
                accesses += 1
                if accesses == number:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(watch)
        put(checkpoints, 2)

    def go_on():
        checkpoints = Checkpoints(folder, keep=1)
        step, content = tensor_of(checkpoints)
        assert content == [float(step)], content
        print(number, step, flush=True)
        put(checkpoints, 2, 3)
        assert tensor_of(checkpoints) == (3, [3.0])
        assert sorted(os.listdir(folder)) == ["latest", "step-00000003"], os.listdir(folder)

    ended = process(save)
    assert ended in (0, signal.SIGKILL), ended
    assert process(go_on) == 0, f"killed at access {number}: {sorted(folder.rglob('*'))}"
"""


@pytest.mark.thorough
def test_killed_at_any_moment_of_saving_the_last_good_one_loads(place: Path) -> None:
    script = place / "script.py"
    script.write_text(KILLED_WHILE_SAVING)
    paths = [HERE, str(ROOT / "tests"), str(ROOT), str(place)]
    done = subprocess.run(
        [sys.executable, script, *paths], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    loaded = [int(line.split()[1]) for line in done.stdout.splitlines()]
    assert loaded == sorted(loaded), "from one moment on the new one is there"
    assert loaded.count(1) > 5
    assert loaded.count(2) > 3


# Under torchrun


SCRIPT = """
import os, random, signal, sys
sys.path[:0] = {paths!r}
import elastic

life, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["RANK"])
{body}
sys.exit(elastic.main())
"""

TINY = """
from test_elastic import tiny
elastic.TASKS["digits"] = tiny
"""

# In its second life rank 0 dies when all of a checkpoint is written, and it has no name yet.
DIES_WHILE_SAVING = """
def watch(event, args):
    if event == "os.rename" and "step-" in str(args[0]) and str(args[0]).endswith(".tmp"):
        os.kill(os.getpid(), signal.SIGKILL)

if (life, rank) == (1, 0):
    sys.addaudithook(watch)
"""

# One rank dies at any time after the first step, in each life but the last.
DIES_AT_ANY_TIME = """
chance = random.Random({seed} + life)
victim, seconds = chance.randrange({ranks}), chance.uniform(0.01, 1.5)
take_step = elastic.Training.take_step

def step(self):
    take_step(self)
    if life < {lives} and rank == victim and signal.getitimer(signal.ITIMER_REAL)[0] == 0:
        signal.setitimer(signal.ITIMER_REAL, seconds)  # whose signal ends the process

elastic.Training.take_step = step
"""


def launch(
    place: Path, body: str, nproc: int, restarts: int, *more: str
) -> subprocess.CompletedProcess[str]:
    script = place / "script.py"
    paths = [HERE, str(ROOT / "tests"), str(ROOT / "examples")]
    script.write_text(SCRIPT.format(body=body, paths=paths))
    return launched.run(
        *("--max-restarts", str(restarts), script, "--checkpoints", place / "run", *more),
        nproc=nproc,
        env={"PYTHONPATH": str(ROOT)},
        timeout=500,
    )


def unharmed(folder: Path) -> str:
    return live(folder)[0].report()


@pytest.mark.long
@pytest.mark.parametrize("deaths", [1, pytest.param(2, marks=pytest.mark.thorough)])
def test_torchrun_brings_a_run_through_deaths(deaths: int, place: Path) -> None:
    (expected, _) = run_ranks(unharmed, 2, place / "unharmed")
    kill_at, victim = random.randrange(3, STEPS), random.randrange(2)
    print(f"rank {victim} dies in step {kill_at}")
    common = vars(arguments(place))
    options = [f"--{name}={common[name.replace('-', '_')]}" for name in ("steps", "every")]
    options += ["--batch-size=8", "--bucket-cap-mb=0.003"]
    kills = [f"--kill-at={kill_at}", f"--kill-rank={victim}"]
    body = TINY + (DIES_WHILE_SAVING if deaths == 2 else "")
    done = launch(place, body, 2, deaths, *options, *kills)
    assert done.returncode == 0, done.stderr
    before = kill_at // 3 * 3
    lines = done.stdout.splitlines()
    assert [line for line in lines if "resumed" in line] == deaths * [
        f"resumed at step {before}, saved by 2 ranks"
    ]
    saved = [line for line in lines if line.startswith("saved")]
    assert saved == [f"saved step {step}" for step in range(3, STEPS + 1, 3)]
    assert lines[-1] == expected


# A rank gets SIGTERM in a step, or torchrun does, which hands it on to all.
IS_STRUCK = """
take_step = elastic.Training.take_step

def step(self):
    if self.step == {step} and rank == {rank}:
        os.kill({process}, signal.SIGTERM)
    take_step(self)

elastic.Training.take_step = step
"""


@pytest.mark.long
@pytest.mark.parametrize("struck", ["rank", "torchrun"])
def test_after_sigterm_all_ranks_save_and_the_next_run_has_the_same_bits(
    struck: str, place: Path
) -> None:
    (expected, _) = run_ranks(unharmed, 2, place / "unharmed")
    common = vars(arguments(place))
    options = [f"--{name}={common[name.replace('-', '_')]}" for name in ("steps", "every")]
    options += ["--batch-size=8", "--bucket-cap-mb=0.003"]
    process = "os.getpid()" if struck == "rank" else "os.getppid()"
    body = TINY + IS_STRUCK.format(step=4, rank=1, process=process)
    done = launch(place, body, 2, 0, *options)
    # torchrun ends with an error after SIGTERM, however its ranks end.
    assert (done.returncode == 0) == (struck == "rank"), done.stderr
    first, stopped, *_ = done.stdout.splitlines()
    assert first == "saved step 3"
    assert re.fullmatch(r"saved step [5-9]+, asked to stop", stopped), done.stdout
    assert "exitcode" not in done.stderr, "all ranks end well"
    done = launch(place, TINY, 2, 0, *options)
    assert done.returncode == 0, done.stderr
    step = re.findall(r"\d+", stopped)[0]
    assert done.stdout.splitlines()[0] == f"resumed at step {step}, saved by 2 ranks"
    assert done.stdout.splitlines()[-1] == expected


# What the job of examples/slurm.sh asks for, each as a script that notes down how it is called.
SLURM = {
    "srun": 'while [ "${1#--}" != "$1" ]; do shift; done; exec "$@"',
    "scontrol": 'if [ "$1" = show ]; then echo one; echo two; else echo "$@" >"$NOTES"; fi',
    "torchrun": 'echo "$@" >"$NOTES.torchrun"; printf "$TO" >"$CHECKPOINTS/latest"; exit 1',
}


@pytest.mark.parametrize(
    ("begins", "ends", "said", "status"),
    [
        ("", "step-00000077\n", "stopped at step 77: again", 0),
        ("step-00000077\n", "step-00000098\n", "stopped at step 98: again", 0),
        ("step-00000098\n", "step-00000100\n", "done: 100 steps", 0),
        ("step-00000077\n", "step-00000077\n", "failed at step 77, status 1", 1),
    ],
)
def test_the_job_goes_back_into_the_queue_if_it_has_come_further(
    begins: str, ends: str, said: str, status: int, tmp_path: Path
) -> None:
    for name, content in SLURM.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{content}\n")
        (tmp_path / name).chmod(0o700)
    if begins:
        (tmp_path / "latest").write_text(begins)
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_NUM_NODES": "2"}
    here = {"TO": ends, "NOTES": str(tmp_path / "notes"), "CHECKPOINTS": str(tmp_path)}
    done = subprocess.run(
        ["bash", ROOT / "examples" / "slurm.sh", "100"],
        capture_output=True,
        text=True,
        timeout=60,
        env={"PATH": f"{tmp_path}:{os.environ['PATH']}", "HOME": str(tmp_path), **job, **here},
    )
    assert done.returncode == status, done.stderr
    assert said in done.stdout + done.stderr
    assert (tmp_path / "notes").exists() == ("again" in said)
    if "again" in said:
        assert (tmp_path / "notes").read_text() == "requeue 7\n"
    called = (tmp_path / "notes.torchrun").read_text()
    assert "--rdzv-endpoint one:29500" in called
    assert "--steps 100" in called


@pytest.mark.thorough
@pytest.mark.timeout(900)
def test_the_digits_are_learnt_with_the_same_bits_through_deaths_at_any_time(place: Path) -> None:
    pytest.importorskip("sklearn", reason="needs the extra [examples]")
    seed, options = random.randrange(1000), ("--steps", "80", "--every", "7")
    print(f"seed {seed}")
    last = []
    for lives in (0, 2):
        (place / str(lives)).mkdir()
        body = DIES_AT_ANY_TIME.format(seed=seed, ranks=3, lives=lives)
        done = launch(place / str(lives), body, 3, lives, *options)
        assert done.returncode == 0, done.stderr
        assert len(re.findall("exitcode: -14", done.stderr)) == lives, done.stderr
        last.append(done.stdout.splitlines()[-1])
    assert last[0] == last[1]
    assert last[0].startswith("step 80: ")


def test_without_torchrun_the_example_says_how_to_start_it(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT", raising=False)
    monkeypatch.setattr(sys, "argv", ["elastic.py", "--checkpoints", str(place / "run")])
    assert elastic.main() == 2
    assert capsys.readouterr().err.startswith("elastic.py: error: start it with torchrun: ")
    assert not (place / "run").exists()

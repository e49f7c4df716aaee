"""Checkpoints that survive any failure while they are written.

    folder/
      step-00000040/     files of torch.distributed.checkpoint, and manifest.json
      step-00000060/
      latest             "step-00000060"

A checkpoint is written to ``step-00000060.tmp``, and renamed only when every byte of it is on disk.
``latest`` is replaced after that. If one process, all processes or the machine stop at any moment,
they cannot leave a checkpoint that looks complete and is not, and at least one complete checkpoint
remains. The manifest has the size and the hash of every file, because disks and copies fail too: a
checkpoint that does not match its manifest is skipped in favor of the one before it.

All ranks must see the same folder. Loading unpickles its content, so the folder and its files are
accessible to one user only (0700, 0600).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

MANIFEST = "manifest.json"
_NAME = re.compile(r"step-(\d{8,})")
_NOTHING, _NOTHING_COMPLETE = -1, -2  # in place of a step


class CheckpointError(Exception):
    """No checkpoint can be used. The message is one line with the remedy."""


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint.

    Attributes:
        path: folder of the checkpoint.
        step: number of steps before it was saved.
        world_size: number of ranks that saved it.
    """

    path: Path
    step: int
    world_size: int

    def load(self, state: dict[str, Any]) -> None:
        """Fill ``state``, tensors in place. All ranks must call it, each with the keys it needs."""
        dcp.load(state, storage_reader=dcp.FileSystemReader(self.path))


class Checkpoints:
    """The checkpoints of one run.

    Args:
        folder: created if it does not exist.
        keep: minimum number of checkpoints to keep; older ones are removed.

    Raises:
        CheckpointError: other users may write to the folder.
    """

    def __init__(self, folder: Path, keep: int = 2) -> None:
        self.folder = folder
        self.keep = keep
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if folder.stat().st_mode & 0o022 or folder.stat().st_uid != os.getuid():
            raise CheckpointError(
                f"{folder} is open to other users, and what they put there would be run as code: "
                "give it to yourself alone (chown, chmod 700), or use another one"
            )

    def save(self, step: int, state: dict[str, Any]) -> None:
        """Save ``state``. All ranks must call it.

        Values under the same key must be identical on all ranks; one rank writes them. Rank-local
        values need separate keys. The checkpoint is complete when this returns on rank 0.
        """
        name = f"step-{step:08d}"
        temporary = self.folder / f"{name}.tmp"
        with _private():
            if dist.get_rank() == 0:
                shutil.rmtree(temporary, ignore_errors=True)  # left by a killed run
                temporary.mkdir()
            dist.barrier()
            # Each rank syncs its files. Then rank 0 writes and syncs the index, and returns.
            dcp.save(state, storage_writer=dcp.FileSystemWriter(temporary, sync_files=True))
            if dist.get_rank() == 0:
                self._publish(temporary, step)

    def _publish(self, temporary: Path, step: int) -> None:
        """Rename a completely written checkpoint. The order of the operations is essential."""
        files = {file.name: _fingerprint(file) for file in sorted(temporary.iterdir())}
        manifest = {"world_size": dist.get_world_size(), "files": files}
        _write(temporary / MANIFEST, json.dumps(manifest, indent=1))
        _sync(temporary)
        final = temporary.with_suffix("")
        if final.exists():  # incomplete, or from before the run went back
            shutil.rmtree(final)
        temporary.rename(final)
        _sync(self.folder)
        _write(self.folder / "latest.tmp", final.name + "\n")
        (self.folder / "latest.tmp").replace(self.folder / "latest")
        _sync(self.folder)
        steps = self._steps()
        # A partially removed checkpoint does not match its manifest.
        # Later checkpoints are from before the run went back, and not part of its history.
        for old in [n for n in steps if n > step] + [n for n in steps if n <= step][self.keep :]:
            shutil.rmtree(self.folder / f"step-{old:08d}")
        for leftover in self.folder.glob("step-*.tmp"):
            shutil.rmtree(leftover, ignore_errors=True)

    def last_good(self) -> Checkpoint | None:
        """Return the newest complete checkpoint, or ``None`` if there is none. All ranks call it.

        Raises:
            CheckpointError: checkpoints exist, but none of them is complete.
        """
        step = self.find() if dist.get_rank() == 0 else _NOTHING
        # Send a number, which need not be unpickled.
        device = torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")
        found = torch.tensor([step], device=device)
        dist.broadcast(found, src=0)
        step = int(found)
        if step == _NOTHING_COMPLETE:
            raise CheckpointError(
                f"no checkpoint in {self.folder} is complete: restore one, or begin anew in "
                "another folder"
            )
        if step == _NOTHING:
            return None
        path = self.folder / f"step-{step:08d}"
        return Checkpoint(path, step, _manifest(path)["world_size"])

    def find(self) -> int:
        """Return the step of the newest complete checkpoint. Report skipped ones on stderr."""
        candidates = self._candidates()
        for path in candidates:
            problem = _problem(path)
            if problem is None:
                return int(path.name.removeprefix("step-"))
            print(f"passed over: {problem}", file=sys.stderr, flush=True)
        return _NOTHING_COMPLETE if candidates else _NOTHING

    def _candidates(self) -> list[Path]:
        """Return the checkpoint named by ``latest``, then all others, newest first."""
        names = [f"step-{step:08d}" for step in self._steps()]
        try:
            latest = (self.folder / "latest").read_text().strip()
        except (OSError, UnicodeDecodeError):
            latest = ""
        names.sort(key=lambda name: name != latest)
        return [self.folder / name for name in names]

    def _steps(self) -> list[int]:
        """Return the steps of all checkpoints, complete or not, newest first."""
        matches = [_NAME.fullmatch(path.name) for path in self.folder.iterdir()]
        return sorted((int(match[1]) for match in matches if match), reverse=True)


def _problem(path: Path) -> str | None:
    """Return why the checkpoint at ``path`` cannot be used, or ``None`` if it can."""
    try:
        manifest = _manifest(path)
        if not isinstance(manifest["world_size"], int):
            return f"{path / MANIFEST} says nothing of use"
        for name, expected in manifest["files"].items():
            if _fingerprint(path / name) != expected:
                return f"{path / name} is not what was written"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{path}: {type(error).__name__}: {error}"
    return None


def _manifest(path: Path) -> dict[str, Any]:
    return json.loads((path / MANIFEST).read_text())


def _fingerprint(file: Path) -> list[Any]:
    """Return the size in bytes and the SHA-256 hash of ``file``."""
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return [file.stat().st_size, digest.hexdigest()]


def _write(file: Path, text: str) -> None:
    with file.open("w") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())


def _sync(folder: Path) -> None:
    """Sync a folder: names of files are on disk once their folder is."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _private() -> Iterator[None]:
    """Restrict new files of this process to its user in this context."""
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)

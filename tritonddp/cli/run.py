"""Run a script under torchrun, with tritonddp's class in the place of torch's.

It takes what torchrun takes, and ends with its exit code. The script is not edited and need not
know: every Python process below gets tritonddp's class wherever it imports torch's
DistributedDataParallel from. In the end a line on stderr tells how many models were wrapped.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch.distributed.run
from torch.distributed.elastic.multiprocessing.errors import record

from tritonddp.cli.injection import RUN, environment, errors, wrapped_models


def parents() -> list[argparse.ArgumentParser]:
    """torchrun's own arguments."""
    return [torch.distributed.run.get_args_parser()]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add nothing to the arguments of torchrun."""


def main(arguments: argparse.Namespace) -> int:
    """Run; returns 0, and ends as torchrun does if the script fails."""
    if not says_where_to_meet(arguments):
        arguments.standalone = True
    with tempfile.TemporaryDirectory(prefix="tritonddp-run-") as folder:
        os.environ.update(environment(RUN, folder=folder))
        has_failed = True
        try:
            record(torch.distributed.run.run)(arguments)
            has_failed = False
        finally:
            report = summary(wrapped_models(Path(folder)), has_failed, errors(Path(folder)))
            print(f"tritonddp run: {report}", file=sys.stderr)
    return 0


def says_where_to_meet(arguments: argparse.Namespace) -> bool:
    """Whether torchrun was told of a rendezvous, by its options or by the variables for them."""
    (torchrun,) = parents()
    names = ("standalone", "nnodes", "rdzv_backend", "rdzv_endpoint", "rdzv_id", "master_port")
    return any(
        f"PET_{name.upper()}" in os.environ  # that is the default then
        or getattr(arguments, name) != torchrun.get_default(name)
        for name in names
    )


def summary(counts: list[int], has_failed: bool = False, errors: Sequence[str] = ()) -> str:
    """A line about the models that each process has wrapped, and of errors of the script."""
    if not any(counts):
        if errors:
            return f"the script failed before it wrapped a model: {errors[0]}"
        if has_failed:
            return (
                "the script failed, or was stopped, before it wrapped a model: its own error is "
                "above"
            )
        return (
            "WARNING: no model was wrapped by tritonddp. Does the script wrap one with torch's "
            "DistributedDataParallel? (Python started with -I, -E or -S keeps torch's class.)"
        )
    numbers = ", ".join(
        f"{count} {'model' if count == 1 else 'models'} in "
        f"{'1 process' if often == 1 else f'each of {often} processes'}"
        for count, often in sorted(Counter(counts).items())
    )
    return f"tritonddp wrapped {numbers}"

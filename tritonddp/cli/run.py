"""Run a script under torchrun, with tritonddp's class in place of torch's.

The options and the exit code are torchrun's. The script is not edited: every Python process of the
run uses tritonddp's class, no matter how it imports torch's DistributedDataParallel. At the end, a
line on stderr reports how many models were wrapped. Without a rendezvous option, the script runs on
this machine only, with 2 ranks unless --nproc-per-node is given. A script that starts its own ranks
(torch.multiprocessing.spawn) is run with python instead of torchrun.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from tritonddp.cli.injection import RUN, SPAWNS, environment, errors, wrapped_models
from tritonddp.cli.terminal import RANKS, ranks

# Options that tell torchrun of a rendezvous; variables such as PET_NNODES do so too.
_RENDEZVOUS = ("standalone", "nnodes", "rdzv_backend", "rdzv_endpoint", "rdzv_id", "master_port")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of torchrun and of the script.

    They are parsed from torchrun's source, because importing torchrun takes seconds, too long to
    report a typo. torchrun itself parses the command line later.
    """
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None, "torch is installed without its source"
    source = (Path(spec.origin).parent / "distributed" / "run.py").read_text(encoding="utf-8")
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call) or not ast.unparse(node.func).endswith(".add_argument"):
            continue
        names = [ast.literal_eval(each) for each in node.args]
        keywords = {each.arg: each.value for each in node.keywords}
        if not names[0].startswith("-"):
            continue
        is_flag = "action" in keywords and ast.unparse(keywords["action"]) == "check_env"
        description = ast.literal_eval(keywords["help"]).replace("%", "%%")
        if is_flag:
            parser.add_argument(*names, action="store_true", help=description)
        else:
            kind = ranks if "--nproc-per-node" in names else str
            parser.add_argument(*names, type=kind, metavar="...", help=description)
    parser.add_argument("script", help="the training script")
    parser.add_argument("script_arguments", nargs=argparse.REMAINDER, metavar="...")


def main(arguments: argparse.Namespace) -> int:
    """Run the script. Return the exit code; if a rank of torchrun fails, end as torchrun does."""
    is_file = not (arguments.module or arguments.no_python)
    if is_file and not Path(arguments.script).is_file():
        print(f"tritonddp run: error: there is no file {arguments.script}", file=sys.stderr)
        return 2
    words = list(arguments.words)
    if not says_where_to_meet(arguments):
        words.insert(0, "--standalone")
        if arguments.nproc_per_node is None and "PET_NPROC_PER_NODE" not in os.environ:
            words.insert(0, f"--nproc-per-node={RANKS}")
    import torch.distributed.run
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, record

    with tempfile.TemporaryDirectory(prefix="tritonddp-run-") as folder:
        os.environ.update(environment(RUN, folder=folder))
        spawns = Path(folder) / SPAWNS
        code = 1
        try:
            try:
                record(torch.distributed.run.run)(torch.distributed.run.parse_args(words))
                code = 0
            except ChildFailedError:
                if not spawns.exists():  # or code after its ranks has failed
                    raise
            if spawns.exists():
                code = _run_as_it_is(arguments)
        finally:
            report = summary(wrapped_models(Path(folder)), code != 0, errors(Path(folder)))
            print(f"tritonddp run: {report}", file=sys.stderr)
    return code


def _run_as_it_is(arguments: argparse.Namespace) -> int:
    """Run a script that starts its own ranks. Return its exit code."""
    print(
        "tritonddp run: the script starts its own ranks, so it is run with python instead of "
        "torchrun",
        file=sys.stderr,
        flush=True,
    )
    module = ["-m"] if arguments.module else []
    command = [sys.executable, *module, arguments.script, *arguments.script_arguments]
    return subprocess.run(command, check=False).returncode


def says_where_to_meet(arguments: argparse.Namespace) -> bool:
    """Return whether torchrun's options or their variables define a rendezvous."""
    return any(
        f"PET_{name.upper()}" in os.environ or getattr(arguments, name) for name in _RENDEZVOUS
    )


def summary(counts: list[int], has_failed: bool = False, errors: Sequence[str] = ()) -> str:
    """Return a line about the models that each process has wrapped, and the script's errors."""
    if not any(counts):
        if errors:
            return f"the script failed before it wrapped a model: {errors[0]}"
        if has_failed:
            return "the script failed or was stopped before it wrapped a model; see its error above"
        return (
            "WARNING: tritonddp wrapped no model. Does the script wrap a model with torch's "
            "DistributedDataParallel? (Python started with -I, -E or -S keeps torch's class.)"
        )
    numbers = ", ".join(
        f"{count} {'model' if count == 1 else 'models'} in "
        f"{'1 process' if often == 1 else f'each of {often} processes'}"
        for count, often in sorted(Counter(counts).items())
    )
    return f"tritonddp wrapped {numbers}"

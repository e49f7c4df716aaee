"""The command ``tritonddp``: its subcommands and their exit codes.

A subcommand is a module of this room with ``add_arguments(parser)`` and ``main(arguments)``, which
returns the exit code. Only the module of the requested subcommand is imported, and torch only after
the command line has been parsed.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import warnings
from collections.abc import Sequence

from tritonddp import __version__

COMMANDS = {
    "run": "run a script under torchrun with tritonddp's class in place of torch's",
    "compare": "time a script with torch's class and with tritonddp's, and compare the gradients",
    "doctor": "show this machine and the communication rates of its ranks, and recommend options",
}
EXIT_CODES = """\
exit codes:
  0  success (run: the script's exit code)
  1  problem found: gradients or parameters differ, only tritonddp fails, or tritonddp is slower
  2  the command line is invalid; the message gives the reason
  3  the script failed, wrapped no model or ran too few steps; the message gives the reason
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line, by default the one of this process. Return the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words:
        _overview().print_help(sys.stderr)
        return 2
    if words[0] not in COMMANDS:
        name = _overview().parse_args(words).command  # exits here: help, version, or an error
        raise AssertionError(f"no command {name}")
    module = importlib.import_module(f"tritonddp.cli.{words[0]}")
    parser = argparse.ArgumentParser(
        prog=f"tritonddp {words[0]}",
        usage="%(prog)s [OPTION ...]" + " SCRIPT ..." * (words[0] != "doctor"),
        description=module.__doc__,
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    module.add_arguments(parser)
    arguments = parser.parse_args(words[1:], argparse.Namespace(words=words[1:]))
    # torch warns each time it is imported, in each rank too.
    warnings.filterwarnings("ignore", "Failed to initialize NumPy")
    os.environ.setdefault("PYTHONWARNINGS", "ignore:Failed to initialize NumPy")
    return module.main(arguments)


def _overview() -> argparse.ArgumentParser:
    """Return the parser of the words before a subcommand."""
    commands = "\n".join(f"  {name:<9}{text}" for name, text in COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="tritonddp",
        usage="tritonddp [-h] [--version] COMMAND ...",
        description=f"commands (see tritonddp COMMAND --help):\n{commands}",
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"tritonddp {__version__}")
    parser.add_argument("command", choices=COMMANDS, help=argparse.SUPPRESS, metavar="COMMAND")
    return parser

"""``tritonddp run``: the script gets tritonddp's class in place of torch's, and no other change."""

import argparse
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import launched
import pytest
import torch.distributed.run
from launched import ROOT

from tritonddp.cli import run
from tritonddp.cli.injection import FOLDER, RUN, environment, wrapped_models
from tritonddp.cli.main import main

SCRIPT = """
import sys
import sitecustomize
print(sitecustomize.hidden, [path for path in sys.path if path.endswith("injected")])
print(__name__, sys.argv[1:], [name for name in sys.modules if name.startswith("tritonddp")])
import torch
print(torch.__spec__.loader, torch.__loader__)
from torch.nn.parallel import DistributedDataParallel

def work(rank, file):
    torch.distributed.init_process_group("gloo", f"file://{file}", rank=rank, world_size=1)
    model = DistributedDataParallel(torch.nn.Linear(1, 1))
    print("wrapped by", type(model).__module__, __name__, sys.argv[2:], flush=True)

if __name__ == "__main__":
    torch.multiprocessing.spawn(work, sys.argv[1:2])
"""


@pytest.mark.long
def test_spawned_processes_and_hidden_modules(tmp_path: Path) -> None:
    script, counts, hidden = (tmp_path / name for name in ("train.py", "counts", "hidden"))
    script.write_text(SCRIPT)
    counts.mkdir()
    hidden.mkdir()
    (hidden / "sitecustomize.py").write_text("hidden = 'the hidden one has run'")
    variables = environment(RUN, folder=str(counts))
    variables["PYTHONPATH"] += f"{os.pathsep}{hidden}{os.pathsep}{ROOT}"
    store = str(tmp_path / "store")
    done = launched.run(script, store, "--lr", "0.1", nproc=None, env=variables)
    assert done.returncode == 0, done.stderr
    plain, main_line, loaders, *rest = done.stdout.splitlines()
    assert plain == "the hidden one has run []"
    assert main_line == f"__main__ ['{store}', '--lr', '0.1'] []"
    assert "_frozen_importlib_external.SourceFileLoader" in loaders
    assert "wrapped by tritonddp.wrapper __mp_main__ ['--lr', '0.1']" in rest
    assert wrapped_models(counts) == [1]


def python(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a Python process below ``tritonddp run``."""
    env = {**environment(RUN, folder="/nowhere"), **variables}
    return launched.run(*words, nproc=None, env=env)


def test_a_process_without_torch_imports_nothing_more() -> None:
    listed = "import sys, json; print(json.dumps(sorted(set(sys.modules))))"
    plain, injected = python("-c", listed, PYTHONPATH=""), python("-c", listed)
    more = set(json.loads(injected.stdout)) - set(json.loads(plain.stdout))
    assert "sitecustomize" in more
    assert not [name for name in more if name.startswith(("torch", "tritonddp"))]


def test_a_class_that_cannot_be_replaced_is_named(tmp_path: Path) -> None:
    """A process of another environment keeps torch's class; an error here ends the import."""
    (tmp_path / "torch.py").touch()
    (tmp_path / "tritonddp").mkdir()
    (tmp_path / "tritonddp" / "__init__.py").write_text("raise ImportError('no triton here')")
    script = tmp_path / "script.py"
    script.write_text("import torch; print('imported')")
    session = environment(RUN, folder="/nowhere")["TRITONDDP_SESSION"]
    elsewhere = python(str(script), TRITONDDP_SESSION=session.replace(sys.prefix, "/another"))
    assert elsewhere.stdout == "imported\n"
    assert "does not belong to the environment /another" in elsewhere.stderr
    broken = python(str(script))
    assert broken.returncode == 1
    assert "could not replace torch's" in broken.stderr
    assert "no triton here" in broken.stderr


@pytest.mark.parametrize(
    ("words", "nnodes", "expected"),
    [
        ("train.py --standalone-looking -m", "", (True, "2")),
        ("--nproc-per-node 3 train.py", "", (True, "3")),
        ("--nnodes 2 --rdzv-endpoint host:1 train.py", "", (False, "1")),
        ("train.py", "2", (False, "1")),
    ],
)
def test_torchrun_gets_the_words_and_its_variables(
    words, nnodes, expected, monkeypatch, capsys, tmp_path
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    calls: list[Any] = []
    monkeypatch.setattr(torch.distributed.run, "run", calls.append)
    for name in ("PYTHONPATH", "TRITONDDP_SESSION"):
        monkeypatch.setenv(name, "")  # restored at the end
    if nnodes:
        monkeypatch.setenv("PET_NNODES", nnodes)
    assert main(["run", *words.split()]) == 0
    (arguments,) = calls
    assert (bool(arguments.standalone), arguments.nproc_per_node) == expected
    assert arguments.training_script == "train.py"
    assert arguments.training_script_args == words.partition("train.py")[2].split()
    assert os.environ["PYTHONPATH"].split(os.pathsep)[0] == str(FOLDER)
    assert "WARNING: tritonddp wrapped no model" in capsys.readouterr().err


def test_all_options_of_torchrun_are_known() -> None:
    """Also which options take a value: this decides which word is the script."""
    parser = argparse.ArgumentParser(add_help=False)
    run.add_arguments(parser)
    found, expected = (
        {(each.dest, each.nargs) for each in actions if each.option_strings}
        for actions in (parser._actions, torch.distributed.run.get_args_parser()._actions)
    )
    assert found == {each for each in expected if each[0] != "help"}


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("", "commands (see tritonddp COMMAND --help):"),
        ("nosuch", "invalid choice: 'nosuch'"),
        ("compare nosuch.py", "compare: error: there is no file nosuch.py"),
        ("run nosuch.py", "tritonddp run: error: there is no file nosuch.py"),
        ("run --nproc-per-node 0 train.py", "0 is not a number of ranks"),
        ("compare --html /no/a.html train.py", "compare: error: there is no folder /no"),
    ],
)
def test_a_wrong_argument_is_named(words, text, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    with pytest.raises(SystemExit) as caught:
        sys.exit(main(words.split()))
    assert caught.value.code == 2
    assert text in capsys.readouterr().err


def test_the_summary_counts_models_by_process() -> None:
    assert run.summary([1, 1]) == "tritonddp wrapped 1 model in each of 2 processes"
    assert run.summary([1]) == "tritonddp wrapped 1 model in 1 process"
    assert run.summary([2, 1]) == "tritonddp wrapped 1 model in 1 process, 2 models in 1 process"


def test_a_script_that_fails_before_it_wraps_shows_its_own_error(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import torch\nraise ValueError('no data here')")
    words = ("-m", "tritonddp", "run", script)
    done = launched.run(*words, nproc=None, env={"PYTHONPATH": str(ROOT)})
    assert done.returncode == 1
    # Both ranks fail; torchrun names the rank that ended first.
    error = r"^tritonddp run:.* before it wrapped a model: rank [01]: ValueError: no data here"
    assert len(re.findall(error, done.stderr, re.MULTILINE)) == 1

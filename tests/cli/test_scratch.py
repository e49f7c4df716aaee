"""``tritonddp compare`` redirects the files that a script saves: the user's files stay the same."""

from pathlib import Path

import launched
import pytest
import torch
from launched import ROOT

ENV = {"PYTHONPATH": str(ROOT)}

PROGRAM = """
import glob, os, shutil, sys
from pathlib import Path
import torch
import torch.distributed.checkpoint as dcp
from tritonddp.cli.comparison.scratch import Scratch

Scratch(sys.argv[1], sys.argv[1] + ".folders").install()
assert torch.load("own.pt") == {"step": 7}  # the user's file
torch.save({"step": 1}, "own.pt")
assert torch.load(f="own.pt") == {"step": 1}
torch.save(obj={"step": 2}, f=Path("new.tmp"))
os.replace("new.tmp", "new.pt")
assert not os.path.exists("new.tmp")
shutil.copyfile("new.pt", "best.pt")
shutil.copy2("new.pt", "folder/best.pt")
with open("best.pt", "rb") as file:
    assert torch.load(file) == {"step": 2}
assert torch.load("folder/best.pt") == {"step": 2}
assert sorted(glob.glob("*.pt")) == ["best.pt", "new.pt", "own.pt"]
assert sorted(os.listdir()) == ["best.pt", "folder", "new.pt", "own.pt"]
assert [path.name for path in Path("folder").iterdir()] == ["best.pt"]
assert len(list(os.walk("."))) == 2
for target in ("best.pt", os.path.abspath("new.pt")):
    Path("last.pt").unlink(missing_ok=True)
    Path("last.pt").symlink_to(target)
    assert os.path.islink("last.pt")
    assert torch.load("last.pt") == {"step": 2}
os.link(src="new.pt", dst="folder/linked.pt")
assert os.access("folder/linked.pt", os.R_OK)
os.remove("best.pt")
assert not os.path.exists("best.pt")
os.makedirs("out/a", exist_ok=True)
import fsspec
with fsspec.open("out/a/fs.pt", "wb") as file:
    torch.save({"step": 3}, file)
with fsspec.open("out/a/fs.pt") as file:
    assert torch.load(file) == {"step": 3}
Path("log.txt").write_text("a file that the script opens itself")
state = {"weight": torch.arange(4.0)}
dcp.save(state, checkpoint_id="runs/step-1", no_dist=True)
loaded = {"weight": torch.zeros(4)}
dcp.load(loaded, checkpoint_id="runs/step-1", no_dist=True)
assert torch.equal(loaded["weight"], state["weight"])
assert os.listdir("runs") == ["step-1"]
shutil.rmtree("runs/step-1")
from safetensors import safe_open
from safetensors.torch import load_file, save_file
save_file(state, "model.safetensors")
assert torch.equal(load_file("model.safetensors")["weight"], state["weight"])
with safe_open("model.safetensors", framework="pt") as file:
    assert list(file.keys()) == ["weight"]
print("saved and loaded")
"""


@pytest.mark.long
def test_files_of_the_user_stay_as_they_are(tmp_path: Path) -> None:
    pytest.importorskip("safetensors", reason="needs the extra [integrations]")
    home, scratch, script = (tmp_path / name for name in ("home", "scratch", "script.py"))
    (home / "folder").mkdir(parents=True)
    torch.save({"step": 7}, home / "own.pt")
    before = (home / "own.pt").read_bytes()
    script.write_text(PROGRAM)
    done = launched.run(script, scratch, nproc=None, env=ENV, cwd=home)
    assert done.stdout == "saved and loaded\n", done.stderr
    made = Path(f"{scratch}.folders").read_text().splitlines()
    folders = [path for path in made if not path.startswith(str(scratch))]
    assert folders == [str(home / "out"), str(home / "out" / "a")]
    for path in reversed(folders):
        Path(path).rmdir()  # it is empty
    assert sorted(path.name for path in home.rglob("*")) == ["folder", "log.txt", "own.pt"]
    assert (home / "own.pt").read_bytes() == before


@pytest.mark.long
def test_no_launch_resumes_from_the_file_of_another(tmp_path: Path) -> None:
    script = ROOT / "tests" / "cli" / "planted.py"
    words = ("-m", "tritonddp", "compare", "--seconds", "0", script, "10", "resumes")
    done = launched.run(*words, nproc=None, env=ENV, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "steps 6 to 10 of 1 whole launch of each" in done.stdout
    assert not list(tmp_path.iterdir())

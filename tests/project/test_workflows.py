"""The workflows of GitHub: what they run is in the Makefile, and nothing in them moves by itself.

``make lint`` checks them by actionlint.
"""

import re

import pytest
from launched import ROOT

yaml = pytest.importorskip("yaml", reason="needs PyYAML, which comes with the extra [docs]")

FOLDER = ROOT / ".github" / "workflows"
WORKFLOWS = {path.name: yaml.safe_load(path.read_text()) for path in sorted(FOLDER.glob("*.yml"))}
JOBS = {
    f"{name}: {job}": content
    for name, workflow in WORKFLOWS.items()
    for job, content in workflow["jobs"].items()
}
STEPS = [(job, step) for job, content in JOBS.items() for step in content.get("steps", ())]
TARGETS = set(re.findall(r"^([\w-]+):(?!=)", (ROOT / "Makefile").read_text(), re.MULTILINE))
MATRIX = WORKFLOWS["ci.yml"]["jobs"]["test"]["strategy"]["matrix"]


def combinations() -> set[tuple[str, str]]:
    """Of Python and torch, as GitHub makes them of the matrix."""
    excluded = [(each["python"], each["torch"]) for each in MATRIX["exclude"]]
    every = {(python, torch) for python in MATRIX["python"] for torch in MATRIX["torch"]}
    assert set(excluded) <= every, "it excludes what is not there"
    return every - set(excluded) | {(each["python"], each["torch"]) for each in MATRIX["include"]}


def minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def test_each_command_is_a_target_of_the_makefile() -> None:
    commands = [(job, step["run"]) for job, step in STEPS if "run" in step]
    assert len(commands) >= 5
    for job, command in commands:
        expression = re.search(r"\$\{\{ matrix\.target \|\| '([\w-]+)' \}\}", command)
        if expression:
            targets = {expression[1], *(each.get("target", "test") for each in MATRIX["include"])}
            command = command.replace(expression[0], " ".join(sorted(targets)))
        make, *targets = command.split()
        assert make == "make", f"{job} runs {command!r}"
        assert set(targets) <= TARGETS, f"{job}: the Makefile has not all of {targets}"


def test_actions_are_pinned_by_commit_and_say_their_version() -> None:
    for path in FOLDER.glob("*.yml"):
        for line in path.read_text().splitlines():
            if "uses:" in line and "uses: ./" not in line:
                assert re.search(r"uses: [\w.-]+/[\w./-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+$", line), (
                    line
                )


def test_a_workflow_may_read_the_repository_and_a_job_what_it_needs() -> None:
    for workflow in WORKFLOWS.values():
        assert workflow["permissions"] == {"contents": "read"}
    more = {job: each["permissions"] for job, each in JOBS.items() if "permissions" in each}
    assert more == {
        "release.yml: publish": {"id-token": "write"},
        "site.yml: deploy": {"pages": "write", "id-token": "write"},
    }


def test_a_release_is_built_from_a_tag_and_published_after_all_tests() -> None:
    release = WORKFLOWS["release.yml"]
    assert release[True] == {"push": {"tags": ["v*"]}}  # YAML reads the key "on" as a boolean
    assert release["jobs"]["publish"]["needs"] == ["ci", "build"]
    assert release["jobs"]["publish"]["environment"]["name"] == "pypi"
    assert "secrets." not in (FOLDER / "release.yml").read_text()


def test_each_python_and_each_torch_that_is_supported_is_tested() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    pythons = set(re.findall(r'"Programming Language :: Python :: (3\.\d+)"', project))
    known = set(re.findall(r"^TRITON_FOR_(\d+\.\d+) :=", (ROOT / "Makefile").read_text(), re.M))
    (pinned,) = re.findall(r"^torch==(\S+)$", (ROOT / "constraints.txt").read_text(), re.M)
    tested = combinations()
    assert {python for python, _ in tested} == pythons
    assert {minor(torch or pinned) for _, torch in tested} == known

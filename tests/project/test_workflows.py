"""The workflows of GitHub: nothing in them moves by itself, and they may read, not write.

``make lint`` checks them by actionlint.
"""

import re

import pytest
from launched import ROOT

yaml = pytest.importorskip("yaml", reason="needs PyYAML, which comes with the extra [docs]")

FOLDER = ROOT / ".github" / "workflows"
WORKFLOWS = {path.name: yaml.safe_load(path.read_text()) for path in sorted(FOLDER.glob("*.yml"))}


def test_actions_are_pinned_by_commit_and_say_their_version() -> None:
    pinned = re.compile(r"uses: [\w.-]+/[\w./-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+$")
    for path in FOLDER.glob("*.yml"):
        for line in path.read_text().splitlines():
            assert "uses:" not in line or "uses: ./" in line or pinned.search(line), line


def test_a_workflow_may_read_the_repository_and_a_job_what_it_needs() -> None:
    jobs = {
        f"{name}: {job}": content.get("permissions")
        for name, workflow in WORKFLOWS.items()
        for job, content in workflow["jobs"].items()
    }
    assert all(each["permissions"] == {"contents": "read"} for each in WORKFLOWS.values())
    assert {job: more for job, more in jobs.items() if more} == {
        "release.yml: publish": {"id-token": "write"},
        "site.yml: deploy": {"pages": "write", "id-token": "write"},
    }
    release = WORKFLOWS["release.yml"]
    assert release["jobs"]["publish"]["needs"] == ["ci", "build"]
    assert "secrets." not in (FOLDER / "release.yml").read_text()

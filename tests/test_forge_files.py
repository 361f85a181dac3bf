"""What a forge and pre-commit read: the check, the hooks, the forms for issues, the changelog and the citation."""

import shlex
import subprocess
import sys
import tomllib

import pytest
import yaml
from pages import ROOT, headings, read

VERSION = tomllib.loads(read("pyproject.toml"))["project"]["version"]
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))


def load(name):
    return yaml.safe_load(read(name))


def test_the_workflow_runs_the_check_on_the_oldest_python():
    (job,) = load(".github/workflows/ci.yml")["jobs"].values()
    assert job["timeout-minutes"] == 90
    used = [step["uses"].split("@")[0] for step in job["steps"] if "uses" in step]
    assert used == ["actions/checkout", "actions/setup-python"]
    (python,) = [step["with"]["python-version"] for step in job["steps"] if "with" in step]
    assert f">={python}" == tomllib.loads(read("pyproject.toml"))["project"]["requires-python"]
    (command,) = [step["run"] for step in job["steps"] if "run" in step]
    start, script = shlex.split(command)
    assert (start, script) == ("bash", ".ci/run")
    assert (ROOT / script).is_file()


def test_the_hooks_are_the_linters_of_make_lint():
    (repository,) = load(".pre-commit-config.yaml")["repos"]
    assert repository["repo"] == "local"  # and no version of its own beside constraints.txt
    hooks = repository["hooks"]
    assert {(hook["language"], hook["pass_filenames"]) for hook in hooks} == {("system", False)}
    command = ["make", "--no-print-directory", "--dry-run", "--always-make", "lint", f"PYTHON={sys.executable}"]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    installed = next(number for number, line in enumerate(shown) if line.startswith("touch"))
    assert [hook["entry"] for hook in hooks] == shown[installed + 1 :]


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_a_form_for_issues_has_what_a_forge_asks_for(path):
    form = yaml.safe_load(path.read_text())
    if path.stem == "config":
        assert form == {"blank_issues_enabled": False}
        return
    assert {"name", "description", "body"} <= form.keys()
    fields = [entry for entry in form["body"] if entry["type"] != "markdown"]
    assert {entry["type"] for entry in fields} <= {"input", "textarea"}
    assert len({entry["id"] for entry in fields}) == len(fields)
    assert all(entry["attributes"]["label"] for entry in fields)


def test_a_bug_report_asks_for_version_configuration_and_statement():
    first, *fields = load(".github/ISSUE_TEMPLATE/bug_report.yml")["body"]
    required = {entry["id"] for entry in fields if entry.get("validations", {}).get("required")}
    assert {"version", "configuration", "statement"} <= required
    assert "`SECURITY.md`" in first["attributes"]["value"]
    assert (ROOT / "SECURITY.md").is_file()


def test_the_newest_entry_of_the_changelog_is_the_version():
    newest = headings(read("CHANGELOG.md"), 2)[0]
    assert newest.split(" - ")[0] == f"[{VERSION}]"


def test_the_citation_names_the_version_and_the_paper():
    citation = load("CITATION.cff")
    project = tomllib.loads(read("pyproject.toml"))["project"]
    assert citation["cff-version"] == "1.2.0"
    assert (citation["version"], citation["license"]) == (VERSION, project["license"])
    assert citation["abstract"] == project["description"]
    assert citation["authors"] == [{"name": "The dp_lightning authors"}]
    (paper,) = citation["references"]
    assert [author["family-names"] for author in paper["authors"]] == ["Shanmugam", "Barnes", "Taylor"]
    assert paper["year"] == 2026

"""The faults of ``tools/mutants.py`` fit the code, and it tells which of them the tests notice."""

import re
import shutil
import subprocess
import sys

import pytest
import yaml
from pages import ROOT, read, table

sys.path.insert(0, str(ROOT / "tools"))
import mutants

FAULTS = mutants.read_faults()
PAGE = read("docs/contract.md")


def test_every_fault_fits_the_code_and_names_tests():
    for fault in FAULTS:
        fault.applied(ROOT)  # which says what to adapt
        assert fault.file.startswith("dp_lightning/")
        for test in fault.tests:
            path, name = re.fullmatch(r"(tests/[^:]*\.py)::(\w+)(?:\[.*\])?", test).groups()
            assert f"\ndef {name}(" in read(path), f"{fault.name}: there is no {test}"
        assert fault.tests
    names = [fault.name for fault in FAULTS]
    assert len(names) == len(set(names))


@pytest.mark.docs
def test_every_promise_has_faults_and_the_page_counts_them():
    promises = {row[0].text for row in table(PAGE, "promise").rows}
    assert {fault.promise for fault in FAULTS} == promises
    assert f"has {len(FAULTS)} faults" in PAGE


SMALL = "def noise(sigma):\n    return 2 * sigma\n"
TESTS = """
from small import noise


def test_noise():
    assert noise(3) == 6


def test_a_number():
    assert noise(3) > 0


def test_nothing():
    assert noise(0) == 1
"""
FOUND = {
    "noticed": ("return 2 * sigma", "return sigma", "test_noise", "killed"),
    "not noticed": ("return 2 * sigma", "return sigma", "test_a_number", "survived"),
    "written wrongly": ("return 2 * sigma", "return 2 * stigma", "test_noise", "broken"),
    "always noticed": ("return 2 * sigma", "return sigma", "test_nothing", "broken"),
    "no longer there": ("return 3 * sigma", "return sigma", "test_noise", "broken"),
}


def test_it_tells_what_is_noticed_from_what_is_not(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # each fork would import them
    for name in mutants._COPIED:
        (tmp_path / name).touch() if "." in name else (tmp_path / name).mkdir()
    (tmp_path / "tests" / "small.py").write_text(SMALL)
    (tmp_path / "tests" / "test_small.py").write_text(TESTS)
    (tmp_path / "tools").mkdir()
    shutil.copy(mutants.__file__, tmp_path / "tools")
    entry = {"promise": "some", "file": "tests/small.py"}
    entries = [
        {**entry, "name": name, "old": old, "new": new, "tests": [f"tests/test_small.py::{test}"]}
        for name, (old, new, test, _) in FOUND.items()
    ]
    (tmp_path / "tools" / "faults.yaml").write_text(yaml.safe_dump(entries))
    code = "import sys; sys.path.insert(0, 'tools'); import mutants; mutants._PRELOADED = ['pytest']; mutants.main()"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    found = {name: outcome for outcome, name in re.findall(r"^(killed|survived|broken) +(.+)$", done.stdout, re.M)}
    assert found == {name: outcome for name, (*_, outcome) in FOUND.items()}
    assert done.returncode == 1
    assert "5 faults: 1 killed, 1 survived, 3 broken." in done.stdout
    assert (tmp_path / "tests" / "small.py").read_text() == SMALL

"""The stand-in for ``python`` does with a script what Python does, in a process of its own."""

import os
import signal
import subprocess
import sys

import pytest

TELLS = """
import os, signal, sys, time
print(__name__, sys.argv[1:], os.getcwd(), os.environ.get("GIVEN"), "lightning" in sys.modules, os.getpid(), flush=True)
time.sleep(float(sys.argv[1]))
sys.exit(int(sys.argv[2]))
"""


@pytest.fixture
def tells(tmp_path, warm_python):
    (tmp_path / "tells.py").write_text(TELLS)

    def start(*arguments, **settings):
        command = [warm_python, "tells.py", *map(str, arguments)]
        return subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True, **settings)

    return start


def test_arguments_folder_environment_and_status_are_those_of_the_call(tmp_path, tells):
    process = tells(0, 3, env={**os.environ, "GIVEN": "5"})
    said = process.communicate()[0].split(maxsplit=1)
    assert said[0] == "__main__"
    assert said[1].startswith(f"['0', '3'] {tmp_path} 5 True ")
    assert process.returncode == 3


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_signal_reaches_the_script(tells, number):
    process = tells(1000, 0)
    process.stdout.readline()
    process.send_signal(number)
    assert process.stdout.read() == ""  # is open until the script has ended, and not only its stand-in
    assert process.wait() == -number


def test_a_module_runs_and_what_fails_says_so(tmp_path, warm_python):
    (tmp_path / "fails.py").write_text("raise ValueError('this')")
    shown = subprocess.run([warm_python, "-m", "fails"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert shown.returncode == 1
    assert shown.stderr.endswith("ValueError: this\n")


def test_any_other_call_is_that_of_the_real_python(warm_python):
    code = "import sys; print(sys.executable)"
    shown = subprocess.run([warm_python, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == sys.executable

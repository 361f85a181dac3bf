"""What the page about planning shows: its commands run, and print what stands below them."""

import shlex

import pytest
from pages import blocks, lines, read

from dp_lightning.cli import main
from dp_lightning.commands import plan

pytestmark = pytest.mark.docs

PAGE = read("docs/planning.md")
DOCTOR, SHOWN, MEASURED = lines("bash", PAGE)


@pytest.fixture(autouse=True)
def _root(monkeypatch, request):
    monkeypatch.chdir(request.config.rootpath)


def test_the_plan_shown_is_what_the_command_prints(capsys):
    (shown,) = blocks("text", PAGE)
    main(shlex.split(SHOWN)[1:])
    assert capsys.readouterr().out == shown


def test_the_other_commands_take_their_options():
    options, of_fit = plan._parser().parse_known_args(shlex.split(MEASURED)[2:])
    assert (options.epsilon, options.epochs, options.measure) == ([1.0, 4.0], [50, 100], True)
    assert of_fit == shlex.split(SHOWN)[2:4]
    assert DOCTOR == "dpl doctor"

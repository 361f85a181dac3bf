"""`dpl account RUN ...`: the steps of several runs are composed together, and none counts twice."""

import json
import shutil

import pytest

from dp_lightning.cli import main
from dp_lightning.commands.total import total_epsilon
from dp_lightning.errors import ConfigurationError, DataError
from dp_lightning.privacy.accounting import Ledger, compose
from dp_lightning.privacy.journal import Journal
from dp_lightning.privacy.plan import PrivacyPlan
from dp_lightning.privacy.statement import PrivacyStatement

RATE = 0.01


def take(journal, folder, steps, sigma=1.0, bands=1):
    journal.add_folder(folder)
    for step in range(steps):
        journal.record(noise_multiplier=sigma, sample_rate=RATE, place=step % bands)


def write_statement(journal, folder, delta=1e-5, earlier=None, **facts):
    plan = PrivacyPlan(num_train=1000, expected_batch_size=10, num_steps=99, noise_multiplier=1.0, delta=delta)
    ledger = Ledger()
    ledger.load_state_dict({**journal.ledger.state_dict(), "earlier": earlier or {}})
    given = {"clipping": {}, "sensitivity": 1.0, "sampler": "Poisson", "run": journal.run, **facts}
    PrivacyStatement(plan=plan, ledger=ledger, journal_head=journal.head, **given).write(folder)


@pytest.fixture
def run(tmp_path):
    """Makes the folder of a run of this name, with a journal and a statement."""

    def make(name, steps=5, sigma=1.0, bands=1, **facts):
        folder, journal = tmp_path / name, Journal(name)
        folder.mkdir()
        take(journal, folder, steps, sigma, bands)
        write_statement(journal, folder, **facts)
        return folder

    return make


@pytest.mark.parametrize(("sigma", "bands"), [(1.0, 1), (2.0, 1), (2.0, 4)])
def test_all_steps_of_two_runs_are_composed_at_the_smallest_delta(run, sigma, bands):
    total = total_epsilon([run("a", 30, delta=1e-4), run("b", 40, sigma, bands, delta=1e-6)])
    rounds = [(1.0, RATE, 30), (sigma, RATE, 40 // bands)]
    assert total.epsilon == total.epsilons()["prv"] == pytest.approx(compose(rounds, delta=1e-6), rel=1e-9)
    assert max(map(total.epsilon_of, "ab")) < total.epsilon < sum(map(total.epsilon_of, "ab"))
    assert (total.delta, total.num_steps, total.unit) == (1e-6, 70, "one training example")
    assert f"2 runs on the same data together: ({total.epsilon:.4g}, 1e-06)-DP by PRV" in total.sentence


def test_a_finished_run_has_spent_what_its_statement_says(finished_run, tmp_path, capsys):
    spent = json.loads((finished_run / "privacy_statement.json").read_text())["epsilon"]
    copy = shutil.copytree(finished_run, tmp_path / "copy")
    main(["account", str(finished_run), str(copy), "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["epsilon"] == pytest.approx(spent)
    assert (found["num_steps"], found["delta"], found["accountant"]) == (12, 1e-4, "rdp")
    main(["account", str(copy), "--delta", "1e-5"])
    shown = capsys.readouterr().out
    assert ", 1e-05)-DP by RDP, add or remove one training example, 12 steps." in shown
    assert len([line for line in shown.splitlines() if line.split()[1:2] == ["12"]]) == 2


def test_a_run_that_resumed_elsewhere_and_one_that_forked_count_each_step_once(run, tmp_path):
    first = run("a", 5)
    for number, more in enumerate((3, 4)):
        folder = tmp_path / f"fork{number}"
        shutil.copytree(first, folder)
        take(Journal("a"), folder, more)
    total = total_epsilon([first, tmp_path / "fork0", tmp_path / "fork1"])
    assert total.num_steps == 5 + 3 + 4
    assert total_epsilon([tmp_path]).num_steps == 12  # all that is below a folder


def test_steps_before_a_start_from_the_weights_of_another_run_count_once(run):
    taken = {"a": [[1.0, RATE, 5]], "elsewhere": [[3.0, RATE, 7]]}
    later, other = run("b", 20, earlier=taken), run("c", 1, earlier={"a": [[1.0, RATE, 3]]})
    alone = total_epsilon([later, other])
    assert alone.num_steps == 20 + 5 + 7 + 1
    assert total_epsilon([later, other, run("a", 6)]).num_steps == alone.num_steps + 1


def test_a_run_that_is_still_going_counts_by_its_journal(run, tmp_path):
    folder = tmp_path / "going"
    folder.mkdir()
    take(Journal("g"), folder, 4)
    with pytest.raises(ConfigurationError, match="give --delta"):
        total_epsilon([folder])
    assert total_epsilon([folder], 1e-5).epsilon == pytest.approx(compose([(1.0, RATE, 4)], delta=1e-5))
    (note,) = total_epsilon([folder, run("a")]).notes
    assert note.startswith("Run g has no statement")


def test_what_may_not_be_released_is_named(run, capsys):
    main(["account", str(run("a", faults=("weights are not finite",)))])
    assert "Run a is not for release: weights are not finite." in capsys.readouterr().out


def test_what_cannot_be_added_up_is_refused(run, tmp_path):
    folder = run("a")
    with pytest.raises(ConfigurationError, match="different units"):
        total_epsilon([folder, run("b", unit_of_privacy="one person")])
    (folder / "privacy_journal_a.jsonl").rename(tmp_path / "away")
    with pytest.raises(DataError, match="has no journal"):
        total_epsilon([folder])
    shutil.copy(tmp_path / "b" / "privacy_journal_b.jsonl", folder)
    with pytest.raises(DataError, match="is missing or lacks steps"):
        total_epsilon([folder])
    edited = (tmp_path / "away").read_text().replace('"noise_multiplier": 1.0', '"noise_multiplier": 9', 1)
    (folder / "privacy_journal_a.jsonl").write_text(edited)
    with pytest.raises(DataError, match="not as it was written"):
        total_epsilon([folder])

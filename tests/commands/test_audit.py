"""``dpl audit`` on the digits network: honest ones pass, and planted faults are found."""

import json
from pathlib import Path

import pytest
import torch
from PIL import Image

from dp_lightning.cli import main
from dp_lightning.commands.audit_runs import AuditRuns, place_canaries
from dp_lightning.commands.fit_settings import prepare
from dp_lightning.privacy import step
from dp_lightning.privacy.bands import coefficients
from dp_lightning.privacy.noise import GaussianNoise

QUICK = ["--config", "digits", "--trainer.accelerator", "cpu", "--privacy.target_epsilon", "null"]
QUICK += ["--privacy.noise_multiplier", "1.0", "--canaries", "100"]
LAYERS = ["--config", "disk_sgd", "--privacy.clipping", "per_layer", "--privacy.max_grad_norm", "0.3"]


@pytest.fixture
def faults(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    from audit import FAULTS

    return FAULTS


def audit(out, *options):
    with pytest.raises(SystemExit) as ended:
        main(["audit", *QUICK, "--out", str(out), *options])
    numbers = json.loads((out / "numbers.json").read_text())
    assert ended.value.code == (0 if numbers["holds"] else 1)
    return numbers, [check["subject"] for check in numbers["checks"] if not check["holds"]]


def test_an_honest_configuration_passes(tmp_path, capsys):
    frozen = ["--privacy.frozen_until", '{"model.features.*": 0.3}']
    numbers, failed = audit(tmp_path, *LAYERS, *frozen, "--privacy.augmult", "2")
    assert failed == []
    assert numbers["epsilon_shown"] < numbers["epsilon_claimed"]
    # The canaries reach the bound: without that they would show nothing.
    assert numbers["contributions"]["Largest contribution of a canary"] == pytest.approx(1.0, abs=1e-5)
    assert numbers["contributions"]["Largest contribution by the module's own loss"] == pytest.approx(1.0, abs=1e-5)
    assert "All 9 checks hold." in capsys.readouterr().out


def test_a_planted_fault_is_found(faults, tmp_path):
    plant, more = faults["2 C"]
    with plant():
        _, failed = audit(tmp_path, *more, "--canaries", "500")
    assert "Canaries, all together" in failed


def test_the_claim_about_persons_is_that_of_a_run_that_counts_persons(tmp_path):
    for number in range(24):
        folder = tmp_path / "scans" / "train" / "ab"[number % 2] / f"p{number // 4}"
        folder.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8)).save(folder / f"{number}.png")
    settings = ["--data", "ImageFolder", "--data.root", str(tmp_path / "scans"), "--data.group_folders", "true"]
    settings += ["--data.image_size", "8", "--data.val_fraction", "0.2", "--privacy.delta", "0.01"]
    group = ["--privacy.unit_of_privacy", "group", "--privacy.images_per_group", "2"]
    runs = AuditRuns(["--config", "digits", *settings, *group, "--privacy.expected_batch_size", "2"])
    assert runs.plan.num_train == prepare(runs.settings).datamodule.num_train_groups < 12
    assert runs.plan.sample_rate == 2 / runs.plan.num_train


def test_a_run_without_noise_is_refused(tmp_path, capsys):
    without = ["--privacy.noise_multiplier", "0", "--privacy.not_private", "true"]
    with pytest.raises(SystemExit, match="2"):
        main(["audit", *QUICK, *without, "--out", str(tmp_path)])
    assert "claims no privacy" in capsys.readouterr().err


@pytest.mark.parametrize("groups", [[["a", "b", "c"]], [["a", "b"], ["c"]]], ids=["flat", "per layer"])
def test_canaries_have_coordinates_of_their_own_in_every_group(groups):
    sizes = {"a": 1000, "b": 1, "c": 60}
    included, excluded = place_canaries(sizes, groups, 50, torch.Generator().manual_seed(0))
    assert len(included) == 50
    names = list(sizes)
    for group in groups:
        columns = [names.index(name) for name in group]
        assert (included.chosen[:, columns].sum(1) <= 1).all()
    assert included.chosen.any(1).all()
    assert included.chosen.any(0).all()  # each parameter has one
    for k in range(3):
        mine, others = (which.places[:, k][which.chosen[:, k]].tolist() for which in (included, excluded))
        assert len({*mine, *others}) == len(mine) + len(others)


@pytest.mark.parametrize("fault", ["none", "independent", "longer", "forgets"])
def test_noise_that_is_not_correlated_as_it_is_claimed_is_found(tmp_path, monkeypatch, fault):
    unit = GaussianNoise._unit
    if fault == "independent":
        monkeypatch.setattr(GaussianNoise, "_unit", lambda self, like, n: self._normals(like.shape, like.device, n))
    elif fault == "longer":
        monkeypatch.setattr(step, "coefficients", lambda *given: tuple(1.2 * c for c in coefficients(*given)))
    elif fault == "forgets":
        fresh = lambda self: GaussianNoise(coefficients=self.coefficients)  # noqa: E731
        monkeypatch.setattr(GaussianNoise, "_unit", lambda self, like, n: unit(fresh(self), like, n))
    _, failed = audit(tmp_path, "--privacy.bands", "4", "--privacy.expected_batch_size", "100")
    assert bool(failed) == (fault != "none")
    assert ("Norm of the columns of correlated noise" in failed) == (fault == "longer")

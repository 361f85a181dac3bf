"""``dpl analyze`` on a small network: its gradients against ``clipped_gradient_sum``, its numbers against formulas."""

import json

import pytest
import torch
from clipped_sums import clipped_gradient_sum
from torch.nn import functional as F
from torch.utils.data import default_collate

from dp_lightning.analysis import participation_ratio
from dp_lightning.cli import main
from dp_lightning.commands.analysis_run import AnalysisRun, Measured
from dp_lightning.commands.analyze import KINDS
from dp_lightning.experiments.document import Document
from dp_lightning.privacy import ClipPlan, GaussianNoise
from dp_lightning.privacy.plan import RunShape

QUICK = ["--config", "digits", "--privacy.accountant", "rdp", "--trainer.accelerator", "cpu"]
N, LAYER = 1437, "model.features.3.weight"
WITHOUT_NOISE = ["--privacy.target_epsilon", "null", "--privacy.noise_multiplier", "0", "--privacy.not_private", "true"]


def analyze(kind, out, *options):
    main(["analyze", kind, *QUICK, "--out", str(out), *map(str, options)])
    folder = out / "unprotected" / kind
    return folder, json.loads((folder / "numbers.json").read_text())


@pytest.fixture
def run():
    return AnalysisRun(QUICK, None)


def test_its_gradients_are_the_clipped_means_of_poisson_draws(run):
    before = {name: p.detach().clone() for name, p in run.module.named_parameters()}
    measured = run.measure(N)  # every example is drawn
    run.data.setup("fit")
    batch = default_collate([run.data.train_dataset[k] for k in range(N)])
    images, labels = run.data.on_after_batch_transfer(batch, 0)
    sums, norms = clipped_gradient_sum(
        run.module, F.cross_entropy, images, labels, clip_plan=ClipPlan.flat(max_grad_norm=1.0)
    )
    assert (norms > 1).any()
    means = {name: total / N for name, total in sums.items()}
    (norm,) = measured.norms
    assert norm == pytest.approx(float(torch.cat([mean.flatten() for mean in means.values()]).norm()), rel=1e-4)
    assert measured.num_parameters == sum(mean.numel() for mean in means.values())
    for name, matrix in measured.matrices.items():
        torch.testing.assert_close(matrix, means[name].flatten(1), rtol=1e-3, atol=1e-7)
    for name, parameter in run.module.named_parameters():
        assert torch.equal(parameter, before[name])
    # 8 draws of 128 estimate the mean over all examples.
    run.num_batches = 8
    draws = run.measure(128)
    assert len(draws.norms) == 8
    for name, matrix in draws.matrices.items():
        assert torch.cosine_similarity(matrix.flatten(), measured.matrices[name].flatten(), dim=0) > 0.8


def test_signal_and_noise_by_batch_size(tmp_path, capfd, run):
    folder, numbers = analyze("snr", tmp_path, "--batch-sizes", 128, 512, "--privacy.disk", "{gain: 0.5}")
    said = "".join(capfd.readouterr())
    assert said.index("UNPROTECTED: these numbers are computed from raw gradients") < said.index("| B | sigma |")
    assert "NOT PRIVATE" not in said  # of the run that takes the gradients
    assert numbers["unprotected"].startswith("UNPROTECTED")
    assert "UNPROTECTED: these numbers are computed from raw gradients" in (folder / "page.html").read_text()
    for fact, size in zip(numbers["by_batch_size"], (128, 512), strict=True):
        shape = RunShape(delta=1e-4, num_train=N, expected_batch_size=size, num_steps=53 * round(N / size))
        plan = shape.calibrate(3.0, accountant="rdp")
        count = sum(p.numel() for p in run.module.parameters())
        assert fact["noise_multiplier"] == pytest.approx(plan.noise_multiplier)
        assert fact["noise"] == pytest.approx(plan.noise_multiplier / size * count**0.5)
        assert fact["snr"] == pytest.approx(fact["signal"] / fact["noise"])
    assert {path.name for path in folder.iterdir()} == {"page.md", "page.html", "numbers.json"}


def test_noise_that_is_correlated_has_the_level_of_the_gradients_of_a_fit(tmp_path):
    rules = ["--privacy.bands", "2", "--trainer.max_steps", "6", "--privacy.adaptive_clipping", "{}"]
    main(["fit", *QUICK, *rules, "--trainer.default_root_dir", str(tmp_path)])
    (statement,) = tmp_path.rglob("privacy_statement.json")
    stated = json.loads(statement.read_text())
    noise = GaussianNoise(coefficients=stated["noise_coefficients"])
    drawn = torch.stack([noise.add_to(torch.zeros(100_000), 1.0, step=step) for step in range(6)])
    folder, numbers = analyze("snr", tmp_path, *rules)
    (fact,) = numbers["by_batch_size"]
    level = float(drawn.square().mean().sqrt()) * stated["noise_multiplier"] / 512
    assert level > 1.4 * stated["noise_multiplier"] / 512
    assert fact["noise"] == pytest.approx(level * 5050**0.5, rel=0.01)
    text = (folder / "page.md").read_text()
    assert "in single gradients" in text
    assert "are those of the first steps" in text
    _, numbers = analyze("recovery", tmp_path, *rules)
    assert list(numbers["noise_multipliers"]) == ["256", "512"]  # at most N/2
    fact = numbers["matrices"][LAYER]
    assert fact["thresholds"]["512"]["detection"] == pytest.approx(512 * level * 48**0.5 / fact["top"], rel=0.01)


def test_spectra_and_thresholds_are_those_of_the_gradient_and_of_noise(tmp_path, run):
    sigma, norm = run.plan(512).noise_multiplier, 3.0  # noise and thresholds grow with the clipping norm
    clip = ["--privacy.max_grad_norm", norm]
    folder, numbers = analyze("spectrum", tmp_path, *clip)
    layer = numbers[LAYER]
    assert len(layer["values"]) == 16
    assert layer["values"] == sorted(layer["values"], reverse=True)
    assert layer["ranks"]["without_noise"] == pytest.approx(float(participation_ratio(torch.tensor(layer["values"]))))
    assert layer["noise_edge"] == pytest.approx(norm * sigma / 512 * (16**0.5 + 144**0.5))
    # Noise dominates at this batch size: the largest value lies near the end of the noise.
    assert layer["with_noise"][0] == pytest.approx(layer["noise_edge"], rel=0.25)
    assert "UNPROTECTED: these numbers are computed from raw gradients" in (folder / "spectrum.svg").read_text()
    folder, numbers = analyze("recovery", tmp_path, *clip, "--batch-sizes", 64, 512)
    assert list(numbers["noise_multipliers"]) == ["64", "512"]
    fact = numbers["matrices"][LAYER]
    needed = fact["thresholds"]["512"]
    assert needed["recovery"] == pytest.approx(norm * sigma * (16**0.5 + 144**0.5) / fact["gap"])
    assert needed["detection"] == pytest.approx(norm * sigma * (16 * 144) ** 0.25 / fact["top"])
    assert "share of matrices" in (folder / "page.md").read_text()


def test_directions_of_a_checkpoint(tmp_path, finished_run):
    (checkpoint,) = finished_run.rglob("*.ckpt")
    saved = torch.load(checkpoint, weights_only=True)["state_dict"]
    run = AnalysisRun(QUICK, checkpoint)
    assert all(torch.equal(tensor, saved[name]) for name, tensor in run.module.state_dict().items())
    _, numbers = analyze("direction", tmp_path, "--ckpt_path", checkpoint, "--batch-sizes", 64, 1400)
    for name in (LAYER, "model.classifier.weight"):
        assert numbers[name]["1400"]["mean"] > numbers[name]["64"]["mean"]


def test_zero_matrices_and_matrices_of_one_row_have_pages(tmp_path, monkeypatch, run):
    gradients = {"zero": torch.zeros(3, 4), "row": torch.ones(1, 4)}
    monkeypatch.setattr(run, "measure", lambda size: Measured(1, matrices=gradients))
    for kind in ("spectrum", "recovery", "direction"):
        page = Document(kind, tmp_path)
        KINDS[kind][1](run, page)
        assert "| row | 1 x 4 |" in page.markdown()
        assert ("| zero | 3 x 4 |" in page.markdown()) == (kind != "direction")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--batch-sizes", "64", "99999"], "expected_batch_size must be at most num_train = 1437; got 99999"),
        (WITHOUT_NOISE, "there is no noise to compare"),
    ],
)
def test_what_is_wrong_is_named(tmp_path, capsys, arguments, message):
    with pytest.raises(SystemExit, match="2"):
        main(["analyze", "recovery", *QUICK, *arguments, "--out", str(tmp_path)])
    assert message in capsys.readouterr().err

"""``dpl analyze`` on a small network: its gradients against ``clipped_gradient_sum``, its numbers against formulas."""

import dataclasses
import json

import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import default_collate

from dp_lightning.analysis import participation_ratio
from dp_lightning.cli import main
from dp_lightning.commands.analysis_pages import PAGES
from dp_lightning.commands.analysis_run import AnalysisRun
from dp_lightning.commands.analyze import KINDS
from dp_lightning.privacy import ClipPlan, clipped_gradient_sum
from dp_lightning.privacy.plan import RunShape

QUICK = ["--config", "configs/digits.yaml", "--privacy.accountant", "rdp", "--trainer.accelerator", "cpu"]
QUICK += ["--trainer.enable_progress_bar", "false"]
N = 1437
WITHOUT_NOISE = ["--privacy.target_epsilon", "null", "--privacy.noise_multiplier", "0", "--privacy.not_private", "true"]


@pytest.fixture(autouse=True)
def _root(monkeypatch, request):
    monkeypatch.chdir(request.config.rootpath)


def analyze(kind, out, *options):
    main(["analyze", kind, *QUICK, "--out", str(out), *map(str, options)])
    folder = out / "unprotected" / kind
    return folder, json.loads((folder / "numbers.json").read_text())


def test_its_gradients_are_the_clipped_means_of_poisson_draws():
    run = AnalysisRun(QUICK, None)
    before = {name: p.detach().clone() for name, p in run.module.named_parameters()}
    measured = run.measure(N)  # every example is drawn
    run.data.setup("fit")
    images, labels = default_collate([run.data.train_dataset[k] for k in range(N)])
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


def test_draws_are_averaged_matrix_by_matrix():
    run = AnalysisRun(QUICK, None, num_batches=8)
    measured = run.measure(128)
    assert len(measured.norms) == 8
    matrices = torch.cat([matrix.flatten() for matrix in measured.matrices.values()])
    assert float(matrices.norm()) < max(measured.norms)
    whole = AnalysisRun(QUICK, None)
    whole.module.load_state_dict(run.module.state_dict())
    for name, matrix in whole.measure(N).matrices.items():
        # 8 draws of 128 estimate the mean over all examples.
        assert torch.cosine_similarity(matrix.flatten(), measured.matrices[name].flatten(), dim=0) > 0.8


def test_signal_and_noise_by_batch_size(tmp_path, capsys):
    folder, numbers = analyze("snr", tmp_path, "--batch-sizes", 128, 512)
    said = capsys.readouterr().out
    assert said.index("UNPROTECTED: these numbers are computed from raw gradients") < said.index("| B | sigma |")
    assert numbers["unprotected"].startswith("UNPROTECTED")
    assert "<strong>UNPROTECTED: these numbers" in (folder / "page.html").read_text()
    for fact, size in zip(numbers["by_batch_size"], (128, 512), strict=True):
        plan = RunShape(delta=1e-4, num_train=N, expected_batch_size=size, num_steps=53 * round(N / size)).calibrate(
            3.0, accountant="rdp"
        )
        count = sum(p.numel() for p in AnalysisRun(QUICK, None).module.parameters())
        assert fact["noise_multiplier"] == pytest.approx(plan.noise_multiplier)
        assert fact["noise"] == pytest.approx(plan.noise_multiplier / size * count**0.5)
        assert fact["snr"] == pytest.approx(fact["signal"] / fact["noise"])
    assert {path.name for path in folder.iterdir()} == {"page.md", "page.html", "numbers.json", "snr.png", "snr.svg"}


def test_spectra_are_those_of_the_gradient_and_of_noise(tmp_path):
    _, numbers = analyze("spectrum", tmp_path)
    layer = numbers["model.features.3.weight"]
    assert len(layer["values"]) == 16
    assert layer["values"] == sorted(layer["values"], reverse=True)
    assert layer["ranks"]["effective"] == pytest.approx(float(participation_ratio(torch.tensor(layer["values"]))))
    sigma = AnalysisRun(QUICK, None).plan(512).noise_multiplier
    assert layer["noise_edge"] == pytest.approx(sigma / 512 * (16**0.5 + 144**0.5))
    # Noise dominates at this batch size: the largest value lies near the end of the noise.
    assert layer["with_noise"][0] == pytest.approx(layer["noise_edge"], rel=0.25)


def test_thresholds_by_matrix_and_batch_size(tmp_path):
    folder, numbers = analyze("recovery", tmp_path, "--batch-sizes", 64, 1024)
    assert list(numbers["noise_multipliers"]) == ["64", "1024"]
    for fact in numbers["matrices"].values():
        rows, columns = fact["shape"]
        for size, sigma in numbers["noise_multipliers"].items():
            assert fact["thresholds"][size]["recovery"] == pytest.approx(
                sigma * (rows**0.5 + columns**0.5) / fact["gap"]
            )
    assert "share of matrices" in (folder / "page.md").read_text()


def test_convergence_and_directions_of_a_checkpoint(tmp_path):
    quiet = ["--trainer.default_root_dir", str(tmp_path), "--trainer.max_epochs", "2"]
    main(["fit", *QUICK, *quiet])
    (checkpoint,) = tmp_path.rglob("*.ckpt")
    saved = torch.load(checkpoint, weights_only=True)["state_dict"]
    run = AnalysisRun(QUICK, checkpoint)
    assert all(torch.equal(tensor, saved[name]) for name, tensor in run.module.state_dict().items())
    _, numbers = analyze("newton-schulz", tmp_path, "--ckpt_path", checkpoint)
    assert all(
        0.9 < cosines[-1] < 1
        for layer in numbers.values()
        if layer != numbers["unprotected"]
        for cosines in layer.values()
    )
    _, numbers = analyze("direction", tmp_path, "--ckpt_path", checkpoint, "--batch-sizes", 64, 1400)
    for name in ("model.features.3.weight", "model.classifier.weight"):
        assert numbers[name]["1400"]["mean"] > numbers[name]["64"]["mean"]


def test_figures_say_that_they_are_unprotected_and_no_other_statement_is_printed(tmp_path, capfd):
    folder, _ = analyze("spectrum", tmp_path)
    assert "UNPROTECTED: these numbers are computed from raw gradients" in (folder / "spectrum.svg").read_text()
    said = "".join(capfd.readouterr())
    assert "NOT PRIVATE" not in said
    assert "privacy.disk" not in said


def test_noise_and_thresholds_grow_with_the_clipping_norm(tmp_path):
    found = {}
    for norm in (1.0, 3.0):
        clip = ["--privacy.max_grad_norm", norm]
        spectrum, recovery = analyze("spectrum", tmp_path, *clip)[1], analyze("recovery", tmp_path, *clip)[1]
        thresholds = recovery["matrices"]["model.features.3.weight"]
        needed = thresholds["thresholds"]["512"]
        found[norm] = (
            spectrum["model.features.3.weight"]["noise_edge"],
            needed["recovery"] * thresholds["gap"],
            needed["detection"] * thresholds["top"],
        )
    assert found[3.0] == pytest.approx([3 * value for value in found[1.0]])


def test_disk_is_left_out_and_the_page_says_so(tmp_path, capsys):
    analyze("spectrum", tmp_path, "--privacy.disk", "{gain: 0.5}")
    assert "privacy.disk is left out" in capsys.readouterr().out


def test_a_checkpoint_of_another_model_is_named(tmp_path, capsys):
    torch.save({"state_dict": {"layer.weight": torch.zeros(2)}}, tmp_path / "other.ckpt")
    torch.save({"weights": torch.zeros(2)}, tmp_path / "foreign.ckpt")
    for name in ("other", "foreign"):
        with pytest.raises(SystemExit):
            analyze("snr", tmp_path, "--ckpt-path", tmp_path / f"{name}.ckpt")
        said = capsys.readouterr().err
        assert f"{name}.ckpt does not fit the configuration's model" in said
        assert "Give the checkpoint of a run with the same model" in said


def test_zero_matrices_and_matrices_of_one_row_have_pages(tmp_path, monkeypatch, capsys):
    measure = AnalysisRun.measure
    gradients = {"zero": torch.zeros(3, 4), "row": torch.ones(1, 4)}
    monkeypatch.setattr(
        AnalysisRun, "measure", lambda run, size: dataclasses.replace(measure(run, size), matrices=gradients)
    )
    for kind in KINDS[1:]:
        _, numbers = analyze(kind, tmp_path)
        assert ("row" in numbers) == (kind != "recovery")
        assert ("zero" in numbers) == (kind not in ("recovery", "direction"))
    for left, message in (({"zero": torch.zeros(3, 4)}, "have no direction"), ({}, "The model trains no matrix")):
        gradients.clear()
        gradients |= left
        with pytest.raises(SystemExit):
            analyze("direction", tmp_path)
        assert message in capsys.readouterr().err


def test_every_kind_has_a_page():
    assert tuple(PAGES) == KINDS


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["snr"], "needs the --config of a run"),
        (["snr", *QUICK, "--batches", "0"], "--batches is 0"),
        (["snr", *QUICK, "--privacy.target_epsilom", "3"], "Did you mean privacy.target_epsilon"),
        (["recovery", *QUICK, "--batch-sizes", "64", "99999"], "--batch-sizes has 99999; choose from 1 to the number"),
        (
            ["snr", *QUICK, *WITHOUT_NOISE],
            "there is no noise to compare",
        ),
        (["snr", *QUICK, "--ckpt_path", "absent.ckpt"], "absent.ckpt"),
        (["spectrum", *QUICK, "--batch-sizes", "64"], "set --privacy.expected_batch_size instead of"),
    ],
)
def test_what_is_wrong_is_named(tmp_path, capsys, arguments, message):
    with pytest.raises(SystemExit) as exit_:
        main(["analyze", *arguments, "--out", str(tmp_path)])
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err

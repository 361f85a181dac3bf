"""The page of a run: what it says of finished, interrupted, resumed and unfinished runs, and what it leaves out."""

import base64
import json
import re
import shutil

import pytest
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from plain_run import Plain, Stop, loader, privacy, trainer

from dp_lightning.callbacks import ResultFile, SignalToNoise
from dp_lightning.cli import main
from dp_lightning.commands.run_page import curves_in, run_page
from dp_lightning.experiments.results import shown_epsilon
from dp_lightning.privacy.accounting import compose


def page_of(folder):
    return run_page(folder)[0].markdown()


def drawn(html):
    """The texts in the pictures of a page."""
    pictures = [base64.b64decode(data).decode() for data in re.findall(r"svg\+xml;base64,([^\"]+)", html)]
    return set(re.findall(r"<text[^>]*>(.*?)</text>", "".join(pictures)))


@pytest.fixture
def copy(finished_run, tmp_path):
    return shutil.copytree(finished_run, tmp_path / "version_7")


def plain_fit(folder, *callbacks, **kwargs):
    """A run of a Trainer of one's own, whose logs are in ``folder``."""
    logger = TensorBoardLogger(folder, name=None, version="")
    torch.manual_seed(0)
    run = trainer(
        folder, privacy(**kwargs), SignalToNoise(), ResultFile(), *callbacks, logger=logger, log_every_n_steps=1
    )
    try:
        run.fit(Plain(), loader())
    except RuntimeError:
        assert callbacks
    logger.finalize("")
    return page_of(folder)


def test_a_finished_run_has_one_page_that_needs_no_other_file(copy, capsys):
    before = {path.name for path in copy.iterdir()}
    main(["report", str(copy)])
    assert {path.name for path in copy.iterdir()} - before == {"report.html"}
    result = json.loads((copy / "result.json").read_text())
    headline = (
        f"{100 * result['test_accuracy_last']:.1f} % test accuracy, mean AUROC {result['test_auroc']:.3f}, "
        f"epsilon {shown_epsilon(result['epsilon'])} at delta 0.0001. Fit for release."
    )
    assert headline in capsys.readouterr().out
    html = (copy / "report.html").read_text()
    assert headline in html
    sources = re.findall(r'(?:src|href)="([^"]{0,40})', html)
    assert all(source.startswith("data:") for source in sources)
    assert "What the guarantee does not cover" in html
    assert re.search(r"<summary>Configuration: config.yaml<.*expected_batch_size: 512.*</details>", html, re.DOTALL)
    assert all(name in html for name in ("model.features.0.weight", "model.classifier.bias"))
    assert "| whole gradient | " in page_of(copy)
    # Training losses are in the event files; no noise protects them.
    assert "unprotected/train_loss" in curves_in(copy)
    assert {"test/accuracy", "test/loss"} <= drawn(html)
    assert not any("train_loss" in text for text in drawn(html))


def test_a_page_has_numbers_of_each_class_under_the_note_that_they_are_unprotected(copy):
    result = json.loads((copy / "result.json").read_text())
    table = result["test_confusion"]
    assert [sum(row) for row in table] == [row["images"] for row in result["test_by_class"]]
    right = sum(table[k][k] for k in range(10)) / sum(map(sum, table))
    assert right == pytest.approx(result["test_accuracy_last"], abs=1e-6)
    page = page_of(copy)
    section = page[page.index("## Test images by class") : page.index("## Signal and noise")]
    assert "these numbers are outside the guarantee" in section
    for row, confused in zip(result["test_by_class"], table, strict=True):
        assert f"| {row['class']} | {row['images']} | {row['accuracy']:.3f} | {row['auroc']:.3f} | " in section
        assert f"| {row['class']} | {' | '.join(map(str, confused))} |" in section
    assert f"{result['test_calibration_error']:.3f}" in section


def test_a_page_of_a_result_without_classes_or_with_undefined_numbers(copy):
    result = json.loads((copy / "result.json").read_text())
    result["test_by_class"][3] |= {"images": 0, "accuracy": None, "auroc": None, "average_precision": None}
    (copy / "result.json").write_text(json.dumps(result))
    assert "| 3 | 0 | - | - | - |" in page_of(copy)
    old = {name: value for name, value in result.items() if name not in ("test_by_class", "test_auroc")}
    (copy / "result.json").write_text(json.dumps(old))
    assert "Test images by class" not in page_of(copy)


def test_a_curve_that_the_statement_calls_unprotected_is_left_out(copy):
    facts = json.loads((copy / "privacy_statement.json").read_text())
    (copy / "privacy_statement.json").write_text(json.dumps({**facts, "unprotected": ["test/loss"]}))
    seen = drawn(run_page(copy)[0].html())
    assert "test/accuracy" in seen
    assert "test/loss" not in seen


def test_an_interrupted_run_says_so(tmp_path):
    page = plain_fit(tmp_path, Stop(5))
    assert "interrupted or ended by an error after 5 of 9 steps" in page
    assert "NOT FIT for release: the run ended by an error (RuntimeError)" in page
    assert "No test accuracy" in page
    assert "Nothing was evaluated during the run" in page
    facts = json.loads((tmp_path / "privacy_statement.json").read_text())
    (kind,) = facts["ledger"]
    assert shown_epsilon(compose([kind], delta=1e-3, accountant="rdp")) in page


@pytest.mark.parametrize(("bands", "independent"), [(1, 3), (3, 1)])
def test_correlated_steps_resolve_no_more_than_one_step(tmp_path, bands, independent):
    size = sum(parameter.numel() for parameter in Plain().parameters())
    row = next(row for row in plain_fit(tmp_path, bands=bands).splitlines() if row.startswith("| whole gradient | "))
    assert row.endswith(f"| {(2 / (size * independent)) ** 0.25:.3f} |")


def test_what_a_resumed_run_logs_again_replaces_what_was_logged_before(tmp_path):
    for number, (steps, value) in enumerate([(range(6), 1.0), (range(3, 8), 2.0)]):
        logger = TensorBoardLogger(tmp_path, name=None, version="", filename_suffix=f".{number}")
        for step in steps:
            logger.log_metrics({"val/loss": value, "nan": float("nan")}, step)
        logger.finalize("")
    assert len(list(tmp_path.glob("events.out.tfevents.*"))) == 2
    expected = dict(enumerate([1.0] * 3 + [2.0] * 5))
    assert curves_in(tmp_path)["val/loss"] == expected


def test_a_run_without_noise_is_called_not_private(tmp_path):
    page = plain_fit(tmp_path, noise_multiplier=0.0, not_private=True)
    assert "epsilon infinite: NOT PRIVATE. NOT FIT for release: not private: epsilon is infinite" in page
    assert "There is no snr.json" in page


def test_text_from_files_is_shown_and_never_run(copy):
    evil = "<script>alert(1)</script>"
    for name in ("config.yaml", "privacy_statement.md"):
        with (copy / name).open("a") as file:
            file.write(f"\n{evil}\n")
    snr = json.loads((copy / "snr.json").read_text())
    snr["by_parameter"] = {f"{name}{evil}$x$": fact for name, fact in snr["by_parameter"].items()}
    (copy / "snr.json").write_text(json.dumps(snr))
    html = run_page(copy)[0].html()
    assert "<script" not in html
    assert html.count("&lt;script&gt;alert(1)") >= 3


def test_a_run_that_was_killed_has_no_page(copy, capsys):
    (copy / "privacy_statement.json").unlink()
    with pytest.raises(SystemExit, match="2"):
        main(["report", str(copy)])
    assert "was killed: release nothing of it; `dpl account" in capsys.readouterr().err

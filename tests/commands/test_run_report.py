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


def captions(page):
    return re.findall(r"!\[(.*?)\]", page)


def drawn(html):
    """The texts in the pictures of a page."""
    pictures = [base64.b64decode(data).decode() for data in re.findall(r"svg\+xml;base64,([^\"]+)", html)]
    return set(re.findall(r"<text[^>]*>(.*?)</text>", "".join(pictures)))


@pytest.fixture
def copy(finished_run, tmp_path):
    return shutil.copytree(finished_run, tmp_path / "version_7")


def plain_fit(folder, *callbacks, ckpt_path=None, **kwargs):
    """A run of a Trainer of one's own, whose logs are in ``folder``."""
    logger = TensorBoardLogger(folder, name=None, version="")
    torch.manual_seed(0)
    run = trainer(
        folder, privacy(**kwargs), SignalToNoise(), ResultFile(), *callbacks, logger=logger, log_every_n_steps=1
    )
    try:
        run.fit(Plain(), loader(), ckpt_path=ckpt_path)
    except RuntimeError:
        run.save_checkpoint(folder / "stopped.ckpt")
    logger.finalize("")
    return page_of(folder)


def test_a_finished_run_has_one_page_that_needs_no_other_file(copy, capsys):
    before = {path.name for path in copy.iterdir()}
    main(["report", str(copy)])
    assert {path.name for path in copy.iterdir()} - before == {"report.html"}
    result = json.loads((copy / "result.json").read_text())
    headline = (
        f"{100 * result['test_accuracy_last']:.1f} % test accuracy, epsilon {shown_epsilon(result['epsilon'])} "
        "at delta 0.0001. Fit for release."
    )
    assert headline in capsys.readouterr().out
    html = (copy / "report.html").read_text()
    assert headline in html
    sources = re.findall(r'(?:src|href)="([^"]{0,40})', html)
    assert all(source.startswith("data:") for source in sources)
    assert "What the guarantee does not cover" in html
    assert re.search(r"<details><summary>config.yaml</summary>.*expected_batch_size: 512.*</details>", html, re.DOTALL)
    assert all(name in html for name in ("model.features.0.weight", "model.classifier.bias"))
    assert captions(page_of(copy)) == [
        "Evaluations by steps taken",
        "Epsilon by steps taken",
        "Signal-to-noise ratio of the whole gradient by epoch",
    ]
    # Training losses are in the event files; no noise protects them.
    assert "unprotected/train_loss" in curves_in(copy)
    assert {"test/accuracy", "test/loss"} <= drawn(html)
    assert not any("train_loss" in text for text in drawn(html))


def test_a_curve_that_the_statement_calls_unprotected_is_left_out(copy):
    facts = json.loads((copy / "privacy_statement.json").read_text())
    (copy / "privacy_statement.json").write_text(json.dumps({**facts, "unprotected": ["test/loss"]}))
    assert "test/accuracy" in drawn(run_page(copy)[0].html())
    assert "test/loss" not in drawn(run_page(copy)[0].html())


def test_epsilon_is_accounted_from_the_journal_where_a_run_was_killed(copy):
    epsilon = json.loads((copy / "result.json").read_text())["epsilon"]
    for name in ("result.json", "privacy_statement.json", "privacy_statement.md"):
        (copy / name).unlink()
    page = page_of(copy)
    assert (
        f"epsilon {shown_epsilon(epsilon)} at delta 0.0001. NOT FIT for release: there is no privacy statement." in page
    )
    assert "it was killed: there is no statement" in page
    assert "% test accuracy" in page  # from the event files
    (journal,) = copy.glob("privacy_journal_*.jsonl")
    lines = journal.read_text().splitlines(keepends=True)
    journal.write_text("".join(lines[1:]))
    edited = page_of(copy)
    assert "epsilon unknown" in edited
    assert "is not as it was written" in edited


def test_an_interrupted_run_says_so_and_a_resumed_one_has_further_steps(tmp_path):
    page = plain_fit(tmp_path, Stop(5))
    assert "interrupted or ended by an error after 5 of 9 steps" in page
    assert "NOT FIT for release: the run ended by an error (RuntimeError)" in page
    assert "No test accuracy" in page
    assert "Nothing was evaluated during the run" in page
    assert "the run was not started by dpl fit" in page
    facts = json.loads((tmp_path / "privacy_statement.json").read_text())
    (kind,) = facts["ledger"]
    assert shown_epsilon(compose([kind], delta=1e-3, accountant="rdp")) in page
    resumed = plain_fit(tmp_path / "other", ckpt_path=tmp_path / "stopped.ckpt")
    assert "The run is finished." in resumed
    assert "its journal has 4 steps that this statement does not count" in page_of(tmp_path)


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
    assert "There is no curve of epsilon" in page
    assert "There is no snr.json" in page


def test_text_from_files_is_shown_and_never_run(copy):
    evil = "<script>alert(1)</script>"
    config = (copy / "config.yaml").read_text().replace("SmallCNNModule", f"SmallCNN{evil}")
    (copy / "config.yaml").write_text(config)
    with (copy / "privacy_statement.md").open("a") as file:
        file.write(f"\n{evil}\n")
    snr = json.loads((copy / "snr.json").read_text())
    snr["by_parameter"] = {f"{name}{evil}$x$": fact for name, fact in snr["by_parameter"].items()}
    (copy / "snr.json").write_text(json.dumps(snr))
    html = run_page(copy)[0].html()
    assert "<script" not in html
    assert html.count("&lt;script&gt;alert(1)") >= 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{root}"], "is not the folder of a private run"),
        (["{run}", "--override", "a=1"], "--out and --override belong to the report of a grid"),
        (["{root}/none"], "none"),
    ],
)
def test_what_is_wrong_is_named(finished_run, capsys, arguments, message):
    with pytest.raises(SystemExit, match="2"):
        main(["report", *(text.format(root=finished_run.parents[1], run=finished_run) for text in arguments)])
    assert message in capsys.readouterr().err

"""The page of a run: what it says of finished, interrupted, resumed and unfinished runs, and what it leaves out."""

import dataclasses
import json
import shutil
from html.parser import HTMLParser

import pytest
import torch
from browser import look_at
from lightning.pytorch.loggers import TensorBoardLogger
from plain_run import Plain, Stop, loader, privacy, trainer

from dp_lightning.callbacks import ResultFile, SignalToNoise
from dp_lightning.cli import main
from dp_lightning.commands.run_files import RunFiles
from dp_lightning.commands.run_page import run_page
from dp_lightning.errors import DataError
from dp_lightning.experiments.event_files import Curve, curves_in
from dp_lightning.experiments.results import shown_epsilon
from dp_lightning.privacy.accounting import compose

PARAMETERS = ("model.features.0.weight", "model.classifier.bias")


class Page(HTMLParser):
    """The texts, tags and attributes of a page."""

    def __init__(self, text):
        super().__init__()
        self.texts, self.tags, self.attributes, self.figures = [], set(), [], []
        self.feed(text)
        self.text = " ".join(" ".join(self.texts).split())

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes += attrs
        if tag == "figure":
            self.figures.append(dict(attrs)["aria-label"])

    def handle_data(self, data):
        self.texts.append(data)


def report(folder, *options):
    main(["report", str(folder), *options])
    return Page((folder / ("report_release.html" if "--release" in options else "report.html")).read_text())


def of(folder, **kwargs):
    return Page(run_page(RunFiles.read(folder), **kwargs).html())


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The log folder of a short run of ``dpl fit`` with a validation set."""
    root = tmp_path_factory.mktemp("run")
    main(
        [
            *(
                "fit",
                "--config",
                "configs/digits.yaml",
                "--trainer.max_epochs",
                "3",
                "--trainer.log_every_n_steps",
                "1",
            ),
            *("--privacy.accountant", "rdp", "--trainer.accelerator", "cpu", "--trainer.enable_progress_bar", "false"),
            *("--data.init_args.val_fraction", "0.1", "--trainer.default_root_dir", str(root)),
        ]
    )
    (folder,) = (root / "lightning_logs").iterdir()
    return folder


@pytest.fixture(scope="module")
def page(finished):
    return of(finished)


@pytest.fixture
def copy(finished, tmp_path):
    return shutil.copytree(finished, tmp_path / "version_7")


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
    return RunFiles.read(folder)


def test_a_finished_run_has_one_page_with_its_accuracy_its_epsilon_and_whether_it_is_fit_for_release(finished, capsys):
    before = {path.name for path in finished.iterdir()}
    page = report(finished)
    assert {path.name for path in finished.iterdir()} - before == {"report.html"}
    result = json.loads((finished / "result.json").read_text())
    headline = (
        f"{100 * result['test_accuracy_last']:.1f} % test accuracy, epsilon {shown_epsilon(result['epsilon'])} "
        "at delta 0.0001. Fit for release."
    )
    assert headline in page.text
    assert headline in capsys.readouterr().out
    assert f"{result['num_steps']} of {result['num_steps']}" in page.text
    assert f"{100 * result['val_accuracy_last']:.1f} % at step {result['num_steps']}" in page.text


def test_it_is_one_file_with_curves_statement_and_configuration(page):
    sources = [value for name, value in page.attributes if name in ("src", "href", "xlink:href")]
    assert all(source.startswith(("data:", "#")) for source in sources)
    assert not page.tags & {"script", "img", "iframe"}
    assert [figure.split(",")[0] for figure in page.figures] == [
        "Accuracy by steps taken",
        "Loss by steps taken",
        "Epsilon at delta 0.0001 by steps taken",
        "Signal-to-noise ratio of the whole gradient by epoch",
        "Signal-to-noise ratio by parameter",
        "unprotected/train_loss by steps taken",
    ]
    assert "What the guarantee does not cover" in page.text
    assert "expected_batch_size: 512" in page.text
    assert all(name in page.text for name in PARAMETERS)


def test_epsilon_is_accounted_from_the_journal(finished):
    spent = RunFiles.read(finished).spent
    statement = json.loads((finished / "privacy_statement.json").read_text())
    kind = statement["noise_multiplier"], statement["sample_rate"]
    steps, epsilons = spent.curve
    assert (steps[0], steps[-1], epsilons[0]) == (0, statement["num_steps"], 0.0)
    assert epsilons[1:] == [compose([(*kind, step)], delta=1e-4, accountant="rdp") for step in steps[1:]]
    assert (spent.target, spent.to_come.steps, spent.further) == (3.0, [], 0)


def test_what_comes_from_training_examples_is_in_the_last_section_which_is_marked(finished, page):
    assert page.text.index("UNPROTECTED: the last section") < page.text.index("test accuracy")
    assert page.text.index("What of this folder may be released") < page.text.rindex("UNPROTECTED: may be computed")
    run = RunFiles.read(finished)
    # A tag that was logged while training is raw, whatever its name; so is one that nobody knows.
    named = dataclasses.replace(run.statement, unprotected=("val/accuracy",))
    curves = {**run.curves, "my_score": Curve([1, 2], [0.1, 0.2])}
    figures = Page(run_page(dataclasses.replace(run, statement=named, curves=curves)).html()).figures
    raw = figures.index("my_score by steps taken")
    assert raw < figures.index("unprotected/train_loss by steps taken") < figures.index("val/accuracy by steps taken")
    assert raw > figures.index("Loss by steps taken")


def test_a_page_for_release_shows_nothing_of_training_examples(finished):
    page = report(finished, "--release")
    assert "unprotected/train_loss by steps taken" not in page.figures
    assert "UNPROTECTED" not in page.text
    assert "Fit for release." in page.text
    assert len(page.figures) == 5
    (finished / "report_release.html").unlink()


def test_every_file_of_the_folder_has_a_row_that_says_whether_it_may_be_released(copy):
    (copy / "notes.txt").write_text("mine")
    (copy / "export").mkdir()
    run = RunFiles.read(copy)
    text = of(copy).text
    assert all(name in text for name in run.names)
    assert "notes.txt not of dp_lightning unknown" in text
    assert "export the network that dpl export wrote, and its statement yes" in text
    assert "snr.json signal-to-noise ratios of privatized gradients yes" in text
    unfit = Page(run_page(dataclasses.replace(run, facts={**run.facts, "release": "not for release: a fault"})).html())
    assert "snr.json signal-to-noise ratios of privatized gradients no: the run is not fit for release" in unfit.text
    assert "config.yaml the settings of the run yes" in unfit.text
    assert "NOT FIT for release" in unfit.text
    assert "no: a fault" in unfit.text


def test_a_run_that_was_killed_is_accounted_by_its_journal_and_is_not_fit_for_release(copy, capsys):
    epsilon = json.loads((copy / "result.json").read_text())["epsilon"]
    for name in ("result.json", "privacy_statement.json", "privacy_statement.md"):
        (copy / name).unlink()
    page = report(copy)
    assert f"epsilon {shown_epsilon(epsilon)} at delta 0.0001. NOT FIT for release." in page.text
    assert "it was killed: there is no statement" in page.text
    assert "% test accuracy" in page.text  # from the event files
    (journal,) = copy.glob("privacy_journal_*.jsonl")
    lines = journal.read_text().splitlines(keepends=True)
    journal.write_text("".join(lines[1:]))
    edited = of(copy).text
    assert "epsilon unknown" in edited
    assert "is not as it was written" in edited
    with pytest.raises(SystemExit, match="2"):
        report(copy, "--release")
    assert "there is no privacy statement" in capsys.readouterr().err


def test_an_interrupted_run_shows_its_steps_and_what_the_rest_will_cost(tmp_path):
    run = plain_fit(tmp_path, Stop(5))
    page = of(tmp_path)
    assert "interrupted or ended by an error after 5 of 9 steps" in page.text
    assert "no: the run ended by an error (RuntimeError)" in page.text
    assert "No test accuracy" in page.text
    assert "Nothing was evaluated during the run" in page.text
    assert "There is no config.yaml" in page.text
    assert (run.spent.curve.steps[-1], run.spent.to_come.steps) == (5, [5, 7, 9])
    plan = run.statement.plan
    all_steps = compose([(plan.noise_multiplier, plan.sample_rate, 9)], delta=1e-3, accountant="rdp")
    assert run.spent.to_come.values[-1] == all_steps
    # In the same folder, the run has two event files; in another one, its journal goes on here.
    other = tmp_path / "other"
    resumed = plain_fit(other, ckpt_path=tmp_path / "stopped.ckpt")
    assert resumed.spent.curve.steps[-1] == 9
    assert len(resumed.snr.whole) == 3
    assert "its journal has 4 steps that this statement does not count" in of(tmp_path).text
    assert RunFiles.read(tmp_path).spent.curve == run.spent.curve


def test_what_a_resumed_run_logs_again_replaces_what_was_logged_before(tmp_path):
    for number, (steps, value) in enumerate([(range(6), 1.0), (range(3, 8), 2.0)]):
        logger = TensorBoardLogger(tmp_path, name=None, version="", filename_suffix=f".{number}")
        for step in steps:
            logger.log_metrics({"val/loss": value, "nan": float("nan")}, step)
        logger.finalize("")
    assert len(list(tmp_path.glob("events.out.tfevents.*"))) == 2
    assert curves_in(tmp_path) == {"val/loss": Curve(list(range(8)), [1.0] * 3 + [2.0] * 5)}


def test_an_event_file_that_was_cut_short_is_read_up_to_there(copy):
    (path,) = copy.glob("events.out.tfevents.*")
    whole = curves_in(copy)["unprotected/train_loss"]
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    cut = curves_in(copy)["unprotected/train_loss"]
    assert 0 < len(cut.steps) < len(whole.steps)
    assert cut.values == whole.values[: len(cut.values)]


def test_a_run_without_noise_is_called_not_private(tmp_path):
    plain_fit(tmp_path, noise_multiplier=0.0, not_private=True)
    page = of(tmp_path)
    assert "epsilon infinite: NOT PRIVATE. NOT FIT for release." in page.text
    assert "There is no curve of epsilon. Epsilon is infinite." in page.text
    assert "There is no snr.json" in page.text
    assert page.figures == ["train_loss by steps taken"]


def test_text_from_files_is_shown_and_never_run(copy):
    evil = "<script>alert(1)</script>"
    snr = json.loads((copy / "snr.json").read_text())
    snr["by_parameter"] = {f"{name}{evil}$x$\ud800": fact for name, fact in snr["by_parameter"].items()}
    (copy / "snr.json").write_text(json.dumps(snr))
    config = (copy / "config.yaml").read_text().replace("SmallCNNModule", f"SmallCNN{evil}")
    (copy / "config.yaml").write_text(config)
    with (copy / "privacy_statement.md").open("a") as file:
        file.write(f"\n{evil} [a](javascript:alert(1)) ![b](http://example.com/b.png) <http://example.com> &lt;b>\n")
        file.write("\n[c]\n\n[c]: javascript:alert(1)\n\n<div onclick='alert(1)'>\n\n# Heading\n")
    (copy / f"{evil.replace('/', '')}.txt").touch()
    page = report(copy)
    assert not page.tags & {"script", "img", "a", "b", "div onclick"}
    assert not [name for name, _ in page.attributes if name.startswith("on")]
    assert page.text.count(evil) >= 4
    assert "[a](javascript:alert(1))" in page.text


def test_a_file_of_ratios_of_another_form_is_named(copy):
    for content in ('{"snr": [1], "steps": [2], "by_parameter": {"a": {"size": 3, "snr": []}}}', "[]", "{"):
        (copy / "snr.json").write_text(content)
        with pytest.raises(DataError, match=r"snr\.json is not a file of signal-to-noise ratios"):
            RunFiles.read(copy)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{root}"], "is not the folder of a private run.*Did you mean .*version_0"),
        (["{run}", "--override", "a=1"], "--out and --override belong to the report of a grid"),
        (["{root}/none.yaml", "--release"], "--release belongs to the report of a run"),
        (["{root}/none"], "none"),
    ],
)
def test_what_is_wrong_is_named(finished, capsys, arguments, message):
    root = finished.parents[1]
    with pytest.raises(SystemExit, match="2"):
        main(["report", *(text.format(root=root, run=finished) for text in arguments)])
    said = capsys.readouterr().err
    assert all(part in said for part in message.split(".*"))


def test_the_page_fits_a_phone_and_a_desk_on_light_and_dark_screens(finished, tmp_path):
    path = run_page(dataclasses.replace(RunFiles.read(finished), folder=tmp_path)).write_html("report.html")
    windows = [(width, scheme) for width in (400, 1280) for scheme in ("light", "dark")]
    for (width, scheme), seen in zip(windows, look_at(path, windows), strict=True):
        assert seen.console == []
        assert seen.overflow == 0
        assert len(seen.figures) == 6
        assert all(100 < figure < width for figure in seen.figures)
        light = "rgb(26, 26, 26)", "rgb(255, 255, 255)"
        assert seen.colours == (light if scheme == "light" else ("rgb(228, 228, 228)", "rgb(23, 25, 29)"))

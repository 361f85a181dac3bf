"""What the page about persons shows: its run trains on a folder by person, its code runs, its prices are right."""

import contextlib
import json
import shlex
import warnings
from pathlib import Path

import numpy as np
import pytest
from pages import ROOT, blocks, lines, read
from PIL import Image

from dp_lightning.cli import main

pytestmark = pytest.mark.docs

PAGE, OWN_DATA = read("docs/persons.md"), read("docs/own_data.md")
FIT, BENCHMARK, ACCOUNT = lines("bash", PAGE)


def write_scans(root):
    """24 patients with 1 to 20 images each; every third one has images of both classes."""
    noise = np.random.default_rng(0)
    for patient in range(24):
        for number in range(noise.integers(1, 21)):
            kind = "malign" if patient % 2 or (patient % 3 == 0 and number % 2) else "benign"
            folder = root / "train" / kind / f"p{patient:03d}"
            folder.mkdir(parents=True, exist_ok=True)
            Image.fromarray(noise.integers(0, 255, (20, 24, 3), np.uint8)).save(folder / f"{number}.png")
    for kind in ("benign", "malign"):
        folder = root / "test" / kind / f"q{kind}"
        folder.mkdir(parents=True)
        Image.new("RGB", (20, 24)).save(folder / "0.png")


def test_the_run_shown_trains_on_a_folder_by_person(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (photos,) = [block for block in blocks("yaml", OWN_DATA) if block.startswith("# photos.yaml")]
    Path("photos.yaml").write_text(photos)
    write_scans(tmp_path / "scans")
    small = ["--model.init_args.depth", "10", "--model.init_args.width", "1", "--data.init_args.val_fraction", "0.25"]
    short = ["--trainer.max_steps", "2", "--trainer.accelerator", "cpu", "--trainer.enable_progress_bar", "false"]
    fewer = ["--privacy.expected_batch_size", "6", "--privacy.accountant", "rdp", "--privacy.target_epsilon", "8"]
    main([*shlex.split(FIT)[1:], *small, *short, *fewer])
    facts = json.loads(Path("lightning_logs/version_0/privacy_statement.json").read_text())
    assert facts["release"] == "ok"
    assert facts["num_steps"] == 2
    assert facts["unit_of_privacy"] == "one person (all images with the same group)"
    assert facts["num_train"] == 24 - 6
    assert facts["sample_rate"] == pytest.approx(6 / 18)
    assert facts["clipping"]["images_per_group"].startswith("4 images of each person")
    with pytest.raises(SystemExit, match="0"):
        main(["verify", "lightning_logs/version_0"])


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ("--data.init_args.group_folders false", "scans/train/benign, scans/train/malign hold no image files"),
        ("--data Digits", "unit_of_privacy is group, but Digits does not know which images belong to the same person"),
        ("--privacy.unit_of_privacy example", "images_per_group is 4, but each image is an example"),
        ("--privacy.max_physical_batch_size 3", "must be at least 4, privacy.images_per_group"),
    ],
)
def test_the_run_shown_with_a_setting_that_does_not_fit_is_refused(changed, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (photos,) = [block for block in blocks("yaml", OWN_DATA) if block.startswith("# photos.yaml")]
    Path("photos.yaml").write_text(photos)
    write_scans(tmp_path / "scans")
    # The class of the data comes first, and its settings are those of the class that was there before.
    line = (
        FIT.replace("--data.init_args.root scans --data.init_args.group_folders true", changed)
        if ("Digits" in changed)
        else f"{FIT} {changed}"
    )
    with pytest.raises(SystemExit, match="2"):
        main(shlex.split(line)[1:])
    assert message in capsys.readouterr().err


def test_the_code_shown_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (code,) = blocks("python", PAGE)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Lightning's advice about workers and logging
        exec(compile(code, "persons.md", "exec"), {"__name__": "persons"})
    assert "add or remove one person (all images with the same group)" in capsys.readouterr().out


def test_the_price_shown_is_that_of_the_command(capsys):
    (shown,) = blocks("text", PAGE)
    with contextlib.suppress(SystemExit):
        main(shlex.split(ACCOUNT)[1:])
    assert capsys.readouterr().out == shown


@pytest.mark.benchmarks
def test_the_benchmark_shown_takes_its_options(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import persons

    assert persons.parse(shlex.split(BENCHMARK)[2:]).images_per_group == [1, 4]

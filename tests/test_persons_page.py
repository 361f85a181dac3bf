"""The run that the page about persons shows trains on a folder by person."""

import json
import shlex
from pathlib import Path

import numpy as np
import pytest
from pages import blocks, lines, read
from PIL import Image

from dp_lightning.cli import main

pytestmark = pytest.mark.docs


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
    (photos,) = [block for block in blocks("yaml", read("docs/own_data.md")) if block.startswith("# photos.yaml")]
    Path("photos.yaml").write_text(photos)
    write_scans(tmp_path / "scans")
    small = ["--model.init_args.depth", "10", "--model.init_args.width", "1", "--data.init_args.val_fraction", "0.25"]
    short = ["--trainer.max_steps", "2", "--trainer.accelerator", "cpu", "--trainer.enable_progress_bar", "false"]
    fewer = ["--privacy.expected_batch_size", "6", "--privacy.accountant", "rdp", "--privacy.target_epsilon", "8"]
    (fit,) = [line for line in lines("bash", read("docs/persons.md")) if line.startswith("dpl fit")]
    main([*shlex.split(fit)[1:], *small, *short, *fewer])
    facts = json.loads(Path("lightning_logs/version_0/privacy_statement.json").read_text())
    assert (facts["release"], facts["num_steps"], facts["num_train"]) == ("ok", 2, 24 - 6)
    assert facts["unit_of_privacy"] == "one person (all images with the same group)"
    assert facts["sample_rate"] == pytest.approx(6 / 18)
    with pytest.raises(SystemExit, match="0"):
        main(["verify", "lightning_logs/version_0"])

"""Every configuration takes its steps on a device without memory: no device is mixed, and none is waited for."""

import copy

import numpy as np
import pytest
import yaml
from devices import OneDevice, stand_in_for_a_gpu, trainers_use_it
from test_configs import RUNS, SHAPES, content, probe_of_small_network, put_images, without_download

from dp_lightning.cli import main
from dp_lightning.privacy.step import PrivateStep

EXAMPLES, STEPS, PHYSICAL = 12, 2, 7


def configuration(path, folder):
    """The run on synthetic images, in two physical batches a step; the second one has two examples that stand in."""
    classes, size = next((shape for name, shape in SHAPES.items() if name in path.stem), (10, 16))
    images = np.random.default_rng(0).integers(
        0, 255, (EXAMPLES, size, size, 1 if path.stem == "digits" else 3), np.uint8
    )
    labels = np.arange(EXAMPLES) % classes
    np.savez(folder / "s.npz", train_images=images, train_labels=labels, test_images=images, test_labels=labels)
    synthetic = {"path": str(folder / "s.npz"), "num_classes": classes, "eval_batch_size": 2}
    config = copy.deepcopy(content(path))
    put_images(config, synthetic)
    if "backbone" in config["data"]["init_args"]:
        config["data"]["init_args"]["cache"] = str(folder / "features")
    config["trainer"] |= {"max_steps": STEPS, "max_epochs": -1, "limit_val_batches": 0, "accelerator": "cpu"}
    config["trainer"] |= {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False}
    config["trainer"] |= {"default_root_dir": str(folder)}
    augmult = 2 if "augmult" in config["privacy"] else 1
    config["privacy"] |= {"expected_batch_size": EXAMPLES, "delta": 1e-2, "accountant": "rdp", "constant_shapes": True}
    config["privacy"] |= {"max_physical_batch_size": PHYSICAL * augmult, "augmult": augmult}
    return config


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.stem)
def test_every_run_stays_on_its_device_and_waits_once_for_each_step(path, tmp_path, monkeypatch):
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(configuration(path, tmp_path)))
    probe = probe_of_small_network(tmp_path) if "probe" in path.stem else []
    batches, accumulate = [], PrivateStep.accumulate
    monkeypatch.setattr(PrivateStep, "accumulate", lambda step, batch: batches.append(batch) or accumulate(step, batch))
    on_purpose = stand_in_for_a_gpu(monkeypatch)
    releases, release = [], PrivateStep.release

    def counted_release(step, **options):
        before = len(on_purpose)
        stopping = release(step, **options)
        releases.append(len(on_purpose) - before)
        return stopping

    monkeypatch.setattr(PrivateStep, "release", counted_release)
    device = OneDevice()
    with trainers_use_it(monkeypatch), device:
        main(["fit", "--config", str(tmp_path / "run.yaml"), *without_download(path), *probe])
    assert len(batches) == 2 * STEPS
    assert releases == [1] * STEPS
    loop = "training_epoch_loop.py"
    assert [read for read in device.reads if any(loop in frame and frame.endswith(" advance") for frame in read)] == []

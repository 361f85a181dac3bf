"""``dpl plan``: its numbers are those of the plan and of closed forms, and nothing is read to get them."""

import json

import pytest
import torch

from dp_lightning.cli import main
from dp_lightning.commands import pricing
from dp_lightning.datamodules import Digits
from dp_lightning.lightning_modules import SmallCNNModule
from dp_lightning.privacy.accounting import compose
from dp_lightning.privacy.plan import RunShape, error_of_noise

CONFIG = "digits --privacy.accountant rdp --trainer.accelerator cpu"
N, D = 1437, 5050


@pytest.fixture(autouse=True)
def touched(monkeypatch):
    """The splits whose images were read."""
    found = []
    monkeypatch.setattr(Digits, "read_split", lambda self, split: found.append(split))
    return found


def answer(capsys, options):
    main(["plan", *options.split(), "--json"])
    (line,) = capsys.readouterr().out.splitlines()
    return json.loads(line)


def test_every_combination_has_the_noise_of_its_own_plan(capsys, touched):
    found = answer(capsys, f"{CONFIG} --epsilon 1 8 --epochs 2 4 --batch_size 50 200")["runs"]
    order = [(target, epochs, size) for target in (1, 8) for epochs in (2, 4) for size in (50, 200)]
    assert len(found) == len(order)
    for run, (target, epochs, size) in zip(found, order, strict=True):
        steps = epochs * round(N / size)
        shape = RunShape(num_train=N, expected_batch_size=size, num_steps=steps, delta=1e-4)
        sigma = shape.calibrate(float(target), accountant="rdp").noise_multiplier
        assert run == {
            "epsilon": target,
            "epochs": pytest.approx(steps * size / N),
            "expected_batch_size": size,
            "num_steps": steps,
            "noise_multiplier": sigma,
            "noise_level": pytest.approx(sigma / size),
            "noise_norm_over_clipping_norm": pytest.approx(sigma * D**0.5 / size),
        }
    assert not touched


def test_noise_that_is_correlated_has_its_bands_its_error_and_batches_that_allow_them(capsys):
    found = answer(capsys, f"{CONFIG} --privacy.bands 4 --trainer.max_steps 24")["runs"]
    assert [run["expected_batch_size"] for run in found] == [128, 256, N // 4]
    for run in found:
        shape = RunShape(num_train=N, expected_batch_size=run["expected_batch_size"], num_steps=24, delta=1e-4, bands=4)
        assert (run["bands"], run["error_of_noise"]) == (4, error_of_noise(shape, 3.0))


@pytest.mark.parametrize(("clipping", "sensitivity"), [("flat", 1.0), ("per_layer", 3.0)])
def test_a_configuration_gives_its_numbers(capsys, clipping, sensitivity):
    found = answer(capsys, f"{CONFIG} --privacy.clipping {clipping} --privacy.max_grad_norm {sensitivity}")
    assert [found[name] for name in ("num_train", "delta", "accountant", "num_parameters")] == [N, 1e-4, "rdp", D]
    assert [run["expected_batch_size"] for run in found["runs"]] == [128, 256, 512, 1024, N]
    assert all(run["num_steps"] == 53 * round(N / run["expected_batch_size"]) for run in found["runs"])
    for run in found["runs"]:
        expected = sensitivity * run["noise_multiplier"] / run["expected_batch_size"]
        assert run["noise_level"] == pytest.approx(expected)


def test_noise_that_is_set_gives_the_epsilon_that_it_spends(capsys):
    noise = "--privacy.target_epsilon null --privacy.noise_multiplier 2 --trainer.max_steps 7"
    (run,) = answer(capsys, f"{CONFIG} {noise} --batch-size 64")["runs"]
    assert (run["num_steps"], run["noise_multiplier"]) == (7, 2.0)
    rate = 64 / N
    assert run["epsilon"] == compose([(2.0, rate, 7)], delta=1e-4, accountant="rdp")
    # What is compared replaces both limits of the length, and the noise.
    (run,) = answer(capsys, f"{CONFIG} {noise} --batch-size 64 --epochs 2 --epsilon 3")["runs"]
    assert (run["num_steps"], run["epsilon"]) == (2 * N // 64, 3.0)


def test_the_steps_that_are_timed_grow_until_they_are_long_or_full(monkeypatch):
    taken = []

    def seconds(settings, examples):
        taken.append((examples, settings["privacy"]["unit_of_privacy"], settings["trainer"]["devices"]))
        return 0.01 * examples

    monkeypatch.setattr(pricing, "_seconds_of_step", seconds)
    privacy = {"augmult": 1, "max_physical_batch_size": 1000, "unit_of_privacy": "example"}
    settings = {"privacy": privacy, "trainer": {"devices": 4}}
    assert pricing.seconds_per_example(settings) == pytest.approx(0.01)
    assert taken == [(16, "example", 1), (64, "example", 1)]
    taken.clear()
    privacy |= {"augmult": 4, "max_physical_batch_size": 30, "unit_of_privacy": "group", "images_per_group": 3}
    assert pricing.seconds_per_example(settings) == pytest.approx(0.03)
    assert taken == [(4, "example", 1), (7, "example", 1)]


def test_steps_are_timed_on_synthetic_images(capsys, monkeypatch, touched):
    released = []
    monkeypatch.setattr(pricing, "_LONG_ENOUGH", 0.0)
    fit = pricing.fit_on_synthetic_images

    def watched(settings, *, releases, **numbers):
        fit(settings, releases=lambda step, sums: released.append(sums) or releases(step, sums), **numbers)

    monkeypatch.setattr(pricing, "fit_on_synthetic_images", watched)
    (run,) = answer(capsys, f"{CONFIG} --batch-size 256 --measure")["runs"]
    assert run["seconds"] > 0
    assert [sum(map(torch.numel, sums.values())) for sums in released] == [D, D, D]
    assert not touched


def test_steps_are_timed_on_all_views_of_an_image(capsys, monkeypatch):
    shapes, own = set(), SmallCNNModule.training_step

    def watched(self, batch, batch_idx):
        shapes.add(tuple(batch[0].shape[1:]))
        return own(self, batch, batch_idx)

    monkeypatch.setattr(pricing, "_LONG_ENOUGH", 0.0)
    monkeypatch.setattr(SmallCNNModule, "training_step", watched)
    views = '{"scales":1,"angles":2,"mirror":true,"shift":true}'
    data = f"--data CachedFeatures --data.images Digits --data.backbone scattering --data.backbone_kwargs {views}"
    answer(capsys, f"{CONFIG} {data} --batch-size 64 --measure")
    assert shapes == {(4, 3, 4, 4)}


def no_images(self, batch, batch_idx):
    images, _, masks = batch
    return (images * masks).sum()


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ("--batch-size 10 1438", "expected_batch_size must be at most num_train = 1437"),
        ("--trainer.gradient_clip_val 1.0", "trainer.gradient_clip_val"),
        (
            "--privacy.target_epsilon null --privacy.noise_multiplier 0 --privacy.not_private true",
            "privacy.noise_multiplier is 0: the run adds no noise",
        ),
        ("--measure", "--measure: SmallCNNModule does not take"),
    ],
)
def test_what_cannot_be_planned_is_refused_by_name(capsys, monkeypatch, options, named):
    monkeypatch.setattr(SmallCNNModule, "training_step", no_images)
    with pytest.raises(SystemExit, match="2"):
        main(["plan", *CONFIG.split(), *options.split()])
    captured = capsys.readouterr()
    assert captured.out == ""
    assert named in " ".join(captured.err.split())

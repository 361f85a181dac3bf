"""``dpl plan``: its numbers are those of the plan and of closed forms, and nothing is read to get them."""

import json
import math

import pytest
import torch

from dp_lightning.cli import main
from dp_lightning.commands import pricing
from dp_lightning.commands.plan import batch_sizes_around
from dp_lightning.datamodules import Digits
from dp_lightning.lightning_modules import SmallCNNModule
from dp_lightning.privacy.accounting import epsilon
from dp_lightning.privacy.plan import RunShape

PLAIN = "--num-train 1000 --delta 1e-4 --epochs 3 --epsilon 2 --accountant rdp"
CONFIG = "--config configs/digits.yaml --privacy.accountant rdp --trainer.accelerator cpu"
N, D = 1437, 5050
# The trained matrices of the digits network: convolutions of 1 to 16 and 16 to 16 channels, 10 classes of 256 features.
SHAPES = [(16, 9), (16, 144), (10, 256)]


@pytest.fixture(autouse=True)
def _root(monkeypatch, request):
    monkeypatch.chdir(request.config.rootpath)


def answer(capsys, options):
    main(["plan", *options.split(), "--json"])
    (line,) = capsys.readouterr().out.splitlines()
    return json.loads(line)


def refusal(capsys, options):
    with pytest.raises(SystemExit) as ended:
        main(["plan", *options.split()])
    assert ended.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err


def test_every_combination_has_the_noise_of_its_own_plan(capsys):
    options = PLAIN.replace("--epochs 3 --epsilon 2", "--epochs 4,2 --epsilon 1,8")
    found = answer(capsys, f"{options} --batch_size 200,50 --num-parameters 400")["runs"]
    order = [(target, epochs, size) for target in (1, 8) for epochs in (2, 4) for size in (50, 200)]
    assert len(found) == len(order)
    for run, (target, epochs, size) in zip(found, order, strict=True):
        steps = epochs * 1000 // size
        shape = RunShape(num_train=1000, expected_batch_size=size, num_steps=steps, delta=1e-4)
        sigma = shape.calibrate(float(target), accountant="rdp").noise_multiplier
        assert run == {
            "at": f"epsilon {target}, {epochs} epochs",
            "epsilon": target,
            "epochs": epochs,
            "expected_batch_size": size,
            "num_steps": steps,
            "sample_rate": size / 1000,
            "noise_multiplier": sigma,
            "noise_level": pytest.approx(sigma / size),
            "noise_norm_over_clipping_norm": pytest.approx(sigma * math.sqrt(400) / size),
            "recovery": [],
            "detection": [],
            "seconds": None,
        }


def test_a_configuration_gives_its_numbers_and_the_shapes_of_its_model(capsys, monkeypatch):
    touched = []
    monkeypatch.setattr(Digits, "read_split", lambda self, split: touched.append(split))
    found = answer(capsys, CONFIG)
    assert (found["num_train"], found["unit_of_privacy"], found["delta"], found["accountant"]) == (
        N,
        "example",
        1e-4,
        "rdp",
    )
    assert found["num_parameters"] == D
    assert [(m["rows"], m["columns"], m["count"], m["bound"]) for m in found["matrices"]] == [
        (*shape, 1, 1.0) for shape in SHAPES
    ]
    assert [run["expected_batch_size"] for run in found["runs"]] == [128, 256, 512, 1024, N]
    for run in found["runs"]:
        size = run["expected_batch_size"]
        shape = RunShape(num_train=N, expected_batch_size=size, num_steps=53 * round(N / size), delta=1e-4)
        level = shape.calibrate(3.0, accountant="rdp").noise_multiplier / size
        assert run["recovery"] == pytest.approx([level * (m**0.5 + n**0.5) for m, n in SHAPES])
        assert run["detection"] == pytest.approx([level * (m * n) ** 0.25 for m, n in SHAPES])
        assert run["noise_norm_over_clipping_norm"] == pytest.approx(level * D**0.5)
    assert not touched


def test_under_per_layer_clipping_a_matrix_has_the_share_of_its_layer(capsys):
    flat = answer(capsys, f"{CONFIG} --batch-size 256")
    layers = answer(capsys, f"{CONFIG} --batch-size 256 --privacy.clipping per_layer --privacy.max_grad_norm 3")
    # Two convolutions, their norms, and the classifier.
    module = SmallCNNModule(num_classes=10, in_channels=1, image_size=8, channels=16)
    count = len({name.rpartition(".")[0] for name, _ in module.named_parameters()})
    assert [matrices["bound"] for matrices in layers["matrices"]] == pytest.approx([3 / count**0.5] * 3)
    (flat,), (layers,) = flat["runs"], layers["runs"]
    assert layers["noise_level"] == pytest.approx(3 * flat["noise_level"])
    assert layers["noise_norm_over_clipping_norm"] == pytest.approx(flat["noise_norm_over_clipping_norm"])
    assert layers["recovery"] == pytest.approx([count**0.5 * share for share in flat["recovery"]])


def test_noise_that_is_set_gives_the_epsilon_that_it_spends(capsys):
    noise = "--privacy.target_epsilon null --privacy.noise_multiplier 2 --trainer.max_steps 7"
    (run,) = answer(capsys, f"{CONFIG} {noise} --batch-size 64")["runs"]
    assert (run["num_steps"], run["noise_multiplier"]) == (7, 2.0)
    rate = 64 / N
    assert run["epsilon"] == epsilon(noise_multiplier=2.0, sample_rate=rate, num_steps=7, delta=1e-4, accountant="rdp")
    # What is compared replaces both limits of the length, and the noise.
    (run,) = answer(capsys, f"{CONFIG} {noise} --batch-size 64 --epochs 2 --epsilon 3")["runs"]
    assert (run["num_steps"], run["epsilon"]) == (2 * N // 64, 3.0)


def test_without_a_size_the_sample_rates_go_from_half_a_percent_to_twenty():
    assert batch_sizes_around(None, 50_000) == [256, 512, 1024, 2048, 4096, 8192]
    assert batch_sizes_around(None, 9) == batch_sizes_around(None, 1) == [1]


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


def test_steps_are_timed_on_synthetic_images(capsys, monkeypatch):
    touched, released = [], []
    monkeypatch.setattr(Digits, "read_split", lambda self, split: touched.append(split))
    monkeypatch.setattr(pricing, "_LONG_ENOUGH", 0.0)
    fit = pricing.fit_on_synthetic_images

    def watched(settings, loss, columns, releases, **numbers):
        fit(settings, loss, columns, lambda step, sums: released.append(sums) or releases(step, sums), **numbers)

    monkeypatch.setattr(pricing, "fit_on_synthetic_images", watched)
    found = answer(capsys, f"{CONFIG} --batch-size 256 --measure")
    (run,) = found["runs"]
    assert run["seconds"] == found["seconds_per_example"] * 53 * round(N / 256) * 256 > 0
    assert found["device"].endswith("CPU threads")
    assert [sum(map(torch.numel, sums.values())) for sums in released] == [D, D, D]
    assert not touched


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ("", "needs the --config of a run, such as wrn16_cifar10; or else --num-train"),
        (f"{PLAIN} --batch-size 1001,10", "expected_batch_size must be at most num_train = 1000"),
        (f"{PLAIN} --batch-size 10,x", "--batch-size/--batch_size: invalid list of int value: '10,x'"),
        (f"{PLAIN} --num-train 0", "--num-train must be an integer of at least 1"),
        (f"{PLAIN} --measure", "--measure times a model: give the --config"),
        (f"{PLAIN} --privacy.delta 1e-5", "unrecognized arguments without --config: --privacy.delta 1e-5"),
        (f"{CONFIG} --delta 1e-5", "--delta is for plans without a configuration. With --config, set --privacy.delta"),
        (f"{CONFIG} --trainer.gradient_clip_val 1.0", "trainer.gradient_clip_val"),
        (
            f"{CONFIG} --privacy.target_epsilon null --privacy.noise_multiplier 0 --privacy.not_private true",
            "privacy.noise_multiplier is 0: the run adds no noise",
        ),
    ],
)
def test_what_cannot_be_planned_is_refused_by_name(capsys, options, named):
    assert named in " ".join(refusal(capsys, options).split())


def test_a_module_that_takes_no_synthetic_images_cannot_be_timed(capsys, monkeypatch):
    def step(self, batch, batch_idx):
        images, _, masks = batch
        return (images * masks).sum()

    monkeypatch.setattr(SmallCNNModule, "training_step", step)
    assert "--measure: SmallCNNModule does not take" in refusal(capsys, f"{CONFIG} --measure")

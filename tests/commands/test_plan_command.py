"""``dpl plan``: its numbers are those of the plan and of closed forms, and nothing is read to get them."""

import base64
import html
import json
import math
import re

import pytest
import torch

from dp_lightning.cli import main
from dp_lightning.commands import timing
from dp_lightning.commands.plan import _parser
from dp_lightning.commands.plan_cells import Basis
from dp_lightning.datamodules import Digits
from dp_lightning.lightning_modules import SmallCNNModule
from dp_lightning.privacy.accounting import epsilon
from dp_lightning.privacy.clipping import ClipPlan
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
    found = answer(capsys, f"{options} --batch-size 200,50 --num-parameters 400 --max-grad-norm 0.5")["runs"]
    order = [(target, epochs, size) for target in (1, 8) for epochs in (2, 4) for size in (50, 200)]
    assert len(found) == len(order)
    for run, (target, epochs, size) in zip(found, order, strict=True):
        steps = epochs * 1000 // size
        shape = RunShape(num_train=1000, expected_batch_size=size, num_steps=steps, delta=1e-4)
        sigma = shape.calibrate(float(target), accountant="rdp").noise_multiplier
        assert run == {
            "epsilon": target,
            "epochs": epochs,
            "expected_batch_size": size,
            "num_steps": steps,
            "sample_rate": size / 1000,
            "noise_multiplier": sigma,
            "noise_level": pytest.approx(0.5 * sigma / size),
            "noise_norm_over_clipping_norm": pytest.approx(sigma * math.sqrt(400) / size),
            "recovery": [],
            "detection": [],
            "seconds": None,
        }


def test_a_configuration_gives_its_numbers_and_the_shapes_of_its_model(capsys, monkeypatch):
    touched = []
    monkeypatch.setattr(Digits, "read_split", lambda self, split: touched.append(split))
    found = answer(capsys, CONFIG)
    assert (found["num_train"], found["unit"], found["delta"], found["accountant"]) == (N, "examples", 1e-4, "rdp")
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


def test_a_plan_fits_a_terminal_and_names_every_number(capsys):
    many = "--batch-size 1,2,4,8,16,32,64,128,1000 --epochs 1,1000000 --num-parameters 123456789"
    main(["plan", *PLAIN.split(), *many.split(), "--matrix", "4096x36864,10x20,10x20"])
    text = capsys.readouterr().out
    lines = text.splitlines()
    assert max(map(len, lines)) <= 80
    heads = [line.split() for line in lines if " B " in f" {line} " and "epsilon" in line]
    assert ["epsilon", "epochs", "B", "T", "sigma", "noise", "sd", "norm", "/", "C"] in heads
    shapes = [line.split()[3:] for line in lines if line.split()[:3] == ["10", "x", "20"]]
    assert {count for count, *_ in shapes} == {"2"}
    assert sum(len(shares) - 2 for _, *shares in shapes) == 2 * 9  # without the factor: two lengths, nine sizes


def test_a_page_is_one_file_with_its_picture(capsys, tmp_path):
    found = answer(capsys, f"{CONFIG} --epsilon 1,3 --out {tmp_path}")
    page = (tmp_path / "plan.html").read_text()
    (picture,) = re.findall(r'src="data:image/svg\+xml;base64,([^"]+)"', page)
    assert not re.findall(r'(?:src|href)="(?!data:|#)', page)
    shown = html.unescape(page)
    for run in found["runs"]:
        assert f"<td>{run['noise_multiplier']:.4g}</td>" in re.sub(r'<td style="[^"]*">', "<td>", shown)
    for label in ("epsilon 1, 53 epochs", "epsilon 3, 53 epochs", "16 x 144", "norm of the noise / C"):
        assert label in base64.b64decode(picture).decode()


def test_without_a_size_the_sample_rates_go_from_half_a_percent_to_twenty():
    def sizes(num_train):
        clip_plan = ClipPlan.flat()
        return Basis(name="", num_train=num_train, delta=1e-9, accountant="rdp", clip_plan=clip_plan).batch_sizes

    assert sizes(50_000) == [256, 512, 1024, 2048, 4096, 8192]
    assert sizes(9) == [1]
    assert sizes(1) == [1]
    assert all(0.005 <= size / 1_281_167 <= 0.2 for size in sizes(1_281_167))


def test_time_is_that_of_all_steps(capsys, monkeypatch):
    monkeypatch.setattr("dp_lightning.commands.plan_configuration.seconds_per_example", lambda settings: 0.25)
    found = answer(capsys, f"{CONFIG} --batch-size 256,512 --measure")
    assert [run["seconds"] for run in found["runs"]] == [0.25 * 53 * round(N / size) * size for size in (256, 512)]
    assert found["device"].endswith("CPU threads")
    assert answer(capsys, f"{CONFIG} --batch-size 256")["runs"][0]["seconds"] is None


def test_the_steps_that_are_timed_grow_until_they_are_long_or_full(monkeypatch):
    taken = []

    def seconds(settings, examples):
        taken.append((examples, settings["privacy"]["unit_of_privacy"], settings["trainer"]["devices"]))
        return 0.01 * examples

    monkeypatch.setattr(timing, "_seconds_of_step", seconds)
    privacy = {"augmult": 1, "max_physical_batch_size": 1000, "unit_of_privacy": "example"}
    settings = {"privacy": privacy, "trainer": {"devices": 4}}
    assert timing.seconds_per_example(settings) == pytest.approx(0.01)
    assert taken == [(16, "example", 1), (64, "example", 1)]
    taken.clear()
    privacy |= {"augmult": 4, "max_physical_batch_size": 30, "unit_of_privacy": "group", "images_per_group": 3}
    assert timing.seconds_per_example(settings) == pytest.approx(0.03)
    assert taken == [(4, "example", 1), (7, "example", 1)]


def test_steps_are_timed_on_synthetic_images(capsys, monkeypatch):
    touched, released = [], []
    monkeypatch.setattr(Digits, "read_split", lambda self, split: touched.append(split))
    monkeypatch.setattr(timing, "_LONG_ENOUGH", 0.0)
    fit = timing.fit_on_synthetic_images

    def watched(settings, loss, columns, releases, **numbers):
        fit(settings, loss, columns, lambda step, sums: released.append(sums) or releases(step, sums), **numbers)

    monkeypatch.setattr(timing, "fit_on_synthetic_images", watched)
    found = answer(capsys, f"{CONFIG} --batch-size 256 --measure")
    assert found["seconds_per_example"] > 0
    assert [sum(map(torch.numel, sums.values())) for sums in released] == [D, D, D]
    assert not touched


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ("", "needs the --config of a run, such as configs/wrn16_cifar10.yaml; or else --num-train"),
        ("--num-train 1000 --delta 1e-4 --epochs 3", "or else --epsilon"),
        (f"{PLAIN} --batch-size 1001,10", "--batch-size has 1001; choose from 1 to the number of training examples"),
        (f"{PLAIN} --batch-size 0", "--batch-size has 0; choose from 1"),
        (f"{PLAIN} --batch-size 10,x", "--batch-size/--batch_size: invalid list of int value: '10,x'"),
        (f"{PLAIN} --epochs 3,0", "--epochs has 0"),
        (f"{PLAIN} --epsilon 1,-1", "--epsilon has -1; choose finite numbers above 0"),
        (f"{PLAIN} --epsilon nan", "--epsilon has nan"),
        (f"{PLAIN} --epsilon 1e-9", "cannot be reached"),
        (f"{PLAIN} --delta 0.01", "delta must be below 1/num_train"),
        (f"{PLAIN} --num-train 0", "--num-train has 0"),
        (f"{PLAIN} --num-parameters 0", "--num-parameters has 0"),
        (f"{PLAIN} --max-grad-norm 0", "max_grad_norm is 0"),
        (f"{PLAIN} --matrix 3x0", "--matrix: invalid list of shape value: '3x0'"),
        (f"{PLAIN} --measure", "--measure times a model: give the --config"),
        (f"{PLAIN} --privacy.delta 1e-5", "unrecognized arguments without --config: --privacy.delta 1e-5"),
        (f"{PLAIN} --out /dev/null/plan", "--out is /dev/null/plan"),
        (f"{CONFIG} --delta 1e-5", "--delta is for plans without a configuration. With --config, set --privacy.delta"),
        (f"{CONFIG} --num-train 5", "set --privacy.num_train"),
        (f"{CONFIG} --matrix 3x4", "--matrix: with --config, it is that of the configuration's model"),
    ],
)
def test_what_cannot_be_planned_is_refused_by_name(capsys, options, named):
    assert named in " ".join(refusal(capsys, options).split())


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        (
            "--privacy.target_epsilon null --privacy.noise_multiplier 0 --privacy.not_private true",
            "privacy.noise_multiplier is 0: the run adds no noise",
        ),
        ("--trainer.max_epochs 0", "leave no step to take; set at least one epoch or step"),
        ("--trainer.gradient_clip_val 1.0", "trainer.gradient_clip_val"),
        ('--privacy.frozen_until {"net.*":0.5}', "privacy.frozen_until: no trained parameter's name matches 'net.*'"),
        ("--batch-size 1438", "--batch-size has 1438; choose from 1 to the number of training examples, 1437"),
    ],
)
def test_a_configuration_that_cannot_run_is_refused_as_by_a_fit(capsys, settings, named):
    assert named in refusal(capsys, f"{CONFIG} {settings}")


def test_a_module_that_takes_no_synthetic_images_cannot_be_timed(capsys, monkeypatch):
    def step(self, batch, batch_idx):
        images, _, masks = batch
        return (images * masks).sum()

    monkeypatch.setattr(SmallCNNModule, "training_step", step)
    assert "--measure: SmallCNNModule does not take" in refusal(capsys, f"{CONFIG} --measure")


def test_underscores_and_dashes_mean_the_same():
    options = ["--batch_size", "1", "--num_train", "2", "--max_grad_norm", "3", "--num_parameters", "4"]
    assert _parser().parse_args(options) == _parser().parse_args([option.replace("_", "-") for option in options])

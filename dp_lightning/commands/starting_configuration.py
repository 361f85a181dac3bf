"""The configuration of a first private run, by rules that need only N, the images' form and the size of the network.

The noise in one privatized gradient has the norm nu = sigma C sqrt(d) / B, and the gradient itself at most C. At a
given number of steps T, nu hardly depends on B as long as B is at least N/4: a smaller batch gains less by sampling
than it loses by the division by B. So B = N/4, and T is small. With correlated noise, which a small network on
scattering coefficients takes, B = N/40 is as good in fewer epochs. docs/own_data.md shows what the rules give.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, NamedTuple

import torch
import yaml
from torch import nn

from dp_lightning.datamodules.survey import Survey
from dp_lightning.models import SmallCNN, WideResNet
from dp_lightning.models.feature_network import SCATTERING, FeatureNetwork
from dp_lightning.models.pretrained import without_weights
from dp_lightning.privacy.plan import PrivacyPlan, RunShape, best_bands, error_of_noise

#: Data sets of fewer images start with the features of a pretrained network, that of configs/probe_cifar10.yaml.
FEW_IMAGES, BACKBONE = 10_000, "vit_small_patch16_224.augreg_in21k"
#: The most that N delta may be: the number of persons that a mechanism which publishes each with probability delta, and
#: which the guarantee allows, would be expected to publish.
MOST_PUBLISHED = 0.1
# Sides of an image in pixels: the least, and the most that a pretrained network and one from scratch see.
_SMALLEST_SIDE, _FEATURE_SIDE, _SCRATCH_SIDE = 8, 224, 32
# The least B, where N is at least four times as large.
_SMALL_BATCH = 32
# The side of an image from which scattering has two scales, so that maps have four places a side, and four angles.
_TWO_SCALES, _FOUR_ANGLES = 16, 24
# Images of a person in one step, at most: each is a row that goes through the network.
_IMAGES_PER_PERSON = 4
# The noise of a step over C from which a run cannot be expected to learn.
_HOPELESS = 10.0
# The share of the training set that is held out where the data has no other images to evaluate on.
_VAL_FRACTION = 0.1


# Above the data, where its values have more than 8 bits.
_WINDOW = """\
# window: the values that are black and white; those between them get 256 levels, and others are clipped. These two
# follow from the lowest and the highest value of the images without noise. Replace them by what is known of such
# images, in the units of the files and no wider than what matters: soft tissue is [-160, 240] in Hounsfield units, and
# [864, 1264] in files that add 1,024 to them.
"""
_CACHED = "# The network runs once over each image; its cache is as private as the images.\n"
_MIRROR = """\
# Scattering needs no weights. Where a mirror image shows the same, mirror: true raises the accuracy by points.
"""


@dataclass(frozen=True)
class Model:
    """What a first run trains, and with which numbers; docs/own_data.md has the measurements.

    Attributes:
        class_path, settings: the LightningModule, and its init_args without what comes from the data.
        backbone: the network whose features one layer is trained on, in timm's registry, or ``scattering``, on which it
            is a small network; None for a network from scratch.
        weights: the file of the backbone's weights; None downloads timm's.
        share: N over B.
        largest_batch: B, at most; from scratch a larger one costs time (De et al. 2022).
        epochs: trainer.max_epochs.
        move: the most that the learning rate times the noise of a step may be, or of all steps on scattering.
        highest_rate: from scratch a larger rate costs little accuracy, but makes wrong answers too sure of themselves.
        rows: rows that go through the model at once, at most.
        comment: lines above the data in the file.
    """

    class_path: str
    settings: Mapping[str, Any]
    backbone: str | None = None
    weights: str | None = None
    share: int = 4
    largest_batch: int = 4096
    epochs: int = 50
    move: float = 0.04
    highest_rate: float = 0.3
    rows: int = 128
    comment: str = ""

    @classmethod
    def on_features(cls, backbone: str = BACKBONE, weights: str | None = None) -> "Model":
        """One layer on the features of a pretrained network, or two convolutions on scattering coefficients."""
        shared: dict[str, Any] = {"backbone": backbone, "weights": weights}
        if backbone == SCATTERING:
            shared |= {"share": 40, "epochs": 16, "move": 1.9, "highest_rate": 4.0, "rows": 512}
            return cls("SmallCNNModule", {"channels": 32}, **shared, comment=_CACHED + _MIRROR)
        tip = "# The weights have to come from public data; null downloads those of timm.\n"
        shared |= {"largest_batch": 16_384, "epochs": 25, "move": 0.15, "highest_rate": 1.0, "rows": 4096}
        return cls("LinearProbeModule", {}, **shared, comment=_CACHED + tip)

    @classmethod
    def from_scratch(cls, count: int) -> "Model":
        """The smaller network for few images: noise grows with the number of parameters."""
        if count < FEW_IMAGES:
            return cls("SmallCNNModule", {"channels": 16})
        return cls("WideResNetModule", {"depth": 16, "width": 4})

    @property
    def is_pretrained(self) -> bool:
        """Whether a network with weights sees the images, which it then gets in colour."""
        return self.backbone not in (None, SCATTERING)

    def backbone_kwargs(self, image_size: int) -> dict[str, Any]:
        """Those of the backbone; scattering has more angles where images have fewer pixels."""
        if self.backbone != SCATTERING:
            return {}
        scales, angles = 1 if image_size < _TWO_SCALES else 2, 8 if image_size < _FOUR_ANGLES else 4
        return {"scales": scales, "angles": angles, "mirror": False, "shift": True}

    def num_parameters(self, *, num_classes: int, in_channels: int, image_size: int) -> int:
        """The number d of parameters that are trained; no weights are read.

        Raises:
            ConfigurationError: the backbone is unknown.
        """
        trained: nn.Module
        shape: dict[str, Any] = {"num_classes": num_classes, "in_channels": in_channels}
        with torch.device("meta"), without_weights():
            if self.backbone is not None:
                none: dict[str, Any] = {"weights": None, "input_size": None, "mean": (0.5,), "std": (0.5,)}
                none["backbone_kwargs"] = self.backbone_kwargs(image_size)
                network = FeatureNetwork(self.backbone, **none, in_channels=in_channels)
                shape["in_channels"], image_size = network.length, network.map_size(image_size)
            if self.class_path == "SmallCNNModule":
                trained = SmallCNN(**shape, image_size=image_size, **self.settings)
            elif self.backbone is not None:
                trained = nn.Linear(network.length, num_classes)
            else:
                trained = WideResNet(**shape, **self.settings)
        return sum(parameter.numel() for parameter in trained.parameters())


class Start(NamedTuple):
    """The numbers of a first run.

    Attributes:
        plan: N, B, T, delta and sigma.
        noise_norm: nu over C, the norm of the noise that one gradient leaves over the most that one without noise has.
        learning_rate: of SGD with momentum, before the schedule, in one digit. The noise of one step, without
            momentum, moves the weights by ``Model.move`` at most; on scattering coefficients that of all steps does.
    """

    plan: PrivacyPlan
    noise_norm: float
    learning_rate: float


def start_of(
    num_train: int, num_parameters: int, model: Model, *, epsilon: float = 3.0, delta: float | None = None
) -> Start:
    """The numbers for N images or persons and a model with d parameters; ``delta`` None takes that of `delta_for`.

    Raises:
        ConfigurationError: epsilon cannot be reached, or a number is out of its range.
    """
    batch = max(1, num_train // model.share, min(num_train // 4, _SMALL_BATCH))
    unit = 10 ** max(0, len(str(batch)) - 2)  # B has two significant digits
    shape = RunShape.of_length(
        num_train=num_train,
        expected_batch_size=min(batch // unit * unit, model.largest_batch),
        delta=delta_for(num_train) if delta is None else delta,
        max_epochs=model.epochs,
    )
    plan, steps = shape.calibrate(epsilon), 1.0
    noise = plan.noise_level(sensitivity=1.0) * math.sqrt(num_parameters)  # its norm over C
    if model.backbone == SCATTERING:
        shape = replace(shape, bands=best_bands(shape, epsilon))
        noise *= error_of_noise(shape, epsilon)
        plan, steps = shape.calibrate(epsilon), 3 / 8 * plan.num_steps  # the sum of a cosine schedule's squares
    return Start(plan, noise, float(f"{min(model.highest_rate, model.move / (noise * math.sqrt(steps))):.0e}"))


def delta_for(num_train: int) -> float:
    """The largest power of ten for which N delta is at most 0.1."""
    exponent = math.ceil(math.log10(num_train / MOST_PUBLISHED) - 1e-9)
    return float(f"1e-{exponent}")


def proposed_window(low: float, high: float) -> list[float]:
    """A window around these values, whose ends are multiples of a power of two of about a tenth of their range."""
    step = 2.0 ** (math.frexp(high - low)[1] - 4)
    first = math.floor(low / step)
    return [first * step, max(math.ceil(high / step), first + 1) * step]


def configuration(
    survey: Survey,
    data: tuple[str, Mapping[str, Any]],
    model: Model,
    *,
    epsilon: float,
    delta: float | None,
    name: str,
) -> tuple[str, list[str]]:
    """The YAML text of the run, with comments that say where its numbers come from, and warnings about these numbers.

    Args:
        survey: of the data; files that cannot be read do not count, since the run needs them removed.
        data: the data module, and its settings that say where the images are and whose they are.
        name: of the file, as it is given to ``dpl fit``.

    Raises:
        ConfigurationError: the budget cannot be reached, or the backbone is unknown.
    """
    persons, (class_path, given) = survey.images_of_persons, data
    unit, units = ("images", len(survey.readable)) if persons is None else ("persons", len(persons))
    settings = dict(given)
    held_out = round(_VAL_FRACTION * units) if survey.splits == ("train",) else 0
    if held_out:
        settings["val_fraction"] = _VAL_FRACTION
    size, channels = survey.median_side, survey.readable[0].channels
    if class_path != "NpzImages":
        side, most = survey.median_side, _FEATURE_SIDE if model.is_pretrained else _SCRATCH_SIDE
        if not model.is_pretrained:  # which resizes images itself
            side = side // 4 * 4
        size = settings["image_size"] = min(max(side, _SMALLEST_SIDE), most)
        channels = 1 if survey.is_grey and not model.is_pretrained else 3
        if channels == 1:
            settings["in_channels"] = 1
    d = model.num_parameters(num_classes=len(survey.class_names), in_channels=channels, image_size=size)
    start = start_of(units - held_out, d, model, epsilon=epsilon, delta=delta)
    plan, images, rows = start.plan, {"class_path": class_path, "init_args": settings}, 1
    privacy: dict[str, Any] = {
        "target_epsilon": float(epsilon),
        "delta": plan.delta,
        "expected_batch_size": plan.expected_batch_size,
        "max_grad_norm": 1.0,
    }
    if model.backbone == SCATTERING:
        privacy["bands"] = "auto"
    if persons is not None:
        rows = min(_IMAGES_PER_PERSON, round(median(persons.values())))
        privacy |= {"unit_of_privacy": "group", "images_per_group": rows}
    # Half of the draws have more than B.
    privacy["max_physical_batch_size"] = min(2 * plan.expected_batch_size * rows, model.rows)
    if model.backbone is None:
        settings["augment"] = False
    else:
        network = (
            {"weights": model.weights} if model.is_pretrained else {"backbone_kwargs": model.backbone_kwargs(size)}
        )
        features = {"images": images, "backbone": model.backbone, **network, "cache": "features"}
        images = {"class_path": "CachedFeatures", "init_args": features}
    trained = {"class_path": model.class_path, **({"init_args": dict(model.settings)} if model.settings else {})}
    optimizer = {"class_path": "torch.optim.SGD", "init_args": {"lr": start.learning_rate, "momentum": 0.9}}
    text = f"""\
# Written by `dpl init`. Train with: dpl fit --config {name}
# What is released of the run makes public N, the number of training {unit} ({plan.num_train:,}), the names of the
# classes, and the settings in this file. No noise protects those that follow from the sizes, colours or number of the
# images: set them yourself if they must not depend on the data.
# The seed is that of the first weights and the validation split; noise and sampling take secret keys.
seed_everything: 42

# {d:,} parameters are trained.
{_yaml(model=trained)}
{model.comment}{_WINDOW if "window" in settings else ""}{_yaml(data=images)}
# The noise is solved for target_epsilon: sigma {plan.noise_multiplier:.2f}.
# By default delta is the largest power of ten with N delta <= {MOST_PUBLISHED:g}.
# B is N/{round(plan.num_train / plan.expected_batch_size)}, in {unit}; the run takes {plan.num_steps:,} steps.
# A step leaves as much as independent noise {start.noise_norm:,.2f} times as long as a clipped gradient can be.
# max_physical_batch_size bounds memory, in images, and changes nothing else.
{_yaml(privacy=privacy)}
# The rate is as high as the noise allows. Each further run on these images spends its own epsilon.
{_yaml(optimizer=optimizer)}lr_scheduler:
  class_path: WarmupCosine
trainer:
  accelerator: auto
  devices: 1
  max_epochs: {model.epochs}
  check_val_every_n_epoch: {math.gcd(model.epochs, 20)}
  log_every_n_steps: 10
"""
    warnings = []
    if held_out:
        warnings.append(
            f"No images for validation or test were found: {held_out:,} of the {units:,} training {unit} are held out."
        )
    if (published := plan.num_train * plan.delta) > MOST_PUBLISHED * (1 + 1e-9):
        warnings.append(
            f"N delta is {published:.2g}: the guarantee allows a method that publishes so many {unit} whole. Choose a "
            f"delta of at most {MOST_PUBLISHED / plan.num_train:.1g}, so that N delta is at most {MOST_PUBLISHED:g}."
        )
    if start.noise_norm > _HOPELESS:
        fewer = ", or leave out --from-scratch" if model.backbone is None else ""
        warnings.append(f"So much noise probably leaves nothing to learn. Collect more images or raise epsilon{fewer}.")
    if model.is_pretrained and model.weights is None:
        warnings.append(
            "The first run downloads the weights. Offline, give --weights, --from-scratch or --backbone scattering."
        )
    return text, warnings


def _yaml(**groups: Any) -> str:
    return yaml.safe_dump(groups, sort_keys=False, allow_unicode=True, width=1000)

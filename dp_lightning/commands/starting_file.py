"""The configuration that `dpl init` writes, with comments that say where each number comes from."""

from dataclasses import dataclass
from typing import Any

import yaml

from dp_lightning.commands.starting_model import Features, Network
from dp_lightning.commands.starting_point import MAX_GRAD_NORM, MOMENTUM, StartingPoint
from dp_lightning.foreign_text import printable

# Rows that go through the model at once, at most: features are small.
_PHYSICAL, _PHYSICAL_MAPS, _PHYSICAL_FEATURES = 128, 512, 4096


@dataclass(frozen=True)
class Content:
    """What the file says.

    Attributes:
        name: of the file, as it is given to `dpl fit`.
        class_path: of the data module.
        settings: its init_args.
        model: what is trained.
        start: the numbers.
        epsilon: the budget.
        images_per_person: privacy.images_per_group; None where each image is an example.
    """

    name: str
    class_path: str
    settings: dict[str, Any]
    model: Features | Network
    start: StartingPoint
    epsilon: float
    images_per_person: int | None = None

    @property
    def text(self) -> str:
        """The YAML file."""
        return "\n".join(
            [*self._head(), "", *self._model(), "", *self._data(), "", *self._privacy(), "", *self._rest()]
        )

    @property
    def _unit(self) -> str:
        return "images" if self.images_per_person is None else "persons"

    def _head(self) -> list[str]:
        plan = self.start.plan
        persons = "" if self.images_per_person is None else ", or from the number of images of a person"
        return [
            f"# Written by `dpl init`. Train with: dpl fit --config {printable(self.name)}",
            "#",
            f"# What is released of the run makes public N, the number of training {self._unit} ({plan.num_train:,}),",
            "# the names of the classes, and the settings in this file. No noise protects those that follow from the",
            f"# sizes and colours of the images{persons}: set them yourself if they must not depend on the data.",
            "seed_everything: 42 # the first weights and the validation split; noise and sampling take secret keys",
        ]

    def _model(self) -> list[str]:
        if isinstance(self.model, Features):
            layer = f"  class_path: LinearProbeModule # one layer, {self.start.num_parameters:,} parameters"
            return ["model:", layer, *(["  init_args: {normalize: unit}"] if self.model.scatters else [])]
        lines = ["model:", f"  class_path: {self.model.class_path} # {self.start.num_parameters:,} parameters"]
        return lines + (_mapping("init_args", self.model.settings, 2) if self.model.settings else [])

    def _data(self) -> list[str]:
        if isinstance(self.model, Network):
            return ["data:", f"  class_path: {self.class_path}", *_mapping("init_args", self.settings, 2)]
        weights = self.model.weights
        network = [
            f"    backbone: {_value(self.model.backbone)} # its weights have to come from public data",
            f"    weights: {_value(weights)}{' # downloads those of timm' if weights is None else ''}",
        ]
        if self.model.scatters:
            network = [
                "    backbone: scattering # wavelets, which have no weights and need no other data",
                "    backbone_kwargs:",
                "      mirror: false # true if a mirror image shows the same, as with most photographs",
            ]
        return [
            "data:",
            "  class_path: CachedFeatures # the network runs once over each image; later runs read the cache",
            "  init_args:",
            "    images:",
            f"      class_path: {self.class_path}",
            *_mapping("init_args", self.settings, 6),
            *network,
            "    cache: features # as private as the images",
        ]

    def _privacy(self) -> list[str]:
        plan = self.start.plan
        per_person = [] if self.images_per_person is None else ["  unit_of_privacy: group # one person with all images"]
        if self.images_per_person is not None:
            per_person.append(f"  images_per_group: {self.images_per_person} # drawn of a person for each step")
        rows = plan.expected_batch_size * (self.images_per_person or 1)
        physical = min(rows, _PHYSICAL)
        if isinstance(self.model, Features):
            physical = min(rows, _PHYSICAL_MAPS if self.model.scatters else _PHYSICAL_FEATURES)
        return [
            "privacy:",
            f"  target_epsilon: {float(self.epsilon)} # the noise is solved for it: sigma {plan.noise_multiplier:.2f}",
            f"  delta: {plan.delta:.1e} # the largest power of ten that is at most 1/(2N)",
            f"  expected_batch_size: {plan.expected_batch_size} # B, in {self._unit}: a quarter of N",
            f"  max_grad_norm: {MAX_GRAD_NORM} # C; the noise is {times(self.start.noise_norm)}",
            f"  max_physical_batch_size: {physical} # images at once; bounds memory and changes nothing else",
            *per_person,
        ]

    def _rest(self) -> list[str]:
        noisy = "as high as the noise allows" if self.start.limited_by_noise else "the noise would allow more"
        return [
            "optimizer:",
            "  class_path: torch.optim.SGD",
            "  init_args:",
            f"    lr: {self.start.learning_rate} # {noisy}; each further run on these images spends its own epsilon",
            f"    momentum: {MOMENTUM}",
            "",
            "lr_scheduler:",
            "  class_path: WarmupCosine",
            "",
            "trainer:",
            "  accelerator: auto",
            "  devices: 1",
            f"  max_epochs: {self.start.epochs} # {self.start.plan.num_steps:,} steps",
            "  check_val_every_n_epoch: 5",
            "  log_every_n_steps: 10",
            "",
        ]


def _mapping(name: str, values: dict[str, Any], indent: int) -> list[str]:
    blank = " " * indent
    return [f"{blank}{name}:", *(f"{blank}  {key}: {_value(value)}" for key, value in values.items())]


def _value(value: Any) -> str:
    """A value on one line."""
    text = yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, width=10**9)
    return text.removesuffix("\n").removesuffix("\n...")


def times(ratio: float) -> str:
    """How long something is, in words, before "as ..."."""
    number = f"{ratio:.2g}"
    return "as long" if number == "1" else f"{number} times as long"

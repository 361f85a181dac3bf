"""What a plan takes from a configuration: its settings, the shapes of its model, and the time of its gradients."""

from collections import Counter
from collections.abc import Sequence
from typing import Any, cast

import torch

from dp_lightning.commands.composition import Composer, prepare_to_train
from dp_lightning.commands.plan_cells import Basis, Matrices
from dp_lightning.commands.pricing import length_of
from dp_lightning.commands.timing import seconds_per_example
from dp_lightning.errors import ConfigurationError
from dp_lightning.postprocess.matrix import is_matrix


def basis_of(arguments: Sequence[str], *, measure: bool) -> Basis:
    """The basis of a plan for these options of ``dpl fit``.

    Args:
        measure: time a few private steps on synthetic images.

    Raises:
        DpLightningError: as ``dpl fit`` would, for wrong settings; if nothing is private, or nothing can be timed.
    """
    settings = Composer()(arguments)
    cli, num_train = prepare_to_train(settings)
    privacy, trainer = cli.privacy, settings["trainer"]
    if privacy.noise_multiplier == 0:
        raise ConfigurationError("privacy.noise_multiplier is 0: the run adds no noise, so there is nothing to plan.")
    shapes = {name: p.shape for name, p in cli.model.named_parameters() if p.requires_grad}
    groups = privacy.clip_plan.groups(shapes)
    bounds = dict(zip(groups, privacy.clip_plan.bounds(groups), strict=True))
    bound_of = {name: bounds[label] for label, names in groups.items() for name in names}
    counted = Counter(
        (shape[0], shape[1:].numel(), bound_of[name]) for name, shape in shapes.items() if is_matrix(shape)
    )
    seconds, device = None, cli.trainer.strategy.root_device.type
    if measure:
        seconds = seconds_per_example(settings)
        if seconds is None:
            raise ConfigurationError(
                f"--measure: {type(cli.model).__name__} does not take a batch of synthetic images of the data's shape. "
                "Remove --measure."
            )
    return Basis(
        name=f"{type(cli.model).__name__}, {type(cast(Any, cli.datamodule)).__name__}",
        num_train=num_train,
        delta=privacy.delta,
        accountant=privacy.accountant,
        clip_plan=privacy.clip_plan,
        unit="examples" if privacy.unit_of_privacy == "example" else "persons",
        batch_size=privacy.expected_batch_size,
        **length_of(trainer),
        epsilon=privacy.target_epsilon,
        noise_multiplier=privacy.noise_multiplier,
        num_parameters=sum(shape.numel() for shape in shapes.values()),
        matrices=tuple(Matrices(*shape[:2], count, shape[2]) for shape, count in counted.items()),
        seconds_per_example=seconds,
        device=None if seconds is None else _name_of(device),
    )


def _name_of(device: str) -> str:
    if device == "cuda":
        return torch.cuda.get_device_name()
    return f"{torch.get_num_threads()} CPU threads" if device == "cpu" else device

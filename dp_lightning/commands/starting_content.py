"""The configuration that fits what was found in a data set."""

from collections.abc import Mapping
from statistics import median
from typing import Any

from dp_lightning.commands.starting_file import Content
from dp_lightning.commands.starting_model import Features, Network
from dp_lightning.commands.starting_point import starting_point
from dp_lightning.datamodules.survey import Survey
from dp_lightning.errors import DataError

# Images of a person in one step, at most: each is a row that goes through the network.
_IMAGES_PER_PERSON = 4
# Of the training set, where the data has no other images to evaluate on.
_VAL_FRACTION = 0.1


def content_for(
    survey: Survey,
    class_path: str,
    settings: Mapping[str, Any],
    model: Features | Network,
    *,
    epsilon: float,
    name: str,
) -> Content:
    """The content of the file.

    Args:
        survey: of the data; files that cannot be read do not count, since the run needs them removed.
        class_path, settings: the data module, and where its images are and whose they are.
        model: what is trained.
        epsilon: the budget.
        name: of the file, as it is given to a command.

    Raises:
        ConfigurationError: the budget cannot be reached, or the backbone is unknown.
        DataError: there are too few images to train on.
    """
    persons = survey.images_of_persons
    units = len(survey.readable) if persons is None else len(persons)
    chosen = dict(settings)
    held_out = round(_VAL_FRACTION * units) if set(survey.looks) == {"train"} else 0
    if held_out:
        chosen["val_fraction"] = _VAL_FRACTION
    if units - held_out < 2:
        raise DataError(f"There is {units} training example; a private run needs some hundreds at least.")
    image_size, channels = survey.readable[0].height, survey.readable[0].channels
    if class_path == "ImageFolder":
        image_size = chosen["image_size"] = model.image_size(survey.median_side)
        channels = 1 if survey.is_grey and not model.has_seen_colours else 3
        if channels == 1:
            chosen["in_channels"] = 1
    if isinstance(model, Network):
        chosen["augment"] = False
    facts = {"num_classes": len(survey.class_names), "image_size": image_size}
    start = starting_point(
        units - held_out,
        model.num_parameters(in_channels=channels, **facts),
        epsilon=epsilon,
        features=isinstance(model, Features),
        unit=isinstance(model, Features) and model.scatters,
    )
    per_person = None if persons is None else min(_IMAGES_PER_PERSON, round(median(persons.values())))
    return Content(name, class_path, chosen, model, start, epsilon, per_person)


def from_scratch(content: Content, survey: Survey) -> Content:
    """The same run from scratch, to compare with."""
    model = Network.for_images(len(survey.readable))
    given = {
        key: value
        for key, value in content.settings.items()
        if key not in ("image_size", "in_channels", "val_fraction", "augment")
    }
    return content_for(survey, content.class_path, given, model, epsilon=content.epsilon, name=content.name)

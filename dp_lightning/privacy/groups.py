"""Where the unit of privacy is a person: which elements of a training set are of one person, and which are read.

A data set tells the person of each element by its attribute ``groups``: a sequence with one id per element. Elements
with the same id are one person, wherever they stand. ``Subset`` and ``ConcatDataset`` are looked through. One example
of a step is then a person, and its rows are ``images_per_group`` of the person's elements: always the same number, so
that no size and no scale tells how many elements a person has.
"""

import hashlib
from typing import Any

import numpy as np

from dp_lightning.errors import ConfigurationError
from dp_lightning.privacy.person_ids import Group, groups_of
from dp_lightning.privacy.randomness import host_generator, keys_from

# Tells these keys from the others of a reproducible run.
_DRAWS_OF_IMAGES = 3


class Groups:
    """The persons of a training set, in the order of their ids.

    Args:
        dataset: a map-style data set with ``groups``, or a combination of such.
        images_per_group: k, how many elements of a person are drawn for each step.
        seed: fixes the draws: each follows from the seed, the step and the person's id. None takes secret keys.

    Raises:
        ConfigurationError: where the data set tells no groups.
        DataError: where an id is missing, or is neither text nor a whole number.
    """

    def __init__(self, dataset: Any, images_per_group: int, *, seed: int | None = None) -> None:
        ids = groups_of(dataset)
        if ids is None:
            raise ConfigurationError(
                "privacy.unit_of_privacy is group, but the training set tells no groups. Name them: "
                "data.init_args.group_folders or group_file of ImageFolder, the array train_groups of NpzImages, or an "
                "attribute `groups` of a data set of your own, a sequence with the id of the person of each element."
            )
        self.images_per_group, self._seed = images_per_group, seed
        places: dict[Group, list[int]] = {}
        for place, group in enumerate(ids):
            places.setdefault(group, []).append(place)
        #: The id of each person. Their order follows from no number of images, and so neither does that of a sum.
        self.ids = sorted(places)  # all of them are numbers, or all text
        self._places = [np.array(places[group]) for group in self.ids]

    def __len__(self) -> int:
        """The number of persons."""
        return len(self.ids)

    def draw(self, person: int, step: int) -> list[int]:
        """k places in the data set of one person's elements, in random order.

        They are drawn without replacement, or with replacement where the person has fewer than k.

        Args:
            person: position in ``ids``.
            step: number of the logical step.
        """
        own = self._places[person]
        name = np.frombuffer(hashlib.sha256(repr(self.ids[person]).encode()).digest(), dtype=np.uint32)
        generator = host_generator(keys_from(self._seed, _DRAWS_OF_IMAGES, step, *name.tolist()))
        size = self.images_per_group
        drawn: list[int] = generator.choice(own, size, replace=len(own) < size).tolist()
        return drawn

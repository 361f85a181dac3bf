"""A person as the unit of privacy: one example of a step, however many images the person has."""

import math
from collections import Counter

import numpy as np
import pytest
import torch
from small_steps import plan_of, released
from torch import nn
from torch.nn import functional as F
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

from dp_lightning.errors import ConfigurationError, DataError
from dp_lightning.privacy import PrivateStep
from dp_lightning.privacy.groups import Groups
from dp_lightning.privacy.person_ids import groups_of
from dp_lightning.privacy.reading import Reading

#: How many images the persons have. The one in the middle has none that the others resemble.
SIZES = {"a": 1, "b": 20, "c": 3, "d": 7, "e": 2, "f": 20, "g": 1, "h": 4, "i": 11}
ROWS = 4
#: Rounding of sums of nine float32 vectors of length one.
ALLOWED = 1 + 1e-5


class Images(Dataset):
    """Images of persons in mixed order; an element is (image, label, its number, that of its person)."""

    def __init__(self, sizes, *, left_out=()):
        owners = sorted((number * 0.618 % 1, person) for person in sizes for number in range(1, sizes[person] + 1))
        self.groups = [person for _, person in owners if person not in left_out]
        generators = {person: torch.Generator().manual_seed(ord(person)) for person in sizes}
        scale = {"d": 30.0, "b": 1e4}
        self.x = [torch.randn(5, generator=generators[p]) * scale.get(p, 1.0) for p in self.groups]

    def __len__(self):
        return len(self.groups)

    def __getitem__(self, index):
        person = ord(self.groups[index])
        return self.x[index], person % 3, index, person


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))


def mean_loss(model, x, y):
    return F.cross_entropy(model(x), y)


def sum_loss(model, x, y):
    return F.cross_entropy(model(x), y, reduction="sum")


def statistics_loss(model, x, y):
    """Sees all images of the person together: a function of one example all the same."""
    return F.cross_entropy(model((x - x.mean(0)) / (x.std(0) + 0.1)), y)


def private_step(dataset, ways="together", loss=mean_loss, *, seed=0, k=ROWS, augmult=1, **kwargs):
    model, persons = network(), len(set(dataset.groups))
    reading = Reading(images_per_group=k, augmult=augmult)
    settings = {"reading": reading, "max_physical_batch_size": 3 * k, "seed": seed, "examples": ways}
    settings["plan"] = plan_of(persons)
    return PrivateStep(model, lambda batch: loss(model, *batch[:2]), dataset, **{**settings, **kwargs})


def sums(*args, **kwargs):
    """The sum of each of two steps, without noise and at the same weights."""
    private = private_step(*args, **kwargs)
    return [private.plan.expected_batch_size * released(private).double() for _ in range(2)]


def distance(some, others):
    """The largest L2 distance of two sums of one step."""
    return max(float((a - b).norm()) for a, b in zip(some, others, strict=True))


@pytest.mark.parametrize(
    ("ways", "loss"),
    [
        ("together", mean_loss),
        ("together", sum_loss),
        ("together", statistics_loss),
        ("one_by_one", mean_loss),
        ("one_by_one", statistics_loss),
    ],
)
def test_leaving_a_person_out_moves_a_sum_by_at_most_the_sensitivity(ways, loss):
    whole = sums(Images(SIZES), ways, loss)
    people = SIZES if (ways, loss) == ("together", mean_loss) else "bg"
    found = [distance(whole, sums(Images(SIZES, left_out=person), ways, loss)) for person in people]
    assert max(found) <= ALLOWED
    assert max(found) >= 0.9  # the outliers are clipped, so that the bound is met


@pytest.mark.parametrize("size", [2, 4, 20])
def test_a_person_of_any_number_of_images_counts_once(size):
    """All images of the person are alike, so that no draw hides a scale."""

    class Alike(Images):
        def __init__(self, sizes, **kwargs):
            super().__init__(sizes, **kwargs)
            self.x = [torch.full((5,), 50.0) if p == "d" else x for p, x in zip(self.groups, self.x, strict=True)]

    sizes = {"a": 1, "d": size, "e": 2}
    one = sums(Alike({**sizes, "d": 1}), loss=sum_loss)
    several, without = (sums(Alike(sizes, left_out=names), loss=sum_loss) for names in ((), "d"))
    assert distance(one, several) == 0
    assert 0 < distance(one, without) <= ALLOWED


# What is drawn


def test_draws_take_the_persons_own_images_without_replacement_where_there_are_enough():
    dataset = Images(SIZES)
    groups = Groups(dataset, ROWS)
    assert len(groups) == len(SIZES)
    for person, name in enumerate(groups.ids):
        for step in range(20):
            drawn = groups.draw(person, step)
            assert len(drawn) == ROWS
            assert {dataset.groups[place] for place in drawn} == {name}
            assert len(set(drawn)) == ROWS or SIZES[name] < ROWS


@pytest.mark.parametrize(("size", "k"), [(5, 2), (3, 4)])
def test_every_image_of_a_person_is_drawn_equally_often(size, k):
    groups = Groups(Images({"a": 1, "b": size}), k)
    counts = Counter(place for step in range(2000) for place in groups.draw(groups.ids.index("b"), step))
    expected = 2000 * k / size
    # Five standard deviations of a count of independent draws, which is more than that without replacement.
    assert all(abs(count - expected) < 5 * math.sqrt(expected) for count in counts.values())
    assert len(counts) == size


def test_the_draws_of_a_person_follow_from_nobody_else():
    everyone, rest = Images(SIZES), Images(SIZES, left_out="ab")
    for step in range(5):
        drawn = []
        for dataset in (everyone, rest):
            groups = Groups(dataset, 2, seed=3)
            own = {p: [place for place, q in enumerate(dataset.groups) if q == p] for p in groups.ids}
            places = {p: groups.draw(index, step) for index, p in enumerate(groups.ids)}
            drawn.append({p: [own[p].index(place) for place in places[p]] for p in places})
        assert {p: places for p, places in drawn[0].items() if p not in "ab"} == drawn[1]


def test_draws_of_a_seed_are_repeated_and_others_are_not():
    def drawn(seed):
        groups = Groups(Images(SIZES), 4, seed=seed)
        return [groups.draw(person, step) for person in range(len(groups)) for step in range(4)]

    assert drawn(7) == drawn(7)
    assert drawn(7) != drawn(8)
    assert drawn(None) != drawn(None)


# Which images are of one person

X = torch.randn(6, 2)


def told(groups, count=6):
    dataset = TensorDataset(X[:count])
    dataset.groups = groups
    return dataset


SAME = [7, 8, 7, 7, 9, 8]


@pytest.mark.parametrize(
    ("dataset", "expected"),
    [
        (TensorDataset(X), None),
        (told(SAME), SAME),
        (told(torch.tensor(SAME)), SAME),
        (told([7.0, np.float64(8), np.int64(7), 7, 9, 8]), SAME),
        # e and an accent, as one character and as two.
        (told(["Ren\u00e9", "Rene\u0301", "q", "q", "r", "r"]), ["Ren\u00e9", "Ren\u00e9", "q", "q", "r", "r"]),
        (told(["p", " p ", "q", np.str_("q"), "r", "r"]), ["p", "p", "q", "q", "r", "r"]),
        (Subset(Subset(told(SAME), [4, 0, 1]), torch.tensor([2, 0])), [8, 9]),
        (ConcatDataset([told(SAME), told([9, 1], 2)]), [*SAME, 9, 1]),
        (ConcatDataset([told(SAME), TensorDataset(X)]), None),
        (ConcatDataset([Subset(told(SAME), [1]), Subset(told(SAME), [0, 2])]), [8, 7, 7]),
    ],
)
def test_groups_are_found_however_data_sets_are_put_together(dataset, expected):
    assert groups_of(dataset) == expected
    if expected is not None:
        assert len(Groups(dataset, 1)) == len(set(expected))


@pytest.mark.parametrize("missing", [None, math.nan, "  ", "NaN", "<NA>", -1])
def test_a_person_without_an_id_is_refused(missing):
    others = 5 if isinstance(missing, int | float) else "p"
    with pytest.raises(DataError, match=r"TensorDataset, element 3.*missing"):
        groups_of(told([others, others, others, missing, others, others]))


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ([1, 1, 2], "has 3 ids for 6 elements"),
        ([[1], [2], [1], [2], [1], [2]], r"element 0: the id is \[1\] \(list\)"),
        ([1, 2, 1, 2, 1.5, 2], r"element 4: the id is 1.5 \(float\)"),
        (2**24 + torch.arange(6).float(), r"the id is 16777216\.0.* integers or text"),  # rounded: of several persons
        ([True] * 6, r"the id is True \(bool\)"),
        ([1, 2, "1", 2, 1, 2], r"some ids are numbers and some are text"),
        (5, "is not a sequence"),
    ],
)
def test_what_is_no_id_is_refused(groups, message):
    with pytest.raises(DataError, match=message):
        groups_of(told(groups))


# What is refused


def test_data_without_groups_is_refused_with_the_ways_to_tell_them():
    model, reading = nn.Linear(2, 1), Reading(images_per_group=2)
    with pytest.raises(
        ConfigurationError, match=r"unit_of_privacy is group.*group_folders or group_file.*train_groups"
    ):
        PrivateStep(model, lambda batch: batch[0].sum(), TensorDataset(X), plan=plan_of(6), reading=reading)


def test_a_plan_for_another_number_of_persons_is_refused():
    dataset = Images(SIZES)
    with pytest.raises(ConfigurationError, match=f"has 9 persons, but the plan was made for num_train {len(dataset)}"):
        private_step(dataset, plan=plan_of(len(dataset)))


def test_a_record_that_stands_twice_in_a_group_is_refused():
    dataset = Subset(Images(SIZES), [0, 1, 2, 1])
    dataset.groups = ["x"]
    with pytest.raises(ConfigurationError, match="Examples 1 and 3 of the training set are the same record"):
        private_step(dataset, plan=plan_of(len(set(groups_of(dataset)))))

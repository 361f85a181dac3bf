"""Whatever is random in training takes secret keys, or reproducible ones where a run asks for them."""

import itertools
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from dp_lightning.privacy.randomness import TrainingRandomness
from dp_lightning.privacy.reading import ExampleReader, Reading
from dp_lightning.privacy.sampling import PhysicalBatch

PLACE, OTHER = PhysicalBatch(3, 1, (0,), pieces=3), PhysicalBatch(3, 2, (0,), pieces=3)


def drawn():
    return torch.rand(3).tolist(), np.random.rand(3).tolist(), [random.random() for _ in range(3)]


@pytest.fixture(autouse=True)
def _public_seeds():
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()
    publicly_seeded()
    yield
    torch.set_rng_state(states[0])
    np.random.set_state(states[1])
    random.setstate(states[2])


def publicly_seeded(worker_id=0):
    torch.manual_seed(worker_id)
    np.random.seed(worker_id)
    random.seed(worker_id)


def after_start(seed, rank=0):
    publicly_seeded()
    TrainingRandomness(seed, rank=rank).before_step(PLACE)
    return drawn()


def assert_all_differ(*found):
    """No two of several draws have a number, or a list of numbers, in common at one place."""
    for first, second in itertools.combinations(found, 2):
        assert all(a != b for a, b in zip(first, second, strict=True))


def test_a_reproducible_seed_repeats_and_differs_by_rank():
    assert after_start(7) == after_start(7)
    assert_all_differ(after_start(7), after_start(7, rank=1), after_start(8))


def test_secret_keys_do_not_depend_on_public_seeds():
    assert_all_differ(after_start(None), after_start(None))


def test_draws_from_a_whole_state_are_those_of_numpys_mt19937():
    TrainingRandomness().before_step(PLACE)
    words = torch.get_rng_state().numpy()[24 : 24 + 8 * 624].view(np.uint64).astype(np.uint32)
    reference = np.random.RandomState()
    reference.set_state(("MT19937", words, 624))
    expected = reference.randint(0, 2**32, 2000, dtype=np.uint32) & (2**24 - 1)
    assert (torch.rand(2000) * 2**24).long().tolist() == expected.tolist()


def test_a_reproducible_physical_batch_is_a_function_of_its_place():
    randomness, found = TrainingRandomness(5), []
    for at in (PLACE, OTHER, PLACE):
        randomness.before_reading(at)
        found.append(drawn())
        randomness.before_step(at)
        found.append(drawn())
    reading, step, other_reading, _, again, again_step = found
    assert reading == again
    assert step == again_step
    assert_all_differ(reading, step, other_reading)


class Draws(Dataset):
    def __getitem__(self, index):
        return torch.tensor(drawn())


def test_workers_read_with_secret_keys_also_after_a_public_seed_of_their_own():
    reader = ExampleReader(Draws(), Reading(), before=TrainingRandomness().before_reading)
    workers = DataLoader(reader, sampler=[PLACE, OTHER], batch_size=None, num_workers=2, worker_init_fn=publicly_seeded)
    publicly_seeded(0)
    found = [torch.tensor(drawn()).tolist()]
    found += [batch.leaves[0][0, 0].tolist() for batch in (*workers, *workers)]
    assert_all_differ(*found)


class Holder(nn.Module):
    def __init__(self):
        super().__init__()
        self.generators = [
            torch.Generator().manual_seed(0),
            np.random.default_rng(0),
            np.random.Generator(np.random.Philox(0)),
            np.random.RandomState(0),
            random.Random(0),
        ]
        self.system = random.SystemRandom()

    def draw(self):
        of_torch, *of_numpy, of_python = self.generators
        child = of_numpy[0].spawn(1)[0]
        return [
            torch.rand(2, generator=of_torch).tolist(),
            *(each.standard_normal(3).tolist() for each in (*of_numpy, child)),
            of_python.gauss(),
        ]


def test_every_kind_of_generator_gets_a_new_key_at_the_start_and_before_each_use():
    public, secret = Holder(), Holder()
    found = [public.draw() for _ in range(4)]  # what generators with their own keys draw, one time after the other
    secret.draw()  # so that legacy and Python's generators keep a normal value
    randomness = TrainingRandomness(owners=[secret])
    for again in (lambda: None, lambda: randomness.before_reading(PLACE), lambda: randomness.before_step(PLACE)):
        again()
        found.append(secret.draw())
    assert_all_differ(*found)


def test_generators_of_a_reproducible_run_repeat_and_differ_from_each_other():
    def run(seed):
        holder = Holder()
        randomness, found = TrainingRandomness(seed, owners=[holder]), []
        for place in (PLACE, OTHER, PLACE):
            randomness.before_step(place)
            found.append(holder.draw())
        return found

    first, other, again = run(3)
    assert first == again
    assert_all_differ(first, other, run(4)[0])
    assert len({tuple(values) for values in first[1:5]}) == 4


@pytest.mark.parametrize("seed", [None, 3])
def test_no_example_of_a_step_draws_as_another(seed):
    randomness, found = TrainingRandomness(seed), []
    for example in range(3):
        randomness.before_step(PLACE, example)
        found.append(drawn())
    assert_all_differ(*found)

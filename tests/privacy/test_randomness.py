"""Whatever is random in training takes secret keys, or reproducible ones where a run asks for them."""

import pickle
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from dp_lightning.errors import ConfigurationError
from dp_lightning.privacy.randomness import (
    NoHostDraws,
    TrainingRandomness,
    WorkerSeeding,
    keys_from,
    rekey_generators,
)
from dp_lightning.privacy.sampling import PhysicalBatch


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
    TrainingRandomness(seed, rank=rank).start()
    return drawn()


def assert_all_differ(first, second):
    assert all(a != b for a, b in zip(first, second, strict=True))


def test_a_reproducible_seed_repeats_and_differs_by_rank():
    assert after_start(7) == after_start(7)
    assert_all_differ(after_start(7), after_start(7, rank=1))
    assert_all_differ(after_start(7), after_start(8))


def test_secret_keys_do_not_depend_on_public_seeds():
    assert_all_differ(after_start(None), after_start(None))


@pytest.mark.parametrize("seed", [None, 3])
def test_the_cpu_state_has_the_layout_of_torch_and_full_words(seed):
    TrainingRandomness(seed).start()
    state = torch.get_rng_state().numpy()
    words = state[24 : 24 + 8 * 624].view(np.uint64)
    assert words.max() < 2**32
    # A seed of 32 bits s gives the words s, 1812433253 (s ^ (s >> 30)) + 1, ...: the second follows from the first.
    first = int(words[0])
    assert int(words[1]) != (1812433253 * (first ^ (first >> 30)) + 1) % 2**32
    torch.rand(1)
    after = torch.get_rng_state()
    draws = torch.rand(5)
    torch.set_rng_state(after)
    assert torch.equal(torch.rand(5), draws)


def test_draws_from_a_whole_state_are_those_of_numpys_mt19937():
    TrainingRandomness().start()
    words = torch.get_rng_state().numpy()[24 : 24 + 8 * 624].view(np.uint64).astype(np.uint32)
    reference = np.random.RandomState()
    reference.set_state(("MT19937", words, 624))
    expected = reference.randint(0, 2**32, 2000, dtype=np.uint32) & (2**24 - 1)
    assert (torch.rand(2000) * 2**24).long().tolist() == expected.tolist()


def test_draws_are_uniform_and_normal():
    TrainingRandomness().start()
    uniform, normal = torch.rand(100_000), torch.randn(100_000)
    # Five standard errors.
    assert abs(uniform.mean().item() - 0.5) < 5 * (1 / 12 / 100_000) ** 0.5
    assert abs(normal.mean().item()) < 5 * 100_000**-0.5
    assert abs(normal.var().item() - 1) < 5 * (2 / 100_000) ** 0.5


def test_a_kept_normal_value_is_forgotten():
    np.random.randn()
    assert np.random.get_state()[3] == 1
    TrainingRandomness().start()
    assert np.random.get_state()[3] == 0


def test_a_reproducible_physical_batch_is_a_function_of_its_place():
    place, other = PhysicalBatch(3, 1, (0,), pieces=3), PhysicalBatch(3, 2, (0,), pieces=3)
    randomness, found = TrainingRandomness(5), []
    for at in (place, other, place):
        randomness.before_reading(at)
        found.append(drawn())
        randomness.before_step(at)
        found.append(drawn())
    reading, step, other_reading, _, again, again_step = found
    assert reading == again
    assert step == again_step
    assert_all_differ(reading, step)
    assert_all_differ(reading, other_reading)


def test_a_secret_physical_batch_draws_on():
    randomness, place = TrainingRandomness(), PhysicalBatch(3, 1, (0,), pieces=3)
    randomness.start()
    found = []
    for _ in range(2):
        randomness.before_reading(place)
        randomness.before_step(place)
        found.append(drawn())
    assert_all_differ(*found)


class Draws(Dataset):
    def __len__(self):
        return 2

    def __getitem__(self, index):
        return drawn()


def epochs_of_workers(seeding, epochs=1):
    loader = DataLoader(Draws(), batch_size=None, num_workers=2, worker_init_fn=pickle.loads(pickle.dumps(seeding)))
    return [item for _ in range(epochs) for item in loader]


def test_workers_draw_differently_also_after_a_public_seed_of_their_own():
    publicly_seeded(0)
    public = drawn()
    secret = epochs_of_workers(WorkerSeeding(None, 0, publicly_seeded), epochs=2)
    for place, first in enumerate(secret):
        assert_all_differ(first, public)
        for second in secret[:place]:
            assert_all_differ(first, second)


def test_workers_of_a_reproducible_run_repeat_but_not_from_epoch_to_epoch_or_rank_to_rank():
    def run(rank):
        torch.manual_seed(1)
        return epochs_of_workers(WorkerSeeding(4, rank, publicly_seeded), epochs=2)

    first = run(0)
    assert first == run(0)
    assert_all_differ(first[0], first[2])
    assert_all_differ(first[0], run(1)[0])


class Dropout(nn.Module):
    def __init__(self):
        super().__init__()
        self.generators = {
            "torch": torch.Generator().manual_seed(0),
            "numpy": np.random.default_rng(0),
            "philox": np.random.Generator(np.random.Philox(0)),
            "legacy": np.random.RandomState(0),
            "other": np.random.RandomState(np.random.PCG64(0)),
            "python": random.Random(0),
        }
        self.system = random.SystemRandom()

    def draw(self):
        torch_one, numpy_one, philox, legacy, other, python = self.generators.values()
        child = numpy_one.spawn(1)[0]
        return [
            torch.rand(2, generator=torch_one).tolist(),
            *(each.standard_normal(3).tolist() for each in (numpy_one, philox, legacy, other, child)),
            python.gauss(),
        ]


def test_every_generator_within_reach_gets_a_new_key():
    public, secret = Dropout(), Dropout()
    public.draw()
    secret.draw()  # so that legacy and Python's generators keep a normal value
    found = rekey_generators({"model": secret}, keys_from(None))
    assert found == [(f"model.generators[{name!r}]", each) for name, each in secret.generators.items()]
    assert_all_differ(public.draw(), secret.draw())


def test_rekeyed_generators_of_a_reproducible_run_repeat_and_differ_from_each_other():
    def run(*place):
        models = {"model": Dropout(), "data": [torch.Generator()]}
        assert ("data[0]", models["data"][0]) in rekey_generators(models, keys_from(3, *place))
        return [*models["model"].draw(), torch.rand(2, generator=models["data"][0]).tolist()]

    first = run(0)
    assert first == run(0)
    assert_all_differ(first, run(1))
    assert first[0] != first[-1]
    assert len({tuple(values) for values in first[1:6]}) == 5


def test_a_generator_that_takes_no_key_is_refused_by_name():
    class Own(np.random.PCG64):
        pass

    holder = nn.Module()
    holder.rng = np.random.Generator(Own(0))
    with pytest.raises(ConfigurationError, match=r"model\.rng draws from Own.*default_rng"):
        rekey_generators({"model": holder}, keys_from(None))


def test_ignored_generators_keep_their_keys():
    model = Dropout()
    assert rekey_generators({"model": model}, keys_from(None), lambda owner, name: name == "generators") == []
    assert model.draw() == Dropout().draw()


@pytest.mark.parametrize(
    ("draw", "names"),
    [
        (lambda: torch.rand(3), []),
        (lambda: np.random.rand(), ["numpy.random"]),
        (lambda: np.random.permutation(3), ["numpy.random"]),
        (lambda: random.random(), ["random"]),
        (lambda: random.choice([1, 2]) and np.random.randn(), ["numpy.random", "random"]),
    ],
)
def test_draws_on_the_host_are_named(draw, names):
    host = NoHostDraws()
    host.note()
    assert host.drawn() == []
    draw()
    assert host.drawn() == names
    host.note()
    assert host.drawn() == []


def test_a_fresh_process_may_import_in_a_loss_what_torch_imports_there():
    """torch imports sympy at the first loss, and sympy makes a random generator."""
    code = """
import torch
from torch.nn import functional as F
from torch.utils.data import TensorDataset
from dp_lightning.privacy import PrivacyPlan, PrivateStep

model = torch.nn.Linear(5, 3)
plan = PrivacyPlan(num_train=9, expected_batch_size=9, num_steps=1, noise_multiplier=1.0, delta=1e-3)
dataset = TensorDataset(torch.randn(9, 5), torch.arange(9) % 3)
private = PrivateStep(model, lambda batch: F.cross_entropy(model(batch[0]), batch[1]), dataset, plan=plan)
for batch in private.batches():
    private.accumulate(batch)
private.release()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr

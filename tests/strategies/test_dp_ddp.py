"""Several processes take one private step: the same model as one process makes, with noise added once."""

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from run_ranks import main
from run_release import release
from started_ranks import run_on_ranks
from torch import nn
from torch.utils.data import TensorDataset

from dp_lightning.callbacks import PredictionFile, PrivacyCallback
from dp_lightning.errors import ConfigurationError
from dp_lightning.privacy.sampling import PoissonSampler, cut, sampling_key
from dp_lightning.private_run.agreement import numbers_of
from dp_lightning.ranks import _checksums
from dp_lightning.strategies.private import PrivateStrategy

STEPS = 20


def start(folder, devices, *, privacy=None, **settings):
    """One run."""
    defaults = {
        "expected_batch_size": 12,
        "noise_multiplier": 0.0,
        "not_private": True,
        "reproducible": True,
        "max_physical_batch_size": 4,
    }
    given = {
        "folder": str(folder),
        "devices": devices,
        "privacy": {**defaults, **(privacy or {})},
        "trainer": {"max_steps": STEPS},
        **settings,
    }
    return run_on_ranks(main, folder, devices, given)


def fit(folder, devices, **settings):
    """Each rank's notes of one run."""
    shown = start(folder, devices, **settings)
    assert not any(shown.codes), shown.stderr[-3000:]
    return [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in range(devices)]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return fit(tmp_path_factory.mktemp("alone"), 1)[0]


@pytest.mark.parametrize(
    ("devices", "strategy"),
    # Four processes take more than ten seconds where there are two cores.
    [(2, "dp_ddp"), (2, "ddp"), pytest.param(4, "dp_ddp", marks=pytest.mark.slow)],
)
def test_without_noise_ranks_end_where_one_process_ends(tmp_path, alone, devices, strategy):
    ranks = fit(tmp_path, devices, strategy=strategy)
    assert all(rank["steps"] == rank["global_step"] == STEPS for rank in ranks)
    # One draw in each step, dealt out.
    assert [sum(sizes) for sizes in zip(*(rank["sizes"] for rank in ranks), strict=True)] == alone["sizes"]
    assert all(rank["hashes"] == ranks[0]["hashes"] for rank in ranks)
    for name, value in ranks[0]["parameters"].items():
        # The sum over examples is rounded in another order; twenty steps carry that on.
        torch.testing.assert_close(value, alone["parameters"][name], rtol=1e-5, atol=1e-6)


def test_with_noise_ranks_are_equal_bit_for_bit_after_every_step(tmp_path):
    first, second = fit(tmp_path, 2, privacy={"noise_multiplier": 1.0, "not_private": False, "reproducible": False})
    assert len(first["hashes"]) == len(set(first["hashes"])) == STEPS
    assert first["hashes"] == second["hashes"]
    # One secret draw in each step, of which no example is dealt to both.
    assert not any(set(one) & set(other) for one, other in zip(first["drawn"], second["drawn"], strict=True))
    assert all(map(any, (first["drawn"], second["drawn"])))


@pytest.fixture(scope="module")
def dealt_out(tmp_path_factory):
    return fit(tmp_path_factory.mktemp("dealt"), 2, deal_out=True)


def test_matrices_are_dealt_out_and_every_rank_steps_alike(tmp_path, dealt_out):
    (one,) = fit(tmp_path, 1, deal_out=True)
    first, second = dealt_out
    assert first["hashes"] == second["hashes"]
    for name, value in one["parameters"].items():
        torch.testing.assert_close(first["parameters"][name], value, rtol=1e-3, atol=1e-3)
    for whole, left, right in zip(one["owned"], first["owned"], second["owned"], strict=True):
        assert sorted(left + right) == whole
        assert left
        assert right


def test_two_ranks_that_go_on_end_where_two_that_were_not_stopped_end(tmp_path, dealt_out):
    checkpoint = str(tmp_path / "eight.ckpt")
    fit(tmp_path, 2, deal_out=True, trainer={"max_steps": 8}, save=checkpoint)
    went_on = fit(tmp_path, 2, deal_out=True, ckpt_path=checkpoint)
    for rank in range(2):
        assert went_on[rank]["hashes"] == dealt_out[rank]["hashes"][8:]


@pytest.mark.parametrize(("where", "name"), [("parameter", "net.4.bias"), ("buffer", "scale")])
def test_replicas_that_drift_apart_are_found_at_the_end_of_an_epoch(tmp_path, where, name):
    shown = start(tmp_path, 2, drift=where)
    assert all(shown.codes)
    assert f"models are no longer the same: {name}." in shown.stderr


def test_an_exchange_of_two_numbers_is_a_difference():
    tensor = torch.randn(100)
    exchanged = tensor[torch.randperm(100)]
    assert not torch.equal(_checksums(tensor), _checksums(exchanged))
    assert torch.equal(_checksums(tensor), _checksums(tensor.clone()))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"privacy_by_rank": {"max_grad_norm": [1.0, 10.0]}}, "different settings: privacy.max_grad_norm (on"),
        ({"privacy_by_rank": {"delta": [1e-3, 1e-4]}}, "different settings: privacy.delta (on"),
        ({"trainer": {}, "trainer_by_rank": {"max_steps": [8, 3]}}, "different settings: trainer.max_steps (on"),
        ({"fewer_by_rank": 2}, "different settings: number of training examples (on"),
        ({"frozen_by_rank": [["net.1.weight"], ["net.1.bias"]]}, "which of them are trained"),
        ({"own_split": True}, "different training sets"),
        ({"rolled": True}, "different training sets"),
    ],
)
def test_ranks_that_do_not_agree_are_refused(tmp_path, settings, message):
    shown = start(tmp_path, 2, **settings)
    assert all(shown.codes)
    assert message in shown.stderr
    assert not list(tmp_path.glob("rank*.pt"))


@pytest.mark.parametrize("strategy", ["dp_ddp", "ddp_spawn", "ddp_fork"])
def test_forked_processes_are_refused(strategy):
    strategy = PrivateStrategy(start_method="fork") if strategy == "dp_ddp" else strategy
    with pytest.raises(ConfigurationError, match="fork or spawn"):
        checked(strategy)


def test_ranks_compare_numbers_alone_of_what_a_data_set_keeps_for_each_element():
    """Objects have addresses, and files other places on each node: no honest run is refused for them."""

    class Kept(TensorDataset):
        labels, weights, ids = [0, 1], (0.5, 2.0), np.array([7, 8])
        objects, names, by_name, chosen = [object(), object()], ["/node/a", "/node/b"], {"a": 0, "b": 1}, {0, 1}

        def __init__(self, *tensors):
            super().__init__(*tensors)
            vars(self).update({name: value for name, value in vars(Kept).items() if not name.startswith("_")})

    found = numbers_of(Kept(torch.zeros(2, 3), torch.tensor([1, 0])))
    assert found == {"1": [1, 0], "labels": [0, 1], "weights": [0.5, 2.0], "ids": [7, 8]}


def test_empty_shares_and_empty_draws_take_part(tmp_path):
    ranks = fit(tmp_path, 2, privacy={"expected_batch_size": 1}, num_train=50, trainer={"max_steps": 60})
    sizes = np.array([rank["sizes"] for rank in ranks])
    assert sizes.shape == (2, 60)
    assert (sizes.sum(axis=0) == 0).any()
    assert ((sizes == 0).any(axis=0) & (sizes.sum(axis=0) > 0)).any()
    assert ranks[0]["hashes"] == ranks[1]["hashes"]
    assert [rank["steps"] for rank in ranks] == [60, 60]
    # What ranks log together is the mean over all examples, wherever they are.
    assert ranks[0]["losses"] == ranks[1]["losses"]
    assert min(max(ranks[0]["losses"]), 10) > 1


@pytest.mark.parametrize("seed", [None, 3])
@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
def test_the_global_batch_size_is_that_of_poisson_sampling_for_any_number_of_ranks(num_ranks, seed):
    # So many steps that both bounds are more than five standard errors: fresh keys pass all but once in 10^7 runs.
    num_train, q, steps = 1000, 0.05, 6000
    key = sampling_key(seed)  # broadcast by rank 0
    samplers = [PoissonSampler(num_train=num_train, sample_rate=q, key=key) for _ in range(num_ranks)]
    sizes = []
    for step in range(steps):
        shares = [
            [i for batch in cut(sampler.draw(step), 8, rank=rank, num_ranks=num_ranks) for i in batch.indices]
            for rank, sampler in enumerate(samplers)
        ]
        together = [i for share in shares for i in share]
        assert len(set(together)) == len(together)
        sizes.append(len(together))
    mean, variance = num_train * q, num_train * q * (1 - q)
    assert abs(np.mean(sizes) - mean) < 5.5 * (variance / steps) ** 0.5
    assert 0.9 <= np.var(sizes) / variance <= 1.1


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("count", [0, 1, 2, 7, 8, 9, 40, 41])
@pytest.mark.parametrize("size", [1, 3, 5])
def test_every_rank_gets_as_many_physical_batches(num_ranks, count, size):
    shares = [list(cut(np.arange(count), size, rank=rank, num_ranks=num_ranks)) for rank in range(num_ranks)]
    assert len({len(share) for share in shares}) == 1
    assert sorted(i for share in shares for batch in share for i in batch.indices) == list(range(count))
    for share in shares:
        assert all(len(batch.indices) <= size for batch in share)
        assert [batch.piece for batch in share] == list(range(len(share)))
        assert [batch.last for batch in share] == [False] * (len(share) - 1) + [True]


def releases(folder, size, claimed=None):
    ended = run_on_ranks(release, folder, size, size, str(folder), claimed)
    assert not any(ended.codes), ended.stderr
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(size)]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_noise_on_the_sum_is_that_of_the_plan_for_any_number_of_ranks(tmp_path, size):
    results = releases(tmp_path, size)
    noise = results[0]["noise"]
    # 500,000 draws: the standard deviation is known to 0.1 %.
    assert float(noise.std()) == pytest.approx(0.7 * 3.0, rel=0.005)
    assert abs(float(noise.mean())) < 5 * 2.1 / 500_000**0.5
    assert all(torch.equal(result["noise"], noise) for result in results)
    assert all(result["stop"] for result in results)


@pytest.mark.parametrize("claimed", [0, 1])
def test_noise_that_is_added_twice_or_not_at_all_is_refused(tmp_path, claimed):
    for result in releases(tmp_path, 2, claimed):
        assert "ranks added noise, but exactly one has to" in result


class Tiny(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(2, 2)


def checked(strategy):
    callback = PrivacyCallback(expected_batch_size=2, noise_multiplier=1.0)
    trainer = pl.Trainer(accelerator="cpu", devices=2, strategy=strategy, logger=False, callbacks=[callback])
    callback.check(trainer, Tiny())


@pytest.mark.parametrize("strategy", ["dp_ddp", "ddp", "ddp_find_unused_parameters_true"])
def test_strategies_with_a_whole_model_per_process_are_taken(strategy):
    checked(strategy)


def test_strategies_that_cut_the_model_are_refused_with_the_fix():
    with pytest.raises(ConfigurationError, match=r"ModelParallelStrategy, which cuts the model.*dp_ddp, or ddp"):
        checked(ModelParallelStrategy())


def test_predictions_of_several_processes_are_refused():
    trainer = pl.Trainer(accelerator="cpu", devices=2, strategy="ddp", logger=False)
    with pytest.raises(ConfigurationError, match=r"trainer.devices: 1"):
        PredictionFile().setup(trainer, Tiny(), "predict")

"""Several processes take one private step: the same model as one process makes, with noise added once."""

import json
import os
from contextlib import nullcontext

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from plain_run import Plain
from run_ranks import main, release
from started_ranks import run_on_ranks
from torch.utils.data import Subset, TensorDataset, random_split

from dp_lightning.callbacks import PredictionFile, PrivacyCallback
from dp_lightning.errors import ConfigurationError, DpLightningError
from dp_lightning.privacy.sampling import cut
from dp_lightning.private_run.agreement import numbers_of
from dp_lightning.ranks import _checksums
from dp_lightning.strategies.private import PrivateStrategy

STEPS = 20


def settings_of(folder, devices, *, privacy=None, max_steps=STEPS, **settings):
    """Those of one run."""
    private = {"expected_batch_size": 12, "noise_multiplier": 0.0, "not_private": True, "reproducible": True}
    private |= {"max_physical_batch_size": 4, **(privacy or {})}
    return {"folder": str(folder), "devices": devices, "privacy": private, "max_steps": max_steps, **settings}


def fit(folder, devices, **settings):
    """Each rank's notes of one run."""
    shown = run_on_ranks(main, folder, devices, settings_of(folder, devices, **settings))
    assert not any(shown.codes), shown.stderr[-3000:]
    return [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in range(devices)]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return fit(tmp_path_factory.mktemp("alone"), 1)[0]


@pytest.mark.parametrize(("devices", "strategy"), [(3, "dp_ddp"), (2, "ddp")])
def test_without_noise_ranks_end_where_one_process_ends(tmp_path, alone, devices, strategy):
    ranks = fit(tmp_path, devices, strategy=strategy)
    assert all(rank["steps"] == rank["global_step"] == STEPS for rank in ranks)
    # One draw in each step, dealt out.
    together = [
        sorted(i for share in shares for i in share) for shares in zip(*(rank["drawn"] for rank in ranks), strict=True)
    ]
    assert together == [sorted(drawn) for drawn in alone["drawn"]]
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
def orthogonalized(tmp_path_factory):
    return fit(tmp_path_factory.mktemp("orthogonalized"), 2, muon=True)


def test_ranks_that_orthogonalize_step_alike_and_as_one_process(tmp_path, orthogonalized):
    (one,) = fit(tmp_path, 1, muon=True)
    first, second = orthogonalized
    assert first["hashes"] == second["hashes"]
    for name, value in one["parameters"].items():
        torch.testing.assert_close(first["parameters"][name], value, rtol=1e-3, atol=1e-3)


def test_two_ranks_that_go_on_end_where_two_that_were_not_stopped_end(tmp_path, orthogonalized):
    checkpoint = str(tmp_path / "eight.ckpt")
    fit(tmp_path, 2, muon=True, max_steps=8, save=checkpoint)
    went_on = fit(tmp_path, 2, muon=True, ckpt_path=checkpoint)
    for rank in range(2):
        assert went_on[rank]["hashes"] == orthogonalized[rank]["hashes"][8:]


def test_replicas_that_drift_apart_are_found_at_the_end_of_an_epoch(tmp_path):
    shown = run_on_ranks(main, tmp_path, 2, settings_of(tmp_path, 2, drift=True))
    assert all(shown.codes)
    assert "models are no longer the same: net.4.bias, scale." in shown.stderr


def test_an_exchange_of_two_numbers_is_a_difference():
    tensor = torch.randn(100)
    exchanged = tensor[torch.randperm(100)]
    assert not torch.equal(_checksums(tensor), _checksums(exchanged))
    assert torch.equal(_checksums(tensor), _checksums(tensor.clone()))


def fewer(dataset, place):
    return Subset(dataset, range(60 - place))


def own_split(dataset, place):
    return random_split(dataset, [50, 10])[0]


def rolled(dataset, place):
    return TensorDataset(*(tensor.roll(place, 0) for tensor in dataset.tensors))


DISAGREEING = {
    "different settings: privacy.max_grad_norm (on": {"privacy_by_rank": {"max_grad_norm": [1.0, 10.0]}},
    "different settings: privacy.delta (on": {"privacy_by_rank": {"delta": [1e-3, 1e-4]}},
    "different settings: trainer.max_steps (on": {"trainer_by_rank": {"max_steps": [8, 3]}},
    "different settings: number of training examples (on": {"data_by_rank": fewer},
    "which of them are trained": {"frozen_by_rank": [["net.1.weight"], ["net.1.bias"]]},
    "The ranks have different training sets": {"data_by_rank": own_split},
    "or the same one in another order": {"data_by_rank": rolled},
}


def refused(folder, given):
    """Leave what each of several fits is refused for."""
    said = []
    for settings in given:
        try:
            main(settings)
        except DpLightningError as error:
            said.append(str(error))
        else:
            said.append("nothing")
    (folder / f"{os.environ['RANK']}.json").write_text(json.dumps(said))


def test_ranks_that_do_not_agree_are_refused(tmp_path):
    given = [settings_of(tmp_path, 2, max_steps=8, **different) for different in DISAGREEING.values()]
    ended = run_on_ranks(refused, tmp_path, 2, tmp_path, given)
    assert not any(ended.codes), ended.stderr
    for rank in (0, 1):
        for wanted, said in zip(DISAGREEING, json.loads((tmp_path / f"{rank}.json").read_text()), strict=True):
            assert wanted in said


def test_ranks_compare_numbers_alone_of_what_a_data_set_keeps_for_each_element():
    """Objects have addresses, and files other places on each node: no honest run is refused for them."""
    dataset = TensorDataset(torch.zeros(2, 3), torch.tensor([1, 0]))
    numbers = {"labels": [0, 1], "weights": (0.5, 2.0), "ids": np.array([7, 8])}
    vars(dataset).update(numbers, objects=[object(), object()], names=["/node/a", "/node/b"], by_name={"a": 0, "b": 1})
    assert numbers_of(dataset) == {"1": [1, 0], "labels": [0, 1], "weights": [0.5, 2.0], "ids": [7, 8]}


def test_empty_shares_and_empty_draws_take_part(tmp_path):
    ranks = fit(tmp_path, 2, privacy={"expected_batch_size": 1}, num_train=50, max_steps=40)
    sizes = np.array([[len(drawn) for drawn in rank["drawn"]] for rank in ranks])
    assert sizes.shape == (2, 40)
    assert (sizes.sum(axis=0) == 0).any()
    assert ((sizes == 0).any(axis=0) & (sizes.sum(axis=0) > 0)).any()
    assert ranks[0]["hashes"] == ranks[1]["hashes"]
    assert [rank["steps"] for rank in ranks] == [40, 40]
    # What ranks log together is the mean over all examples, wherever they are.
    assert ranks[0]["losses"] == ranks[1]["losses"]
    assert min(max(ranks[0]["losses"]), 10) > 1


@pytest.mark.parametrize(("size", "count", "num_ranks"), [(1, 7, 3), (2, 0, 2), (5, 1, 8), (5, 41, 2)])
def test_every_rank_gets_as_many_physical_batches(num_ranks, count, size):
    shares = [list(cut(np.arange(count), size, rank=rank, num_ranks=num_ranks)) for rank in range(num_ranks)]
    assert len({len(share) for share in shares}) == 1
    assert sorted(i for share in shares for batch in share for i in batch.indices) == list(range(count))
    for share in shares:
        assert all(len(batch.indices) <= size for batch in share)
        assert [batch.piece for batch in share] == list(range(len(share)))
        assert [batch.last for batch in share] == [False] * (len(share) - 1) + [True]


def releases(folder, size, claimed=None, bands=1):
    ended = run_on_ranks(release, folder, size, size, str(folder), claimed, bands)
    assert not any(ended.codes), ended.stderr
    return [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in range(size)]


@pytest.mark.parametrize(("size", "bands"), [(1, 1), (2, 1), (2, 3), (4, 3)])
def test_the_noise_on_the_sum_is_that_of_the_plan_for_any_number_of_ranks(tmp_path, size, bands):
    results = releases(tmp_path, size, bands=bands)
    noise = results[0]["noise"].double()
    # C y = z: rows of independent noise, of 500,000 draws each, whose standard deviation is known to 0.1 %.
    terms = enumerate(results[0]["coefficients"])
    independent = sum(c * torch.cat([torch.zeros(back, noise.shape[1]), noise[: 5 - back]]) for back, c in terms)
    assert independent.std(1).tolist() == pytest.approx([0.7 * 3.0] * 5, rel=0.005)
    assert independent.mean(1).abs().max() < 5 * 2.1 / 500_000**0.5
    assert (torch.corrcoef(independent) - torch.eye(5)).abs().max() < 5 / 500_000**0.5
    assert len(results[0]["coefficients"]) == bands
    assert all(torch.equal(result["noise"], results[0]["noise"]) for result in results)
    assert all(result["stop"] for result in results)


@pytest.mark.parametrize("claimed", [0, 1])
def test_noise_that_is_added_twice_or_not_at_all_is_refused(tmp_path, claimed):
    for result in releases(tmp_path, 2, claimed):
        assert "ranks added noise, but exactly one has to" in result


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        *((name, None) for name in ("dp_ddp", "ddp", "ddp_find_unused_parameters_true")),
        *((name, "fork or spawn") for name in ("ddp_spawn", "ddp_fork")),
        (PrivateStrategy(start_method="fork"), "fork or spawn"),
        (ModelParallelStrategy(), r"ModelParallelStrategy, which cuts the model.*dp_ddp, or ddp"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_strategies_need_a_whole_model_in_each_process_that_was_started_anew(strategy, message):
    callback = PrivacyCallback(expected_batch_size=2, noise_multiplier=1.0)
    trainer = pl.Trainer(accelerator="cpu", devices=2, strategy=strategy, logger=False, callbacks=[callback])
    with nullcontext() if message is None else pytest.raises(ConfigurationError, match=message):
        callback.check(trainer, Plain())


def test_predictions_of_several_processes_are_refused():
    trainer = pl.Trainer(accelerator="cpu", devices=2, strategy="ddp", logger=False)
    with pytest.raises(ConfigurationError, match=r"trainer.devices: 1"):
        PredictionFile().setup(trainer, Plain(), "predict")

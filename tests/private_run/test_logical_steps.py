"""One Lightning batch is one logical step: counts, positions in an epoch, interruptions and ranks."""

import multiprocessing

import lightning.pytorch as pl
import pytest
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from lightning.pytorch.callbacks import ModelCheckpoint
from plain_run import Plain, Stop, examples, held_out, loader, privacy, trainer
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, WeightedRandomSampler

from dp_lightning.errors import ConfigurationError, ModelError


class Notes(Plain):
    def __init__(self):
        super().__init__()
        self.places, self.indices, self.steps = [], set(), 0

    def training_step(self, batch, batch_idx):
        self.steps += 1
        self.indices.add(batch_idx)
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.places.append((self.current_epoch, batch_idx, int(batch.step), self.steps))


def test_an_epoch_has_round_n_over_b_steps_and_every_number_counts_them(tmp_path):
    module = Notes()
    run = trainer(tmp_path, privacy(expected_batch_size=24, max_physical_batch_size=5), max_epochs=2)
    run.fit(module, loader())  # 60 / 24 = 2.5, which Python rounds to the even number
    assert run.num_training_batches == 2
    assert module.places == [(0, 0, 0, 1), (0, 1, 1, 2), (1, 0, 0, 3), (1, 1, 1, 4)]
    assert module.indices == {0, 1}
    assert run.train_dataloader.dataset.tensors[0].shape == (60, 5)


@pytest.mark.parametrize("persistent", [True, False])
def test_no_worker_is_left_after_a_fit(tmp_path, persistent):
    run = trainer(tmp_path, privacy(expected_batch_size=24), max_epochs=2)
    run.fit(Plain(), loader(num_workers=1, persistent_workers=persistent))
    assert not multiprocessing.active_children()


def saved(tmp_path):
    return ModelCheckpoint(dirpath=tmp_path, every_n_train_steps=1, save_top_k=-1, filename="{step}")


def test_a_limited_run_resumes_within_an_epoch_and_ends_with_its_plan(tmp_path):
    settings = {"limit_train_batches": 3, "enable_checkpointing": True}
    first = privacy(expected_batch_size=12)
    with pytest.raises(RuntimeError, match="stopped"):
        trainer(tmp_path, first, Stop(4), saved(tmp_path), **settings).fit(Plain(), loader())
    second, module = privacy(expected_batch_size=12), Notes()
    run = trainer(tmp_path, second, **settings)
    run.fit(module, loader(), ckpt_path=tmp_path / "step=4.ckpt")
    assert (run.global_step, second.ledger.num_steps, second.plan.num_steps) == (9, 9, 9)
    assert second.ledger.runs == ((1.0, 0.2, 9),)
    assert [place[:3] for place in module.places] == [(1, 1, 1), (1, 2, 2), (2, 0, 0), (2, 1, 1), (2, 2, 2)]


class FailsAfterRelease(pl.Callback):
    def on_before_optimizer_step(self, trainer, module, optimizer):
        if trainer.global_step == 4:
            raise RuntimeError("between release and step")


def test_a_step_that_was_released_and_not_taken_is_spent(tmp_path):
    run = trainer(tmp_path, privacy(), FailsAfterRelease(), saved(tmp_path), enable_checkpointing=True)
    with pytest.raises(RuntimeError, match="between"):
        run.fit(Plain(), loader())
    resumed = privacy()
    run = trainer(tmp_path, resumed)
    run.fit(Plain(), loader(), ckpt_path=tmp_path / "step=4.ckpt")
    assert resumed.ledger.num_steps == 9
    assert run.global_step == 8  # the lost one is in the ledger and not in the weights
    assert resumed.statement().lost_steps == 1


class InterruptsOnce(pl.Callback):
    def __init__(self):
        self.done = False

    def on_train_batch_end(self, trainer, *args):
        if trainer.global_step == 4 and not self.done:
            self.done = True
            raise KeyboardInterrupt


def test_fit_interruption_validate_and_fit_on_one_trainer(tmp_path):
    class Validated(Plain):
        def validation_step(self, batch, batch_idx):
            self.log("val_loss", self.net(batch[0]).square().mean())

    callback, module = privacy(), Validated()
    run = trainer(tmp_path, callback, InterruptsOnce())
    own = {name: getattr(type(run.strategy), name) for name in ("training_step", "backward", "process_dataloader")}
    with pytest.raises(SystemExit):  # as Lightning ends on Ctrl-C
        run.fit(module, loader(), held_out())
    assert callback.ledger.num_steps == 4
    assert not vars(run.strategy).keys() & own.keys()
    assert run.validate(module, held_out(), verbose=False)[0]["val_loss"] > 0
    run.fit(module, loader(), held_out())
    assert callback.ledger.num_steps == callback.plan.num_steps == 9
    assert not vars(run.strategy).keys() & own.keys()


def test_a_hook_that_uses_the_batch_is_told_where_examples_are(tmp_path):
    class UsesBatch(Plain):
        def on_train_batch_start(self, batch, batch_idx):
            batch[0].mean()

    with pytest.raises(ModelError, match="holds no example"):
        trainer(tmp_path, privacy()).fit(UsesBatch(), loader())


class Reversed(DataLoader):
    def __iter__(self):
        return reversed(list(super().__iter__()))


def samplers():
    data = examples()
    return {
        "weighted": DataLoader(data, batch_size=7, sampler=(weighted := WeightedRandomSampler([1.0] * 60, 60))),
        # As Lightning makes it for ranks.
        "of ranks": DataLoader(data, batch_size=7, sampler=DistributedSamplerWrapper(weighted, num_replicas=2, rank=0)),
        "batches": DataLoader(data, batch_sampler=type("Mine", (BatchSampler,), {})(SequentialSampler(data), 7, False)),
        "subclass": Reversed(data, batch_size=7),
    }


@pytest.mark.parametrize("name", ["weighted", "of ranks", "batches", "subclass"])
def test_a_sampler_of_ones_own_is_refused(name, tmp_path):
    with pytest.raises(ConfigurationError, match="train_dataloader"):
        trainer(tmp_path, privacy()).fit(Plain(), samplers()[name])


def test_several_training_loaders_are_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="several training loaders"):
        trainer(tmp_path, privacy()).fit(Plain(), {"one": loader(), "two": loader()})


def test_a_transfer_hook_sees_each_example_and_no_logical_batch(tmp_path):
    seen = []

    class Hooked(Plain):
        def on_before_batch_transfer(self, batch, dataloader_idx):
            seen.append(len(batch[0]))
            return [batch[0] * 2, batch[1]]

    module = Hooked()
    trainer(tmp_path, privacy(), max_epochs=1).fit(module, loader())
    assert set(seen) == {1}
    assert "on_before_batch_transfer" not in vars(module)

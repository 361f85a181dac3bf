import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from plain_run import Plain, held_out, loader, privacy, trainer

from dp_lightning.callbacks import LastCheckpoint


class Evaluated(Plain):
    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.net(batch[0]).square().mean())


def run(tmp_path, checkpoint, *callbacks, **kwargs):
    """A fit of nine steps in three epochs, evaluated after each second epoch; the steps of its checkpoints."""
    fitted = trainer(
        tmp_path,
        privacy(),
        checkpoint,
        *callbacks,
        check_val_every_n_epoch=2,
        enable_checkpointing=True,
        **kwargs,
    )
    fitted.fit(Evaluated(), loader(), held_out())
    assert fitted.global_step == 9
    return sorted(torch.load(path, weights_only=True)["global_step"] for path in tmp_path.rglob("*.ckpt"))


def test_without_it_the_last_steps_are_lost(tmp_path):
    assert run(tmp_path, ModelCheckpoint(tmp_path)) == [6]


@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        ({}, [9]),
        ({"save_top_k": -1}, [6, 9]),
        ({"save_top_k": 0}, []),
        ({"monitor": "val_loss"}, [6]),
        ({"every_n_epochs": 50, "monitor": "val_loss"}, [9]),
        ({"every_n_train_steps": 4}, [9]),
    ],
)
def test_the_weights_of_the_last_step_are_kept_where_the_latest_ones_are(tmp_path, settings, steps):
    checkpoint = ModelCheckpoint(tmp_path, **settings)
    assert run(tmp_path, checkpoint, LastCheckpoint()) == steps
    if steps:
        assert torch.load(checkpoint.best_model_path, weights_only=True)["global_step"] == steps[-1]

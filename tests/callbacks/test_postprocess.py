"""The post-processing callback on a plain Trainer and through jsonargparse."""

import torch
from jsonargparse import ArgumentParser
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader, TensorDataset

from dp_lightning.callbacks.postprocess import PostProcessCallback
from dp_lightning.postprocess import Kalman, Momentum, Orthogonalize


class TinyModule(LightningModule):
    def __init__(self, **optimizer_settings):
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(3, 2)
        self.frozen = torch.nn.Linear(2, 2).requires_grad_(False)
        self.optimizer_settings = {"lr": 0.1, **optimizer_settings}

    def training_step(self, batch, batch_idx):
        return self.frozen(self.layer(batch[0])).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), **self.optimizer_settings)


def fit(module, callback, *, tmp_path, max_epochs=1, ckpt_path=None):
    data = TensorDataset(torch.randn(8, 3, generator=torch.Generator().manual_seed(0)))
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=max_epochs,
        callbacks=[] if callback is None else [callback],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    )
    trainer.fit(module, DataLoader(data, batch_size=2), ckpt_path=ckpt_path)
    return trainer


def test_momentum_in_the_chain_trains_like_momentum_in_the_optimizer(tmp_path):
    ours, theirs = TinyModule(), TinyModule(momentum=0.9)
    fit(ours, PostProcessCallback([Momentum(0.9, applies_to="all")]), tmp_path=tmp_path)
    fit(theirs, None, tmp_path=tmp_path)
    assert not torch.equal(ours.layer.weight, TinyModule().layer.weight)
    # The same operations in float32 over four steps; a fused multiply-add may round once less.
    torch.testing.assert_close(ours.layer.weight, theirs.layer.weight, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(ours.layer.bias, theirs.layer.bias, rtol=1e-5, atol=1e-6)


def test_a_resumed_run_continues_the_state_of_the_chain(tmp_path):
    def callback():
        return PostProcessCallback([Kalman(process_to_measurement_ratio=1.5), Momentum(0.9), Orthogonalize()])

    whole, half, resumed = TinyModule(), TinyModule(), TinyModule()
    fit(whole, callback(), tmp_path=tmp_path, max_epochs=2)
    checkpoint = tmp_path / "half.ckpt"
    fit(half, callback(), tmp_path=tmp_path).save_checkpoint(checkpoint)
    fit(resumed, callback(), tmp_path=tmp_path, max_epochs=2, ckpt_path=checkpoint)
    assert torch.equal(resumed.layer.weight, whole.layer.weight)
    assert not torch.equal(resumed.layer.weight, half.layer.weight)
    # The callback's state holds only what an untrusted-file load accepts.
    assert torch.load(checkpoint, weights_only=True)["callbacks"]


def test_no_transforms_change_nothing(tmp_path):
    ours, plain = TinyModule(momentum=0.9), TinyModule(momentum=0.9)
    fit(ours, PostProcessCallback(), tmp_path=tmp_path)
    fit(plain, None, tmp_path=tmp_path)
    assert torch.equal(ours.layer.weight, plain.layer.weight)


def parser() -> ArgumentParser:
    result = ArgumentParser(exit_on_error=False)
    result.add_argument("--config", action="config")
    result.add_class_arguments(PostProcessCallback, "postprocess")
    return result


def test_yaml_names_transforms_by_their_short_class_name(tmp_path):
    config = tmp_path / "run.yaml"
    config.write_text(
        "postprocess: {transforms: ["
        "{class_path: Momentum, init_args: {beta: 0.95, kind: ema_nesterov}},"
        "{class_path: MagnitudeScale, init_args: {transform: {class_path: Orthogonalize, init_args:"
        " {coefficients: [2.0, -1.5, 0.5]}}}}]}"
    )
    namespace = parser().parse_args([f"--config={config}"])
    momentum, magnitude = parser().instantiate_classes(namespace).postprocess.chain.transforms
    assert (momentum.beta, momentum.kind) == (0.95, "ema_nesterov")
    assert magnitude.transform.coefficients == (2.0, -1.5, 0.5)


def test_the_command_line_replaces_the_whole_list(tmp_path):
    config = tmp_path / "run.yaml"
    config.write_text("postprocess: {transforms: [{class_path: Momentum}, {class_path: Orthogonalize}]}")
    override = '--postprocess.transforms=[{"class_path": "Scale", "init_args": {"factor": 2.0}}]'
    namespace = parser().parse_args([f"--config={config}", override])
    (scale,) = parser().instantiate_classes(namespace).postprocess.chain.transforms
    assert scale.factor == 2.0
    assert parser().instantiate_classes(parser().parse_args([])).postprocess.chain.transforms == ()

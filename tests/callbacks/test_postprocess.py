"""The post-processing callback on a plain Trainer, private or not, and through jsonargparse."""

import pytest
import torch
from jsonargparse import ArgumentParser
from plain_run import Plain, examples, flat, trainer, without_noise
from torch.utils.data import DataLoader

from dp_lightning.callbacks.postprocess import PostProcessCallback
from dp_lightning.postprocess import Kalman, Momentum, Orthogonalize


def fit(folder, *callbacks, momentum=0.0, max_epochs=1, ckpt_path=None):
    """The trainer, and the trained parameters at its end."""

    class WithMomentum(Plain):
        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1, momentum=momentum)

    torch.manual_seed(0)
    module = WithMomentum()
    module.net[0].bias.requires_grad_(False)
    used = trainer(folder, *callbacks, max_epochs=max_epochs)
    used.fit(module, DataLoader(examples(), batch_size=7), ckpt_path=ckpt_path)
    return used, flat(module)


@pytest.mark.parametrize("private", [True, False])
@pytest.mark.parametrize(("transforms", "momentum"), [([Momentum(0.9, applies_to="all")], 0.0), (None, 0.9)])
def test_a_chain_trains_like_the_optimizer_that_does_the_same(tmp_path, transforms, momentum, private):
    def before():
        return [without_noise()] if private else []

    _, ours = fit(tmp_path, *before(), PostProcessCallback(transforms), momentum=momentum)
    _, theirs = fit(tmp_path, *before(), momentum=0.9)
    # The same operations in float32 over nine steps; a fused multiply-add may round once less.
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_momentum_of_the_optimizer_beside_that_of_the_chain_is_named(tmp_path):
    with pytest.warns(UserWarning, match=r"optimizer has momentum 0\.9.*averaged twice"):
        fit(tmp_path, PostProcessCallback([Momentum(0.9)]), momentum=0.9)


def test_a_resumed_run_continues_the_state_of_the_chain(tmp_path):
    def callback():
        return PostProcessCallback([Kalman(process_to_measurement_ratio=1.5), Momentum(0.9), Orthogonalize()])

    whole, checkpoint = fit(tmp_path, callback(), max_epochs=2)[1], tmp_path / "half.ckpt"
    fit(tmp_path, callback())[0].save_checkpoint(checkpoint)
    assert torch.equal(fit(tmp_path, callback(), max_epochs=2, ckpt_path=checkpoint)[1], whole)
    # The callback's state holds only what an untrusted-file load accepts.
    assert torch.load(checkpoint, weights_only=True)["callbacks"]


TWO = "postprocess: {transforms: [{class_path: Momentum, init_args: {beta: 0.95}}, {class_path: Orthogonalize}]}"
SCALE = '--postprocess.transforms=[{"class_path": "Scale", "init_args": {"factor": 2.0}}]'


@pytest.mark.parametrize(
    ("options", "names"),
    [(["--config=run.yaml"], ["Momentum", "Orthogonalize"]), (["--config=run.yaml", SCALE], ["Scale"]), ([], [])],
)
def test_transforms_are_named_in_yaml_and_replaced_as_a_whole_on_the_command_line(
    tmp_path, monkeypatch, options, names
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(TWO)
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--config", action="config")
    parser.add_class_arguments(PostProcessCallback, "postprocess")
    chain = parser.instantiate_classes(parser.parse_args(options)).postprocess.chain
    assert [type(transform).__name__ for transform in chain.transforms] == names
    assert [transform.beta for transform in chain.transforms if isinstance(transform, Momentum)] in ([0.95], [])

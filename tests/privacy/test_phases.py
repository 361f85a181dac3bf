"""Parameters that are frozen at first: what is trained is what the rest of the plan says, with one ledger."""

import json

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from plain_run import Plain, Stop, loader, privacy, trainer
from small_steps import plan_of
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from dp_lightning.callbacks import PostProcessCallback, SignalToNoise
from dp_lightning.callbacks.privacy import privacy_of
from dp_lightning.errors import ConfigurationError
from dp_lightning.postprocess import Momentum, Orthogonalize
from dp_lightning.privacy import ClipPlan, PrivateStep

N, B, T = 40, 10, 10
HEAD_FIRST = {"0.*": 0.5, "2.*": 0.25}  # and 4.* from the start


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))


def private_step(model, *, noise=1.0, **settings):
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(N, 5, generator=generator), torch.arange(N) % 3)
    plan = plan_of(N, expected_batch_size=B, num_steps=T, noise_multiplier=noise)

    def loss(batch):
        return F.cross_entropy(model(batch[0]), batch[1])

    settings = {"max_physical_batch_size": 4, "seed": 0, "frozen_until": HEAD_FIRST, **settings}
    return PrivateStep(model, loss, data, plan=plan, **settings)


def released(model, private):
    """One step's gradient by parameter."""
    for batch in private.batches():
        private.accumulate(batch)
    private.release()
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("ways", ["together", "one_by_one"])
def test_each_step_is_that_of_a_model_with_the_parameters_that_are_not_frozen(ways):
    clip = ClipPlan.flat(max_grad_norm=0.1)
    model = network()
    private = private_step(model, noise=1e-9, clip_plan=clip, examples=ways)
    for number in range(T):
        active = [name for name in dict(model.named_parameters()) if number >= {"0": 5, "2": 2}.get(name[0], 0)]
        expected = dict.fromkeys(active, 0.0)
        rows = [row for place in private.physical_batches(number) for row in place.indices]
        for row in rows:
            x, y = private.reader.dataset[row]
            loss = F.cross_entropy(model(x[None]), y[None])
            wanted = [p for name, p in model.named_parameters() if name in active]
            found = dict(zip(active, torch.autograd.grad(loss, wanted), strict=True))
            norm = torch.cat([gradient.flatten() for gradient in found.values()]).norm()
            assert norm > 0.1
            expected = {name: expected[name] + found[name] * 0.1 / norm / B for name in active}
        gradients = released(model, private)
        assert [name for name, gradient in gradients.items() if gradient is not None] == active
        for name in active:
            torch.testing.assert_close(gradients[name], expected[name] + torch.zeros(()), rtol=1e-4, atol=1e-7)
    assert private.record.ledger.num_steps == T
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_noise_is_on_what_is_trained_and_an_optimizer_leaves_the_rest_alone():
    model = network()
    private, optimizer = private_step(model), torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    for number in range(T):
        gradients = released(model, private)
        optimizer.step()
        for name, parameter in model.named_parameters():
            first = {"0": 5, "2": 2}.get(name[0], 0)
            assert torch.equal(parameter, before[name]) == (number < first)
            if gradients[name] is not None and parameter.numel() > 20:
                assert 0.5 < gradients[name].std() / private.noise_level < 2
    assert not private.statement().faults


def test_the_statement_says_what_was_frozen_and_counts_every_step_once():
    model = network()
    private = private_step(model)
    for _ in range(3):
        released(model, private)
    statement = private.statement()
    expected = "2 of 6 frozen before step 3, 2 of 6 frozen before step 6"
    assert statement.clipping["parameters"] == expected
    assert expected in statement.to_markdown()
    assert statement.ledger.num_steps == 3
    never = private_step(network(), frozen_until={})
    assert "parameters" not in never.statement().clipping
    assert never.state_dict() == {}


@pytest.mark.parametrize(
    ("frozen", "words"),
    [
        ({"0.*": 0.0}, r"has 0.0 for '0.\*'.* above 0 and below 1"),
        ({"backbone.*": 0.5}, r"no trained parameter's name matches 'backbone.\*'.* 0.weight, 0.bias"),
        ({"*": 0.5}, "freezes every trained parameter at first"),
        ({"0.*": float("nan")}, "has nan for"),
    ],
)
def test_a_schedule_that_makes_no_sense_is_refused(frozen, words):
    with pytest.raises(ConfigurationError, match=words):
        private_step(network(), frozen_until=frozen)


class Counting(Plain):
    """Notes which parameters are trained in each step."""

    def __init__(self):
        super().__init__(nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)))
        self.seen = []

    def on_before_optimizer_step(self, optimizer):
        self.seen.append([name for name, parameter in self.named_parameters() if parameter.grad is not None])


def fitted(folder, *callbacks, **fit):
    torch.manual_seed(0)
    module = Counting()
    settings = privacy(reproducible=True, frozen_until={"net.0.*": 0.5})
    run = trainer(folder, settings, *callbacks, max_steps=8, max_epochs=-1, enable_checkpointing=None)
    run.fit(module, loader(), **fit)
    return run, module


@pytest.mark.parametrize("chain", [[], [Momentum(0.9), Orthogonalize()]])
def test_a_fit_trains_the_head_first_and_then_all(tmp_path, chain, capsys):
    run, module = fitted(tmp_path, *([PostProcessCallback(chain)] if chain else []))
    head = ["net.2.weight", "net.2.bias"]
    assert module.seen == [head] * 4 + [["net.0.weight", "net.0.bias", *head]] * 4
    assert privacy_of(run).statement().ledger.num_steps == 8
    assert "2 of 4 frozen before step 5 (privacy.frozen_until)" in capsys.readouterr().out


def stopped_after(folder, steps):
    """The checkpoint of a run that was stopped after so many steps."""
    checkpoint = ModelCheckpoint(folder / "steps", every_n_train_steps=1, save_top_k=-1, filename="{step}")
    with pytest.raises(RuntimeError, match="stopped"):
        fitted(folder, checkpoint, Stop(steps))
    return folder / "steps" / f"step={steps}.ckpt"


@pytest.mark.parametrize("kept", [2, 6])
def test_a_run_that_resumes_is_in_the_phase_of_its_steps(tmp_path, kept):
    _, whole = fitted(tmp_path / "whole")
    _, rest = fitted(tmp_path / "rest", ckpt_path=stopped_after(tmp_path / "part", kept))
    assert rest.seen == whole.seen[kept:]
    for name, value in whole.state_dict().items():
        assert torch.equal(rest.state_dict()[name], value)


def test_another_schedule_does_not_resume_a_run(tmp_path):
    run = trainer(tmp_path, privacy(reproducible=True), max_steps=8, max_epochs=-1)
    with pytest.raises(ConfigurationError, match=r"privacy.frozen_until \{'net.0.\*': 0.5\}, and it is None now"):
        run.fit(Counting(), loader(), ckpt_path=stopped_after(tmp_path, 2))


def test_a_run_that_plans_more_steps_keeps_to_the_steps_of_its_schedule(tmp_path):
    settings = privacy(reproducible=True, frozen_until={"net.0.*": 0.5})
    run, module = trainer(tmp_path, settings, max_steps=20, max_epochs=-1), Counting()
    run.fit(module, loader(), ckpt_path=stopped_after(tmp_path / "part", 2))
    assert [len(names) for names in module.seen] == [2] * 2 + [4] * 16
    assert "2 of 4 frozen before step 5 |" in privacy_of(run).statement().to_markdown()


def test_signal_to_noise_is_that_of_the_parameters_that_are_trained(tmp_path):
    """From the second epoch on, and from the middle of an epoch on."""
    for share in (0.375, 0.5):
        settings = privacy(frozen_until={"net.0.*": share})
        meter = SignalToNoise()
        run = trainer(tmp_path, settings, meter, max_steps=8, max_epochs=-1)
        run.fit(Counting(), loader())
        assert list(meter.curves) == ["net.2.weight", "net.2.bias", "net.0.weight", "net.0.bias"]
        lengths = [len(curve) for curve in meter.curves.values()]
        assert lengths[0] == lengths[1] == len(meter.curve) > lengths[2] == lengths[3]
        saved = json.loads((settings.private_run.folder / "snr.json").read_text())["by_parameter"]
        assert saved["net.0.weight"]["snr"][0] is None
        assert all(len(each["snr"]) == len(meter.curve) for each in saved.values())

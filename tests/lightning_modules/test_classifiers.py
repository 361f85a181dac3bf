"""The classifiers under an ordinary Trainer: logged names, metrics, checkpoints."""

import lightning
import plain_run
import pytest
import torch
import torch.nn.functional as F
from plain_run import N, by_loop, flat, without_noise
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, default_collate

from dp_lightning.datamodules import Digits
from dp_lightning.errors import ConfigurationError
from dp_lightning.lightning_modules import (
    ImageClassifier,
    LinearProbeModule,
    SmallCNNModule,
    TimmModule,
    WideResNetModule,
)
from dp_lightning.lightning_modules.schedules import WarmupCosine


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)
    torch.manual_seed(0)


def trainer(tmp_path, **kwargs) -> lightning.Trainer:
    return lightning.Trainer(
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
        **{"max_epochs": 1, "enable_checkpointing": False, **kwargs},
    )


class Fixed(nn.Module):
    """Logits that say the class in the image's first pixel, with a trainable scale."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.scale * F.one_hot(images[:, 0, 0, 0].long(), 3).float()


def loader(says: list[int], labels: list[int]) -> DataLoader:
    images = torch.tensor(says, dtype=torch.float32).reshape(-1, 1, 1, 1)
    return DataLoader(TensorDataset(images, torch.tensor(labels)), batch_size=2)


def test_a_fit_on_digits_logs_both_evaluation_sets(tmp_path):
    run = trainer(tmp_path, max_epochs=2)
    run.fit(SmallCNNModule(10, in_channels=1), Digits(val_fraction=0.1, eval_batch_size=64))
    assert set(run.callback_metrics) == {
        "unprotected/train_loss",
        "val/loss",
        "val/accuracy",
        "test/loss",
        "test/accuracy",
        "test/auroc",
        "test/average_precision",
        "test/calibration_error",
    }
    assert run.callback_metrics["test/accuracy"] > 0.8


def test_metrics_are_those_of_the_named_loader(tmp_path):
    # 3 of 3 right, and 1 of 3 right with a short last batch: means over examples, not over batches.
    val, test = loader([0, 1, 2], [0, 1, 2]), loader([0, 1, 2], [0, 0, 0])
    module = ImageClassifier(Fixed(), 3)
    run = trainer(tmp_path)
    trainer(tmp_path).validate(module, dataloaders=val, verbose=False)
    assert module.test_report == {}
    results = run.validate(module, dataloaders={"val": val, "test": test}, verbose=False)
    assert module.test_report["test_confusion"] == [[1, 1, 1], [0, 0, 0], [0, 0, 0]]
    merged = {name: value for result in results for name, value in result.items()}
    assert merged["val/accuracy"] == pytest.approx(1.0)
    assert merged["test/accuracy"] == pytest.approx(1 / 3)
    logits = 2.0 * torch.eye(3)
    assert merged["val/loss"] == pytest.approx(F.cross_entropy(logits, torch.arange(3)).item())
    assert merged["test/loss"] == pytest.approx(F.cross_entropy(logits, torch.zeros(3).long()).item())


@pytest.mark.parametrize(
    ("settings", "labels", "factors"),
    [
        ({}, torch.tensor([0, 2, 1]), [1.0, 1.0, 1.0]),
        ({"class_weights": [1, 0.5, 0.1]}, torch.tensor([0, 2, 1]), [1.0, 0.1, 0.5]),
        ({"multi_label": True}, torch.tensor([[0.0, 1, 1], [0, 0, 0], [1, 0, 0]]), [[1.0] * 3] * 3),
        (
            {"multi_label": True, "class_weights": [4, 0.5, 0.1]},
            torch.tensor([[0.0, 1, 1], [0, 0, 0], [1, 0, 0]]),
            [[1, 0.5, 0.1], [1, 1, 1], [4, 1, 1]],
        ),
    ],
)
def test_the_loss_of_each_image_has_its_weight_in_a_batch_and_alone(settings, labels, factors):
    module = ImageClassifier(Fixed(), 3, **settings)
    images = torch.tensor([0.0, 1, 2]).view(-1, 1, 1, 1)
    logits, targets = module(images), F.one_hot(labels, 3) if labels.dim() == 1 else labels
    if labels.dim() == 1:
        expected = [-factor * row.log_softmax(0)[y] for factor, row, y in zip(factors, logits, labels, strict=True)]
    else:
        cross = -(targets * logits.sigmoid().log() + (1 - targets) * (-logits).sigmoid().log())
        expected = list((torch.tensor(factors) * cross).mean(1))
    for image, label, loss in zip(images, labels, expected, strict=True):
        torch.testing.assert_close(module.training_step((image[None], label[None]), 0), loss)
    torch.testing.assert_close(module.training_step((images, labels), 0), torch.stack(expected).mean())


@pytest.mark.parametrize("mode", ["together", "one_by_one"])
@pytest.mark.parametrize(
    "settings",
    [
        {"class_weights": [1.0, 50.0, 0.01]},
        {"multi_label": True},
        {"multi_label": True, "class_weights": [1.0, 50.0, 0.01]},
    ],
)
def test_a_private_run_with_weights_clips_as_a_loop_in_float64(tmp_path, settings, mode):
    # One weight makes every gradient longer than the bound, and one shorter.
    module = ImageClassifier(nn.Sequential(nn.Flatten(), nn.Linear(5, 3)), 3, **settings)
    module.lr = 0.3
    x, y = torch.randn(N, 5, 1, 1, dtype=torch.float64), torch.arange(N) % 3
    if "multi_label" in settings:
        y = torch.stack([y > 0, y == 1, y == 2], dim=1).double()
    dataset = TensorDataset(x, y)
    expected = by_loop(module, [[default_collate([example]) for example in dataset]], bound=0.5)
    module.configure_optimizers = lambda: torch.optim.SGD(module.parameters(), lr=0.3)
    callback = without_noise(expected_batch_size=N, max_grad_norm=0.5, max_physical_batch_size=7, examples=mode)
    plain_run.trainer(tmp_path, callback, max_epochs=1, precision="64-true").fit(module, plain_run.loader(dataset))
    torch.testing.assert_close(flat(module), expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize("mode", ["together", "one_by_one"])
def test_a_private_run_on_views_clips_the_mean_over_the_views_of_an_image(tmp_path, mode):
    module = ImageClassifier(nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 3)), 3)
    module.lr = 0.3
    dataset = TensorDataset(torch.randn(N, 4, 2, 4, 4, dtype=torch.float64), torch.arange(N) % 3)
    expected = by_loop(module, [[default_collate([example]) for example in dataset]], bound=0.5)
    module.configure_optimizers = lambda: torch.optim.SGD(module.parameters(), lr=0.3)
    callback = without_noise(expected_batch_size=N, max_grad_norm=0.5, max_physical_batch_size=7, examples=mode)
    plain_run.trainer(tmp_path, callback, max_epochs=1, precision="64-true").fit(module, plain_run.loader(dataset))
    torch.testing.assert_close(flat(module), expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize("multi_label", [False, True])
def test_views_have_a_mean_loss_and_mean_logits(multi_label):
    module = ImageClassifier(nn.Sequential(nn.Flatten(), nn.Linear(8, 3)), 3, multi_label=multi_label)
    views = torch.randn(5, 4, 2, 2, 2)
    labels = torch.randint(2, (5, 3)).float() if multi_label else torch.arange(5) % 3
    logits = torch.stack([module.model(views[:, k]) for k in range(4)])
    loss = F.binary_cross_entropy_with_logits if multi_label else F.cross_entropy
    expected = torch.stack([loss(each, labels) for each in logits]).mean()
    torch.testing.assert_close(module.training_step((views, labels), 0), expected)
    torch.testing.assert_close(module(views), logits.mean(dim=0))
    assert module.predict_step(views, 0).shape == (5, 3)


def test_weights_for_other_classes_are_refused():
    with pytest.raises(ConfigurationError, match="a number from 0 for each class"):
        ImageClassifier(Fixed(), 3, class_weights=[1.0, 2.0])


class SeveralLabels(lightning.LightningDataModule):
    multi_label, label_names = True, ["mass", "nodule", "fluid"]

    def train_dataloader(self):
        images = torch.tensor([0.0, 1, 2, 2]).view(-1, 1, 1, 1)
        return DataLoader(TensorDataset(images, torch.tensor([[1.0, 0, 0], [0, 1, 1], [0, 0, 1], [0, 0, 0]])))

    test_dataloader = train_dataloader


def test_a_module_that_does_not_know_of_several_labels_says_so(tmp_path):
    with pytest.raises(ConfigurationError, match=r"SeveralLabels have several labels.*argument multi_label"):
        trainer(tmp_path).fit(ImageClassifier(Fixed(), 3), SeveralLabels())


def test_several_labels_are_evaluated_and_predicted_by_label(tmp_path):
    run, module = trainer(tmp_path), ImageClassifier(Fixed(), 3, multi_label=True)
    (logged,) = run.test(module, SeveralLabels(), verbose=False)
    assert logged["test/accuracy"] == pytest.approx(10 / 12)
    assert [row["class"] for row in module.test_report["test_by_class"]] == SeveralLabels.label_names
    assert module.test_report["test_by_class"][0] == {
        **{"class": "mass", "images": 1, "accuracy": 1.0, "auroc": 1.0, "average_precision": 1.0}
    }
    assert logged["test/auroc"] == pytest.approx((1 + 1 + 0.5) / 3)
    probabilities = torch.cat(run.predict(module, SeveralLabels().test_dataloader()))
    torch.testing.assert_close(probabilities, (2.0 * torch.eye(3)[[0, 1, 2, 2]]).sigmoid())


def test_loaders_without_a_known_name_are_refused(tmp_path):
    loaders = [loader([0], [0]), loader([0], [0])]
    with pytest.raises(ConfigurationError, match="dict with the keys 'val' and 'test'"):
        trainer(tmp_path).validate(ImageClassifier(Fixed(), 3), dataloaders=loaders, verbose=False)


@pytest.mark.parametrize(
    "make",
    [
        lambda: WideResNetModule(5, depth=10, width=1, in_channels=1),
        lambda: SmallCNNModule(5, in_channels=1, image_size=16),
        lambda: TimmModule(
            "vit_tiny_patch16_224",
            5,
            in_channels=1,
            model_kwargs={"img_size": 16, "patch_size": 8, "depth": 1, "embed_dim": 24},
        ),
    ],
)
def test_a_checkpoint_restores_the_module_with_weights_only(tmp_path, make):
    module = make()
    run = trainer(tmp_path, max_steps=1)
    run.fit(module, DataLoader(TensorDataset(torch.randn(2, 1, 16, 16), torch.tensor([0, 4])), batch_size=2))
    run.save_checkpoint(tmp_path / "a.ckpt")
    restored = type(module).load_from_checkpoint(tmp_path / "a.ckpt", weights_only=True)
    images = torch.randn(2, 1, 16, 16)
    torch.testing.assert_close(restored.eval()(images), module.eval()(images))


def test_the_default_optimizer_leaves_frozen_parameters_alone():
    module = SmallCNNModule(10)
    module.model.features.requires_grad_(False)
    (group,) = module.configure_optimizers().param_groups
    assert {id(parameter) for parameter in group["params"]} == {
        id(parameter) for parameter in module.model.classifier.parameters()
    }


def test_a_schedule_without_a_length_says_so():
    schedule = WarmupCosine(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0))
    with pytest.raises(ConfigurationError, match=r"lr_scheduler\.num_steps is not set"):
        schedule.step()


@pytest.mark.parametrize(("normalize", "length"), [(True, 8.0), ("unit", 1.0)])
def test_normalised_features_have_one_length(normalize, length):
    maps = torch.randn(5, 4, 4, 4) * torch.logspace(-1, 2, 5).view(-1, 1, 1, 1)
    module = LinearProbeModule(3, in_channels=4, image_size=4, normalize=normalize)
    assert module(maps).shape == (5, 3)
    # The LayerNorm's eps of 1e-5 shows at small variances.
    torch.testing.assert_close(module.model[0](maps).norm(dim=1), torch.full((5,), length), rtol=2e-2, atol=0)
    assert sum(p.numel() for p in module.parameters()) == 64 * 3 + 3
    assert module.model[0](torch.zeros(1, 4, 4, 4)).abs().max() == 0

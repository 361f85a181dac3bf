"""Fine-tuning of timm's networks: what is trained, what is frozen, and what the images become."""

import copy

import pytest
import timm
import torch
from clipped_sums import clipped_gradient_sum
from plain_run import privacy, trainer
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torchvision.transforms.v2 import functional as images_of

from dp_lightning.errors import ConfigurationError, ModelError
from dp_lightning.lightning_modules import TimmModule
from dp_lightning.models import freeze_batch_norm
from dp_lightning.models.trained import merge_low_rank
from dp_lightning.privacy import ClipPlan

VIT = ("vit_tiny_patch16_224", {"img_size": 16, "patch_size": 8, "depth": 2, "embed_dim": 24, "num_heads": 2})
CONVOLUTIONS = ("test_efficientnet", {"drop_path_rate": 0.0})
TRAINED = {
    "vit-head": (VIT, {"trained": "head"}),
    "vit-lora": (VIT, {"trained": "lora", "lora_rank": 3}),
    "vit-lora-some": (VIT, {"trained": "lora", "lora_rank": 2, "lora_layers": ["*.qkv"]}),
    "vit-block": (VIT, {"trained": ["blocks.1.*"]}),
    "convolutions-lora": (CONVOLUTIONS, {"trained": "lora"}),
    "convolutions-bias": (CONVOLUTIONS, {"trained": "bias"}),
    "convolutions-head": (CONVOLUTIONS, {"trained": "head"}),
}


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)
    torch.manual_seed(0)


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """Files with the weights of both networks, whose statistics are not those of a fresh network."""
    torch.manual_seed(1)
    folder, files = tmp_path_factory.mktemp("weights"), {}
    for name, kwargs in (VIT, CONVOLUTIONS):
        model = timm.create_model(name, num_classes=1000, **kwargs).train()
        if name == CONVOLUTIONS[0]:
            with torch.no_grad():
                model(torch.randn(8, 3, 64, 64))
        files[name] = str(folder / f"{name}.pth")
        torch.save(model.state_dict(), files[name])
    return files


def make(case, weights, **changes):
    (name, kwargs), settings = TRAINED[case]
    return freeze_batch_norm(TimmModule(name, 5, weights=weights[name], model_kwargs=kwargs, **{**settings, **changes}))


def data(case, n=3):
    size = 16 if case.startswith("vit") else 32
    generator = torch.Generator().manual_seed(2)
    return torch.randn(n, 3, size, size, generator=generator), torch.arange(n) % 5


@pytest.mark.parametrize("case", [case for case in TRAINED if "lora" not in case])
def test_what_is_trained_is_what_was_asked(weights, case):
    module = make(case, weights)
    trained = {name.removeprefix("model.") for name, p in module.named_parameters() if p.requires_grad}
    (name, kwargs), settings = TRAINED[case]
    model = timm.create_model(name, num_classes=5, **kwargs)  # the lists of timm's own network
    expected = {f"{model.pretrained_cfg['classifier']}.{own}" for own in ("weight", "bias")}
    for parameter in dict(model.named_parameters()):
        chosen = parameter.startswith("blocks.1.") if settings["trained"] == ["blocks.1.*"] else False
        if settings["trained"] == "bias":  # but for those of the norms, which are frozen
            chosen = parameter.endswith("bias") and ".bn" not in parameter and not parameter.startswith("bn")
        expected |= {parameter} if chosen else set()
    assert trained == expected


@pytest.mark.parametrize(("case", "layers"), [("vit-lora", 2 * 4 + 1), ("vit-lora-some", 2)])
def test_low_rank_additions_have_their_rank_and_start_at_nothing(weights, case, layers):
    pytest.importorskip("peft")
    module = make(case, weights)
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    rank = TRAINED[case][1]["lora_rank"]
    first = [p for name, p in trained.items() if "lora_A" in name]
    second = [p for name, p in trained.items() if "lora_B" in name]
    assert len(first) == len(second) == layers
    assert all(p.shape[0] == rank for p in first)
    assert all(p.shape[1] == rank for p in second)
    assert len(trained) == 2 * layers + 2
    whole = make(case, weights, trained="all")
    # The heads are drawn at random.
    whole.head.load_state_dict(module.head.state_dict())
    x, _ = data(case)
    torch.testing.assert_close(module.eval()(x), whole.eval()(x))


def mean_loss(logits, labels):
    return F.cross_entropy(logits, labels)


def gradients_one_by_one(module, x, y, plan):
    """The clipped sum by ordinary autograd in float64."""
    module = copy.deepcopy(module).double()
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    sums = {name: torch.zeros_like(p) for name, p in trained.items()}
    for image, label in zip(x.double(), y, strict=True):
        gradients = torch.autograd.grad(mean_loss(module(image[None]), label[None]), list(trained.values()))
        norm = torch.sqrt(sum(g.square().sum() for g in gradients))
        for name, g in zip(trained, gradients, strict=True):
            sums[name] += g * min(1.0, plan.max_grad_norm / float(norm))
    return sums


@pytest.mark.parametrize("case", ["vit-lora", "convolutions-bias", "convolutions-lora"])
def test_gradients_are_those_of_single_examples(weights, case):
    if "lora" in case:
        pytest.importorskip("peft")
    module = make(case, weights, input_size=None if case.startswith("vit") else 32)
    if "lora" in case:
        for name, p in module.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(p, std=0.02)
    x, y = data(case)
    plan = ClipPlan.flat(max_grad_norm=0.5)
    sums, _ = clipped_gradient_sum(module, mean_loss, x, y, clip_plan=plan)
    expected = gradients_one_by_one(module, x, y, plan)
    assert set(sums) == set(expected)
    distance = sum((sums[name].double() - value).square().sum() for name, value in expected.items()).sqrt()
    assert float(distance) < 2e-3 * 0.5 * len(x)


def private(folder, max_steps=2, batch_norm="freeze"):
    """The trainer of a private run."""
    callback = privacy(expected_batch_size=6, delta=1e-2, max_physical_batch_size=4, batch_norm=batch_norm)
    return trainer(folder, callback, max_steps=max_steps, max_epochs=-1)


def twelve(case):
    return DataLoader(TensorDataset(*data(case, 12)), batch_size=4)


@pytest.mark.parametrize("case", ["vit-lora", "convolutions-bias"])
def test_a_private_run_leaves_what_is_frozen_bit_for_bit(weights, case, tmp_path):
    if "lora" in case:
        pytest.importorskip("peft")
    module = make(case, weights, input_size=None if case.startswith("vit") else 32)
    before = copy.deepcopy(module.state_dict())
    trained = {name for name, p in module.named_parameters() if p.requires_grad}
    private(tmp_path).fit(module, twelve(case))
    after = module.state_dict()
    for name, value in before.items():
        assert torch.equal(after[name], value) == (name not in trained), name
    assert len(trained) > 1


def test_images_become_what_the_network_was_trained_on(weights):
    mean, std = (0.4, 0.5, 0.6), (0.2, 0.25, 0.3)
    module = TimmModule("test_efficientnet", 5, weights=weights["test_efficientnet"], mean=mean, std=std)
    pixels = torch.rand(2, 3, 40, 40)
    given = images_of.normalize(pixels, mean, std)
    seen = []
    module.model.register_forward_pre_hook(lambda model, args: seen.append(args[0]))
    module.eval()(given)
    resized = torch.nn.functional.interpolate(pixels, (160, 160), mode="bicubic", antialias=True)
    expected = images_of.normalize(resized, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    torch.testing.assert_close(seen[0], expected, rtol=1e-4, atol=1e-4)
    # A network from scratch gets the images as they are.
    assert TimmModule("test_efficientnet", 5, mean=mean, std=std).input is None


def test_both_heads_of_a_distilled_network_are_trained(tmp_path):
    name, kwargs = "deit_tiny_distilled_patch16_224", {"img_size": 32, "depth": 1}
    torch.save(timm.create_model(name, **kwargs).state_dict(), tmp_path / "network.pth")
    module = TimmModule(name, 5, weights=str(tmp_path / "network.pth"), trained="head", model_kwargs=kwargs)
    names = {name for name, p in module.model.named_parameters() if p.requires_grad}
    assert names == {f"{head}.{own}" for head in ("head", "head_dist") for own in ("weight", "bias")}
    assert module(torch.zeros(2, 3, 32, 32)).shape == (2, 5)


def test_low_rank_additions_become_part_of_the_weights(weights):
    module = make("vit-lora", weights).eval()
    for name, parameter in module.model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter)
    images = torch.randn(3, 3, 16, 16)
    before = module(images)
    merge_low_rank(module.model)
    torch.testing.assert_close(module(images), before, rtol=1e-4, atol=1e-4)
    whole = timm.create_model(VIT[0], num_classes=5, **VIT[1])
    whole.load_state_dict(module.model.state_dict())


def test_weights_of_another_head_and_of_none_are_taken(weights, tmp_path):
    name, kwargs = VIT
    whole = torch.load(weights[name], weights_only=True)
    body = {key: value for key, value in whole.items() if not key.startswith("head.")}
    other = {**body, "head.weight": torch.ones(3, 24), "head.bias": torch.ones(3)}
    for number, state in enumerate((body, other)):
        torch.save(state, tmp_path / f"{number}.pth")
        module = TimmModule(name, 5, weights=str(tmp_path / f"{number}.pth"), model_kwargs=kwargs)
        assert torch.equal(module.model.blocks[1].mlp.fc1.weight, body["blocks.1.mlp.fc1.weight"])
        assert module.head.weight.shape == (5, 24)
    body.pop("blocks.1.mlp.fc1.weight")
    torch.save(body, tmp_path / "part.pth")
    with pytest.raises(ConfigurationError, match=r"Missing key.*blocks.1.mlp.fc1.weight"):
        TimmModule(name, 5, weights=str(tmp_path / "part.pth"), model_kwargs=kwargs)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"trained": "heads"}, r"no parameter's name matches 'heads'"),
        ({"trained": ["blocks.9.*"]}, r"no parameter's name matches 'blocks.9.\*'"),
        ({"weights": "nowhere.pth"}, r"weights nowhere.pth is not a file"),
        ({"trained": "lora", "lora_rank": 0}, r"lora_rank is 0"),
        (
            {"trained": "lora", "lora_layers": ["*.query"]},
            r"no layer's name matches '\*.query'; layers are",
        ),
    ],
)
def test_wrong_settings_are_named(weights, changes, message):
    name, kwargs = VIT
    with pytest.raises(ConfigurationError, match=message):
        TimmModule(name, 5, **{"weights": weights[name], "model_kwargs": kwargs, **changes})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda saved: {f"model.{name}": value for name, value in saved.items()}, r"Missing key.* \[\.\.\.\]$"),
        (lambda saved: {**saved, "conv_stem.weight": torch.zeros(1, 3, 3, 3)}, "size mismatch for conv_stem.weight"),
        (lambda saved: {**saved, "other": torch.zeros(1)}, r'Unexpected key\(s\) in state_dict: "other"'),
    ],
)
def test_weights_of_another_network_are_refused_in_torchs_words(tmp_path, change, message):
    torch.save(change(timm.create_model("test_efficientnet").state_dict()), tmp_path / "weights.pth")
    with pytest.raises(
        ConfigurationError, match=f"could not build 'test_efficientnet' with the weights .*weights.pth: .*{message}"
    ):
        TimmModule("test_efficientnet", 1000, weights=str(tmp_path / "weights.pth"))


def test_a_whole_pickled_network_is_not_read(tmp_path):
    torch.save(timm.create_model("test_efficientnet"), tmp_path / "network.pth")
    with pytest.raises(ConfigurationError, match=r"network\.pth cannot be read as weights.*state_dict\(\)"):
        TimmModule("test_efficientnet", 5, weights=str(tmp_path / "network.pth"))


class Thaws(TimmModule):
    """Exchanges the statistics of a norm in the third step."""

    def training_step(self, batch, batch_idx):
        if self.trainer.global_step >= 2:
            self.model.bn1.running_mean = self.model.bn1.running_mean + batch[0].mean()
        return super().training_step(batch, batch_idx)


def test_statistics_that_thaw_during_the_run_are_refused(weights, tmp_path):
    name, settings = CONVOLUTIONS[0], TRAINED["convolutions-head"][1]
    module = Thaws(name, 5, weights=weights[name], input_size=32, **settings)
    # A tensor that was never changed in place, as the one that takes its place.
    module.model.bn1.running_mean = module.model.bn1.running_mean.clone()
    run = private(tmp_path, max_steps=6)
    with pytest.raises(ModelError, match="keeps a tensor of an example in the buffer"):
        run.fit(module, twelve("convolutions-head"))
    # Nothing that this batch has shown is released.
    assert run.callbacks[0].ledger.num_steps == run.global_step == 2

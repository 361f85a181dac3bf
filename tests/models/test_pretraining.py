"""Training without labels learns what it says: views of an image lie together, and images spread."""

import torch
import torch.nn.functional as F

from dp_lightning.models import SmallCNN
from dp_lightning.models.pretraining import Pretraining, Recipe, alignment, random_images, uniformity, view
from dp_lightning.models.wide_resnet import WideResNet


def recipe(**settings):
    fixed = {"network": {}, "channels": 3, "size": 8, "mean": (0.5, 0.4, 0.3), "std": (0.2, 0.2, 0.3)}
    return Recipe(**{**fixed, "images": 120, "steps": 50, "batch_size": 32, **settings})


def made(given):
    torch.manual_seed(0)
    network = SmallCNN(4, in_channels=3, image_size=8)
    return Pretraining(network, given, random_images(given), torch.device("cpu"))


def test_the_losses_are_those_of_the_definition():
    points = F.normalize(torch.randn(6, 5, dtype=torch.float64), dim=1)
    others = F.normalize(torch.randn(6, 5, dtype=torch.float64), dim=1)
    distances = [(points[i] - others[i]).square().sum() for i in range(6)]
    torch.testing.assert_close(alignment(points, others), torch.stack(distances).mean())
    pairs = [torch.exp(-2 * (points[i] - points[j]).square().sum()) for i in range(6) for j in range(i)]
    torch.testing.assert_close(uniformity(points), torch.stack(pairs).mean().log())


def test_a_view_is_a_part_of_its_own_image():
    images = torch.rand(5, 3, 16, 16)
    found = view(images, torch.Generator().manual_seed(0))
    assert found.shape == images.shape
    assert 0 <= found.min() < found.max() <= 1
    other = images.clone()
    other[1:] = 0.3
    torch.testing.assert_close(view(other, torch.Generator().manual_seed(0))[0], found[0])
    assert not torch.equal(view(images, torch.Generator().manual_seed(1)), found)


def test_a_network_learns_from_small_views_and_in_16_bits():
    given = recipe(size=16, view_size=8, precision="bf16", steps=16, batch_size=16)
    torch.manual_seed(0)
    training = Pretraining(WideResNet(10, 1, 4), given, random_images(given), torch.device("cpu"))
    seen = []
    training.network.stem.register_forward_hook(lambda _, inputs, output: seen.append((inputs[0].shape, output.dtype)))
    losses = torch.stack([training.step() for _ in range(16)])
    assert seen[0] == ((32, 3, 8, 8), torch.bfloat16)
    assert losses[-5:].mean() < losses[:3].mean() - 0.1
    assert all(value.dtype == torch.float32 for value in training.weights().values())


def test_the_loss_falls_and_the_last_layer_stays():
    training = made(recipe(steps=40))
    last = training.network.classifier.weight.clone()
    losses = torch.stack([training.step() for _ in range(40)])
    assert losses[-10:].mean() < losses[:5].mean() - 0.2
    assert torch.equal(training.network.classifier.weight, last)
    assert not any(name.startswith("classifier") for name in training.weights())


def test_images_take_turns_and_are_the_same_again():
    given = recipe(images=1100)
    counts = []
    images = random_images(given, counts.append)
    assert counts == [500, 1000, 1100]
    assert torch.equal(images, random_images(given))
    assert not torch.equal(images, random_images(recipe(images=1100, seed=1)))
    alone = random_images(recipe(images=500, processes=("spectra",)))
    other = random_images(recipe(images=500, processes=("dead_leaves",)))
    assert torch.equal(images[:500], other)
    assert not torch.equal(alone, other)

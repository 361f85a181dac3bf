"""Features from scattering coefficients are those of the definition, and public."""

import pytest
import torch
import torch.nn.functional as F

from dp_lightning.models.random_images import PROCESSES, dead_leaves, spectra
from dp_lightning.models.scattering import Scattering
from dp_lightning.models.scattering_features import ScatteringFeatures, _normalized


def random_images(seed, n=200, channels=3, size=32):
    generator = torch.Generator().manual_seed(seed)
    each = [make(n // 2, channels=channels, size=size, generator=generator) for make in (dead_leaves, spectra)]
    return torch.cat(each)


@pytest.fixture(scope="module")
def features():
    return ScatteringFeatures(3, angles=4)


@pytest.fixture(scope="module")
def mirrored():
    return ScatteringFeatures(3, angles=4, mirror=True)


def test_they_are_normalised_centred_and_whitened_coefficients(features):
    images = random_images(1, n=4)
    plain = F.group_norm(Scattering(angles=4)(images), features.paths)
    expected = torch.empty_like(plain)
    for n in range(4):
        for y in range(8):
            for x in range(8):
                expected[n, :, y, x] = features.whitening @ (plain[n, :, y, x] - features.mean)
    torch.testing.assert_close(features(images), expected, rtol=1e-4, atol=1e-4)
    assert features(images).shape == (4, 3 * features.paths, features.size(32), features.size(32))


def test_what_whitens_is_the_covariance_of_other_random_images_too(features):
    """A direction of variance v has v / (v / s + 0.01) after it: the larger ones are alike, and the rest is smaller."""
    maps = F.group_norm(Scattering(angles=4)(random_images(77, n=600)), features.paths).transpose(0, 1).flatten(1)
    before, after = torch.cov(maps), torch.cov(features.whitening @ maps)
    largest = torch.linalg.eigvalsh(before)[-1]
    found = torch.linalg.eigvalsh(after) / largest
    assert torch.linalg.eigvalsh(before)[-10] / largest < 0.1
    assert (found <= 1.3).all()
    assert (found[-10:] > 0.6).all()
    assert (maps.mean(1) - features.mean).norm() < 0.1 * features.mean.norm()


def test_an_image_has_the_same_features_beside_others(features):
    images = random_images(2, n=20)
    torch.testing.assert_close(features(images)[7:8], features(images[7:8]), rtol=1e-4, atol=1e-5)


def test_a_mirror_image_has_mirrored_features_where_places_mirror_each_other(mirrored, features):
    images = random_images(3, n=20)
    images = F.pad(images, (0, 1, 0, 0), mode="reflect")  # 33 pixels: places at 0, 4, ..., 32
    for network, mirrors in ((mirrored, True), (features, False)):
        # Away from the edges, which are reflected further on the right.
        found, other = (network(each)[..., 2:-2] for each in (images, images.flip(-1)))
        assert ((found - other).norm() / found.norm() < 0.03) == mirrors


def test_mirrored_features_are_averages_over_both_directions(mirrored):
    images = random_images(4, n=4)
    plain = Scattering(angles=4)(images)
    other = plain.flip(-1).unflatten(1, (3, mirrored.paths))
    # Wavelets of angle k are of angle -k in a mirror: 1 and 3 change places. Order 2 is by the second, then the first.
    turned = [0, 3, 2, 1]
    after_first, after_second = 1 + 4, 1 + 4 + 16
    order = [0, *(1 + k for k in turned), *(after_first + 4 * m + k for m in turned for k in turned)]
    order += [after_second + k for k in turned]
    averaged = (plain + other[:, :, order].flatten(1, 2)) / 2
    expected = F.group_norm(averaged, mirrored.paths)
    torch.testing.assert_close(_normalized(mirrored.scattering, mirrored._mirrored, images), expected)


@pytest.mark.parametrize("make", PROCESSES.values())
@pytest.mark.parametrize("channels", [1, 3])
def test_random_images_are_images_and_made_again(make, channels):
    images, again, other = (
        make(20, channels=channels, size=16, generator=torch.Generator().manual_seed(seed)) for seed in (0, 0, 1)
    )
    assert images.shape == (20, channels, 16, 16)
    assert 0 <= images.min() < 0.2 < 0.8 < images.max() <= 1
    assert torch.equal(images, again)
    assert not torch.equal(images, other)
    assert images.std(dim=(1, 2, 3)).min() > 0.01


@pytest.mark.parametrize("make", [dead_leaves, spectra])
def test_their_spectrum_falls_as_that_of_photographs(make):
    """The power at frequency f of photographs falls as f^-2, of white noise not at all (Field 1987)."""
    images = make(300, channels=1, size=32, generator=torch.Generator().manual_seed(0))
    window = torch.hann_window(32)
    power = torch.fft.fft2((images - images.mean(dim=(2, 3), keepdim=True)) * window * window[:, None]).abs() ** 2
    along = power.mean(dim=(0, 1))[0]  # horizontally
    slope = (along[8].log() - along[2].log()) / torch.log(torch.tensor(4.0))
    assert -3.5 < slope < -0.9

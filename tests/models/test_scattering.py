"""Scattering coefficients are those of direct convolution, and the features of them those of the definition."""

import math

import pytest
import torch
import torch.nn.functional as F

from dp_lightning.errors import ModelError
from dp_lightning.models.random_images import PROCESSES, dead_leaves, spectra
from dp_lightning.models.scattering import Scattering, ScatteringFeatures, average, morlet


def convolved(image, filters):
    """The circular convolution, one shift after the other."""
    found = torch.zeros(image.shape, dtype=filters.dtype)
    for y in range(filters.shape[0]):
        for x in range(filters.shape[1]):
            found += filters[y, x] * torch.roll(image, (y, x), dims=(0, 1))
    return found


def directly(image, scales, angles):
    """The definition, in float64: image (H, W) to (K, h, w)."""
    height, width = image.shape
    edge = 2**scales
    m, n = (-(-pixels // edge) * edge + 2 * edge for pixels in image.shape)
    pads = edge, n - width - edge, edge, m - height - edge
    padded = F.pad(image[None, None].double(), pads, mode="reflect")[0, 0]
    phi = average(m, scales)[:, None] * average(n, scales)

    def averaged(x, j):
        step = 2 ** (scales - j)
        return convolved(x, phi[:: 2**j, :: 2**j] * 4**j)[::step, ::step][1:-1, 1:-1]

    def moduli(x, r, j):
        for angle in range(angles):
            psi = morlet(m, n, j, angle, angles)[:: 2**r, :: 2**r] * 4**r
            yield convolved(x, psi)[:: 2 ** (j - r), :: 2 ** (j - r)].abs()

    found = [averaged(padded, 0)]
    for j in range(scales):
        first = list(moduli(padded, 0, j))
        found += [averaged(x, j) for x in first]
        for larger in range(j + 1, scales):
            seconds = [list(moduli(x, j, larger)) for x in first]
            # By the angle of the second wavelet, then of the first.
            found += [averaged(of_first[k], larger) for k in range(angles) for of_first in seconds]
    return torch.stack(found)


@pytest.mark.parametrize(("scales", "angles", "size"), [(2, 2, (12, 12)), (1, 4, (9, 6)), (3, 1, (20, 17))])
def test_coefficients_are_those_of_direct_convolution(scales, angles, size):
    images = torch.rand(2, 2, *size, generator=torch.Generator().manual_seed(0))
    network = Scattering(scales=scales, angles=angles)
    found = network(images)
    h, w = (-(-pixels // 2**scales) for pixels in size)
    assert found.shape == (2, network.paths * 2, h, w)
    assert (network.size(size[0]), network.size(size[1])) == (h, w)
    for image, of_image in zip(images, found.unflatten(1, (2, network.paths)), strict=True):
        for channel in range(2):
            expected = directly(image[channel], scales, angles)
            error = (of_image[channel] - expected).abs().amax(dim=(1, 2)) / expected.abs().max()
            assert error.max() < 1e-6


@pytest.mark.parametrize("scale", [0, 1])
def test_wavelets_have_no_mean_and_their_frequency(scale):
    spectrum = torch.fft.fft2(morlet(64, 64, scale, 0, 8))
    assert spectrum.imag.abs().max() < 1e-9  # so that a product with it is one of real factors
    assert spectrum[0, 0].abs() < 1e-12
    highest = divmod(int(spectrum.real.argmax()), 64)
    assert highest[0] == 0
    assert abs(2 * math.pi * highest[1] / 64 - 3 * math.pi / 4 / 2**scale) < 0.15
    assert average(64, scale + 1).sum() == pytest.approx(1)


def test_an_image_smaller_than_its_reflected_edges_is_refused():
    with pytest.raises(ModelError, match=r"of 4 pixels are too small .* Lower scales"):
        Scattering()(torch.rand(1, 3, 4, 32))


def random_images(seed, n=200, channels=2, size=32):
    generator = torch.Generator().manual_seed(seed)
    each = [make(n // 2, channels=channels, size=size, generator=generator) for make in (dead_leaves, spectra)]
    return torch.cat(each)


@pytest.fixture(scope="module")
def features():
    return ScatteringFeatures(2, angles=4)


def test_they_are_normalised_centred_and_whitened_coefficients(features):
    images = random_images(1, n=4)
    plain = F.group_norm(Scattering(angles=4)(images), features.paths)
    expected = torch.empty_like(plain)
    for n in range(4):
        for y in range(8):
            for x in range(8):
                expected[n, :, y, x] = features.whitening @ (plain[n, :, y, x] - features.mean)
    torch.testing.assert_close(features(images), expected, rtol=1e-4, atol=1e-4)
    assert features(images).shape == (4, 2 * features.paths, features.size(32), features.size(32))


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
    images = random_images(2, n=40)  # several blocks
    torch.testing.assert_close(features(images)[7:8], features(images[7:8]), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("scales", [1, 2, 3])
@pytest.mark.parametrize(("mirror", "shift"), [(True, False), (False, True), (True, True)])
def test_views_are_the_features_of_each_image_and_may_be_averaged(mirror, shift, scales):
    images, half = random_images(3, n=3), {1: 1, 2: 2, 3: 4}[scales]
    plain, turned = (
        [each, F.pad(each, (0, half, 0, half), mode="reflect")[..., half:, half:]] for each in (images, images.flip(-1))
    )
    views = [plain[0], *turned[:mirror], *plain[1:][:shift], *turned[1:][: mirror and shift]]
    features = ScatteringFeatures(2, angles=2, scales=scales)
    expected = torch.stack([features(view) for view in views], dim=1)
    makes = ScatteringFeatures(2, angles=2, scales=scales, mirror=mirror, shift=shift)
    torch.testing.assert_close(makes(images), expected)
    averages = ScatteringFeatures(2, angles=2, scales=scales, mirror=mirror, shift=shift, average=True)
    torch.testing.assert_close(averages(images), expected.mean(dim=1))
    assert (makes.num_views, averages.num_views) == (len(views), 1)


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

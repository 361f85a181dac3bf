"""Scattering coefficients are those of direct convolution with the same filters, and nothing mixes images."""

import math

import pytest
import torch
import torch.nn.functional as F

from dp_lightning.errors import ModelError
from dp_lightning.models.scattering import Scattering, average, morlet


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


@pytest.mark.parametrize(("scales", "angles", "size"), [(2, 3, (12, 12)), (1, 4, (9, 6)), (3, 1, (20, 17))])
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


def test_an_image_has_the_same_coefficients_beside_others():
    images = torch.rand(40, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    network = Scattering(angles=4)
    together = network(images)  # several blocks
    torch.testing.assert_close(together[20:21], network(images[20:21]), rtol=1e-5, atol=1e-7)


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

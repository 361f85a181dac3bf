"""Second-order scattering coefficients of images: features without weights, so without other data.

Wavelets at ``scales`` sizes and ``angles`` orientations, the modulus, wavelets of larger sizes, the modulus again, and
an average over 2^J pixels (Bruna and Mallat 2013, "Invariant scattering convolution networks"; Oyallon and Mallat
2015). With x an image, psi the wavelets and phi the average:

    S0 = x * phi,   S1 = |x * psi| * phi,   S2 = ||x * psi| * psi'| * phi

Convolutions are products of Fourier transforms of the image, which is reflected at its edges. A path is computed no
finer than its last wavelet asks for: every 2^j-th pixel, where the filters are sampled as well.
"""

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dp_lightning.errors import ModelError
from dp_lightning.models.random_images import dead_leaves, spectra

# Constants of Bruna and Mallat: the width of the smallest envelope in pixels, and its frequency in radians per pixel.
_WIDTH, _FREQUENCY = 0.8, 3 * math.pi / 4
# Number of images of a channel that are transformed together: what they need stays in a processor's cache.
_TOGETHER = 32
# Seed and number of the random images of each kind that features are whitened by.
_SEED, _IMAGES = 0, 500
# Relative to the largest variance: directions with less would be raised by more than tenfold, and carry noise.
_FLOOR = 0.01


class Scattering(nn.Module):
    """Images (N, C, H, W) to their scattering coefficients (N, C K, h, w), float32.

    h = H / 2^J and w = W / 2^J, rounded up, and K = 1 + J L + J (J - 1) L^2 / 2. Channels are ordered by the image's
    channel and then by their path: the average, then each wavelet before its paths of order 2.

    Args:
        scales: J, the number of sizes of the wavelets.
        angles: L, the number of their orientations.

    Raises:
        ModelError: there is no scale or no angle, or an image is smaller than the edges that are reflected.
    """

    def __init__(self, *, scales: int = 2, angles: int = 8) -> None:
        super().__init__()
        if scales < 1 or angles < 1:
            raise ModelError(f"scales and angles of scattering must be at least 1, not {scales} and {angles}")
        self.scales, self.angles = scales, angles
        self._banks: dict[tuple[int, int, torch.device], _Bank] = {}

    @property
    def paths(self) -> int:
        """K, the number of coefficients for each channel and place."""
        j, angles = self.scales, self.angles
        return 1 + j * angles + j * (j - 1) // 2 * angles**2

    def size(self, pixels: int) -> int:
        """Height or width of the coefficients of an image.

        Raises:
            ModelError: the image is smaller than an edge that is reflected.
        """
        _edges(pixels, self.scales)
        return -(-pixels // 2**self.scales)

    def forward(self, images: Tensor) -> Tensor:
        n, channels, height, width = images.shape
        key = height, width, images.device
        if key not in self._banks:
            self._banks[key] = _Bank.of(height, width, self.scales, self.angles, images.device)
        bank = self._banks[key]
        planes = images.reshape(n * channels, height, width).float()
        if torch.compiler.is_compiling():  # a program for any number of images has no blocks
            found = torch.stack(list(bank.coefficients(planes)), dim=1)
        else:
            found = planes.new_empty(n * channels, self.paths, self.size(height), self.size(width))
            for start in range(0, n * channels, _TOGETHER):
                rows = slice(start, start + _TOGETHER)
                torch.stack(list(bank.coefficients(planes[rows])), dim=1, out=found[rows])
        return found.unflatten(0, (n, channels)).flatten(1, 2)


@dataclass(frozen=True)
class _Bank:
    """The filters for images of one size.

    Attributes:
        size: height and width with the reflected edges.
        pads: of the left, right, top and bottom edge.
        scales: J.
        wavelets: for the steps from resolution r to j, (L, 4^(j-r), 2 p q): the Fourier transforms of the L wavelets of
            size j, as sampled at every 2^r-th pixel, in the parts that add up where every 2^(j-r)-th pixel is kept;
            each number twice, for a complex number's parts.
        averages: for each resolution r, matrices that average rows and columns, and keep what lies inside.
    """

    size: tuple[int, int]
    pads: tuple[int, int, int, int]
    scales: int
    wavelets: dict[tuple[int, int], Tensor]
    averages: list[tuple[Tensor, Tensor]]

    @classmethod
    def of(cls, height: int, width: int, scales: int, angles: int, device: torch.device) -> "_Bank":
        top, bottom = _edges(height, scales)
        left, right = _edges(width, scales)
        pads = left, right, top, bottom
        m, n = height + top + bottom, width + left + right
        wavelets = {}
        for j in range(scales):
            spectra = torch.stack([torch.fft.fft2(morlet(m, n, j, k, angles)).real for k in range(angles)])
            for r in range(j + 1):
                sampled = _parts(spectra, 2**r).sum(1)  # in space, every 2^r-th value times 4^r
                parts = _parts(sampled.unflatten(1, (m // 2**r, n // 2**r)), 2 ** (j - r)) / 4 ** (j - r)
                wavelets[r, j] = parts.repeat_interleave(2, dim=-1).float().to(device)
        averages = []
        for r in range(scales):
            row, column = (_averages(size, r, scales).float().to(device) for size in (m, n))
            averages.append((row, column))
        return cls((m, n), pads, scales, wavelets, averages)

    def coefficients(self, images: Tensor) -> Iterator[Tensor]:
        """Yield the coefficients (b, h, w) of each path of images (b, H, W), in the order of the channels."""
        padded = F.pad(images[:, None], self.pads, mode="reflect")[:, 0]
        yield self._averaged(padded, 0)
        spectrum = torch.fft.fft2(padded)
        for j in range(self.scales):
            first = torch.stack(list(self._moduli(spectrum, 0, j)), dim=1)
            yield from self._averaged(first.flatten(0, 1), j).unflatten(0, first.shape[:2]).unbind(1)
            if j + 1 == self.scales:
                continue
            spectra = torch.fft.fft2(first.flatten(0, 1))
            for larger in range(j + 1, self.scales):
                for second in self._moduli(spectra, j, larger):
                    yield from self._averaged(second, larger).unflatten(0, first.shape[:2]).unbind(1)

    def _moduli(self, spectra: Tensor, r: int, j: int) -> Iterator[Tensor]:
        """|x * psi| (b, p, q) at resolution j, for each wavelet of size j and x at resolution r; not to be kept."""
        p, q = (side // 2**j for side in self.size)
        parts = torch.view_as_real(_parts(spectra, 2 ** (j - r))).flatten(2)
        product = parts.new_empty(parts.shape[0], 2 * p * q)  # len() would fix it in a program
        for filters in self.wavelets[r, j]:
            torch.mul(parts[:, 0], filters[0], out=product)
            for part in range(1, len(filters)):
                product.addcmul_(parts[:, part], filters[part])
            field = torch.fft.ifft2(torch.view_as_complex(product.view(-1, p, q, 2)))
            squares = torch.view_as_real(field).square_()
            yield squares[..., 0].add(squares[..., 1]).sqrt_()

    def _averaged(self, maps: Tensor, r: int) -> Tensor:
        """(b, p, q) at resolution r to (b, h, w)."""
        rows, columns = self.averages[r]
        return (rows @ maps) @ columns.T  # in this order: on a CPU the other one takes twice as long


class ScatteringFeatures(Scattering):
    """Images (N, C, H, W) to maps (N, C K, h, w), float32, in two steps; with V views (N, V, C K, h, w).

    Each group of C neighbouring maps of an image gets the mean 0 and the variance 1 (Tramèr and Boneh 2021,
    "Differentially private learning needs better features (or much more data)"). Then the mean of random images is
    subtracted, and the C K maps are multiplied by (S / s + 0.01)^(-1/2), with S their covariance over random images and
    s its largest eigenvalue.

    A private gradient's noise is the same in all directions, so features serve it best where they differ between
    images: what all images share uses up the length of a feature without telling any two apart. Mean and covariance are
    those of random images, so nothing is estimated from the data, nor from other photographs.

    The views of an image are the image, its mirror image, and both shifted up and to the left by half the distance of
    two places, 2^(J-1) pixels; edges are reflected. ``num_views`` is V, or 1 for their mean.

    Args:
        channels: C.
        mirror: The mirror image is a view. It suits images of which it shows the same, as of most photographs, but not
            of letters or a chest from the front.
        shift: The shifted image is a view.
        average: Give the mean over the views (N, C K, h, w). It costs one layer a V-th of the time and the memory; a
            network tells more from each view.

    Raises:
        ModelError: There is no scale or no angle.
    """

    mean: Tensor
    whitening: Tensor

    def __init__(
        self,
        channels: int,
        *,
        scales: int = 2,
        angles: int = 8,
        mirror: bool = False,
        shift: bool = False,
        average: bool = False,
    ) -> None:
        super().__init__(scales=scales, angles=angles)
        self._mirror, self._shift = mirror, shift
        self.num_views = 1 if average else (1 + mirror) * (1 + shift)
        if torch.get_default_device().type == "meta":  # it is built for its shapes
            count = channels * self.paths
            mean, whitening = torch.empty(count), torch.empty(count, count)
        else:
            mean, whitening = (known.clone() for known in _of_random_images(channels, scales, angles))
        self.register_buffer("mean", mean)
        self.register_buffer("whitening", whitening)

    def forward(self, images: Tensor) -> Tensor:
        views = [images, images.flip(-1)] if self._mirror else [images]
        if self._shift:
            step = 2 ** (self.scales - 1)
            views += [F.pad(view, (0, step, 0, step), mode="reflect")[..., step:, step:] for view in views]
        maps = torch.stack([self._maps(view) for view in views], dim=1)
        return maps.mean(dim=1) if self.num_views == 1 else maps

    def _maps(self, images: Tensor) -> Tensor:
        maps = F.group_norm(super().forward(images), self.paths)
        return (self.whitening @ (maps.flatten(2) - self.mean[:, None])).view_as(maps)


@functools.lru_cache(maxsize=4)
def _of_random_images(channels: int, scales: int, angles: int) -> tuple[Tensor, Tensor]:
    """The mean (C K,) of the maps, and the square root of their inverse covariance (C K, C K)."""
    generator = torch.Generator().manual_seed(_SEED)
    size = 8 * 2**scales  # eight places each way
    kinds = [make(_IMAGES, channels=channels, size=size, generator=generator) for make in (dead_leaves, spectra)]
    scattering = Scattering(scales=scales, angles=angles)
    maps = F.group_norm(scattering(torch.cat(kinds)), scattering.paths).transpose(0, 1).flatten(1)
    mean = maps.mean(dim=1)
    centred = (maps - mean[:, None]).double()
    variances, directions = torch.linalg.eigh(centred @ centred.T / centred.shape[1])
    scale = (variances.clamp(min=0) / variances[-1] + _FLOOR).rsqrt()
    return mean, ((directions * scale) @ directions.T).float()


def morlet(height: int, width: int, scale: int, angle: int, angles: int) -> Tensor:
    """A Morlet wavelet with its centre at the origin, periodic, complex128 (height, width).

    A wave of frequency 3 pi / 4 / 2^scale under a Gaussian of width 0.8 * 2^scale along it and angles / 4 times that
    across, less the multiple of the Gaussian that makes its mean zero.
    """
    sigma, slant, theta = _WIDTH * 2**scale, 4 / angles, math.pi * angle / angles
    envelope = torch.zeros(height, width, dtype=torch.float64)
    wave = torch.zeros(height, width, dtype=torch.complex128)
    for rows in range(-2, 3):
        for columns in range(-2, 3):
            y = torch.arange(height, dtype=torch.float64)[:, None] + rows * height
            x = torch.arange(width, dtype=torch.float64) + columns * width
            along, across = x * math.cos(theta) + y * math.sin(theta), y * math.cos(theta) - x * math.sin(theta)
            gaussian = torch.exp(-(along.square() + (slant * across).square()) / (2 * sigma**2))
            envelope += gaussian
            wave += torch.polar(gaussian, along * (_FREQUENCY / 2**scale))
    return (wave - wave.sum() / envelope.sum() * envelope) * (slant / (2 * math.pi * sigma**2))


def average(size: int, scales: int) -> Tensor:
    """The Gaussian of width 0.8 * 2^(scales - 1) with its centre at the origin, periodic, of sum 1: float64 (size,).

    The average of an image is its product with itself over rows and columns.
    """
    x = torch.arange(size, dtype=torch.float64)
    shifted = x + size * torch.arange(-2, 3)[:, None]
    gaussian = torch.exp(-shifted.square() / (2 * (_WIDTH * 2 ** (scales - 1)) ** 2)).sum(0)
    return gaussian / gaussian.sum()


def _averages(size: int, r: int, scales: int) -> Tensor:
    """The matrix (size / 2^J - 2, size / 2^r) that averages a row at resolution r, and leaves out the edges."""
    filters = average(size, scales)[:: 2**r] * 2**r
    places = torch.arange(len(filters))
    circular = filters[(places[:, None] - places) % len(filters)]
    return circular[:: 2 ** (scales - r)][1:-1]


def _edges(pixels: int, scales: int) -> tuple[int, int]:
    """Pixels that are reflected before and after an image's rows or columns.

    Raises:
        ModelError: the image has fewer.
    """
    margin = 2**scales
    before, after = margin, -(-pixels // margin) * margin + margin - pixels
    if max(before, after) >= pixels:
        raise ModelError(
            f"Images of {pixels} pixels are too small for scattering with {scales} scales: it reflects "
            f"{max(before, after)} pixels at the edges. Lower scales, or set a larger input_size."
        )
    return before, after


def _parts(spectra: Tensor, step: int) -> Tensor:
    """(b, m, n) to (b, step^2, m n / step^2): the frequencies that fall together if every step-th pixel is kept."""
    b, m, n = spectra.shape
    blocks = spectra.reshape(b, step, m // step, step, n // step)
    return blocks.transpose(2, 3).reshape(b, step**2, -1)

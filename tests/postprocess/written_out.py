"""Every method written out plainly in float64: one matrix, all of its gradients at once, full decompositions.

Each method takes the gradients g_1, ..., g_t of one parameter and the noise s_1, ..., s_t of each of their entries, and
returns the output at step t.
"""

import math

import torch

MUON = [(3.4445, -4.7750, 2.0315)] * 5
# The polynomials published with Amsel et al. 2025, of which all but the last leave one per cent of room.
PUBLISHED = [
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
]
POLAR_EXPRESS = [*((a / 1.01, b / 1.01**3, c / 1.01**5) for a, b, c in PUBLISHED[:-1]), PUBLISHED[-1]]


def heavy_ball(beta):
    def method(gradients, noise=None):
        last = len(gradients) - 1
        return sum(beta ** (last - k) * g for k, g in enumerate(gradients))

    return method


def ema_nesterov(beta):
    def method(gradients, noise=None):
        last = len(gradients) - 1
        average = sum((1 - beta) * beta ** (last - k) * g for k, g in enumerate(gradients))
        return (1 - beta) * gradients[-1] + beta * average

    return method


def low_pass(a, b, *, corrected=False):
    def method(gradients, noise=None):
        outputs, responses = [], []
        for t in range(len(gradients)):
            for out, inputs in ((outputs, gradients), (responses, [1.0] * len(gradients))):
                value = sum(b[i] * inputs[t - i] for i in range(len(b)) if t >= i)
                out.append(value - sum(a[i] * out[t - 1 - i] for i in range(len(a)) if t > i))
        return outputs[-1] / responses[-1] if corrected else outputs[-1]

    return method


def kalman(gain=None, ratio=None):
    def method(gradients, noise=None):
        estimate, variance = gradients[0], 1 + (ratio or 0)
        for g in gradients[1:]:
            k = variance / (variance + 1) if gain is None else gain
            estimate = estimate + k * (g - estimate)
            variance = (1 - k) * variance + (ratio or 0)
        return estimate

    return method


def scale(factor):
    return lambda gradients, noise=None: factor * gradients[-1]


def matrix(gradient):
    return gradient.double().flatten(1)


def dimension_scale(m, n, cap=4.0):
    return min(cap, math.sqrt(max(1.0, m / n)))


def quintic(polynomials, cap=4.0):
    def method(gradients, noise=None):
        x = matrix(gradients[-1])
        u, s, vh = torch.linalg.svd(x, full_matrices=False)
        norm = s.norm()
        s = s / norm if norm > 0 else s
        for a, b, c in polynomials:
            s = a * s + b * s**3 + c * s**5
        return (dimension_scale(*x.shape, cap) * u * s @ vh).view_as(gradients[-1])

    return method


def exact(gradients, noise=None):
    x = matrix(gradients[-1])
    u, s, vh = torch.linalg.svd(x, full_matrices=False)
    return (dimension_scale(*x.shape) * u * (s > 1e-12 * s[0]) @ vh).view_as(gradients[-1])


def magnitude(method):
    def scaled(gradients, noise=None):
        return torch.linalg.svdvals(matrix(gradients[-1]))[0] * method(gradients, noise)

    return scaled


def orthogonal_norm(m, n, cap=4.0):
    return dimension_scale(m, n, cap) * math.sqrt(min(m, n))


def normalize(norm=None):
    def method(gradients, noise=None):
        x = matrix(gradients[-1])
        target = orthogonal_norm(*x.shape) if norm is None else norm
        return (target * x / x.norm()).view_as(gradients[-1]) if x.any() else gradients[-1]

    return method


def noise_factor(gradient, level):
    m, n = matrix(gradient).shape
    return orthogonal_norm(m, n) / (level * math.sqrt(m * n))


def noise_normalize(gradients, noise):
    return noise_factor(gradients[-1], noise[-1]) * gradients[-1]


def signal(s, m, n, level):
    """The singular value of a signal that shows as s, from y^2 = (z + 1/z) (z + beta/z), by bisection."""
    m, n = min(m, n), max(m, n)
    beta, y = m / n, s / (level * math.sqrt(n))
    if y <= 1 + math.sqrt(beta):
        return 0.0
    low, high = beta**0.25, y
    for _ in range(200):
        z = (low + high) / 2
        low, high = (z, high) if (z + 1 / z) * (z + beta / z) < y * y else (low, z)
    return z * level * math.sqrt(n)


def shrinkage(gradients, noise):
    """The size that the cosines between the singular vectors of signal and data ask for."""
    x = matrix(gradients[-1])
    m, n = min(x.shape), max(x.shape)
    beta, unit = m / n, noise[-1] * math.sqrt(n)
    u, values, vh = torch.linalg.svd(x, full_matrices=False)
    shrunk = []
    for s in values.tolist():
        if z := signal(s, m, n, noise[-1]) / unit:
            left = math.sqrt((z**4 - beta) / (z**4 + beta * z**2))
            right = math.sqrt((z**4 - beta) / (z**4 + z**2))
            shrunk.append(unit * z * left * right)
        else:
            shrunk.append(0.0)
    return (u * torch.tensor(shrunk, dtype=torch.float64) @ vh).view_as(gradients[-1])


def johnstone_edge(m, n):
    """The 99 % quantile of the largest singular value of standard normal noise (Johnstone 2001)."""
    m, n = min(m, n), max(m, n)
    centre = (math.sqrt(n - 1) + math.sqrt(m)) ** 2
    spread = (math.sqrt(n - 1) + math.sqrt(m)) * (1 / math.sqrt(n - 1) + 1 / math.sqrt(m)) ** (1 / 3)
    return math.sqrt(centre + 2.0234 * spread)


def gated(gradients, noise):
    x = matrix(gradients[-1])
    u, s, vh = torch.linalg.svd(x, full_matrices=False)
    open_ = (s > noise[-1] * johnstone_edge(*x.shape)).double()
    if not open_.any():
        return normalize(1.0)(gradients)
    return (dimension_scale(*x.shape) * u * open_ @ vh).view_as(gradients[-1])


def selective(threshold):
    def method(gradients, noise):
        x = matrix(gradients[-1])
        m, n = x.shape
        values = torch.linalg.svdvals(x).tolist()
        if threshold == "detection":
            shows = values[0] > noise[-1] * johnstone_edge(m, n)
        else:
            first, second = (signal(s, m, n, noise[-1]) for s in values[:2])
            shows = first - second > noise[-1] * (math.sqrt(m) + math.sqrt(n))
        return quintic(MUON)(gradients) if shows else noise_normalize(gradients, noise)

    return method

"""Convolutions and transposed convolutions in one, two and three dimensions.

In the sum over output positions, p_t is the patch of the padded input under the kernel. A transposed convolution is
the gradient of a convolution, so its weight's gradient is that of the convolution with input and output gradient
exchanged.

The Gram matrix of the patches is a sum of shifted windows of the Gram matrix of the input over its positions, one for
each place in the kernel, so no patch is ever formed. The windows are added up one dimension after the other: k + k
instead of k^2 for a kernel of k x k. With stride s, a place in the kernel meets only every s-th position, so there are
s x s Gram matrices, each of a part of the positions.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

import torch
from torch import Tensor
from torch.nn import functional as F

from dp_lightning.privacy.gradients.contribution import scaled, sum_of_views, without
from dp_lightning.privacy.gradients.cost_model import Size, formed_by_products, patches_by_place, product_dtype
from dp_lightning.privacy.gradients.products import Empty, Factors
from dp_lightning.processors import below_avx512


@dataclass(frozen=True)
class Geometry:
    """Which numbers of the image each place of the kernel meets, with a value for each dimension of the image.

    Args:
        weight_shape: (outputs, inputs / groups, *kernel).
        stride, dilation: between places.
        padding: zeros before and after each dimension, the last one first, as ``F.pad`` takes them.
        groups: the number of groups of channels.
    """

    weight_shape: torch.Size
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    @property
    def kernel_size(self) -> tuple[int, ...]:
        return tuple(self.weight_shape[2:])


def geometry(
    weight_shape: torch.Size,
    stride: int | Sequence[int] = 1,
    padding: int | str | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
) -> Geometry:
    """From the arguments of ``torch.conv1d``, 2d and 3d."""
    kernel = weight_shape[2:]
    dilations = by_dimension(dilation, len(kernel))
    if padding == "same":
        totals = [place * (size - 1) for place, size in zip(dilations, kernel, strict=True)]
        sides = [side for total in reversed(totals) for side in (total // 2, total - total // 2)]
    else:
        each = by_dimension(0 if isinstance(padding, str) else padding, len(kernel))
        sides = [side for side in reversed(each) for _ in range(2)]
    return Geometry(weight_shape, by_dimension(stride, len(kernel)), tuple(sides), dilations, groups)


def by_dimension(value: int | Sequence[int], dims: int) -> tuple[int, ...]:
    """A number for each dimension; a single one stands for all."""
    values = (value,) if isinstance(value, int) else tuple(value)
    return values * dims if len(values) == 1 else values


class Patches(Factors):
    """The factors of convolutions: G are the output gradients and P the patches of the input.

    Args:
        conv: what the kernel meets.
        image: (b * K, channels, ...), what the kernel moves over.
        values: (b * K, outputs, ...), one for each position of the kernel.
        augmult: K. The views of an example are consecutive.
    """

    _slides = True  # the kernel slides over the layer's input

    def __init__(self, conv: Geometry, image: Tensor, values: Tensor, augmult: int) -> None:
        self._conv, self._image, self._values, self._augmult = conv, image, values, augmult
        self.batch_size, self.device = len(image) // augmult, image.device
        self.dtype = product_dtype(self._grad_output.dtype, image.device)
        groups, positions = conv.groups, augmult * values[0, 0].numel()
        inputs, seen = prod(conv.weight_shape[1:]), augmult * (image[0].numel() + values[0].numel())
        self._windows = self._slides and len(conv.stride) == 2 and groups == 1
        if self._windows:
            # Every stride-th position in each dimension, stride * stride times.
            gram = (augmult * image[0, 0].numel()) ** 2 // prod(conv.stride) * image.shape[1]
        else:
            # Each patch is also formed and widened to float64.
            gram = (positions**2 + 40 * positions) * inputs * groups
        outputs = values.shape[1] // groups
        self.size = Size(groups=groups, positions=positions, outputs=outputs, inputs=inputs, gram=gram, seen=seen)
        depthwise, one_by_one = 1 < groups == image.shape[1], prod(conv.kernel_size) == 1
        channels = conv.weight_shape[1]
        by_products = one_by_one or formed_by_products(self.size, channels, self.dtype, self.device)
        self.by_products = by_products and not depthwise
        by_place = self.by_products and not one_by_one and patches_by_place(self.size, channels, self.device)
        self._channels_last = by_place or _is_channels_last(image)

    @property
    def _grad_output(self) -> Tensor:
        return self._values

    def left(self, rows: slice, dtype: torch.dtype) -> Tensor:
        values, groups = self._values[self._views(rows)].to(dtype), self._conv.groups
        if _is_channels_last(values):
            return self._positions(values.movedim(1, -1).flatten(1, -2).unflatten(2, (groups, -1)).transpose(1, 2))
        return self._positions(values.flatten(2).unflatten(1, (groups, -1)).mT)

    def right(self, rows: slice, dtype: torch.dtype, empty: Empty = torch.empty) -> Tensor:
        conv, spatial = self._conv, self._values.shape[2:]
        x = _padded(conv, self._image[self._views(rows)].to(dtype))
        groups, channels = conv.groups, x.shape[1] // conv.groups
        x = x.movedim(1, -1).contiguous().movedim(-1, 1) if self._channels_last else x.contiguous()
        batch, channel, *steps = x.stride()
        places = [step * dilation for step, dilation in zip(steps, conv.dilation, strict=True)]
        moves = [step * stride for step, stride in zip(steps, conv.stride, strict=True)]
        if self._channels_last:
            size = (len(x), groups, *spatial, *conv.kernel_size, channels)
            stride = (batch, channels * channel, *moves, *places, channel)
            patches = _dense(x.as_strided(size, stride), empty)
            return self._positions(patches.view(len(x), groups, prod(spatial), -1))
        size = (len(x), groups, channels, *conv.kernel_size, *spatial)
        stride = (batch, channels * channel, channel, *places, *moves)
        patches = _dense(x.as_strided(size, stride), empty)
        return self._positions(patches.view(len(x), groups, -1, prod(spatial)).mT)

    def form(self, rows: slice, empty: Empty) -> Tensor:
        if self.by_products:
            return super().form(rows, empty)
        views = self._views(rows)
        image, values = (_folded(x[views].to(self.dtype), self._augmult) for x in (self._image, self._values))
        gradients = _weight_gradient(self._conv, image, values, batch_size=rows.stop - rows.start)
        return self.rows_of(gradients.unflatten(0, (rows.stop - rows.start, -1)))

    @property
    def forming(self) -> int:
        # Without patches: the folded factors, and the gradient in two orders.
        return super().forming if self.by_products else 2 * (self.size.seen + self.size.weight)

    def right_gram(self, rows: slice) -> Tensor:
        if not self._windows:
            return super().right_gram(rows)
        conv, (height, width) = self._conv, self._values.shape[2:]
        x, (left, _, top, _) = self._image[self._views(rows)].double(), conv.padding
        views = self._augmult
        down = _shifts(conv.kernel_size[0], conv.stride[0], conv.dilation[0], top)
        across = _shifts(conv.kernel_size[1], conv.stride[1], conv.dilation[1], left)
        total = x.new_zeros(len(x) // views, views, height, width, views, height, width)
        for (i, downs), (j, acrosses) in product(down.items(), across.items()):
            part = x[:, :, i :: conv.stride[0], j :: conv.stride[1]]
            if 0 in part.shape[2:]:  # fewer positions than the stride: zeros alone are met
                continue
            flat = part.movedim(1, -1).reshape(len(total), -1, part.shape[1])
            gram = (flat @ flat.mT).view(-1, views, *part.shape[2:], views, *part.shape[2:])
            # Zeros around the image are zeros around its Gram matrix, in both positions.
            above, below = _margins(downs, height, part.shape[2])
            before, after = _margins(acrosses, width, part.shape[3])
            gram = F.pad(gram, (before, after, above, below, 0, 0, before, after, above, below))
            starts = [before + shift for shift in acrosses]
            gram = _added(gram[..., start : start + width, :, :, start : start + width] for start in starts)
            for start in (above + shift for shift in downs):
                total += gram[:, :, start : start + height, :, :, start : start + height]
        return total.flatten(4).flatten(1, 3).unsqueeze(1)

    def bias(self, rows: slice) -> Tensor:
        dtype = torch.promote_types(self.dtype, torch.float32)
        return sum_of_views(self._grad_output[self._views(rows)].flatten(2).sum(2, dtype=dtype), self._augmult)

    def weight(self, gradients: Tensor) -> Tensor:
        conv = self._conv
        rows = gradients.flatten(1, 2)
        if self._channels_last:
            return rows.unflatten(2, (*conv.kernel_size, -1)).movedim(-1, 2)
        return rows.unflatten(2, (-1, *conv.kernel_size))

    def let_go(self) -> None:
        del self._image, self._values

    def rows_of(self, weight: Tensor) -> Tensor:
        dims = len(self._conv.weight_shape)
        weight = weight.movedim(1 - dims, -1) if self._channels_last else weight
        return weight.flatten(1 - dims).unflatten(-2, (self.size.groups, self.size.outputs))

    def add_total(self, weights: Tensor, total: Tensor) -> None:
        if below_avx512(self.device):
            super().add_total(weights, total)
            return
        dtype = torch.promote_types(self.dtype, torch.float32)
        weights = weights[:, 0].repeat_interleave(self._augmult) if self._augmult > 1 else weights[:, 0]
        values, image = scaled(self._values.to(dtype), weights), without(self._image.to(dtype), weights)
        if len(image) == 1 and self._conv.groups > 1:
            image = image.contiguous()  # in float64 torch's sum is wrong if the only image has another stride
        total += self.rows_of(_weight_gradient(self._conv, image, values))

    def _views(self, rows: slice) -> slice:
        """The rows of the views of a range of examples."""
        return slice(*(None if end is None else end * self._augmult for end in (rows.start, rows.stop)))

    def _positions(self, rows: Tensor) -> Tensor:
        """(r * K, groups, positions of a view, ...) as (r, groups, positions, ...)."""
        if self._augmult == 1:
            return rows
        return rows.unflatten(0, (-1, self._augmult)).transpose(1, 2).flatten(2, 3)


class TransposedPatches(Patches):
    """The factors of ``nn.ConvTranspose1d``, 2d and 3d: G are the inputs and P the patches of the output gradient."""

    _slides = False

    def __init__(self, conv: Geometry, inputs: Tensor, grad_output: Tensor, augmult: int) -> None:
        super().__init__(conv, grad_output, inputs, augmult)

    @property
    def _grad_output(self) -> Tensor:
        return self._image


def _shifts(kernel: int, stride: int, dilation: int, padding: int) -> dict[int, list[int]]:
    """For one dimension, maps the first of every ``stride``-th input positions to the shifts at which they are met.

    Output position t meets input position (t + shift) * stride + first; outside of the input are zeros.
    """
    shifts: dict[int, list[int]] = {}
    for place in range(kernel):
        shift, first = divmod(place * dilation - padding, stride)
        shifts.setdefault(first, []).append(shift)
    return shifts


def _margins(shifts: list[int], positions: int, size: int) -> tuple[int, int]:
    """Zeros needed before and after ``size`` inputs for windows of ``positions`` at ``shifts``."""
    return max(-min(shifts), 0), max(max(shifts) + positions - size, 0)


def _added(tensors: Iterator[Tensor]) -> Tensor:
    total = next(tensors).clone()
    for tensor in tensors:
        total += tensor
    return total


def _dense(view: Tensor, empty: Empty) -> Tensor:
    """The numbers of a view in their order, in memory from ``empty`` if they are not."""
    if view.is_contiguous():
        return view
    return empty(tuple(view.shape), dtype=view.dtype, device=view.device).copy_(view)


def _is_channels_last(x: Tensor) -> bool:
    if x.dim() not in (4, 5) or x.is_contiguous():
        return False
    return x.is_contiguous(memory_format=torch.channels_last if x.dim() == 4 else torch.channels_last_3d)


def _folded(x: Tensor, augmult: int) -> Tensor:
    """(b * K, channels, ...) as (K, b * channels, ...), in the same memory format."""
    views = x.unflatten(0, (-1, augmult))
    if _is_channels_last(x):
        return views.movedim((0, 2), (-2, -1)).flatten(-2).movedim(-1, 1)
    return views.transpose(0, 1).flatten(1, 2)


def _weight_gradient(conv: Geometry, image: Tensor, values: Tensor, batch_size: int = 1) -> Tensor:
    """The weight's gradient, summed over dimension 0; ``batch_size`` of them if that many examples are folded."""
    before, after = conv.padding[::2], conv.padding[1::2]
    simple = before == after
    outputs, *rest = conv.weight_shape
    if _is_channels_last(image):
        weight = image.new_empty(batch_size * outputs, *rest[1:], rest[0]).movedim(-1, 1)
    else:
        weight = image.new_empty(batch_size * outputs, *rest)
    return torch.ops.aten.convolution_backward(
        values,
        image if simple else _padded(conv, image),
        weight,
        None,
        conv.stride,
        before[::-1] if simple else [0] * len(conv.stride),
        conv.dilation,
        False,
        [0] * len(conv.stride),
        batch_size * conv.groups,
        [False, True, False],
    )[1]


def _padded(conv: Geometry, x: Tensor) -> Tensor:
    return F.pad(x, conv.padding) if any(conv.padding) else x

"""What ``model.onnx`` takes and returns, in full, so that it can be run without this package."""

from collections.abc import Mapping, Sequence
from typing import Any

# ITU-R 601, as `ImageFiles` computes it.
_GREY = "grey: (299 R + 587 G + 114 B + 500) // 1000 of the resized and cropped RGB image"
_RETURNS_LOGITS = "logits: softmax over the last axis gives the probabilities of the classes"


def contract(
    program: bytes,
    *,
    images: Mapping[str, Any],
    resized_to: int | None,
    class_names: Sequence[str] | None,
    logits: bool,
) -> dict[str, Any]:
    """The entry ``onnx`` of ``model.json``: the steps from an image file to the input, and what the output means.

    Names, types and shapes are those of the program itself. The preparation is what `dpl predict` does to a file; none
    of it is part of the program.

    Args:
        program: content of ``model.onnx``.
        images: ``mean`` and ``std`` of the data's normalisation, one number for each channel or one for all; where
            they are missing, the checkpoint does not say.
        resized_to: length of the shorter side in pixels before the centre crop; None is the size of the crop.
        class_names: in the order of the outputs.
        logits: whether the module is known to return logits.
    """
    import onnx

    graph = onnx.load_model_from_string(program).graph
    (given,), (returned,) = map(_described, graph.input), map(_described, graph.output)
    means = _RETURNS_LOGITS if logits else "what forward of the module returns"
    return {
        "input": {**given, **_preparation(given["shape"], images, resized_to)},
        "output": {**returned, "meaning": means, "class_names": None if class_names is None else list(class_names)},
    }


def _described(value: Any) -> dict[str, Any]:
    """Name, type and shape of an input or an output of a program; a name stands for a size that is free."""
    import onnx

    tensor = value.type.tensor_type
    return {
        "name": value.name,
        "dtype": onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type).name,
        "shape": [side.dim_param or side.dim_value for side in tensor.shape.dim],
    }


def _preparation(shape: Sequence[Any], images: Mapping[str, Any], resized_to: int | None) -> dict[str, Any]:
    """From an image file to an input of this shape; a vector of features is not prepared."""
    if len(shape) != 4:
        return {"layout": "NC"}
    _, channels, height, width = shape
    mean, std = (_for_each(images.get(name), channels) for name in ("mean", "std"))
    return {
        "layout": "NCHW",
        "channels": {1: _GREY, 3: "RGB"}.get(channels, "as in the training data"),
        "resize": {
            "shorter_side": resized_to or height,
            "longer_side": "shorter_side * longer side of the file / shorter side of the file, rounded down",
            "interpolation": "bilinear, antialiased, on 8-bit pixels",
        },
        "center_crop": [height, width],
        "crop_from": "left and top: (side - crop) / 2, rounded to the nearest integer and halves to the even one",
        "exif_orientation": "ignored",
        "transparency": "ignored",
        "range": [0.0, 1.0],
        "scale_to_range": "pixel / 255",
        "mean": mean,
        "std": std,
        "normalize": "(scaled pixel - mean) / std for each channel, before the call: the program does not do it",
    }


def _for_each(values: Sequence[float] | None, channels: int) -> list[float] | None:
    return None if values is None else list(values) * (channels if len(values) == 1 else 1)

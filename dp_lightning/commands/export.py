"""`dpl export`: a checkpoint as safetensors and ONNX, with the privacy statement of its steps beside it."""

import argparse
import hashlib
import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from dp_lightning.atomic_files import replacing, require_writable
from dp_lightning.commands.verify import verify
from dp_lightning.errors import ConfigurationError, DataError
from dp_lightning.lightning_modules import ImageClassifier, TimmModule
from dp_lightning.models.batch_norm import change_batch_norm
from dp_lightning.models.feature_network import FeatureNetwork
from dp_lightning.models.pretrained import without_weights
from dp_lightning.models.trained import merge_low_rank
from dp_lightning.privacy.exported import EXPORTED
from dp_lightning.privacy.journal import journal_name, journal_of, read_journal, up_to
from dp_lightning.privacy.statement import STATEMENT, STATEMENT_FILE
from dp_lightning.privacy.weights import digest_of
from dp_lightning.private_run.resume import SavedRun
from dp_lightning.private_run.saved_model import SavedModel
from dp_lightning.strategies.checkpoint_io import PrivateCheckpointIO

_FORMATS = ("safetensors", "onnx")
_WINDOWED = (
    "(value - window[0]) / (window[1] - window[0]) * 255 of each value in the file, rounded to the nearest integer and "
    "halves to the even one, clipped to 0 to 255; values of DICOM after rescale slope and intercept, and where low "
    "values are white (MONOCHROME1, WhiteIsZero), 255 - pixel"
)
# ITU-R 601, as `ImageFiles` computes it.
_GREY = "grey: (299 R + 587 G + 114 B + 500) // 1000 of the resized and cropped RGB image"


def main(arguments: list[str]) -> None:
    """Write ``model.safetensors``, ``model.onnx``, ``model.json`` and the privacy statement, and print their paths.

    The checkpoint is first verified as by `dpl verify`, which can check the export's folder too: the folder has the
    journal up to the checkpoint's steps, and the statement has the digest of each file. The statement's ``weights`` is
    the digest of the tensors in ``model.safetensors``, whose metadata has the same statement without ``files``.

    ``model.onnx`` takes images as the data module gives them, float32 (n, C, H, W) after the normalisation of the data,
    and returns logits (n, classes); it includes what the module does to images, and for a linear probe the network that
    computes its features. ``onnx`` in ``model.json`` has every step from an image file to that input.
    ``model.safetensors`` has only the network's tensors, with low-rank additions merged into them.

    Raises:
        ConfigurationError: naming the option and the fix.
        DataError: if the checkpoint cannot be read, or does not belong to the journal beside it.
    """
    options = _parser().parse_args(arguments[1:])
    checkpoint, out = Path(options.ckpt_path), Path(options.out)
    if "onnx" in options.format and find_spec("onnxscript") is None:
        raise ConfigurationError("--format onnx needs onnxscript: pip install 'dp-lightning[export]'")
    require_writable(out, "--out")
    if (out / STATEMENT_FILE).exists():
        raise ConfigurationError(f"--out {out} holds the statement of other weights. Give another folder.")
    saved = PrivateCheckpointIO().load_checkpoint(checkpoint)
    run, model = SavedRun.read(saved), SavedModel.read(saved)
    if run is None:
        raise ConfigurationError(
            f"{checkpoint} has no privacy statement: it is not from a private run, so it is unknown what its weights "
            "reveal."
        )
    if wrong := [f"{subject}: {finding}" for subject, finding in verify(checkpoint) if finding is not None]:
        raise DataError(
            f"{checkpoint} and the journal beside it do not belong together, so it is not exported: "
            f"{'; '.join(wrong)}. Use the checkpoint as the run left it, with the journal of its folder."
        )
    module = _module(saved["state_dict"], model, options.module_class, batch_norm=run.settings.get("batch_norm"))
    tensors = _tensors(module)
    statement = replace(run.statement, weights=digest_of(tensors))
    facts: dict[str, Any] = {
        "class_path": model.class_path,
        "settings": dict(model.settings),
        **{name: model.data.get(name) for name in ("features", "resized_to", "window", "class_names")},
        "batch_norm": run.settings.get("batch_norm"),
        "checkpoint": run.statement.weights,
    }
    journal = journal_name(statement.run)
    steps = read_journal(checkpoint.parent / journal, statement.run)
    contents = {journal: journal_of(up_to(statement.journal_head, steps))}
    if "onnx" in options.format:
        contents["model.onnx"], facts["onnx"] = _onnx_of(module, model, options)
    if "safetensors" in options.format:
        from safetensors.torch import save

        contents[EXPORTED] = save(tensors, {STATEMENT: json.dumps(statement.saved())})
    contents["model.json"] = (json.dumps(facts, indent=2, default=str) + "\n").encode()
    digests = {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}
    print(*replace(statement, files=digests).write(out), sep="\n")
    for name, content in contents.items():
        with replacing(out / name) as file:
            file.write(content)
        print(out / name)
    if statement.release != "ok":
        print(f"The exported network is {statement.release}", file=sys.stderr)


def _module(
    weights: dict[str, Tensor], saved: SavedModel, module_class: str | None, *, batch_norm: str | None
) -> pl.LightningModule:
    """The module of the checkpoint, as it was trained, with low-rank additions merged into the weights."""
    kind = saved.module_class(trusted=module_class)
    if kind is None:
        raise ConfigurationError(
            f"The module of the checkpoint is of the class {saved.class_path or '(not named)'}. A file does not choose "
            "which code runs: if this is your own LightningModule, trained by `dpl fit`, name it with --module-class."
        )
    with without_weights():
        module: pl.LightningModule = kind(**saved.arguments_of(kind))
    change_batch_norm(module, batch_norm)
    module.load_state_dict(weights)
    if isinstance(module, TimmModule):
        merge_low_rank(module.model)
    return module.eval()


def _tensors(module: pl.LightningModule) -> dict[str, Tensor]:
    """Copies of the network's tensors, under the network's own names."""
    state = {name: tensor for name, tensor in module.state_dict().items() if isinstance(tensor, Tensor)}
    network = {name.removeprefix("model."): tensor for name, tensor in state.items() if name.startswith("model.")}
    return {name: tensor.detach().clone().contiguous() for name, tensor in (network or state).items()}


def _onnx_of(
    module: pl.LightningModule, model: SavedModel, options: argparse.Namespace
) -> tuple[bytes, dict[str, Any]]:
    """The network as ONNX, and what it takes and returns; for a probe, with the network that computes its features."""
    images: Mapping[str, Any]
    if (features := model.data.get("features")) is None:
        whole: nn.Module = module
        images = {"resized_to": model.data.get("resized_to"), "window": model.data.get("window"), **model.settings}
    else:
        weights, images = options.feature_weights, {**features["network"], **features}
        before = FeatureNetwork.again(features["network"], weights=weights, setting="--feature-weights")
        whole = nn.Sequential(before, module).eval()
    channels, size = images.get("in_channels"), options.image_size or images.get("image_size")
    if channels is None or size is None:
        raise ConfigurationError(
            "The checkpoint does not say how large its images are. Give --image-size, or --format safetensors."
        )
    shape = (channels,) if size == 1 else (channels, size, size)
    example = torch.zeros(2, *shape)
    with torch.no_grad():
        classes = whole(example).shape[1]  # what the network makes once for images of this size is a constant
    program: Any = torch.onnx.export(
        whole,
        (example,),
        dynamo=True,
        verbose=False,
        input_names=["images"],
        output_names=["logits"],
        dynamic_shapes=({0: torch.export.Dim("n")},),
    )
    meaning = "logits: softmax over the last axis gives the probabilities of the classes"
    if getattr(module, "multi_label", False):
        meaning = "logits: the sigmoid of each is the probability that the image has this label"
    contract = {
        "input": {"name": "images", "dtype": "float32", "shape": ["n", *shape], **_preparation(shape, images)},
        "output": {
            "name": "logits",
            "dtype": "float32",
            "shape": ["n", classes],
            "meaning": meaning if isinstance(module, ImageClassifier) else "what forward of the module returns",
            "class_names": model.data.get("class_names"),
        },
    }
    return program.model_proto.SerializeToString(), contract


def _preparation(shape: tuple[int, ...], images: Mapping[str, Any]) -> dict[str, Any]:
    """What `dpl predict` does to an image file before the call; the program does none of it.

    An input is (C, H, W), or a vector (D,) of features, which is not prepared. The settings of the images may be
    missing; the mean and the standard deviation have one number for each channel, or one for all.
    """
    if len(shape) == 1:
        return {"layout": "NC"}
    channels, height, width = shape
    given = {name: images.get(name) for name in ("mean", "std")}
    each = {name: v if v is None else list(v) * (channels if len(v) == 1 else 1) for name, v in given.items()}
    window = images.get("window")
    return {
        "layout": "NCHW",
        "exif_orientation": "applied first: the image is turned as a viewer shows it",
        "window": window,
        "pixel": "8 bits of the file" if window is None else _WINDOWED,
        "channels": {1: _GREY, 3: "RGB"}.get(channels, "as in the training data"),
        "resize": {
            "shorter_side": images.get("resized_to") or height,
            "longer_side": "shorter_side * longer side of the file / shorter side of the file, rounded down",
            "interpolation": "bilinear, antialiased, on 8-bit pixels",
        },
        "center_crop": [height, width],
        "crop_from": "left and top: (side - crop) / 2, rounded to the nearest integer and halves to the even one",
        "transparency": "ignored",
        "range": [0.0, 1.0],
        "scale_to_range": "pixel / 255",
        **each,
        "normalize": "(scaled pixel - mean) / std for each channel, before the call: the program does not do it",
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="dpl export", description=__doc__, allow_abbrev=False)
    add = parser.add_argument
    add("--ckpt-path", "--ckpt_path", required=True, help="checkpoint of a private run")
    add("--out", required=True, help="folder for the files")
    add("--format", nargs="+", choices=_FORMATS, default=_FORMATS, help="default: both")
    add("--image-size", "--image_size", type=int, help="height and width, if the checkpoint does not say")
    add("--module-class", "--module_class", help="class of the module, package.module.Class, if it is your own")
    add(
        "--feature-weights",
        "--feature_weights",
        help="for a linear probe: file with the weights of the network that computes its features, if it has moved",
    )
    return parser

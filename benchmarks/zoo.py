"""Which models have right per-example gradients, compared with a loop over single examples and with Opacus' hooks.

The smallest model of every family of timm and torchvision, and small vision models of transformers. Each runs in a
process of its own, in float64, on three examples; dropout is off, so that the loop sees the same function::

    python benchmarks/zoo.py --results zoo.json             # runs what the file does not hold yet
    python benchmarks/zoo.py --results zoo.json --table     # prints the results as a table (CSV)
    python benchmarks/zoo.py --only transformers/ViT        # runs one and prints what was found

A model is right if all examples' gradients differ from the loop's by at most 1e-5 of their norm.
"""

import csv
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
from measuring import arguments
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves, tree_map_only

Case = tuple[nn.Module, Any, Callable[[nn.Module, Any], Tensor]]  # model, examples (b, ...), loss of a batch

EXAMPLES, CLASSES, TOLERANCE = 3, 10, 1e-5
SIDES = (64, 96, 112, 128, 160, 224, 299)
MOST_PARAMETERS = 130_000_000  # four float64 gradients of three examples fit into 13 GiB; larger ones get two blocks


# Families of timm and torchvision


def timm_families() -> dict[str, list[str]]:
    import timm

    return {f"timm/{module}": timm.list_models(module=module) for module in timm.list_modules()}


def torchvision_families() -> dict[str, list[str]]:
    from torchvision import models

    families: dict[str, list[str]] = {}
    for package, kind in ((models, "torchvision"), (models.segmentation, "torchvision/segmentation")):
        for name in models.list_models(package):
            family = models.get_model_builder(name).__module__.rpartition(".")[2]
            families.setdefault(f"{kind}/{family}", []).append(name)
    return families


def build_timm(name: str, **options: Any) -> nn.Module:
    import timm

    return timm.create_model(name, num_classes=CLASSES, **options)


def build_torchvision(name: str) -> nn.Module:
    from torchvision import models

    options = {"weights_backbone": None} if "segmentation" in models.get_model_builder(name).__module__ else {}
    return models.get_model(name, weights=None, num_classes=CLASSES, **options)


def smallest(names: list[str], build: Callable[[str], nn.Module]) -> tuple[str, int] | None:
    """Name and number of parameters."""
    sizes = []
    for name, device in product(names, ("meta", "cpu")):
        if device == "cpu" and any(name == known for _, known in sizes):
            continue
        try:
            with torch.device(device):
                sizes.append((sum(p.numel() for p in build(name).parameters()), name))
        except Exception:
            continue  # a model that cannot be built is not a candidate; some cannot be built on meta
    return min(sizes)[::-1] if sizes else None


def image_case(name: str, build: Callable[..., nn.Module]) -> Case:
    """The model, with examples of the smallest size at which it runs."""
    default = getattr(build(name), "pretrained_cfg", {}).get("input_size", (3, 224, 224))
    for side in (*SIDES, default[-1]):
        for options, frozen in product(({"img_size": side}, {}), (False, True)):
            try:
                model = prepared(build(name, **options), frozen=frozen)
                x = torch.randn(EXAMPLES, default[0], side, side)
                with torch.no_grad():
                    model(x[:1])
            except Exception:
                continue  # the next size, or the next way to set it
            return model, (x, torch.arange(EXAMPLES)), image_loss
    raise RuntimeError("runs at no size")


def image_loss(model: nn.Module, batch: Any) -> Tensor:
    x, y = batch
    output = model(x)
    return F.cross_entropy(output, y) if isinstance(output, Tensor) and output.dim() == 2 else output_loss(output)


def output_loss(output: Any) -> Tensor:
    """A number that depends on every entry of the output, a tree of tensors (b, ...)."""
    total = 0.0
    tensors = [x for x in tree_leaves(dict(output) if isinstance(output, dict) else output) if x.is_floating_point()]
    for x in tensors:
        total = total + (x.tanh() * torch.arange(x[0].numel()).sin().view(x.shape[1:])).mean()
    return total


def prepared(model: nn.Module, *, frozen: bool = False) -> nn.Module:
    """In training mode, without BatchNorm (or with a frozen one) and without randomness; no float64 weight is zero."""
    from dp_lightning.errors import ModelError
    from dp_lightning.models.batch_norm import batch_norm_to_group_norm, freeze_batch_norm

    model.train()
    try:
        if not frozen:
            batch_norm_to_group_norm(model)
    except ModelError:
        frozen = True
    if frozen:
        freeze_batch_norm(model)
    for module in model.modules():
        for option, value in vars(module).items():
            if isinstance(value, float) and (option == "p" or "drop" in option):
                setattr(module, option, 0.0)
    model.double()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.add_(0.02 * torch.randn_like(parameter))
    return model


# Configurations of transformers

_SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
_IMAGE = {**_SMALL, "image_size": 32, "patch_size": 8}
_TEXT = {**_SMALL, "vocab_size": 50, "max_position_embeddings": 32, "eos_token_id": 1}
_FOUR = {"depths": [1, 1, 1, 1], "image_size": 64}
_DECODER = {"decoder_hidden_size": 32, "decoder_num_hidden_layers": 1, "decoder_num_attention_heads": 4}
# By family: the class, its configuration, and what is in a batch beside images.
TRANSFORMERS: dict[str, tuple[str, dict[str, Any], str]] = {
    "CLIP": ("CLIPModel", {"text_config": _TEXT, "vision_config": _IMAGE, "projection_dim": 16}, "words"),
    "ConvNeXt": ("ConvNextForImageClassification", {**_FOUR, "hidden_sizes": [8, 16, 24, 32]}, "class"),
    "DeiT": ("DeiTForImageClassification", _IMAGE, "class"),
    "SegFormer": (
        "SegformerForSemanticSegmentation",
        {**_FOUR, "hidden_sizes": [16, 16, 32, 32], "num_attention_heads": [1, 1, 2, 2], "decoder_hidden_size": 32},
        "pixels",
    ),
    "Siglip": ("SiglipVisionModel", _IMAGE, "nothing"),
    "Swin": (
        "SwinForImageClassification",
        {"image_size": 32, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4},
        "class",
    ),
    "ViT": ("ViTForImageClassification", _IMAGE, "class"),
    "ViTMAE": ("ViTMAEForPreTraining", {**_IMAGE, **_DECODER, "decoder_intermediate_size": 48}, "noise"),
}


def transformers_case(family: str) -> Case:
    """A small model of a family, with examples; the loss is the model's own if it has labels or noise."""
    import transformers

    name, sizes, content = TRANSFORMERS[family]
    kind = getattr(transformers, name)
    config = kind.config_class(num_labels=CLASSES, **sizes)
    for option, value in vars(config).items():
        if "drop" in option and isinstance(value, float):
            setattr(config, option, 0.0)
    side = sizes.get("image_size", 32)
    words = torch.randint(2, 50, (EXAMPLES, 8))
    words[:, -1] = 1  # the end of the text
    # The mask is that of all words before, in four dimensions, which transformers applies without reading it.
    mask = torch.ones(EXAMPLES, 1, 8, 8, dtype=torch.bool).tril()
    beside: dict[str, dict[str, Tensor]] = {
        "class": {"labels": torch.arange(EXAMPLES)},
        "pixels": {"labels": torch.randint(CLASSES, (EXAMPLES, side, side))},
        "noise": {"noise": torch.rand(EXAMPLES, (side // 8) ** 2)},
        "words": {"input_ids": words, "attention_mask": mask},
        "nothing": {},
    }
    batch = {"pixel_values": torch.randn(EXAMPLES, 3, side, side), **beside[content]}
    losses = {"words": clip_loss, "nothing": lambda model, batch: output_loss(model(**batch).pooler_output)}
    return prepared(kind(config)), batch, losses.get(content, lambda model, batch: model(**batch).loss)


def clip_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """CLIP's own loss compares the examples of a batch with each other; this one does not."""
    output = model(**batch)
    return output_loss([output.text_embeds, output.image_embeds])


# One model


def measure(case: Case) -> dict[str, Any]:
    """The relative error of all examples' gradients with each library, or why it refuses the model."""
    model, batch, loss = case
    batch = tree_map_only(Tensor, lambda x: x.double() if x.is_floating_point() else x, batch)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    result: dict[str, Any] = {"parameters": sum(p.numel() for p in trained.values())}
    with torch.no_grad():
        if not torch.equal(loss(model, batch), loss(model, batch)):
            raise RuntimeError("two runs of the model differ")
    expected = by_loop(model, batch, loss, trained)
    norm = sum(g.square().sum() for g in expected.values()).sqrt()
    for way, gradients in (("together", by_recording), ("opacus", by_opacus)):
        try:
            found = gradients(model, batch, loss, trained)
            errors = [(found[name] - g).norm() if name in found else g.norm() for name, g in expected.items()]
            result[way] = {"error": float(torch.stack(errors).norm() / norm)}
        except Exception as error:
            result[way] = {"refused": f"{type(error).__name__}: {' '.join(str(error).split())}"[:1500]}
    return result


def by_loop(model: nn.Module, batch: Any, loss: Any, trained: dict[str, Tensor]) -> dict[str, Tensor]:
    total: dict[str, list[Tensor]] = {name: [] for name in trained}
    for i in range(EXAMPLES):
        value = loss(model, tree_map_only(Tensor, lambda x: x[i : i + 1], batch))  # noqa: B023
        gradients = torch.autograd.grad(value, list(trained.values()), allow_unused=True)
        for (name, parameter), gradient in zip(trained.items(), gradients, strict=True):
            total[name].append(torch.zeros_like(parameter) if gradient is None else gradient)
    return {name: torch.stack(rows) for name, rows in total.items()}


def by_recording(model: nn.Module, batch: Any, loss: Any, trained: dict[str, Tensor]) -> dict[str, Tensor]:
    from dp_lightning.privacy.gradients.recording import Recording
    from dp_lightning.privacy.gradients.refusals import explaining

    found: dict[str, Tensor] = {}
    recording = Recording(trained, EXAMPLES, lambda contribution: found.update(contribution.formed().gradients))
    examples = tree_map_only(Tensor, lambda x: x.unsqueeze(1), batch)
    with explaining():
        recording.backward(recording.run(lambda example: loss(model, example), examples))
    return found


def by_opacus(model: nn.Module, batch: Any, loss: Any, trained: dict[str, Tensor]) -> dict[str, Tensor]:
    from opacus.grad_sample import GradSampleModule

    wrapped = GradSampleModule(model)
    loss(wrapped, batch).backward()
    samples = {name: parameter.grad_sample for name, parameter in trained.items()}
    return {name: sample for name, sample in samples.items() if sample is not None}


def run_one(name: str, model: str, *, shallow: bool) -> dict[str, Any]:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    if name.startswith("transformers/"):
        return measure(transformers_case(model))
    build = build_timm if name.startswith("timm/") else build_torchvision
    return measure(image_case(model, partial(build, depth=2) if shallow else build))


# All of them


def chosen(results: dict[str, Any]) -> Iterator[tuple[str, str, int]]:
    """Name, model and number of parameters of each case; the choice is kept in the results."""
    for families, build in ((timm_families(), build_timm), (torchvision_families(), build_torchvision)):
        for family, names in families.items():
            if family not in results:
                found = smallest(names, build)
                results[family] = {"model": found[0], "parameters": found[1]} if found else {"model": None}
            if results[family]["model"] is not None:
                yield family, results[family]["model"], results[family]["parameters"]
    for family in TRANSFORMERS:
        results.setdefault(f"transformers/{family}", {"model": family})
        yield f"transformers/{family}", family, 0


def run_all(path: Path, jobs: int, seconds: float) -> None:
    results: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}

    def run(case: tuple[str, str, int]) -> None:
        name, model, parameters = case
        if "together" in results[name] or "failed" in results[name]:
            return
        shallow = ["--shallow"] if parameters > MOST_PARAMETERS else []
        command = [sys.executable, __file__, "--only", name, "--model", model, *shallow]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
            results[name].update(json.loads(done.stdout.splitlines()[-1]))
        except subprocess.TimeoutExpired:
            results[name]["failed"] = f"takes more than {seconds:.0f} s"
        except (IndexError, json.JSONDecodeError):
            results[name]["failed"] = " ".join(done.stderr[-500:].split())
        path.write_text(json.dumps(results, indent=1))

    cases = sorted(chosen(results), key=lambda case: case[2])
    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(run, cases))


def verdict(result: dict[str, Any]) -> str:
    if "refused" in result:
        return "refuses"
    return "right" if result["error"] <= TOLERANCE else "wrong"


def write_table(results: dict[str, Any]) -> None:
    """Print a line per family, as docs/evidence/zoo.csv has them."""
    table = csv.writer(sys.stdout, lineterminator="\n")
    table.writerow(["family", "model", "million_parameters", "together", "opacus_hooks", "opacus_relative_error"])
    for name, result in sorted(results.items()):
        if "together" not in result:
            table.writerow([name, result["model"], "", f"not run: {result.get('failed', 'does not build')}", "", ""])
            continue
        ours, theirs = verdict(result["together"]), verdict(result["opacus"])
        error = f"{result['opacus']['error']:.0e}" if theirs == "wrong" else ""
        table.writerow([name, result["model"], f"{result['parameters'] / 1e6:.1f}", ours, theirs, error])


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--results", type=Path, default=Path("zoo.json"))
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=300, help="for one model")
    parser.add_argument("--table", action="store_true", help="print the results as a table")
    parser.add_argument("--only", help="run one family, such as timm/vit, and print what was found")
    parser.add_argument("--model", help="with --only: the model; default: the last part of its name")
    parser.add_argument("--shallow", action="store_true", help="two blocks of it")
    options = parser.parse_args()
    if options.only:
        model = options.model or options.only.rpartition("/")[2]
        print(json.dumps(run_one(options.only, model, shallow=options.shallow)))
    elif options.table:
        write_table(json.loads(options.results.read_text()))
    else:
        run_all(options.results, options.jobs, options.seconds)


if __name__ == "__main__":
    main()

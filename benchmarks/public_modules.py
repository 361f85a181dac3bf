"""Which public modules, losses, augmentations and detectors train privately as they are, compared with a loop.

Each row makes something tiny. It takes one private step without noise on four examples, ``together`` and, where that
is refused, ``one_by_one``; the clipped sum is compared with a loop over single examples, and that of a network also
with Opacus' hooks. Install the packages whose rows shall run in an environment of their own::

    python benchmarks/public_modules.py --results rows.csv                      # runs what the file does not hold yet
    python benchmarks/public_modules.py --results rows.csv --only kornia loss   # of some packages or kinds
    python benchmarks/public_modules.py --results rows.csv --table              # prints how many have which result

The rows are those of ``public_modules.yaml``. All of it is in float64, where rounding does not switch a ReLU, and a sum
is right if it differs by at most 1e-4 of its norm (the step rounds the norms of some layers up, by some 1e-5). What
takes float32 alone may differ by 1e-3. What draws random numbers runs, and is not compared. BatchNorm is replaced by
GroupNorm (or frozen where no GroupNorm is like it), and dropout is off.
"""

import copy
import csv
import importlib
import re
import signal
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
import yaml
from measuring import arguments, positive, table
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves
from torch.utils.data import TensorDataset

Batch = tuple[Tensor, ...]  # images (b, 3, side, side), labels (b,), masks (b, side, side)
Loss = Callable[[nn.Module, Batch], Tensor]

EXAMPLES, CLASSES, FEATURES = 4, 3, 8
SIDES = (32, 64, 96, 112, 224, 256, 299)  # of the images; a network gets the first at which it runs
TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-3}
HEAD = ("package", "kind", "module", "result", "difference", "opacus", "reason")

# The sizes of a transformer whose row gives none.
_VIT = {"patch_size": 8, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
_WITHOUT_WEIGHTS = {"weights": None, "weights_backbone": None, "num_classes": CLASSES}

# How a kind is called: by the loss or augmentation, a convolutional network with FEATURES outputs for each pixel, and
# a batch of one example.
LOSSES: dict[str, Callable[[Any, Callable[[Tensor], Tensor], Batch], Tensor]] = {
    "augmentation": lambda part, net, batch: F.cross_entropy(mean(net(part(batch[0])[:, :3])), batch[1]),
    "loss of classes": lambda part, net, batch: part(mean(net(batch[0])), batch[1]),
    "loss of labels": lambda part, net, batch: part(mean(net(batch[0])), F.one_hot(batch[1], FEATURES).to(batch[0])),
    "loss of masks": lambda part, net, batch: part(net(batch[0]), batch[2]),
    "loss of channels": lambda part, net, batch: part(net(batch[0]), batch[2].unsqueeze(1)),
    "loss of images": lambda part, net, batch: part(net(batch[0])[:, :3], batch[0]),
    "loss of embeddings": lambda part, net, batch: part(mean(net(batch[0])), batch[1]),
    "loss of two views": lambda part, net, batch: part(mean(net(batch[0])), mean(net(batch[0].square()))),
}


def rows() -> Iterator[tuple[str, str]]:
    """Kind and expression of each row of ``public_modules.yaml``."""
    listed = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())
    families = listed.pop("families")
    for kind, expressions in listed.items():
        yield from ((kind, expression) for expression in expressions)
    for path, names in families.items():
        yield from (("network", f"{path}({name!r}, num_classes={CLASSES})") for name in names.split())


def made(expression: str, **more: Any) -> Any:
    """The object of an expression; ``more`` are arguments that it may not name."""
    path, _, given = expression.partition("(")
    module, _, name = path.rpartition(".")
    make = getattr(importlib.import_module(module), name)
    args, kwargs = eval(f"(lambda *args, **kwargs: (args, kwargs))({given}", {"torch": torch})
    if module == "transformers":
        return make(make.config_class(image_size=SIDES[0], num_labels=CLASSES, **(kwargs or _VIT)))
    if module in ("torchvision.models.detection", "torchvision.models.segmentation"):
        more = {**more, **_WITHOUT_WEIGHTS}
    return make(*args, **more, **kwargs)


def mean(maps: Tensor) -> Tensor:
    """One number for each channel of maps (b, channels, height, width)."""
    return maps.mean((2, 3))


def output_loss(output: Any) -> Tensor:
    """The mean over examples of a number that depends on every entry of the output, a tree of tensors (b, ...)."""
    found = [x for x in tree_leaves(dict(output) if isinstance(output, dict) else output) if x.is_floating_point()]
    return sum((x.tanh() * torch.arange(x[0].numel()).sin().view(x.shape[1:])).mean() for x in found)


def transformer_loss(model: nn.Module, batch: Batch) -> Tensor:
    """The model's own loss, if it takes labels."""
    if type(model).__name__.endswith("VisionModel"):
        return output_loss(model(pixel_values=batch[0]).last_hidden_state)
    return model(pixel_values=batch[0], labels=batch[1]).loss


def detection_loss(model: nn.Module, batch: Batch) -> Tensor:
    box = torch.tensor([[4.0, 6.0, 20.0, 24.0]])
    return sum(model(list(batch[0]), [{"boxes": box, "labels": batch[1]}]).values())


def prepared(model: nn.Module) -> nn.Module:
    """In training mode, without BatchNorm and dropout; no weight is zero."""
    from dp_lightning.errors import ModelError
    from dp_lightning.models.batch_norm import batch_norm_to_group_norm, freeze_batch_norm

    model.train()
    try:
        batch_norm_to_group_norm(model)
    except ModelError:
        freeze_batch_norm(model)
    for module in model.modules():
        for option, value in vars(module).items():
            if isinstance(value, float) and (option == "p" or "drop" in option):
                setattr(module, option, 0.0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.add_(0.02 * torch.randn_like(parameter))
    return model.to(torch.get_default_dtype())


def network_of(expression: str) -> tuple[nn.Module, int]:
    """A network, and the side of the smallest images that it takes."""
    for side, named in product(SIDES, (True, False)):
        try:
            model = prepared(made(expression, **({"img_size": side} if named else {})))
            with torch.no_grad():
                model(torch.rand(1, 3, side, side))
            return model, side
        except Exception as error:  # the next size, or the next way to set it
            last = error
    raise last


def case_of(kind: str, expression: str) -> tuple[nn.Module, Loss, int]:
    """A module, the loss of a batch, and the side of its images."""
    if kind == "network":
        model, side = network_of(expression)
        return model, lambda model, batch: output_loss(model(batch[0])), side
    part = made(expression)
    if kind == "detector":
        return prepared(part), detection_loss, SIDES[0]
    if kind == "transformer":
        return prepared(part), transformer_loss, SIDES[0]
    if kind == "adapter":
        import peft

        vit = made("transformers.ViTForImageClassification()")
        return prepared(peft.get_peft_model(vit, part)), transformer_loss, SIDES[0]
    net = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.Tanh(), nn.Conv2d(8, FEATURES, 1))
    parts = nn.ModuleList([net, part] if isinstance(part, nn.Module) else [net])
    return parts, lambda parts, batch: LOSSES[kind]([*parts, part][1], parts[0], batch), SIDES[0]


def examples_of(batch: Batch) -> Iterator[Batch]:
    """Batches of one example each."""
    return zip(*(x.split(1) for x in batch), strict=True)


def difference(found: Tensor, expected: Tensor) -> float:
    """The norm of the difference of two sums, over that of the second."""
    return float((found - expected).norm() / expected.norm())


def clipped(gradients: Tensor) -> Tensor:
    """The sum of the rows of ``gradients`` (b, parameters), each clipped to a norm of one."""
    return (gradients / gradients.norm(dim=1, keepdim=True).clamp(min=1.0)).sum(0).double()


def by_loop(model: nn.Module, loss: Loss, batch: Batch) -> Tensor:
    """The clipped sum by ordinary autograd."""
    model = copy.deepcopy(model)
    trained, total = [p for p in model.parameters() if p.requires_grad], torch.zeros(())
    for example in examples_of(batch):
        found = torch.autograd.grad(loss(model, example), trained, allow_unused=True, materialize_grads=True)
        total = total + clipped(torch.cat([gradient.flatten() for gradient in found]).unsqueeze(0))
    return total


def by_opacus(model: nn.Module, loss: Loss, batch: Batch) -> Tensor:
    """The same sum by Opacus' hooks."""
    from opacus.grad_sample import GradSampleModule

    wrapped = GradSampleModule(model)
    loss(wrapped, batch).backward()
    found = [(p, p.grad_sample) for p in wrapped.parameters() if p.requires_grad]
    return clipped(torch.cat([(p.new_zeros(EXAMPLES, p.numel()) if g is None else g.flatten(1)) for p, g in found], 1))


def by_step(model: nn.Module, loss: Loss, batch: Batch, examples: str) -> Tensor:
    """The same sum by a private step without noise, which draws every example."""
    from dp_lightning.privacy import ClipPlan, PrivateStep
    from dp_lightning.privacy.plan import PrivacyPlan

    sizes = {"num_train": EXAMPLES, "expected_batch_size": EXAMPLES, "num_steps": 1, "delta": 0.1}
    plan = PrivacyPlan(**sizes, noise_multiplier=0.0, accountant="rdp")
    settings = {"plan": plan, "clip_plan": ClipPlan.flat(max_grad_norm=1.0), "examples": examples, "seed": 0}
    step = PrivateStep(model, lambda example: loss(model, example), TensorDataset(*batch), **settings)
    for each in step.batches():
        step.accumulate(each)
    step.release()
    return torch.cat([p.grad.double().flatten() for p in model.parameters() if p.requires_grad]) * EXAMPLES


def reason_of(error: BaseException) -> str:
    """The first sentence of an error, without the place."""
    said = re.split(r"\): (?=[A-Z])", " ".join(str(error).split()) or type(error).__name__)[-1]
    return re.split(r"\. | \(The step sees", said)[0][:200]


def reference(model: nn.Module, loss: Loss, batch: Batch) -> Tensor | str:
    """The sum by a loop, or why there is none: two runs of the loss differ, or one fails."""
    try:
        with torch.no_grad():
            first, second = ([loss(model, example) for example in examples_of(batch)] for _ in range(2))
        return by_loop(model, loss, batch) if first == second else "random"
    except Exception:
        return "the loop fails"


def judged(kind: str, expression: str) -> tuple[str, str, str, str]:
    """Result, difference from the loop, what Opacus does, and why the row does not run ``together``."""
    for dtype in TOLERANCE:
        torch.set_default_dtype(dtype)
        torch.manual_seed(0)
        model, loss, side = case_of(kind, expression)
        labels, masks = 1 + torch.arange(EXAMPLES) % (CLASSES - 1), torch.randint(CLASSES, (EXAMPLES, side, side))
        batch = torch.rand(EXAMPLES, 3, side, side), labels, masks
        expected = reference(model, loss, batch)
        if isinstance(expected, Tensor):
            break
    result, told, opacus, reason = "refused", "", "", ""
    for examples in ("together", "one_by_one"):
        try:
            found = by_step(copy.deepcopy(model), loss, batch, examples)
        except Exception as error:
            reason = reason_of(error)
            continue
        if isinstance(expected, str):
            result, told = examples.replace("_", " "), expected
        elif not expected.any() and not found.any():
            reason = "Nothing to learn: the gradient of every example is zero, as in the loop"
        else:
            right, told = difference(found, expected) <= TOLERANCE[dtype], f"{difference(found, expected):.0e}"
            result = examples.replace("_", " ") if right else "WRONG"
        break
    if isinstance(expected, Tensor) and kind in ("network", "transformer", "adapter"):
        try:
            opacus = "right" if difference(by_opacus(model, loss, batch), expected) <= TOLERANCE[dtype] else "wrong"
        except Exception:
            opacus = "refuses"
    return result, told, opacus, reason


def summary(found: list[dict[str, str]]) -> list[tuple[str, str]]:
    """Each result, and how many rows of each package have it, as docs/own_module.md shows them."""
    counts: dict[str, Counter[str]] = {result: Counter() for result in ("together", "one by one", "refused")}
    for row in found:
        counts[row["result"]][row["package"].partition(" ")[0]] += 1
    return [
        (f"{result} ({count.total()})", ", ".join(f"{package} {number}" for package, number in sorted(count.items())))
        for result, count in counts.items()
    ]


class TooSlow(BaseException):
    """A row takes longer than it may; no ``except Exception`` of the row's own code catches it."""


def too_slow(*_: Any) -> None:
    raise TooSlow


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--results", type=Path, default=Path("public_modules.csv"))
    parser.add_argument("--only", nargs="+", default=[""], help="packages, kinds, or parts of an expression")
    parser.add_argument("--seconds", type=positive, default=300, help="for one row (default 300)")
    parser.add_argument("--table", action="store_true", help="print how many rows have which result")
    options = parser.parse_args()
    found = list(csv.DictReader(options.results.open(newline=""))) if options.results.exists() else []
    if options.table:
        print(table(["result", "rows"], summary(found)))
        return
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    signal.signal(signal.SIGALRM, too_slow)
    done = {row["module"] for row in found}
    with options.results.open("a", newline="") as file:
        lines = csv.writer(file, lineterminator="\n")
        if not found:
            lines.writerow(HEAD)
        for kind, expression in rows():
            if expression in done or not any(each in f"{kind}: {expression}" for each in options.only):
                continue
            package = expression.partition(".")[0]
            signal.alarm(options.seconds)
            try:
                verdict = judged(kind, expression)
                package = f"{package} {version(package).partition('+')[0]}"
            except TooSlow:
                verdict = ("not run", "", "", f"takes more than {options.seconds} s")
            except Exception as error:
                verdict = ("not run", "", "", reason_of(error))
            signal.alarm(0)
            lines.writerow([package, kind, expression, *verdict])
            file.flush()


if __name__ == "__main__":
    main()

"""How far updates move along the strong and the weak directions of the gradient without noise.

The singular pairs (u_i, v_i) of a matrix's gradient, computed without noise on 8,192 examples, are its directions, the
strongest first. An update D moves downhill in pair i by u_i' D v_i. The table has the sum of these moves over a run of
private steps of WRN-10-1, epsilon 4, for the mean pair of each group, and beside it the length of all moves. Gradients
without noise come from raw examples: the numbers must not be released where the images are private.

    python benchmarks/weak_directions.py --data cifar10_16.npz --runs dp_sgd,4096,3 dp_muon,4096,3
"""

import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
import torch.nn.functional as F
import yaml
from measuring import arguments, table
from torch import Tensor, nn

from dp_lightning import postprocess
from dp_lightning.datamodules import NpzImages
from dp_lightning.models.wide_resnet import WideResNet
from dp_lightning.postprocess import Chain
from dp_lightning.privacy import ClipPlan, PrivateStep, RunShape

# Pairs of each group, counted from 1.
GROUPS = {"1": (0, 1), "2 to 4": (1, 4), "5 to 16": (4, 16), "17 to 64": (16, 64)}
# Steps of a run, evenly spaced, at which the gradient without noise is computed.
_MEASURED = 12
_CHAINS = Path(__file__).parents[1] / "configs" / "fragments" / "same_rate"


def chain(method: str) -> Chain:
    """The transforms of a file of ``configs/fragments/same_rate``."""
    given = yaml.safe_load((_CHAINS / f"{method}_tuned.yaml").read_text())["postprocess"]["transforms"]
    return Chain([getattr(postprocess, one["class_path"])(**one.get("init_args", {})) for one in given])


def run(method: str, batch_size: int, rate: float, data: Any, num_steps: int | None) -> dict[str, Any]:
    """Moves of one run by parameter and pair, length of all moves by parameter, and test accuracy."""
    torch.manual_seed(1)
    (images, labels), test = data
    model = WideResNet(10, 1, 10)
    limits: dict[str, Any] = {"max_epochs": None if num_steps else 3, "max_steps": num_steps or -1}
    shape = RunShape.of_length(num_train=len(images), expected_batch_size=batch_size, delta=1e-5, **limits)
    plan, num_steps = shape.calibrate(target_epsilon=4.0), shape.num_steps

    def loss(batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    examples = torch.utils.data.TensorDataset(images, labels)
    private = PrivateStep(model, loss, examples, plan=plan, clip_plan=ClipPlan.flat(max_grad_norm=1.0))
    steps, optimizer = chain(method), torch.optim.SGD(model.parameters(), lr=rate)
    matrices = {name: p for name, p in model.named_parameters() if p.dim() > 1}
    moves = {name: torch.zeros(min(p.flatten(1).shape)) for name, p in matrices.items()}
    length = dict.fromkeys(matrices, 0.0)
    measured = {round(i * (num_steps - 1) / (_MEASURED - 1)) for i in range(_MEASURED)}
    for step in range(num_steps):
        for batch in private.batches():
            private.accumulate(batch)
        private.release()
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        update = steps(gradients, noise=plan.noise_multiplier / batch_size)
        now = rate * (1 + math.cos(math.pi * step / num_steps)) / 2
        if step in measured:
            for name, pairs in downhill(model, images, labels, {n: now * update[n] for n in matrices}).items():
                moves[name] += pairs * num_steps / len(measured)
        for name in gradients:
            gradients[name].copy_(update[name])
        optimizer.param_groups[0]["lr"] = now
        optimizer.step()
        for name in matrices:
            length[name] += now * float(update[name].norm())
    with torch.no_grad():
        right = sum(int((model(x).argmax(1) == y).sum()) for x, y in zip(*(t.split(500) for t in test), strict=True))
    return {"moves": moves, "length": length, "accuracy": right / len(test[1])}


def downhill(model: nn.Module, images: Tensor, labels: Tensor, moves: dict[str, Tensor]) -> dict[str, Tensor]:
    """For each move (m, ...), its part along each singular pair (min(m, n),) of the gradient of 8,192 examples."""
    rows = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))[:8192]
    parameters = dict(model.named_parameters())
    total = {name: torch.zeros_like(parameters[name]) for name in moves}
    for part in rows.split(512):
        loss = F.cross_entropy(model(images[part]), labels[part], reduction="sum") / len(rows)
        for name, gradient in zip(moves, torch.autograd.grad(loss, [parameters[n] for n in moves]), strict=True):
            total[name] += gradient
    found = {}
    for name, move in moves.items():
        u, _, v = torch.linalg.svd(total[name].flatten(1), full_matrices=False)
        found[name] = torch.einsum("mi,mn,in->i", u, move.flatten(1), v)
    return found


def _tensors(data: NpzImages, dataset: Any) -> Any:
    images, labels = zip(*(dataset[index] for index in range(len(dataset))), strict=True)
    return data.on_after_batch_transfer([torch.stack(images), torch.tensor(labels)], 0)


def main(given: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = arguments(__doc__)
    parser.add_argument("--data", type=Path, required=True, help="images as NpzImages reads them")
    parser.add_argument("--runs", nargs="+", required=True, metavar="METHOD,B,LR", help="such as dp_muon,2048,3")
    parser.add_argument("--steps", type=int, help="steps of a run, whatever its batch size; default: three epochs")
    options = parser.parse_args(given)
    constants = {"mean": [0.4914, 0.4822, 0.4465], "std": [0.2470, 0.2435, 0.2616]}
    data = NpzImages(path=options.data, num_classes=10, val_fraction=0.1, augment=False, **constants)
    data.setup("fit")
    data.setup("test")
    tensors = [_tensors(data, loader.dataset) for loader in (data.train_dataloader(), data.test_dataloader())]
    lines = []
    for text in options.runs:
        method, size, rate = text.split(",")
        found = run(method, int(size), float(rate), tensors, options.steps)
        # Groups beyond a matrix's last pair have no mean: nan, which is shown as a dash.
        rows = {
            f"`{name}`": [*(float(move[first:last].mean()) for first, last in GROUPS.values()), found["length"][name]]
            for name, move in found["moves"].items()
        }
        rows["all, mean"] = torch.tensor(list(rows.values())).nanmean(0).tolist()
        for name, values in rows.items():
            cells = ["-" if math.isnan(value) else f"{value:.3f}" for value in values]
            lines.append([size, f"{method}, {rate}", name, *cells, f"{100 * found['accuracy']:.1f}"])
    print(table(["B", "", "matrix", *(f"pairs {group}" for group in GROUPS), "length", "test accuracy"], lines))


if __name__ == "__main__":
    main()

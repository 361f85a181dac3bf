"""Private members of libraries stand in one file for each family of libraries, and do what they are used for."""

import ast
from importlib.metadata import version
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.func import grad, vmap
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric

import dp_lightning
from dp_lightning import lightning_internals, torch_internals

PACKAGE = Path(dp_lightning.__file__).parent
LINES = (PACKAGE.parent / "constraints.txt").read_text().splitlines()
PINNED = dict(line.split("==") for line in LINES if "==" in line and not line.startswith("#"))


# What starts with an underscore and is documented.
DOCUMENTED = {
    "_exit": "os._exit, for which Python's documentation gives this use",
    "_asdict": "of a named tuple",
    "_fields": "of a named tuple",
    "_thread": "a module of Python's documentation",
}


def own_names(tree):
    """Whatever a file defines: functions, classes, variables, attributes and slots."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.id if isinstance(node, ast.Name) else node.attr
            if isinstance(node, ast.Name) and node.id == "__slots__":
                yield from (each.value for each in ast.walk(tree) if isinstance(each, ast.Constant))


def private_members(tree):
    """Private attributes, imports, and attributes that are read by name, which the file does not define itself."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            used = [node.attr]
        elif isinstance(node, ast.ImportFrom) and not str(node.module).startswith("dp_lightning"):
            used = [*str(node.module).split("."), *(alias.name for alias in node.names)]
        elif isinstance(node, ast.Import):
            used = [part for alias in node.names for part in alias.name.split(".")]
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr", "setattr", "delattr"):
            used = [argument.value for argument in node.args if isinstance(argument, ast.Constant)]
        else:
            continue
        yield from (name for name in map(str, used) if name.startswith("_") and not name.startswith("__"))


def used_of_others(path):
    tree = ast.parse(path.read_text())
    return set(private_members(tree)) - set(own_names(tree)) - DOCUMENTED.keys()


def test_no_other_file_uses_a_private_member_of_a_library():
    files = [path for path in PACKAGE.rglob("*.py") if not path.name.endswith("_internals.py")]
    assert {path.relative_to(PACKAGE): used for path in files if (used := used_of_others(path))} == {}


class Fit(pl.LightningModule):
    """Logs by step, by epoch and as a metric, and notes what the internals say meanwhile."""

    def __init__(self):
        super().__init__()
        self.layer, self.mean = torch.nn.Linear(2, 1), MeanMetric()

    def training_step(self, batch, batch_idx):
        loss = self.layer(batch[0]).mean()
        self.log("both", loss, on_step=True, on_epoch=True)
        self.mean(loss.detach())
        lightning_internals.set_value_of_step(self.mean, torch.tensor(7.0))
        self.log("metric", self.mean, on_step=True)
        return loss

    def on_train_batch_end(self, *args):
        self.logged = {result.meta.name for result in lightning_internals.logged_in_training(self.trainer)}

    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.randn(4, 2)), batch_size=2)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)


def trainer(tmp_path, **kwargs):
    quiet = {"logger": False, "enable_checkpointing": False, "enable_model_summary": False}
    return pl.Trainer(max_epochs=1, accelerator="cpu", devices=1, default_root_dir=tmp_path, **quiet, **kwargs)


@pytest.mark.parametrize("internals", [lightning_internals, torch_internals])
def test_the_versions_that_were_tried_are_the_pinned_ones_that_are_installed_here(internals):
    assert {name: PINNED[name] for name in internals.TRIED} == internals.TRIED
    assert all(version(name).partition("+")[0] == tried for name, tried in internals.TRIED.items())


def test_what_a_fit_logs(tmp_path):
    module, run = Fit(), trainer(tmp_path, enable_progress_bar=False)
    run.fit(module)
    assert module.logged == {"both", "metric"}
    assert run.callback_metrics["metric"] == 7


# torch


def test_hooks_of_a_parameter():
    def parameter():
        return nn.Parameter(torch.ones(1))

    first, second, third = parameter(), parameter(), parameter()
    first.register_hook(lambda gradient: None)
    second.register_post_accumulate_grad_hook(lambda owner: None)
    assert [torch_internals.has_hooks(each) for each in (first, second, third)] == [True, True, False]


def test_inside_of_a_vmap():
    found, weight = {}, torch.ones(3)

    def one(x):
        found.update(
            batched=(torch_internals.is_batched(x), torch_internals.is_batched(weight)),
            wrapped=(torch_internals.is_wrapped(x), torch_internals.is_wrapped(weight)),
            level=torch_internals.level(),
            dim=torch_internals.batch_dimension(x),
            tensor=torch_internals.wrapped_tensor(x),
            rows=torch_internals.unwrapped(x),
        )
        with torch_internals.below_transforms():
            found["below"] = torch_internals.level()
            whole = torch_internals.wrapped_tensor(x) * 2
        return torch_internals.wrapped(whole.movedim(1, 0), torch_internals.level())

    examples = torch.arange(6.0).view(3, 2)
    result = vmap(one, in_dims=1)(examples)
    assert found.pop("tensor") is examples
    assert torch.equal(found.pop("rows"), examples.T)
    assert found == {"batched": (True, False), "wrapped": (True, False), "level": 1, "dim": 1, "below": None}
    assert torch.equal(result, 2 * examples.T)
    assert torch_internals.level() is None


def test_a_wrapper_of_an_inner_transform_leads_to_the_tensor_of_the_example():
    def one(x):
        return grad(lambda inner: kept.append(inner) or inner.sum())(x) + x.sum()

    kept = []
    vmap(lambda x: kept.append(x) or one(x))(torch.ones(3, 2))
    example, inner = kept
    assert torch_internals.is_wrapped(inner)
    assert not torch_internals.is_batched(inner)
    assert torch_internals.wrapped_tensor(inner) is example
    assert torch_internals.is_batched(example)  # after the transform has ended, too

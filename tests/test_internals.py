"""Private members of libraries stand in one file for each family of libraries, and each of them is there."""

import ast
from importlib.metadata import version
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric

import dp_lightning
from dp_lightning import lightning_internals as internals

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


#: Every private member that the package uses, and where.
MEMBERS = {
    "lightning_internals.py": {
        "_compiler_ctx",
        "_results",
        "_forward_cache",
        "_average_model",
        "_set_seed",
        "_parse_ckpt_path",
        "_run_subcommand",
        "_parser",
        "_actions",
        "_option_string_actions",
    },
    "torch_internals.py": {
        "_C",
        "_functorch",
        "_pytree",
        "_version",
        "_cdata",
        "_storage_Use_Count",
        "_backward_hooks",
        "_post_accumulate_grad_hooks",
        "_grouped_mm",
        "_is_mkldnn_bf16_supported",
        "_add_batch_dim",
        "_compiled_call_impl",
    },
}


@pytest.mark.parametrize("name", MEMBERS)
def test_the_private_members_are_known(name):
    tree = ast.parse((PACKAGE / name).read_text())
    assert set(private_members(tree)) == MEMBERS[name]


class Fit(pl.LightningModule):
    """Logs by step, by epoch and as a metric, and notes what the internals say meanwhile."""

    def __init__(self):
        super().__init__()
        self.layer, self.mean = torch.nn.Linear(2, 1), MeanMetric()

    def training_step(self, batch, batch_idx):
        loss = self.layer(batch[0]).mean()
        self.log("both", loss, on_step=True, on_epoch=True)
        self.mean(loss.detach())
        internals.set_value_of_step(self.mean, torch.tensor(7.0))
        self.log("metric", self.mean, on_step=True)
        return loss

    def on_train_batch_end(self, *args):
        self.logged = {result.meta.name for result in internals.logged_in_training(self.trainer)}

    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.randn(4, 2)), batch_size=2)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)


def trainer(tmp_path, **kwargs):
    quiet = {"logger": False, "enable_checkpointing": False, "enable_model_summary": False}
    return pl.Trainer(max_epochs=1, accelerator="cpu", devices=1, default_root_dir=tmp_path, **quiet, **kwargs)


def test_the_versions_that_were_tried_are_those_that_are_installed_here():
    assert {name: PINNED[name] for name in internals.TRIED} == internals.TRIED
    assert all(version(name) == tried for name, tried in internals.TRIED.items())


def test_what_a_fit_logs(tmp_path):
    module, run = Fit(), trainer(tmp_path, enable_progress_bar=False)
    run.fit(module)
    assert module.logged == {"both", "metric"}
    assert run.callback_metrics["metric"] == 7


def test_a_compiled_module_is_known(tmp_path):
    class Asks(pl.Callback):
        def setup(self, trainer, pl_module, stage):
            found.append(internals.was_compiled(pl_module))

    found = []
    for module in (Fit(), torch.compile(Fit(), backend="eager")):
        trainer(tmp_path, enable_progress_bar=False, callbacks=[Asks()], max_steps=0).fit(module)
    assert found == [False, True]

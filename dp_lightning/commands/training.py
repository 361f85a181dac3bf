"""``dpl fit | validate | test | predict``: LightningCLI with ``privacy``, ``postprocess`` and ``averaging``."""

import inspect
import os
import pydoc
import re
import shlex
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import lightning.pytorch as pl
import torch
from jsonargparse import Namespace, get_loader, set_loader
from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.pytorch import callbacks, loggers
from lightning.pytorch.callbacks import ModelCheckpoint, ProgressBar
from lightning.pytorch.cli import LightningArgumentParser, ReduceLROnPlateau, SaveConfigCallback
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from yaml import YAMLError

from dp_lightning import datamodules, lightning_modules, postprocess
from dp_lightning.atomic_files import require_writable
from dp_lightning.callbacks import (
    AveragedWeights,
    DataRecord,
    PostProcessCallback,
    PredictionFile,
    PrivacyCallback,
    PrivateProgressBar,
    ResultFile,
    SignalToNoise,
    StopOnSignal,
)
from dp_lightning.commands.configs import with_paths
from dp_lightning.commands.quiet import quiet
from dp_lightning.errors import ConfigurationError, DpLightningError, did_you_mean
from dp_lightning.foreign_text import load_yaml
from dp_lightning.lightning_internals import CommandLine, flags_of
from dp_lightning.lightning_modules import schedules
from dp_lightning.lightning_modules.classifiers import OWN_NETWORKS
from dp_lightning.lightning_modules.schedules import WarmupCosine
from dp_lightning.models.pretrained import require_weights
from dp_lightning.private_run.resume import SavedRun, latest_checkpoint, newest_checkpoint
from dp_lightning.private_run.saved_model import SavedModel
from dp_lightning.private_run.settings import PrivacySettings
from dp_lightning.private_run.trainer_checks import OF_THE_OTHER_PACKAGE, is_of_the_other_package
from dp_lightning.strategies.checkpoint_io import PrivateCheckpointIO
from dp_lightning.strategies.private import NAME as PRIVATE_STRATEGY

# Modules whose classes a configuration gives by short names, since they are imported here.
_MODULES = (
    datamodules,
    lightning_modules,
    postprocess,
    schedules,
    torch.optim,
    torch.optim.lr_scheduler,
    callbacks,
    loggers,
)
# How the parser quotes a name that it does not know.
_UNKNOWN = re.compile(r"(?:unrecognized arguments: --?|accept option '|Option '|import path string: )([\w.]+)")
# How the parser quotes a class whose package is missing.
_MISSING = re.compile(r"class_path '([\w.]+)':\s+((?:Requirement|No module named) .*)")
# Groups of which nothing is set where all lines below them are comments.
_MAY_BE_EMPTY = {"init_args", "dict_kwargs", "trainer", "privacy", "postprocess", "averaging"}

_load = get_loader("yaml")


def _without_empty(value: Any) -> Any:
    """A configuration without groups that are null."""
    if isinstance(value, dict):
        return {
            name: _without_empty(one) for name, one in value.items() if one is not None or name not in _MAY_BE_EMPTY
        }
    return [_without_empty(one) for one in value] if isinstance(value, list) else value


set_loader("yaml", lambda text: _without_empty(load_yaml(text, _load)), (YAMLError,))


class Parser(LightningArgumentParser):
    """Lightning's parser, which takes no abbreviations and names the nearest name for a misspelt one."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "allow_abbrev": False})

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Raise the message, with a hint, instead of printing the usage of some hundred settings."""
        hint = _hint(message, {flag.removesuffix("+") for flag in flags_of(self)})
        raise ConfigurationError(f"{message.strip()}.{hint}" if hint else message.strip()) from ex


def _hint(message: str, flags: set[str]) -> str:
    """What to change; empty where the message says it, which repeats what the parser of a class within has said."""
    if (found := _UNKNOWN.search(message)) and "Did you mean" not in message:
        names = {name for module in _MODULES for name in getattr(module, "__all__", dir(module))}
        return did_you_mean(found[1], {*flags, *(name for name in names if name[0].isupper())})
    if found := re.search(r"correspond to a subclass of .*Given value: ([\w.]+)", message, re.DOTALL):
        kind = pydoc.locate(found[1])
        if inspect.isclass(kind) and is_of_the_other_package(kind):
            return f" {kind.__name__} {OF_THE_OTHER_PACKAGE}"
    if "arguments are required" in message:
        return " `dpl configs` lists configurations, and `dpl init FOLDER` writes one for your images."
    return ""


class RunConfiguration(SaveConfigCallback):
    """Writes the configuration of the run: what can be run again, so not the checkpoint that this part began from."""

    def __init__(self, parser: Any, config: Namespace, *args: Any, **kwargs: Any) -> None:
        config = config.clone()
        config.ckpt_path = None
        super().__init__(parser, config, *args, **kwargs)


class TrainingCLI(CommandLine):
    """The command line of a private run."""

    privacy: PrivacyCallback
    postprocess: PostProcessCallback
    averaging: AveragedWeights

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_lightning_class_args(PrivacyCallback, "privacy")
        parser.add_lightning_class_args(PostProcessCallback, "postprocess")
        parser.add_lightning_class_args(AveragedWeights, "averaging")
        parser.callback_keys.clear()  # instantiate_trainer gives them their places among the callbacks
        # Properties of the data, which nobody has to repeat for the model.
        for name in ("num_classes", "in_channels", "image_size", "mean", "std"):
            parser.link_arguments(f"data.{name}", f"model.init_args.{name}", apply_on="instantiate")
        # A data module of the user's own need not have this one.
        several = "model.init_args.multi_label"
        parser.link_arguments("data", several, lambda data: getattr(data, "multi_label", False), apply_on="instantiate")

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        self.config = parser.parse_args(args)

    def setting(self, config: Namespace, name: str, default: Any = None) -> Any:
        """The value of a setting of the command that runs."""
        return config.get(str(self.config.get("subcommand")), config).get(name, default)

    def read_checkpoint_settings(self) -> None:
        """Take the module's settings from the checkpoint, as Lightning does, but only settings that the module has."""
        command, path = self.config.get("subcommand"), self.setting(self.config, "ckpt_path")
        if path == "last" and command != "fit":
            path = self.config[command].ckpt_path = self._last_checkpoint()
        if command is None or path is None or not Path(path).is_file():
            return
        weights_only = self.setting(self.config, "weights_only")
        checkpoint = PrivateCheckpointIO().load_checkpoint(path, weights_only=weights_only)
        if "pytorch-lightning_version" not in checkpoint:
            raise ConfigurationError(
                f"ckpt_path {path} is not a checkpoint of a run: it holds only weights, or something else. To "
                "start a run from weights, use the model's own settings, such as TimmModule's `weights`."
            )
        saved, model = SavedModel.read(checkpoint), self.setting(self.config, "model")
        kind = saved.module_class(trusted=None if model is None else model.class_path)
        if kind is None:
            return
        data = self.setting(self.config, "data")
        if data is not None and data.class_path.endswith(".ImageFiles"):
            known = {**saved.settings, **saved.data}
            if (features := saved.data.get("features")) is not None:
                # A probe: the files are images for the network that computes its features.
                known = {**known, **features["network"], **features, "features": features["network"]}
            for name, value in data.init_args.items():
                if value is None and name in known:
                    data.init_args[name] = known[name]
        arguments = saved.arguments_of(kind)
        if kind in OWN_NETWORKS:  # the file may be gone, and the checkpoint has the weights
            arguments.pop("weights", None)
        model = {"class_path": saved.class_path, "dict_kwargs": arguments}
        run = SavedRun.read(checkpoint)
        kept = {} if run is None else {"privacy": {"batch_norm": run.settings.get("batch_norm", "refuse")}}
        self.config = self.parser.parse_object({command: {"model": model, **kept}}, self.config)

    def _last_checkpoint(self) -> str:
        """The newest checkpoint in ``trainer.default_root_dir``, or below it where a logger keeps a run's folder."""
        root = Path(self.setting(self.config, "trainer").get("default_root_dir") or ".")
        folders = [folder for above in ("", "*/", "*/*/") for folder in root.glob(f"{above}checkpoints")]
        if (path := newest_checkpoint([root, *folders], self.setting(self.config, "weights_only"))) is None:
            raise ConfigurationError(
                f"ckpt_path is 'last', but there is no checkpoint of a run in {root}. Give the path of one, or the "
                "run's trainer.default_root_dir."
            )
        return path

    def before_instantiate_classes(self) -> None:
        """Refuse a checkpoint that does not exist, and warn of an evaluation without one."""
        path = self.setting(self.config, "ckpt_path")
        if path is None and self.subcommand in ("validate", "test", "predict"):
            rank_zero_warn(
                f"`dpl {self.subcommand}` without --ckpt_path uses a module that was never trained. Give a checkpoint."
            )
        resumes = self.subcommand == "fit" and path == "last"
        if path is not None and not resumes and not Path(path).is_file():
            raise ConfigurationError(
                f"ckpt_path {path} is not a file; give the path of a checkpoint, or 'last' for the newest one."
            )

    def instantiate_classes(self) -> None:
        with _refusals():
            for group in (self.setting(self.config, "model"), self.setting(self.config, "data")):
                if group is not None and group.class_path.startswith("dp_lightning."):
                    require_weights(group.get("init_args.weights"))  # before data modules read their files
            super().instantiate_classes()

    def instantiate_trainer(self, **kwargs: Any) -> pl.Trainer:
        """The trainer with the privacy callback first, so that every other callback sees the privatized gradient."""
        self.privacy = self.setting(self.config_init, "privacy")
        self.postprocess = self.setting(self.config_init, "postprocess")
        self.averaging = self.setting(self.config_init, "averaging")
        config: dict[str, Any] = {**self.setting(self.config_init, "trainer", default={}), **kwargs}
        trains = self.subcommand in ("fit", None)
        if trains:
            self.privacy.num_train = _num_train(self.privacy, self.datamodule)
            if config.get("strategy") == "auto" and _wants_processes(config):
                config["strategy"] = PRIVATE_STRATEGY
        given = config.get("callbacks") or []
        callbacks: list[pl.Callback] = [self.privacy, SignalToNoise(), self.postprocess, self.averaging]
        callbacks += [*(given if isinstance(given, list) else [given]), DataRecord(), ResultFile()]
        if self.subcommand == "predict":
            callbacks.append(PredictionFile())
        has_bar = any(isinstance(callback, ProgressBar) for callback in callbacks)
        if config.get("enable_progress_bar") is not False and not has_bar:
            callbacks.append(PrivateProgressBar())
        if config.get("enable_model_summary") is None:
            config["enable_model_summary"] = False  # a log of a run is plain text
        if self.subcommand == "fit":
            keeps = any(isinstance(callback, ModelCheckpoint) for callback in callbacks)
            if config.get("enable_checkpointing") is not False and not keeps:
                # After an evaluation alone, as is Lightning's default, the steps behind the last one would be lost.
                callbacks.append(ModelCheckpoint(save_on_train_epoch_end=True))
            callbacks.append(StopOnSignal())  # after all that prints: its last line resumes the run
        config["callbacks"] = callbacks
        if config.get("logger") is None or config.get("logger") is True:
            folder = config.get("default_root_dir") or os.getcwd()
            # Lightning's default logger, without its placeholder curve ``hp_metric``.
            curves = TensorBoardLogger(folder, version=SLURMEnvironment.job_id(), default_hp_metric=False)
            config["logger"] = curves if trains else False
        if not trains:
            self.save_config_callback = None  # a configuration is part of a run
        return super().instantiate_trainer(**config)

    @staticmethod
    def configure_optimizers(lightning_module: pl.LightningModule, optimizer: Any, lr_scheduler: Any = None) -> Any:
        """Schedules step once per logical step; ``WarmupCosine`` gets its length from the privacy plan."""
        if lr_scheduler is None or isinstance(lr_scheduler, ReduceLROnPlateau):
            return CommandLine.configure_optimizers(lightning_module, optimizer, lr_scheduler)
        if isinstance(lr_scheduler, WarmupCosine):
            lr_scheduler.set_num_steps(int(lightning_module.trainer.estimated_stepping_batches))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": lr_scheduler, "interval": "step"}}

    def run_command(self, command: str) -> None:
        """Run the command.

        Raises:
            ConfigurationError: for settings that Lightning refuses when it starts, and for a checkpoint whose state is
                not that of this model or its optimizer.
        """
        try:
            super().run_command(command)
        except DpLightningError:
            raise
        except (MisconfigurationException, RuntimeError, ValueError) as error:
            if "to NOT exist" in str(error):  # the file of the configuration, without a logger or with its version set
                fix = "Give another trainer.default_root_dir, or resume that run with --ckpt_path."
            elif re.search("state_dict|state dict", str(error)):
                path = self.setting(self.config_init, "ckpt_path")
                fix = f"ckpt_path {path} does not fit this configuration. Take the one that its run saved."
            elif isinstance(error, MisconfigurationException):
                fix = ""
            else:
                raise
            raise ConfigurationError(f"{error} {fix}") from error

    def before_fit(self) -> None:
        """Refuse wrong settings before any data is touched."""
        self.privacy.check(self.trainer, self.model)
        require_writable(Path(self.trainer.default_root_dir), "trainer.default_root_dir")
        asked = self.config_init.fit.ckpt_path
        if asked == "last":
            self.config_init.fit.ckpt_path = latest_checkpoint(self.trainer, self.config_init.fit.get("weights_only"))
        for callback in self.trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, SaveConfigCallback) and (asked is not None or SLURMEnvironment.detect()):
                # A resumed run may use its earlier log folder again.
                callback.overwrite = True

    def after_fit(self) -> None:
        """Print what can be done with the best or last checkpoint of the run."""
        keepers = [one for one in self.trainer.checkpoint_callbacks if isinstance(one, ModelCheckpoint)]
        named = [path for one in keepers for path in (one.best_model_path, one.last_model_path)]
        if self.privacy.private_run.ends_at_once:
            named = [str(self.trainer.ckpt_path)]
        saved = next((Path(path) for path in named if path and Path(path).is_file()), None)
        if saved is None or not self.trainer.is_global_zero:
            return
        run = self.privacy.private_run.folder
        config, images = run / "config.yaml", ("--data", "ImageFiles", "--data.root", "FOLDER")
        print("\nWhat to do next:")
        for command in (
            ("predict", "--config", config, "--ckpt_path", saved, *images),
            ("export", "--ckpt-path", saved, "--out", run / "export"),
            ("report", run),
        ):
            print(shlex.join(["dpl", *map(str, command)]), flush=True)


@contextmanager
def _refusals() -> Iterator[None]:
    """Turn what a class or Lightning says of its settings into an error that a user can act on, with its place."""
    try:
        yield
    except (MisconfigurationException, ModuleNotFoundError, TypeError, ValueError) as error:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, DpLightningError):
            cause = cause.__cause__  # the parser wraps what a class within raises
        if missing := _MISSING.search(str(error)):
            raise ConfigurationError(f"{missing[1]} needs a package that is not installed: {missing[2]}") from error
        if cause is not None:
            raise cause from None
        place = traceback.extract_tb(error.__traceback__)[-1]
        where = "/".join(Path(place.filename).parts[-3:])
        raise ConfigurationError(f"{error} ({type(error).__name__} in {where}, line {place.lineno})") from error


def _num_train(privacy: PrivacySettings, data: Any) -> int | None:
    """N: what the data module states, which has to agree with ``privacy.num_train``; None if neither is known yet."""
    persons = privacy.unit_of_privacy == "group"
    if persons and not hasattr(type(data), "num_train_groups"):
        raise ConfigurationError(
            f"privacy.unit_of_privacy is group, but {type(data).__name__} does not say how many persons it trains on. "
            "Give the data module a property num_train_groups, and its training set an attribute groups."
        )
    known: int | None = data.num_train_groups if persons else getattr(data, "num_train", None)
    if None not in (privacy.num_train, known) and privacy.num_train != known:
        raise ConfigurationError(
            f"privacy.num_train is {privacy.num_train}, but {type(data).__name__} has {known} training "
            f"{'persons' if persons else 'examples'}. Remove privacy.num_train; dpl reads it from the data module."
        )
    return privacy.num_train if known is None else known


def _wants_processes(config: dict[str, Any]) -> bool:
    """Whether Lightning would start one process per device for these settings on this machine."""
    asked: dict[str, Any] = {
        name: config[name] for name in ("accelerator", "devices", "num_nodes", "plugins") if name in config
    }
    asked |= dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    return isinstance(pl.Trainer(**asked).strategy, DDPStrategy)


def command_line(arguments: list[str], kind: type[TrainingCLI] = TrainingCLI) -> TrainingCLI:
    """Read one of the four commands and its options; ``kind`` decides whether it is run."""
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # a class_path may name a file beside the configuration
    with quiet():
        return _of_the_asked(kind, arguments)(
            model_class=pl.LightningModule,
            datamodule_class=pl.LightningDataModule,
            subclass_mode_model=True,
            subclass_mode_data=True,
            args=with_paths(arguments),
            save_config_callback=RunConfiguration,
            parser_class=Parser,
            parser_kwargs={"prog": "dpl"},
        )


def _of_the_asked(kind: type[TrainingCLI], arguments: list[str]) -> type[TrainingCLI]:
    """The same class with only the parser of the given command: building all four takes as long as reading a run."""
    commands = kind.subcommands()
    asked = {name: commands[name] for name in arguments[:1] if name in commands}
    return type(kind.__name__, (kind,), {"subcommands": staticmethod(lambda: asked)}) if asked else kind


def main(arguments: list[str]) -> None:
    """Run one of the four commands."""
    command_line(arguments)

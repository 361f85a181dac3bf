"""``dpl fit | validate | test | predict``: LightningCLI with ``privacy``, ``postprocess`` and ``averaging``."""

import os
import re
import shlex
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from jsonargparse import Namespace
from lightning.fabric.plugins.environments import LightningEnvironment, SLURMEnvironment
from lightning.pytorch.callbacks import ModelCheckpoint, ProgressBar
from lightning.pytorch.cli import LightningArgumentParser, ReduceLROnPlateau, SaveConfigCallback
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

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
from dp_lightning.commands.foreign_modules import ForeignModules
from dp_lightning.commands.linked_settings import LINKED, given_to_model, require_those_of
from dp_lightning.commands.misfit import weights_that_do_not_fit
from dp_lightning.commands.named_configs import with_paths
from dp_lightning.commands.parser import StrictParser, in_one_line
from dp_lightning.commands.parser_messages import shortened
from dp_lightning.commands.plausible import require_plausible
from dp_lightning.commands.quiet import quiet
from dp_lightning.errors import ConfigurationError, DataError, DpLightningError, ModelError
from dp_lightning.lightning_internals import CommandLine
from dp_lightning.lightning_modules.classifiers import OWN_NETWORKS
from dp_lightning.lightning_modules.schedules import WarmupCosine
from dp_lightning.private_run.latest_checkpoint import latest_checkpoint
from dp_lightning.private_run.saved_model import SavedModel
from dp_lightning.private_run.settings import PrivacySettings
from dp_lightning.strategies.checkpoint_io import PrivateCheckpointIO
from dp_lightning.strategies.private import NAME as PRIVATE_STRATEGY

# Processes of one node, and nodes.
_MOST_DEVICES, _MOST_NODES = 1024, 65_536


class RunConfiguration(SaveConfigCallback):
    """Writes the configuration of the run: what can be run again, so not the checkpoint that this part began from."""

    def __init__(self, parser: Any, config: Namespace, *args: Any, **kwargs: Any) -> None:
        config = config.clone()
        config.ckpt_path = None
        super().__init__(parser, config, *args, **kwargs)

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        try:
            super().setup(trainer, pl_module, stage)
        except RuntimeError as error:
            if not Path(trainer.log_dir or "", self.config_filename).is_file():
                raise
            raise ConfigurationError(
                f"{trainer.log_dir} has the configuration of an earlier run. Give another trainer.default_root_dir, or "
                "go on with that run by --ckpt_path. With a logger whose version is not set, each run has a folder of "
                "its own."
            ) from error


class TrainingCLI(CommandLine):
    """The command line of a private run."""

    privacy: PrivacyCallback
    postprocess: PostProcessCallback
    averaging: AveragedWeights
    given_to_model: dict[str, Any]

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_lightning_class_args(PrivacyCallback, "privacy")
        parser.add_lightning_class_args(PostProcessCallback, "postprocess")
        parser.add_lightning_class_args(AveragedWeights, "averaging")
        parser.callback_keys.clear()  # instantiate_trainer gives them their places among the callbacks
        for name in LINKED:
            parser.link_arguments(f"data.{name}", f"model.init_args.{name}", apply_on="instantiate")

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        foreign = ForeignModules()
        with (
            refusals("The configuration does not have the form its settings need"),
            in_one_line(parser),
            foreign.named_before_they_run(),
        ):
            self.config = parser.parse_args(args)
        command = self.config.get("subcommand")
        settings = self.config if command is None else self.config[command]
        self.given_to_model = given_to_model(args, settings)
        foreign.name_those_of_classes(settings)
        require_plausible(settings)
        for group in ("trainer", "privacy", "postprocess", "averaging"):
            if not isinstance(settings.get(group), Namespace):
                raise ConfigurationError(f"{group} must be a mapping of its settings, as in {group}: {{...}}.")

    def set_seed(self) -> None:
        with refusals("seed_everything"):
            super().set_seed()

    def instantiate_classes(self) -> None:
        settings = self.config if self.subcommand is None else self.config[self.subcommand]
        with (
            _with_the_groups_of(settings),
            refusals("A class of the configuration does not accept its settings", settings),
        ):
            super().instantiate_classes()
        require_those_of(self.datamodule, self.given_to_model)

    def read_checkpoint_settings(self) -> None:
        """Take the module's settings from the checkpoint, as Lightning does, but only settings that the module has."""
        command = self.config.get("subcommand")
        path = self.config[command].get("ckpt_path") if command else None
        if path is None or not Path(path).is_file():
            return
        checkpoint = PrivateCheckpointIO().load_checkpoint(path, weights_only=self.config[command].get("weights_only"))
        if "pytorch-lightning_version" not in checkpoint:
            raise ConfigurationError(
                f"ckpt_path {path} is not a checkpoint of a run: it holds only weights, or something else. To "
                "start a run from weights, use the model's own settings, such as TimmModule's `weights`."
            )
        saved, model = SavedModel.read(checkpoint), self.config[command].get("model")
        kind = saved.module_class(trusted=None if model is None else model.class_path)
        if kind is None:
            return
        data = self.config[command].get("data")
        if data is not None and _is_of_files(data):
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
        if model is not None and model.class_path == saved.class_path:
            given = vars(model.init_args or Namespace())
            _warn_of_others({name: value for name, value in given.items() if name not in LINKED}, arguments)
        model = {"class_path": saved.class_path, "dict_kwargs": arguments}
        with in_one_line(self.parser):
            self.config = self.parser.parse_object({command: {"model": model}}, self.config)

    def before_instantiate_classes(self) -> None:
        """Refuse what would fail without a reason when it is built."""
        data = self.setting(self.config, "data")
        if data is not None and data.class_path == "lightning.LightningDataModule":  # how an empty mapping is parsed
            raise ConfigurationError(
                "data names no data module. Set data.class_path, such as Digits or ImageFolder, and its settings in "
                "data.init_args."
            )
        path = self.setting(self.config, "ckpt_path")
        if path is None and data is not None and _needs_a_checkpoint(data):
            raise ConfigurationError(
                f"`dpl {self.subcommand}` has no checkpoint: give --ckpt_path CHECKPOINT, from which the network and "
                "the settings of its images come."
            )
        if path is None and self.subcommand in ("validate", "test", "predict"):
            rank_zero_warn(
                f"`dpl {self.subcommand}` without --ckpt_path uses a module that was never trained. Give a checkpoint."
            )
        resumes = self.subcommand == "fit" and path == "last"
        if path is not None and not resumes and not Path(path).is_file():
            known = " (or 'last', for that of the previous run)" if self.subcommand == "fit" else ""
            raise ConfigurationError(f"ckpt_path {path} is not a file; give the path of a checkpoint{known}.")

    def instantiate_trainer(self, **kwargs: Any) -> pl.Trainer:
        """The trainer with the privacy callback first, so that every other callback sees the privatized gradient."""
        self.privacy = self.setting(self.config_init, "privacy")
        self.postprocess = self.setting(self.config_init, "postprocess")
        self.averaging = self.setting(self.config_init, "averaging")
        config: dict[str, Any] = {**self.setting(self.config_init, "trainer", default={}), **kwargs}
        _require_startable(config)
        trains = self.subcommand in ("fit", None)
        if trains:
            self.privacy.num_train = _num_train(self.privacy, self.datamodule)
        with _named_refusals(config):
            if trains and config.get("strategy") == "auto" and _wants_processes(config):
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
            config["logger"] = _curves(config) if trains else False
        if not trains:
            self.save_config_callback = None  # a configuration is part of a run
        with _named_refusals(config):
            return super().instantiate_trainer(**config)

    def setting(self, config: Namespace, name: str, default: Any = None) -> Any:
        """The value of a setting of the command that runs."""
        return config.get(str(self.subcommand), config).get(name, default)

    @staticmethod
    def configure_optimizers(lightning_module: pl.LightningModule, optimizer: Any, lr_scheduler: Any = None) -> Any:
        """Schedules step once per logical step; ``WarmupCosine`` gets its length from the privacy plan."""
        if lr_scheduler is None:
            return optimizer
        if isinstance(lr_scheduler, WarmupCosine):
            lr_scheduler.set_num_steps(int(lightning_module.trainer.estimated_stepping_batches))
        plateau = isinstance(lr_scheduler, ReduceLROnPlateau)
        when = {"monitor": lr_scheduler.monitor} if plateau else {"interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": lr_scheduler, **when}}

    def run_command(self, command: str) -> None:
        """Run the command; any error in restoring a checkpoint that does not fit is raised as a `DataError`."""
        try:
            super().run_command(command)
        except DpLightningError:
            raise
        except MisconfigurationException as error:
            raise ConfigurationError(f"Lightning refuses the settings of trainer: {error}") from error
        except Exception as error:
            frames = traceback.extract_tb(error.__traceback__)
            restoring = [frame for frame in frames if frame.name.lstrip("_").startswith(("restore", "resume_start"))]
            if not any(Path(frame.filename).name == "checkpoint_connector.py" for frame in restoring):
                raise
            misfit = weights_that_do_not_fit(str(error), known_classes=getattr(self.datamodule, "num_classes", None))
            raise DataError(
                f"ckpt_path {self.config_init[command].get('ckpt_path')} does not fit this configuration: "
                f"{misfit or f'{shortened(str(error))} ({type(error).__name__})'}"
            ) from error

    def before_fit(self) -> None:
        """Refuse wrong settings before any data is touched."""
        self.privacy.check(self.trainer, self.model)
        require_writable(Path(self.trainer.default_root_dir), "trainer.default_root_dir")
        _require_other_nodes(self.trainer)
        asked = self.config_init.fit.ckpt_path
        if asked == "last":
            self.config_init.fit.ckpt_path = latest_checkpoint(self.trainer, self.config_init.fit.get("weights_only"))
        for callback in self.trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, SaveConfigCallback) and (asked is not None or SLURMEnvironment.detect()):
                # A resumed run may use its earlier log folder again.
                callback.overwrite = True
        check_files = getattr(self.datamodule, "check_files", None)
        if check_files is not None:
            check_files()

    def after_fit(self) -> None:
        """Print what can be done with the best or last checkpoint of the run."""
        keepers = [one for one in self.trainer.checkpoint_callbacks if isinstance(one, ModelCheckpoint)]
        named = [path for one in keepers for path in (one.best_model_path, one.last_model_path)]
        saved = next((Path(path) for path in named if path and Path(path).is_file()), None)
        if saved is None or not self.trainer.is_global_zero:
            return
        run = self.privacy.private_run.folder
        own = "--config", run / "config.yaml", "--ckpt_path", saved
        owner = self.datamodule or self.model
        splits = getattr(owner, "own_splits", None)
        has_test_set = is_overridden("test_dataloader", owner) if splits is None else "test" in splits
        images = () if has_test_set else ("--data", "ImageFiles", "--data.root", "FOLDER")
        print("\nWhat to do next:")
        for command in (
            ("test" if has_test_set else "validate", *own),
            ("predict", *own, *images),
            ("export", "--ckpt-path", saved, "--out", run / "export"),
            ("report", run),
        ):
            print(shlex.join(["dpl", *map(str, command)]), flush=True)


@contextmanager
def refusals(what: str, settings: Namespace | None = None) -> Iterator[None]:
    """Turn an error about settings into one that a user can act on.

    Args:
        what: the beginning of its message, where nothing of ``settings`` can be named.
        settings: those from which classes are built within this context.
    """
    try:
        yield
    except Exception as error:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, DpLightningError):
            cause = cause.__cause__
        if cause is not None:
            raise cause from None
        group = None if settings is None else _group_being_built(error, settings)
        if group is not None and isinstance(error, ValueError) and len(str(error).split()) > 2:
            raise ConfigurationError(f"{group}: {shortened(str(error))}") from error
        what = what if group is None else group
        place = traceback.extract_tb(error.__traceback__)[-1]
        where = "/".join(Path(place.filename).parts[-3:])
        raise ConfigurationError(
            f"{what}: {shortened(str(error)) or 'no reason is given'} ({type(error).__name__} in {where}, line "
            f"{place.lineno})"
        ) from error


def _is_of_files(data: Namespace) -> bool:
    return str(data.class_path).endswith(".ImageFiles")


def _warn_of_others(given: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """Say which settings of the model are not taken, since the checkpoint has others."""
    for name, value in saved.items():
        if name in given and given[name] != value:
            rank_zero_warn(
                f"model.init_args.{name} is {given[name]}, and {value} in the checkpoint: its weights need its own "
                "value, which is taken."
            )


def _needs_a_checkpoint(data: Namespace) -> bool:
    """Whether the data module leaves settings to the checkpoint that nothing else can give."""
    needed = ("image_size", "num_classes", "in_channels", "mean", "std")
    return _is_of_files(data) and any(data.init_args.get(name) is None for name in needed)


def _group_being_built(error: Exception, settings: Namespace) -> str | None:
    """The settings of the class whose ``__init__`` raised the error; None if it is none of the groups with a class."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__) if frame.f_code.co_name == "__init__"]
    kinds = {type(frame.f_locals.get("self")).__name__ for frame in frames}
    for group in ("optimizer", "lr_scheduler", "data", "model"):
        class_path = settings.get(f"{group}.class_path")
        if class_path is not None and class_path.split(".")[-1] in kinds:
            return f"{group}.init_args"
    return None


@contextmanager
def _with_the_groups_of(settings: Namespace) -> Iterator[None]:
    """Within this context, a message of a network that begins with a bare setting names it as the configuration does.

    A setting that comes from the data is named as that of the data, where the data module has it.
    """
    try:
        yield
    except ModelError as error:
        name = str(error).partition(" ")[0]
        group = next((one for one in ("data", "model") if name in (settings.get(f"{one}.init_args") or ())), None)
        if group is None or (group == "data" and name not in LINKED):
            raise
        raise ModelError(f"{group}.init_args.{error}") from error


def _curves(config: dict[str, Any]) -> TensorBoardLogger:
    """Lightning's default logger, without its placeholder curve ``hp_metric``."""
    folder = config.get("default_root_dir") or os.getcwd()
    return TensorBoardLogger(folder, version=SLURMEnvironment.job_id(), default_hp_metric=False)


def _require_startable(config: dict[str, Any]) -> None:
    """Refuse trainer settings that no command can run with.

    Nobody has more devices or nodes than the bounds: Lightning would start that many processes, or wait for them.
    """
    if config.get("barebones"):
        raise ConfigurationError(
            "trainer.barebones is true: it leaves out checkpoints and logs, so nothing of a run would be kept. "
            "Remove it; for less output, set trainer.enable_progress_bar: false and trainer.logger: false."
        )
    for name, most in (("devices", _MOST_DEVICES), ("num_nodes", _MOST_NODES)):
        text = str(config.get(name)).strip()
        if text.isdecimal() and int(text) > most:
            raise ConfigurationError(f"trainer.{name} is {shortened(text)}; the maximum is {most:,}.")


def _require_other_nodes(trainer: pl.Trainer) -> None:
    """Refuse to wait for nodes that were not started."""
    environment = getattr(trainer.strategy, "cluster_environment", None)
    if trainer.num_nodes > 1 and type(environment) is LightningEnvironment and "MASTER_ADDR" not in os.environ:
        raise ConfigurationError(
            f"trainer.num_nodes is {trainer.num_nodes}, but the other nodes were not started. Start `dpl` with srun "
            "or torchrun, or set MASTER_ADDR, MASTER_PORT and NODE_RANK on each node."
        )


def _num_train(privacy: PrivacySettings, data: Any) -> int | None:
    """N: what the data module states, which has to agree with ``privacy.num_train``; None if neither is known yet."""
    persons = privacy.unit_of_privacy == "group"
    known: int | None = _count_persons(data) if persons else getattr(data, "num_train", None)
    if None not in (privacy.num_train, known) and privacy.num_train != known:
        raise ConfigurationError(
            f"privacy.num_train is {privacy.num_train}, but {type(data).__name__} has {known} training "
            f"{'persons' if persons else 'examples'}. Remove privacy.num_train; dpl reads it from the data module."
        )
    return privacy.num_train if known is None else known


def _count_persons(data: Any) -> int:
    """N, if the unit of privacy is a person."""
    if not hasattr(type(data), "num_train_groups"):
        raise ConfigurationError(
            f"privacy.unit_of_privacy is group, but {type(data).__name__} does not say how many persons it trains on. "
            "Give the data module a property num_train_groups, and its training set an attribute groups."
        )
    return data.num_train_groups


def _wants_processes(config: dict[str, Any]) -> bool:
    """Whether Lightning would start one process per device for these settings on this machine."""
    asked: dict[str, Any] = {
        name: config[name] for name in ("accelerator", "devices", "num_nodes", "plugins") if name in config
    }
    asked |= dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    return isinstance(pl.Trainer(**asked).strategy, DDPStrategy)


@contextmanager
def _named_refusals(config: dict[str, Any]) -> Iterator[None]:
    """Turn Lightning's errors about the Trainer's settings into ones that a user can act on."""
    try:
        yield
    except DpLightningError:
        raise
    except (MisconfigurationException, ValueError, ModuleNotFoundError) as error:
        told = " ".join(str(error).split())
        named = [f"{name}: {value}" for name, value in config.items() if re.search(rf"\b{name}\b", told)]
        named = named or [
            f"{name}: {config[name]}" for name in ("accelerator", "devices", "strategy") if name in config
        ]
        which = f" ({', '.join(named)})" if named else ""
        missing = re.search("No supported gpu backend|accelerator is not available|Requirement 'torch_xla", told)
        fix = " Give --trainer.accelerator cpu, or auto, which takes what this machine has." if missing else ""
        raise ConfigurationError(f"Lightning refuses the settings of trainer{which}: {told}{fix}") from error


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
            parser_class=StrictParser,
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

"""Every private member of Lightning, torchmetrics and jsonargparse that this package uses.

They may change with any release. Each has a public name here, and `tests/test_internals.py` uses each, so that a
missing one is noticed, and can be replaced, in one place.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import lightning.pytorch as pl
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.profilers import Profiler
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.connectors.data_connector import _DataLoaderSource as LoaderSource
from lightning.pytorch.trainer.connectors.logger_connector import _LoggerConnector
from torch import Tensor
from torchmetrics import Metric

#: The versions with which these members were tested.
TRIED = {"lightning": "2.6.6", "torchmetrics": "1.9.0", "jsonargparse": "4.53.0"}

__all__ = [
    "CALL_BATCH_HOOK",
    "CLASS_PATH",
    "TRIED",
    "CommandLine",
    "LoaderSource",
    "LoggerConnector",
    "detects_anomalies",
    "flags_of",
    "gathered_value",
    "joined",
    "leave_signals_alone",
    "loader_source",
    "logged_in_step",
    "logged_in_training",
    "logger_connector",
    "order_groups",
    "records_modules",
    "saves_states",
    "set_loader_source",
    "set_logger_connector",
    "start_method",
    "state_defaults",
    "take_signals_again",
    "training_is_logged",
]

# The training loader


def loader_source(trainer: pl.Trainer) -> LoaderSource:
    """The source that the trainer takes its training loader from."""
    return trainer.fit_loop._data_source


def set_loader_source(trainer: pl.Trainer, source: LoaderSource) -> None:
    """Make the trainer take its training loader from another source."""
    trainer.fit_loop._data_source = source


#: Attribute of a LightningModule through which Lightning calls the hooks that see a batch.
CALL_BATCH_HOOK = "_call_batch_hook"

#: Among the hyperparameters of a checkpoint: the class that the command line instantiated.
CLASS_PATH = "_class_path"

# What is logged


class LoggerConnector(_LoggerConnector):
    """The part of a trainer that keeps and shows what is logged."""

    @property
    def kept(self) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        """The numbers for callbacks, loggers and progress bars."""
        return self._callback_metrics, self._logged_metrics, self._progress_bar_metrics

    @property
    def metrics_of_training(self) -> dict[str, dict[str, Tensor]]:
        """What ``metrics`` has while training, as tensors: Lightning reads a progress bar's after every batch."""
        results: Any = self.trainer._results
        on_step = self._first_loop_iter is not None
        shown = [logged for logged in results.values() if logged.meta.prog_bar]
        for logged in shown:
            logged.meta.prog_bar = False
        try:
            metrics: dict[str, dict[str, Tensor]] = dict(results.metrics(on_step))
        finally:
            for logged in shown:
                logged.meta.prog_bar = True
        names = {results._forked_name(logged, on_step)[1] for logged in shown}
        metrics["pbar"] = {name: value for name, value in metrics["callback"].items() if name in names}
        return metrics


def logger_connector(trainer: pl.Trainer) -> _LoggerConnector:
    """The logger connector of a trainer."""
    return trainer._logger_connector


def set_logger_connector(trainer: pl.Trainer, connector: _LoggerConnector) -> None:
    """Replace it."""
    trainer._logger_connector = connector


def training_is_logged(trainer: pl.Trainer) -> bool:
    """Whether the numbers shown now come from training."""
    return trainer._results is not None and trainer._results.training


def logged_in_training(trainer: pl.Trainer) -> Iterable[Any]:
    """Everything logged in the training epoch so far, each with its ``meta``."""
    return trainer.fit_loop.epoch_loop._results.values()


def logged_in_step(logged: Any) -> Tensor | None:
    """The number of the step; None if there is none."""
    value = logged._forward_cache
    return value if isinstance(value, Tensor) and value.numel() == 1 else None


def gathered_value(logged: Any) -> Tensor | None:
    """The epoch's value so far on this rank; None for a metric object and for values that are logged only per step."""
    if not (logged.is_tensor and logged.meta.on_epoch):
        return None
    mean: Tensor = logged.value / (logged.cumulated_batch_size if logged.meta.is_mean_reduction else 1)
    return mean


# Epochs


def begin_after_epochs(trainer: pl.Trainer, whole: int, *, steps: int) -> None:
    """Let a trainer that is about to fit count so many whole epochs, whatever it or its checkpoint has counted.

    Args:
        trainer: whose loops are not restored yet.
        whole: the number of epochs.
        steps: those of the next one that a checkpoint has behind it.
    """
    saved = trainer._checkpoint_connector._loaded_checkpoint.get("loops", {}).get("fit_loop")
    if saved is None:
        progress = trainer.fit_loop.epoch_progress
        progress.load_state_dict(_progress(progress.state_dict(), whole, whole))
    else:
        saved["epoch_progress"] = _progress(saved["epoch_progress"], whole, whole + bool(steps))
        batches = saved["epoch_loop.batch_progress"]
        batches.update(current=dict.fromkeys(batches["current"], steps), is_last_batch=False)


def _progress(counted: Mapping[str, Any], whole: int, begun: int) -> dict[str, dict[str, int]]:
    """Counts of epochs; those of earlier fits of the trainer stay in the total."""
    before = counted["total"]["processed"] - counted["current"]["processed"]
    current = {"ready": begun, "started": begun, "processed": whole, "completed": whole}
    return {"total": {name: before + count for name, count in current.items()}, "current": current}


# Metrics


def state_defaults(metric: Metric) -> Mapping[str, Any]:
    """The names of a metric's states, and their values before the first update."""
    return cast(Mapping[str, Any], getattr(metric, "_defaults", {}))  # a class that is only registered has none


def saves_states(metric: Metric) -> bool:
    """Whether its states go into the module's state dict."""
    return any(metric._persistent.values())


def joined(metric: Metric, twin: Metric, calls: Sequence[tuple[tuple[Any, ...], dict[str, Any]]]) -> None:
    """Set a metric's value for the step to that of several calls of its ``forward``, not only of the last one.

    Args:
        metric: the metric that was called.
        twin: a clone of it, whose states are used.
        calls: positional and named arguments of each.
    """
    twin.reset()
    twin.distributed_available_fn = lambda: False  # forward does not put ranks together either
    for args, kwargs in calls:
        twin.update(*args, **twin._filter_kwargs(**kwargs))
    metric._forward_cache = twin.compute()
    twin.reset()


# Trainers


def detects_anomalies(trainer: pl.Trainer) -> bool:
    """The setting ``detect_anomaly``."""
    return trainer._detect_anomaly


def records_modules(profiler: Profiler) -> bool:
    """Whether a profiler has hooks on the modules."""
    return getattr(profiler, "_record_module_names", False)


def was_compiled(module: pl.LightningModule) -> bool:
    """Whether ``trainer.fit`` was given what ``torch.compile`` has made of it; Lightning takes the module out."""
    return module._compiler_ctx is not None


def leave_signals_alone(trainer: pl.Trainer) -> None:
    """Let Lightning set no handlers of signals: that for SIGTERM may start a collective at any moment."""
    vars(trainer._signal_connector)["register_signal_handlers"] = lambda: None


def take_signals_again(trainer: pl.Trainer) -> None:
    """Undo `leave_signals_alone`."""
    vars(trainer._signal_connector).pop("register_signal_handlers", None)


def start_method(strategy: DDPStrategy) -> str:
    """How the other processes of a machine are started: popen, fork or spawn."""
    return strategy._start_method


# The command line


class CommandLine(LightningCLI):
    """LightningCLI with steps that subclasses can override."""

    def set_seed(self) -> None:
        """Seed everything as ``seed_everything`` says."""
        super()._set_seed()

    def read_checkpoint_settings(self) -> None:
        """Take the module's settings from the checkpoint of ``ckpt_path``."""
        super()._parse_ckpt_path()

    def run_command(self, command: str) -> None:
        """Call the trainer's method of this name."""
        super()._run_subcommand(command)

    def _set_seed(self) -> None:
        self.set_seed()

    def _parse_ckpt_path(self) -> None:
        self.read_checkpoint_settings()

    def _run_subcommand(self, subcommand: str) -> None:
        self.run_command(subcommand)


def flags_of(parser: LightningArgumentParser) -> set[str]:
    """The options of a parser and of its commands, without their dashes."""
    commands = [action.choices.values() for action in parser._actions if isinstance(action.choices, dict)]
    parsers = [parser, *(one for choices in commands for one in choices)]
    return {option.removeprefix("--") for one in parsers for option in one._option_string_actions}


def order_groups(parser: LightningArgumentParser, titles: Mapping[str, str]) -> None:
    """Show the groups of options in the order of ``titles``, under these titles; other groups stay before and after.

    Args:
        parser: of a command.
        titles: by the first part of the group's options, such as ``trainer``.
    """
    places: dict[str, int] = {}
    shown = cast(list[Any], parser._action_groups)
    for place, group in enumerate(shown):
        for action in group._group_actions[:1]:
            name = str(action.dest).partition(".")[0]
            if name in titles and name not in places:
                places[name] = place
    groups = {name: shown[place] for name, place in places.items()}
    for place, name in zip(sorted(places.values()), (name for name in titles if name in groups), strict=True):
        groups[name].title = titles[name]
        shown[place] = groups[name]

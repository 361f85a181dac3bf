"""Logging in a private step: ``self.log`` and torchmetrics, for all examples of a logical batch.

While the step sees one example, the values that it logs or gives to a metric are set aside. After each physical batch
every metric is updated with the rows of all of its examples; after the logical batch the mean of each number is logged.
So a metric's result is not known inside of the step: it can be logged and nothing else. Examples that do not take part
in the step are left out. Where ranks log together (``sync_dist``), every rank takes part, also one without an example.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn, TypeAlias

import lightning.pytorch as pl
import torch
from torch import Tensor
from torchmetrics import Metric, MetricCollection

from dp_lightning.errors import ModelError
from dp_lightning.lightning_internals import set_value_of_step
from dp_lightning.private_run.unprotected import POST_PROCESSING
from dp_lightning.processors import sent
from dp_lightning.torch_internals import detached, level, tree_map_only

AnyMetric: TypeAlias = Metric | MetricCollection

_LOG_ARGUMENTS = ("prog_bar", "logger", "on_step", "on_epoch")


class Result:
    """The result of a metric, which is known after the step.

    Args:
        source: what tells this result from the results of other metrics.
        get: returns the value, after the step.
    """

    def __init__(self, source: tuple[int, str], get: Callable[[], Any]) -> None:
        self._source, self._get = source, get

    def __getitem__(self, key: Any) -> "Result":
        return Result(self._source, lambda: self._get()[key])

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise ModelError(
            "training_step uses what a metric returned. A metric is computed from all examples of a batch, so its "
            "result may be given to self.log or self.log_dict and to nothing else."
        )

    __bool__ = __float__ = __int__ = __iter__ = __len__ = __call__ = __str__ = __repr__ = __getattr__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __neg__ = _refuse
    __lt__ = __le__ = __gt__ = __ge__ = __eq__ = __ne__ = __hash__ = _refuse


class StepLogging:
    """Takes the place of a module's ``log`` and of its metrics' methods while its private step runs."""

    def __init__(self, module: pl.LightningModule) -> None:
        self._module = module
        self._metrics: list[AnyMetric] = [part for part in module.modules() if isinstance(part, AnyMetric)]
        for metric in self._metrics if module.trainer.world_size > 1 else ():
            vars(metric).update(compute_with_cache=False)  # ranks compute together, with new examples or without
        self._copies: dict[int, AnyMetric] = {}  # by the ids of metrics: copies that see one step alone
        self._mine: list[bool] = []  # whether each example of a call of the loss takes part
        self._clear()

    def _clear(self) -> None:
        self._updates: list[Callable[[], None]] = []  # calls of metrics at the end of the physical batch
        self._at_end: dict[Any, Callable[[], None]] = {}  # calls at the end of the logical batch
        self._numbers: dict[str, tuple[list[Tensor], list[int]]] = {}
        self._resets: dict[Any, Callable[[], None]] = {}  # calls after those
        self._size = 0  # number of examples of the step that take part

    @contextmanager
    def logical_batch(self) -> Iterator[None]:
        """Runs a step, and logs its numbers when the step is over."""
        try:
            yield
            with torch.no_grad():
                for act in (*self._at_end.values(), *self._resets.values()):
                    act()
        finally:
            self._clear()

    @contextmanager
    def physical_batch(self, counted: Tensor) -> Iterator[None]:
        """Runs a physical batch of the step, and updates the metrics when the batch is over.

        Args:
            counted: (b,) whether each example takes part.
        """
        self._counted, self._example = counted.tolist(), -1
        self._size += sum(self._counted)
        others: list[tuple[dict[str, Any], dict[str, Any]]] = [
            (vars(self._module), {"log": self._log, "log_dict": self._log_dict})
        ]
        others += [(vars(metric), self._deferring(metric)) for metric in self._metrics]
        before = [{name: own[name] for name in names if name in own} for own, names in others]
        for own, names in others:
            own.update(names)
        try:
            yield
        finally:
            for (own, names), old in zip(others, before, strict=True):
                for name in names:
                    own.pop(name, None)
                own.update(old)
            updates, self._updates = self._updates, []
        with torch.no_grad():
            for update in updates:
                update()

    def begin_example(self) -> None:
        """Note that the loss is called next, for all examples together or for the next example."""
        self._example += 1
        self._mine = self._counted if level() is not None else self._counted[self._example : self._example + 1]

    # Numbers

    def _log(self, name: str, value: Any, *args: Any, **options: Any) -> None:
        options = {**dict(zip(_LOG_ARGUMENTS, args, strict=False)), **options}
        if name in POST_PROCESSING:
            raise ModelError(f"training_step logs '{name}', a name that is reserved for a number that is not raw.")
        if isinstance(value, Metric):
            self._at_end[name] = lambda: self._module.log(name, value, **options)
        elif isinstance(value, Result):
            self._at_end[name or value._source] = lambda: self._log_result(name, value, options)
        else:
            tensor = value if isinstance(value, Tensor) else torch.full((), float(value), device=self._module.device)
            _require_single(name, tensor)
            totals, counts = self._numbers.setdefault(name, ([], []))
            self._at_end[name] = lambda: self._log_mean(name, torch.stack(totals).sum(), sum(counts), options)
            numbers = _Rows(tensor, self._mine).numbers(self._module.device)
            totals.append(numbers.sum(dtype=torch.float64))
            counts.append(len(numbers))

    def _log_dict(self, dictionary: Any, *args: Any, **options: Any) -> None:
        if isinstance(dictionary, Result):
            return self._log("", dictionary, *args, **options)  # several numbers, each with a name of its own
        whole = isinstance(dictionary, MetricCollection)
        items = dictionary.items(keep_base=False, copy_state=False) if whole else dictionary.items()
        for name, value in items:
            self._log(name, value, *args, **options)

    def _log_result(self, name: str, result: Result, options: dict[str, Any]) -> None:
        """Log what a metric returned for the examples of the step, with their number as its weight."""
        size, several = self._size, self._module.trainer.world_size > 1
        if not size and not (several and (options.get("sync_dist") or result._source[1] == "epoch")):
            return  # some metrics cannot compute without an example
        value = result._get()
        for key, each in value.items() if isinstance(value, dict) else [(name, value)]:
            number = torch.as_tensor(each, device=self._module.device)
            _require_single(key, number)
            self._log_mean(key, number.double().reshape(()) * size if size else torch.zeros_like(number), size, options)

    def _log_mean(self, name: str, total: Tensor, count: int, options: dict[str, Any]) -> None:
        trainer = self._module.trainer
        if options.get("sync_dist") and trainer.world_size > 1:
            # The sum over ranks that Lightning makes waits for the device too.
            both = torch.stack([total, torch.full_like(total, count)])
            total, all_counts = trainer.strategy.reduce(both, options.get("sync_dist_group"), reduce_op="sum")
            count = int(all_counts)
        if count:
            mean = (total / count).float()
            self._module.log(name, mean, **{**options, "sync_dist": False, "batch_size": count})

    # Metrics

    def _deferring(self, metric: AnyMetric) -> dict[str, Callable[..., Any]]:
        """What stands in the place of a metric's methods."""
        update, compute, reset = metric.update, metric.compute, metric.reset

        def later(call: Callable[..., Any], args: Any, kwargs: Any) -> None:
            if any(self._mine):
                kept = tree_map_only(Tensor, lambda tensor: _Rows(tensor, self._mine), (args, kwargs))

                def run() -> None:
                    rows, named = tree_map_only(_Rows, _Rows.rows, kept)
                    call(*rows, **named)

                self._updates.append(run)

        def new_update(*args: Any, **kwargs: Any) -> None:
            later(update, args, kwargs)

        def new_forward(*args: Any, **kwargs: Any) -> Result:
            later(update, args, kwargs)
            later(lambda *rows, **named: self._copy_of(metric).update(*rows, **named), args, kwargs)
            self._at_end[id(metric)] = lambda: self._give_values(metric)
            self._resets[id(metric), "step"] = lambda: self._copy_of(metric).reset()
            return Result((id(metric), "step"), lambda: self._copy_of(metric).compute())

        def new_compute() -> Result:
            return Result((id(metric), "epoch"), compute)

        def new_reset() -> None:
            self._resets[id(metric), "epoch"] = reset

        return {"update": new_update, "forward": new_forward, "compute": new_compute, "reset": new_reset}

    def _copy_of(self, metric: AnyMetric) -> AnyMetric:
        """A copy of a metric that sees the examples of one step alone; its methods are its own."""
        if id(metric) not in self._copies:
            copy = self._copies[id(metric)] = metric.clone()
            copy.reset()
            for part in _parts(copy):
                part.distributed_available_fn = lambda: False  # a rank's own value, as forward returns it
        return self._copies[id(metric)]

    def _give_values(self, metric: AnyMetric) -> None:
        """Let Lightning log the value of the step where `self.log` is given the metric itself."""
        for part, copy in zip(_parts(metric), _parts(self._copy_of(metric)), strict=True):
            if copy.update_called:
                set_value_of_step(part, copy.compute())


def _parts(metric: AnyMetric) -> list[Metric]:
    return list(metric.values(copy_state=False)) if isinstance(metric, MetricCollection) else [metric]


def _require_single(name: str, number: Tensor) -> None:
    """Refuse several numbers, which have no single mean."""
    if number.numel() != 1:
        raise ModelError(f"self.log takes a single number; '{name}' has the shape {tuple(number.shape)}.")


class _Rows:
    """A tensor of the step with a row for each example: (b, ...), or (1, ...) where the step sees one example."""

    def __init__(self, tensor: Tensor, mine: list[bool]) -> None:
        self._tensor, self._mine, self._has_rows = detached(tensor, len(mine)), mine, tensor.dim() > 0

    def rows(self) -> Tensor:
        """The rows of the examples that take part."""
        return self._counted().flatten(0, 1) if self._has_rows else self._counted()

    def numbers(self, device: torch.device) -> Tensor:
        """(c,) one number for each example that takes part, on a device."""
        return sent(self._counted(), device).flatten()

    def _counted(self) -> Tensor:
        if all(self._mine):
            return self._tensor
        rows = torch.tensor([row for row, counts in enumerate(self._mine) if counts], dtype=torch.long)
        return self._tensor.index_select(0, sent(rows, self._tensor.device))  # a mask would wait for the device

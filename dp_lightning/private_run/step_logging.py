"""Logging in a training step: ``self.log`` and torchmetrics, for the whole physical batch at once.

While the step sees one example, the values that it logs or gives to a metric are set aside. After the step the numbers
of all examples are logged as their mean, and each metric is called once on the rows of all of them. So a metric's
result is not known inside of the step: it can be logged and nothing else. Examples that do not take part are left out.
Where examples go through one by one, a metric is called for each of them. One that is logged by itself has the value of
all of them on the step.

Where ranks log together (``sync_dist``), every one of them takes part with what it has, which may be nothing.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import lightning.pytorch as pl
import torch
from torch import Tensor
from torchmetrics import Metric, MetricCollection

from dp_lightning.errors import ModelError
from dp_lightning.lightning_internals import joined
from dp_lightning.privacy.gradients.vmap import detached
from dp_lightning.private_run.unprotected import POST_PROCESSING
from dp_lightning.processors import sent
from dp_lightning.torch_internals import level, tree_map_only

CALLS = ("forward", "update", "compute", "reset")
_LOG_ARGUMENTS = ("prog_bar", "logger", "on_step", "on_epoch")


class Result:
    """What a metric will have returned after the step."""

    def __init__(self, get: Callable[[], Any]) -> None:
        self._get = get

    def __getitem__(self, key: Any) -> "Result":
        return Result(lambda: self._get()[key])

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise ModelError(
            "training_step uses what a metric returned. A metric is computed from all examples of a batch, so its "
            "result may be given to self.log or self.log_dict and to nothing else."
        )

    __bool__ = __float__ = __int__ = __iter__ = __len__ = __call__ = __str__ = __repr__ = __getattr__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __neg__ = _refuse
    __lt__ = __le__ = __gt__ = __ge__ = __eq__ = __ne__ = __hash__ = _refuse


def result_of(result: Result) -> Any:
    """The value, after the step."""
    return object.__getattribute__(result, "_get")()


class Observer:
    """Takes the place of a module's ``log`` and its metrics while a private step runs.

    Args:
        module: whose training step is private.
    """

    def __init__(self, module: pl.LightningModule) -> None:
        self._module = module
        self._metrics = [part for part in module.modules() if isinstance(part, Metric | MetricCollection)]
        self._counted: list[bool] = []
        self._twins: dict[int, Metric] = {}
        self._inside = False
        self._clear()

    def _clear(self) -> None:
        self._example, self._mine, self._count = -1, self._counted, 0
        self._calls: list[Callable[[], None]] = []
        self._logs: list[Callable[[], None]] = []
        self._numbers: dict[str, tuple[list[_OfAll | _OfMetric], dict[str, Any]]] = {}
        self._whole: dict[str, tuple[Metric, dict[str, Any]]] = {}
        # For each metric's id and each call of the loss, what forward has got last.
        self._inputs: dict[int, dict[int, tuple[Any, Any]]] = {}

    @contextmanager
    def step(self, counted: Tensor) -> Iterator[None]:
        """Around a physical batch; logs when it is over.

        Args:
            counted: (b,) whether each example takes part.
        """
        self._counted, self._inside = counted.tolist(), True
        try:
            with self._standing({"log": self._log, "log_dict": self._log_dict}, CALLS, self._deferred):
                yield
        finally:
            calls, logs, numbers = self._calls, self._logs, self._numbers
            whole, inputs = self._whole, self._inputs
            self._clear()
        with torch.no_grad():
            for call in (*calls, *logs):
                call()
            for name, (values, options) in numbers.items():
                self._log_mean(name, [value.total_and_count(name) for value in values], options)
            for name, (metric, options) in whole.items():
                if options.get("on_step") is not False:
                    self._join(metric, list(inputs.get(id(metric), {}).values()))
                self._module.log(name, metric, **options)
        self._inside = False

    @contextmanager
    def closed(self) -> Iterator[None]:
        """While the optimizer steps: metrics may have gathered from examples, and are not read but by the step."""

        def refused(metric: Metric | MetricCollection, name: str) -> Callable[..., Any]:
            call = getattr(metric, name)
            return lambda *args, **kwargs: call(*args, **kwargs) if self._inside else _not_read()

        with self._standing({}, ("forward", "compute"), refused):
            yield

    @contextmanager
    def _standing(
        self, of_module: dict[str, Any], names: Sequence[str], of_metric: Callable[[Any, str], Any]
    ) -> Iterator[None]:
        """Put others in the place of methods of the module and of its metrics."""
        owners = [(self._module.__dict__, of_module)]
        owners += [(metric.__dict__, {name: of_metric(metric, name) for name in names}) for metric in self._metrics]
        before = [{name: own[name] for name in others if name in own} for own, others in owners]
        for own, others in owners:
            own.update(others)
        try:
            yield
        finally:
            for (own, others), old in zip(owners, before, strict=True):
                for name in others:
                    del own[name]
                own.update(old)

    def begin_example(self) -> None:
        """The loss is called: for all examples together, or for the next one."""
        self._example += 1
        self._mine = self._counted if level() is not None else [self._counted[self._example]]
        self._count = sum(self._mine)

    def _log_mean(self, name: str, totals_and_counts: list[tuple[Tensor, int]], options: dict[str, Any]) -> None:
        trainer, totals = self._module.trainer, [total for total, _ in totals_and_counts]
        total, count = torch.stack(totals).sum(), sum(count for _, count in totals_and_counts)
        if options.get("sync_dist") and trainer.world_size > 1:
            # The sum over ranks that Lightning makes waits for the device too.
            both = torch.stack([total, torch.full_like(total, count)])
            total, count = trainer.strategy.reduce(both, options.get("sync_dist_group"), reduce_op="sum")
            count = int(count)
        if count:
            mean = (total / count).float()
            self._module.log(name, mean, **{**options, "sync_dist": False, "batch_size": count})

    def _log(self, name: str, value: Any, *args: Any, **options: Any) -> None:
        options = {**dict(zip(_LOG_ARGUMENTS, args, strict=False)), **options}
        if name in POST_PROCESSING:
            raise ModelError(f"training_step logs '{name}', a name that is reserved for a number that is not raw.")
        if isinstance(value, Metric):
            self._whole[name] = (value, options)
            return
        found: _OfAll | _OfMetric
        if isinstance(value, Result):
            found = _OfMetric(value, self._count, self._module.device)
        else:
            tensor = value if isinstance(value, Tensor) else torch.full((), float(value), device=self._module.device)
            _require_single(name, tensor)
            found = _OfAll(tensor, self._mine, self._module.device)
        self._numbers.setdefault(name, ([], options))[0].append(found)

    def _log_dict(self, dictionary: Any, *args: Any, **options: Any) -> None:
        if not isinstance(dictionary, Result):
            whole = isinstance(dictionary, MetricCollection)
            items = dictionary.items(keep_base=False, copy_state=False) if whole else dictionary.items()
            for name, value in items:
                self._log(name, value, *args, **options)
            return
        options = {**dict(zip(_LOG_ARGUMENTS, args, strict=False)), **options}
        if options.get("sync_dist") and self._module.trainer.world_size > 1:
            raise ModelError(
                "self.log_dict cannot put together over ranks what a collection of metrics returned, whose names a "
                "rank without examples does not know. Log the collection itself: self.log_dict(self.metrics)."
            )
        if count := self._count:
            self._logs.append(lambda: self._module.log_dict(result_of(dictionary), batch_size=count, **options))

    def _join(self, metric: Metric, inputs: list[tuple[Any, Any]]) -> None:
        """Let the metric's value on the step be that of all calls, and not of the last one."""
        if len(inputs) < 2 or type(metric).forward is not Metric.forward:
            return
        if id(metric) not in self._twins:
            self._twins[id(metric)] = metric.clone()
        joined(metric, self._twins[id(metric)], tree_map_only(_OfAll, _OfAll.rows, inputs))

    def _deferred(self, metric: Metric | MetricCollection, name: str) -> Callable[..., Any]:
        call = getattr(metric, name)

        def deferred(*args: Any, **kwargs: Any) -> Result:
            found: list[Any] = []
            # Ranks compute together, whether they have an example or not.
            if self._count or name in ("compute", "reset"):
                kept = tree_map_only(Tensor, lambda tensor: _OfAll(tensor, self._mine), (args, kwargs))
                if name == "forward":
                    for part in [metric] if isinstance(metric, Metric) else metric.values(copy_state=False):
                        self._inputs.setdefault(id(part), {})[self._example] = kept

                def call_now() -> None:
                    rows, named = tree_map_only(_OfAll, _OfAll.rows, kept)
                    found.append(call(*rows, **named))

                self._calls.append(call_now)
            return Result(lambda: found[0])

        return deferred


def _require_single(name: str, tensor: Tensor) -> None:
    """Before it is summed: several numbers have no single mean."""
    if tensor.numel() != 1:
        raise ModelError(f"self.log takes a single number; '{name}' has the shape {tuple(tensor.shape)}.")


def _not_read() -> NoReturn:
    raise ModelError(
        "optimizer_step or lr_scheduler_step computes a metric, which may have gathered from raw training examples: "
        "what depends on it would not be a function of the releases. Use the number of the step, or a validation "
        "metric from trainer.callback_metrics."
    )


class _OfAll:
    """What the step said of each example by one tensor: (b, ...), or of one alone (1, ...)."""

    def __init__(self, tensor: Tensor, mine: list[bool], device: torch.device | None = None) -> None:
        self._tensor, self._mine, self._has_rows = detached(tensor, len(mine)), mine, tensor.dim() > 0
        self._device = device

    def counted(self) -> Tensor:
        """Of the examples that take part: (c, ...)."""
        tensor = self._tensor if self._device is None else sent(self._tensor, self._device)
        if all(self._mine):
            return tensor
        rows = torch.tensor([row for row, counts in enumerate(self._mine) if counts], dtype=torch.long)
        return tensor.index_select(0, sent(rows, tensor.device))  # a mask would wait for the device

    def total_and_count(self, name: str) -> tuple[Tensor, int]:
        """Of the examples that take part."""
        values = self.counted()
        return values.sum(dtype=torch.float64), values.numel()

    def rows(self) -> Tensor:
        """The rows of the examples that take part."""
        return self.counted().flatten(0, 1) if self._has_rows else self.counted()


class _OfMetric:
    """What a metric returns for the examples that take part."""

    def __init__(self, result: Result, count: int, device: torch.device) -> None:
        self._result, self._count, self._device = result, count, device

    def total_and_count(self, name: str) -> tuple[Tensor, int]:
        """With the number of examples as the weight."""
        if not self._count:
            return torch.zeros((), dtype=torch.float64, device=self._device), 0
        value = torch.as_tensor(result_of(self._result), device=self._device)
        _require_single(name, value)
        return value.double().reshape(()) * self._count, self._count

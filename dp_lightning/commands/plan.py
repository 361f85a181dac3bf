"""`dpl plan`: what batch size, epochs and epsilon do to a run, before it starts.

For every combination it shows the noise multiplier, the noise in the gradient beside the clipping norm C, the number
of steps, and how strong a gradient must be for its first singular direction to survive the noise. All of it follows
from public numbers; no image is read and nothing is trained.
"""

import argparse
import json
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, product
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

from dp_lightning.commands.named_configs import with_paths
from dp_lightning.errors import ConfigurationError
from dp_lightning.experiments.results import shown_duration

_WIDTH = 80
# Options of a plan without a configuration, which has settings for them or a model.
_NEEDED, _OPTIONAL = ("num_train", "delta", "epochs", "epsilon"), ("accountant", "num_parameters")

Row = dict[str, Any]
Table = list[list[str]]


class Matrix(NamedTuple):
    """The shape of trained matrices.

    Attributes:
        rows, columns: m and n of a parameter viewed as a matrix.
        bound: the most, in L2 norm, that clipping leaves of an example's gradient of one of them.
    """

    rows: int
    columns: int
    bound: float


@dataclass(frozen=True, kw_only=True)
class Basis:
    """What all runs of the table have in common.

    Attributes:
        name: the names of the model and the data.
        num_train: N.
        privacy: the configuration's `PrivacySettings`, or the few of them that a plan of numbers has.
        length: what limits the steps of the configuration's run, as `RunShape.of_length` takes it.
        num_parameters: d, the number of trained parameters; None if it is not known.
        matrices: how many trained matrices there are of each shape.
        seconds_per_example: time of a private step for each of its examples; None if it was not measured.
        device: the device on which it was measured.
    """

    name: str
    num_train: int
    privacy: Any
    length: Mapping[str, Any] = field(default_factory=dict)
    num_parameters: int | None = None
    matrices: Mapping[Matrix, int] = field(default_factory=dict)
    seconds_per_example: float | None = None
    device: str | None = None


def main(arguments: list[str]) -> None:
    """Print the table, or one JSON object."""
    parser = _parser()
    options, of_fit = parser.parse_known_args(with_paths(arguments)[1:])
    if any(argument == "--config" or argument.startswith("--config=") for argument in of_fit):
        for name in ("num_train", "delta", *_OPTIONAL):
            if getattr(options, name) is not None:
                raise ConfigurationError(
                    f"{_option(name)} is for plans without a configuration. With --config, set --privacy.{name}; the "
                    "number of parameters is that of its model."
                )
        basis = _basis_of_configuration(of_fit, measure=options.measure)
    else:
        if of_fit:
            parser.error(f"unrecognized arguments without --config: {' '.join(of_fit)}")
        basis = _basis_of_numbers(options)
    rows = rows_of(basis, batch_sizes=options.batch_size, epochs=options.epochs, epsilons=options.epsilon)
    print(json.dumps(_as_dict(basis, rows)) if options.json else _text(basis, rows))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dpl plan",
        description=__doc__,
        epilog="Give the --config of a run, and any other option of dpl fit; or, without one, --num-train, --delta, "
        "--epochs and --epsilon. Several numbers are separated by commas.",
        allow_abbrev=False,
    )

    def add(group: Any, name: str, **given: Any) -> None:
        group.add_argument(*dict.fromkeys((_option(name), f"--{name}")), **given)

    axes = parser.add_argument_group("what is compared; default: the configuration's own")
    sizes = "expected batch sizes; default: a quarter to four times the configuration's"
    add(axes, "batch_size", type=_several(int), metavar="B,...", help=sizes)
    in_place = "in the place of trainer.max_epochs and max_steps"
    add(axes, "epochs", type=_several(int), metavar="E,...", help=in_place)
    in_place = "in the place of privacy.target_epsilon or noise_multiplier"
    add(axes, "epsilon", type=_several(float), metavar="EPS,...", help=in_place)
    plain = parser.add_argument_group("without a configuration")
    add(plain, "num_train", type=int, help="number of training examples, or of persons")
    add(plain, "delta", type=float, help="below 1/num_train")
    add(plain, "accountant", choices=("prv", "rdp", "pld"), help="default: prv; rdp answers at once")
    add(plain, "num_parameters", type=int, help="d, for the norm of the noise")
    measured = "with --config: time a few private steps of the model on synthetic images; takes some seconds"
    add(parser, "measure", action="store_true", help=measured)
    add(parser, "json", action="store_true", help="print one JSON object")
    return parser


def _several(kind: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    def read(text: str) -> list[Any]:
        return [kind(part) for part in text.split(",")]

    read.__name__ = f"list of {kind.__name__}"  # argparse names it in its message
    return read


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def _basis_of_numbers(options: argparse.Namespace) -> Basis:
    from dp_lightning.privacy.accounting import check_accountant
    from dp_lightning.privacy.clipping import ClipPlan
    from dp_lightning.privacy.ranges import check_count

    if missing := [_option(name) for name in _NEEDED if getattr(options, name) is None]:
        raise ConfigurationError(
            f"dpl plan needs the --config of a run, such as wrn16_cifar10; or else {', '.join(missing)}."
        )
    if options.measure:
        raise ConfigurationError("--measure times a model: give the --config of a run, or remove it.")
    check_count("--num-train", options.num_train)
    privacy = SimpleNamespace(delta=options.delta, accountant=options.accountant or "prv", clip_plan=ClipPlan.flat())
    privacy.unit_of_privacy, privacy.expected_batch_size = "example", None
    check_accountant(privacy.accountant)
    return Basis(
        name="plain numbers",
        num_train=options.num_train,
        privacy=privacy,
        num_parameters=options.num_parameters,
    )


def _basis_of_configuration(arguments: Sequence[str], *, measure: bool) -> Basis:
    """The settings of these options of ``dpl fit``, the shapes of the model, and the time of its steps.

    Raises:
        DpLightningError: as ``dpl fit`` would, for wrong settings; if nothing is private, or nothing can be timed.
    """
    import torch

    from dp_lightning.commands.composition import Composer, prepare_to_train
    from dp_lightning.commands.pricing import length_of, seconds_per_example
    from dp_lightning.postprocess.matrix import is_matrix

    settings = Composer()(arguments)
    cli, num_train = prepare_to_train(settings)
    privacy, model = cli.privacy, type(cli.model).__name__
    if privacy.noise_multiplier == 0:
        raise ConfigurationError("privacy.noise_multiplier is 0: the run adds no noise, so there is nothing to plan.")
    shapes = {name: p.shape for name, p in cli.model.named_parameters() if p.requires_grad}
    groups = privacy.clip_plan.groups(shapes)
    bounds = dict(zip(groups, privacy.clip_plan.bounds(groups), strict=True))
    bound_of = {name: bounds[label] for label, names in groups.items() for name in names}
    seconds = seconds_per_example(settings) if measure else None
    if measure and seconds is None:
        raise ConfigurationError(
            f"--measure: {model} does not take a batch of synthetic images of the data's shape. Remove --measure."
        )
    device = cli.trainer.strategy.root_device
    on_cpu = f"{torch.get_num_threads()} CPU threads"
    return Basis(
        name=f"{model}, {type(cast(Any, cli.datamodule)).__name__}",
        num_train=num_train,
        privacy=privacy,
        length=length_of(settings["trainer"]),
        num_parameters=sum(shape.numel() for shape in shapes.values()),
        matrices=Counter(
            Matrix(shape[0], shape[1:].numel(), bound_of[name]) for name, shape in shapes.items() if is_matrix(shape)
        ),
        seconds_per_example=seconds,
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else on_cpu,
    )


def rows_of(
    basis: Basis,
    *,
    batch_sizes: Sequence[int] | None = None,
    epochs: Sequence[int] | None = None,
    epsilons: Sequence[float] | None = None,
) -> list[Row]:
    """A run for every combination, in the order epsilon, length, batch size; None takes the configuration's.

    Returns:
        The numbers of each run by name; the thresholds are shares of the matrices' ``bound``, in their order.

    Raises:
        ConfigurationError: for a batch size or a length out of range, or an epsilon that cannot be reached.
    """
    from dp_lightning.analysis import detection_norm, recovery_gap
    from dp_lightning.privacy.plan import RunShape

    privacy, own = basis.privacy, {"max_epochs": None, **basis.length}
    lengths = [own] if epochs is None else [own | {"max_epochs": e, "max_steps": -1} for e in sorted(set(epochs))]
    targets = [privacy.target_epsilon] if epsilons is None else sorted(set(epsilons))
    sizes = batch_sizes_around(privacy.expected_batch_size, basis.num_train) if batch_sizes is None else batch_sizes
    sensitivity, rows = privacy.clip_plan.sensitivity, []
    for target, length, size in product(targets, lengths, sorted(set(sizes))):
        shape = RunShape.of_length(num_train=basis.num_train, expected_batch_size=size, delta=privacy.delta, **length)
        if target is None:
            plan = shape.with_noise(privacy.noise_multiplier, accountant=privacy.accountant)
        else:
            plan = shape.calibrate(target, accountant=privacy.accountant)
        level, d, seconds = plan.noise_level(sensitivity), basis.num_parameters, basis.seconds_per_example
        noise = f"sigma {plan.noise_multiplier:.4g}" if target is None else f"epsilon {target:g}"
        steps = length.get("max_steps", -1)
        row = {
            "at": f"{noise}, {length['max_epochs']} epochs" if steps == -1 else f"{noise}, at most {steps} steps",
            "epsilon": plan.epsilon() if target is None else target,
            "epochs": plan.num_steps * plan.sample_rate,  # how often an example is drawn in expectation
            "expected_batch_size": size,
            "num_steps": plan.num_steps,
            "sample_rate": plan.sample_rate,
            "noise_multiplier": plan.noise_multiplier,
            "noise_level": level,
            "noise_norm_over_clipping_norm": None
            if d is None
            else plan.noise_norm(num_parameters=d, sensitivity=sensitivity) / privacy.clip_plan.max_grad_norm,
            "recovery": [recovery_gap(m, n, noise_level=level) / bound for m, n, bound in basis.matrices],
            "detection": [detection_norm(m, n, noise_level=level) / bound for m, n, bound in basis.matrices],
            "seconds": None if seconds is None else seconds * plan.num_steps * size,
        }
        rows.append(row)
    return rows


def batch_sizes_around(batch_size: int | None, num_train: int) -> list[int]:
    """B from a quarter to four times the configuration's; without one, powers of two with q from 0.5 % to 20 %."""
    if batch_size is None:
        return [2**power for power in range(40) if 0.005 <= 2**power / num_train <= 0.2] or [1]
    return [min(max(batch_size * 2**power // 4, 1), num_train) for power in range(5)]


def _as_dict(basis: Basis, rows: Sequence[Row]) -> dict[str, Any]:
    return {
        "name": basis.name,
        "num_train": basis.num_train,
        "unit_of_privacy": basis.privacy.unit_of_privacy,
        "delta": basis.privacy.delta,
        "accountant": basis.privacy.accountant,
        "clipping": basis.privacy.clip_plan.describe(),
        "num_parameters": basis.num_parameters,
        "matrices": [{**matrix._asdict(), "count": count} for matrix, count in basis.matrices.items()],
        "seconds_per_example": basis.seconds_per_example,
        "device": basis.device,
        "runs": list(rows),
    }


def _text(basis: Basis, rows: Sequence[Row]) -> str:
    """Paragraphs of 80 columns, and tables between them."""
    parts = [f"Plan: {basis.name}"]
    for part in _parts(basis, rows):
        if isinstance(part, str):
            parts.append("\n".join(textwrap.wrap(part, _WIDTH)))
        else:
            widths = [max(map(len, column)) for column in zip(*part, strict=True)]
            lines = ("  ".join(map(str.rjust, cells, widths)) for cells in part)
            parts.append("\n".join(lines))
    return "\n\n".join(parts)


def _parts(basis: Basis, rows: Sequence[Row]) -> Iterator[str | Table]:
    privacy, clipping = basis.privacy, basis.privacy.clip_plan
    unit = "examples" if privacy.unit_of_privacy == "example" else "persons"
    d = "" if basis.num_parameters is None else f", {basis.num_parameters:,} trained parameters (d)"
    yield (
        f"N = {basis.num_train:,} {unit}, delta {privacy.delta:g}, {privacy.accountant.upper()} accountant, "
        f"{clipping.kind.replace('_', ' ')} clipping at C = {clipping.max_grad_norm:g}{d}. No image was read, and "
        "nothing was trained."
    )
    yield _table_of_runs(rows)
    said = "noise sd is the standard deviation of the noise in each coordinate of the gradient, sigma S / B with S = C."
    if basis.num_parameters is not None:
        said += (
            " norm / C is the norm of the noise, sigma S sqrt(d) / B, over C; that of the mean clipped gradient is at "
            "most 1."
        )
    if basis.seconds_per_example is not None:
        said += (
            f" time is that of T private steps on {basis.device}, with {1000 * basis.seconds_per_example:.3g} ms for "
            "each of B examples; image files, evaluations and checkpoints come on top."
        )
    yield said
    if not basis.matrices:
        return
    yield (
        "What a matrix needs, as a share of the most that clipping leaves of its gradient: its first singular "
        "direction is recovered if s1 - s2 of the mean clipped gradient exceeds the share (Wedin 1972; sufficient, "
        "not necessary), and begins to be detected if s1 exceeds the share times the last column (Benaych-Georges and "
        "Nadakuditi 2012). No gradient reaches a share above 1."
    )
    for at, group in groupby(rows, key=lambda row: row["at"]):
        yield f"At {at}:"
        yield _table_of_matrices(basis, list(group))


def _table_of_runs(rows: Sequence[Row]) -> Table:
    columns: dict[str, Callable[[Row], str]] = {
        "epsilon": lambda row: f"{row['epsilon']:.4g}",
        "epochs": lambda row: f"{row['epochs']:.4g}",
        "B": lambda row: str(row["expected_batch_size"]),
        "T": lambda row: str(row["num_steps"]),
        "sigma": lambda row: f"{row['noise_multiplier']:.4g}",
        "noise sd": lambda row: f"{row['noise_level']:.3g}",
    }
    if rows[0]["noise_norm_over_clipping_norm"] is not None:
        columns["norm / C"] = lambda row: f"{row['noise_norm_over_clipping_norm']:.3g}"
    if rows[0]["seconds"] is not None:
        columns["time"] = lambda row: shown_duration(row["seconds"])
    return [list(columns), *([shown(row) for shown in columns.values()] for row in rows)]


def _table_of_matrices(basis: Basis, rows: Sequence[Row]) -> Table:
    table = [["m x n", "matrices", *(f"B = {row['expected_batch_size']}" for row in rows), "detected"]]
    for place, (matrix, count) in enumerate(basis.matrices.items()):
        shares = [row["recovery"][place] for row in rows]
        factor = rows[0]["detection"][place] / shares[0]
        shown = [f"{share:.2g}" for share in shares]
        table.append([f"{matrix.rows} x {matrix.columns}", str(count), *shown, f"x {factor:.2f}"])
    return table

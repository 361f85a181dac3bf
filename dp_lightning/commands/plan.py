"""`dpl plan`: what batch size, epochs and epsilon do to a run, before it starts.

For every combination it shows the noise multiplier, the noise in the gradient beside the clipping norm C, the number
of steps, and how strong a gradient must be for its first singular direction to survive the noise. All of it follows
from public numbers; no image is read and nothing is trained.
"""

import argparse
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dp_lightning.atomic_files import require_writable
from dp_lightning.commands.named_configs import with_paths
from dp_lightning.errors import ConfigurationError

if TYPE_CHECKING:
    from dp_lightning.commands.plan_cells import Basis, Cell

# Without a configuration: what has to be given, and what may be. A configuration has settings for all of them.
_NEEDED = {"num_train": None, "epochs": None, "epsilon": None, "delta": "privacy.delta"}
_OTHERS = {"max_grad_norm": "privacy.max_grad_norm", "accountant": "privacy.accountant"}
_OF_MODEL = ("num_parameters", "matrix")


def main(arguments: list[str]) -> None:
    """Print the table, or one JSON object; with ``--out`` also write a page."""
    parser = _parser()
    options, of_fit = parser.parse_known_args(with_paths(arguments)[1:])
    configured = any(argument == "--config" or argument.startswith("--config=") for argument in of_fit)
    if configured:
        _require_none_of_the_plain(options)
    elif of_fit:
        parser.error(f"unrecognized arguments without --config: {' '.join(of_fit)}")
    else:
        _require_all_of_the_plain(options)
    _check_axes(options)
    if options.out is not None:
        require_writable(options.out, "--out")
    # Imported here to keep --help fast.
    from dp_lightning.commands.plan_cells import cells_of
    from dp_lightning.commands.plan_page import as_dict, page_of, text_of

    if configured:
        from dp_lightning.commands.plan_configuration import basis_of

        basis = basis_of(of_fit, measure=options.measure)
    else:
        basis = _basis_of_numbers(options)
    cells: list[Cell] = cells_of(basis, batch_sizes=options.batch_size, epochs=options.epochs, epsilons=options.epsilon)
    if options.out is not None:
        page_of(basis, cells, options.out).write_html("plan.html")
    print(json.dumps(as_dict(basis, cells)) if options.json else text_of(basis, cells))
    if options.out is not None and not options.json:
        print(f"Written to {options.out / 'plan.html'}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dpl plan",
        description=__doc__,
        epilog="Give the --config of a run, and any other option of dpl fit; or, without one, --num-train, --delta, "
        "--epochs and --epsilon. Several numbers are separated by commas.",
        allow_abbrev=False,
    )
    axes = parser.add_argument_group("what is compared; default: the configuration's own")
    axes.add_argument(
        "--batch-size",
        "--batch_size",
        type=_several(int),
        metavar="B,...",
        help="expected batch sizes; default: a quarter to four times the configuration's, or powers of two with a "
        "sample rate from 0.5%% to 20%%",
    )
    axes.add_argument(
        "--epochs", type=_several(int), metavar="E,...", help="in the place of trainer.max_epochs and max_steps"
    )
    axes.add_argument(
        "--epsilon",
        type=_several(float),
        metavar="EPS,...",
        help="in the place of privacy.target_epsilon or noise_multiplier",
    )
    plain = parser.add_argument_group("without a configuration")
    plain.add_argument("--num-train", "--num_train", type=int, help="number of training examples, or of persons")
    plain.add_argument("--delta", type=float, help="below 1/num_train")
    plain.add_argument("--max-grad-norm", "--max_grad_norm", type=float, help="C, by flat clipping; default: 1")
    plain.add_argument("--accountant", choices=("prv", "rdp", "pld"), help="default: prv; rdp answers at once")
    plain.add_argument("--num-parameters", "--num_parameters", type=int, help="d, for the norm of the noise")
    plain.add_argument("--matrix", type=_several(_shape), metavar="MxN,...", help="shapes, for what they need")
    parser.add_argument(
        "--measure",
        action="store_true",
        help="with --config: time a few private steps of the model on synthetic images; takes some seconds",
    )
    parser.add_argument("--out", type=Path, help="folder of a page with a picture, plan.html")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def _several(kind: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    def read(text: str) -> list[Any]:
        return [kind(part) for part in text.split(",")]

    read.__name__ = f"list of {kind.__name__.strip('_')}"  # argparse names it in its message
    return read


def _shape(text: str) -> tuple[int, int]:
    sides = re.fullmatch(r"([1-9]\d{0,8})x([1-9]\d{0,8})", text)
    if sides is None:
        raise ValueError(text)
    return int(sides[1]), int(sides[2])


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def _require_none_of_the_plain(options: argparse.Namespace) -> None:
    settings = {"num_train": "privacy.num_train", "delta": _NEEDED["delta"], **_OTHERS}
    for name, setting in settings.items():
        if getattr(options, name) is not None:
            raise ConfigurationError(
                f"{_option(name)} is for plans without a configuration. With --config, set --{setting}."
            )
    for name in _OF_MODEL:
        if getattr(options, name) is not None:
            raise ConfigurationError(f"{_option(name)}: with --config, it is that of the configuration's model.")


def _require_all_of_the_plain(options: argparse.Namespace) -> None:
    missing = [_option(name) for name in _NEEDED if getattr(options, name) is None]
    if missing:
        raise ConfigurationError(
            f"dpl plan needs the --config of a run, such as configs/wrn16_cifar10.yaml; or else {', '.join(missing)}."
        )
    if options.measure:
        raise ConfigurationError("--measure times a model: give the --config of a run, or remove it.")


def _check_axes(options: argparse.Namespace) -> None:
    for name in ("epochs", "num_train", "num_parameters"):
        given = getattr(options, name)
        for number in given if isinstance(given, list) else [1 if given is None else given]:
            if not 1 <= number <= 2**53:
                raise ConfigurationError(f"{_option(name)} has {number}; choose from 1 to 2**53.")
    for number in options.epsilon or ():
        if not 0 < number < math.inf:
            raise ConfigurationError(f"--epsilon has {number:g}; choose finite numbers above 0.")


def _basis_of_numbers(options: argparse.Namespace) -> "Basis":
    from collections import Counter

    from dp_lightning.commands.plan_cells import Basis, Matrices
    from dp_lightning.privacy.accounting import check_accountant
    from dp_lightning.privacy.clipping import ClipPlan

    clip_plan = ClipPlan.flat(max_grad_norm=1.0 if options.max_grad_norm is None else options.max_grad_norm)
    accountant = options.accountant or "prv"
    check_accountant(accountant)
    counted, bound = Counter(options.matrix or ()), clip_plan.max_grad_norm
    return Basis(
        name="plain numbers",
        num_train=options.num_train,
        delta=options.delta,
        accountant=accountant,
        clip_plan=clip_plan,
        num_parameters=options.num_parameters,
        matrices=tuple(Matrices(rows, columns, count, bound) for (rows, columns), count in counted.items()),
    )

"""`dpl plan`: what batch size, epochs and epsilon do to a run, before it starts.

It prints the noise of every combination, which follows from public numbers: no image is read and no model is trained.
"""

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

from dp_lightning.commands.configs import with_paths
from dp_lightning.commands.fit_settings import SettingsReader, prepare_to_train
from dp_lightning.commands.pricing import plan_of, seconds_per_example
from dp_lightning.errors import ConfigurationError
from dp_lightning.experiments.results import shown_duration
from dp_lightning.privacy.plan import error_of_noise

# The heads of columns that have other names in JSON.
_HEADS = {
    "expected_batch_size": "B",
    "num_steps": "T",
    "noise_multiplier": "sigma",
    "noise_level": "noise sd",
    "noise_norm_over_clipping_norm": "norm / C",
    "error_of_noise": "error",
    "seconds": "time",
}


def main(arguments: list[str]) -> None:
    """Print a table, or one JSON object with the same numbers.

    Raises:
        DpLightningError: as ``dpl fit`` would, for wrong settings; if nothing is private, or nothing can be timed.
    """
    options, of_fit = _parser().parse_known_args(with_paths(arguments)[1:])
    settings = SettingsReader()(of_fit)
    cli, num_train = prepare_to_train(settings)
    privacy, trainer, clipping = settings["privacy"], settings["trainer"], cli.privacy.clip_plan
    if cli.privacy.noise_multiplier == 0:
        raise ConfigurationError("privacy.noise_multiplier is 0: the run adds no noise, so there is nothing to plan.")
    seconds = seconds_per_example(settings) if options.measure else None
    if options.measure and seconds is None:
        raise ConfigurationError(
            f"--measure: {type(cli.model).__name__} does not take a batch of synthetic images of the data's shape. "
            "Remove --measure."
        )
    num_parameters = sum(p.numel() for p in cli.model.parameters() if p.requires_grad)
    runs = []
    for epsilon, epochs, size in product(
        options.epsilon or [None], options.epochs or [None], options.batch_size or _sizes(privacy, num_train)
    ):
        target = {} if epsilon is None else {"target_epsilon": epsilon, "noise_multiplier": None}
        length = {} if epochs is None else {"max_epochs": epochs, "max_steps": -1}
        plan = plan_of({**privacy, **target}, {**trainer, **length}, num_train=num_train, batch_size=size)
        level = plan.noise_level(clipping.sensitivity)
        run = {
            "epsilon": plan.epsilon() if plan.target_epsilon is None else plan.target_epsilon,
            "epochs": plan.epochs,
            "expected_batch_size": size,
            "num_steps": plan.num_steps,
            "noise_multiplier": plan.noise_multiplier,
            "noise_level": level,
            "noise_norm_over_clipping_norm": level * math.sqrt(num_parameters) / clipping.max_grad_norm,
        }
        if cli.privacy.bands != 1:
            run |= {"bands": plan.bands, "error_of_noise": error_of_noise(plan, run["epsilon"])}
        runs.append(run if seconds is None else {**run, "seconds": seconds * plan.num_steps * size})
    if options.json:
        numbers = {"num_train": num_train, "delta": plan.delta, "accountant": plan.accountant}
        print(json.dumps({**numbers, "num_parameters": num_parameters, "runs": runs}))
        return
    unit = "examples" if cli.privacy.unit_of_privacy == "example" else "persons"
    print(
        f"{type(cli.model).__name__}, {type(cli.datamodule).__name__}: {num_train:,} {unit}, "
        f"{num_parameters:,} trained parameters\n"
        f"delta {plan.delta:g}, {plan.accountant.upper()} accountant, {clipping.kind.replace('_', ' ')} clipping at "
        f"C = {clipping.max_grad_norm:g}\n\n{_table(runs)}"
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dpl plan",
        description=__doc__,
        epilog="It takes --config and every other option of dpl fit.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    sizes = "expected batch sizes; default: a quarter to four times the configuration's"
    add("--batch-size", "--batch_size", type=int, nargs="+", metavar="B", help=sizes)
    add("--epochs", type=int, nargs="+", metavar="E", help="instead of trainer.max_epochs and max_steps")
    instead = "instead of privacy.target_epsilon or noise_multiplier"
    add("--epsilon", type=float, nargs="+", metavar="EPS", help=instead)
    add("--measure", action="store_true", help="time a few private steps of the model on synthetic images")
    add("--json", action="store_true", help="print one JSON object")
    return parser


def _sizes(privacy: Mapping[str, Any], num_train: int) -> list[int]:
    """Batch sizes from a quarter to four times the configuration's."""
    most = num_train // (1 if privacy["bands"] == "auto" else privacy["bands"])
    return sorted({min(max(privacy["expected_batch_size"] * 2**power // 4, 1), most) for power in range(5)})


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows in columns, with the names of the values above."""
    lines = [[_HEADS.get(name, name) for name in rows[0]]]
    lines += [[_shown(name, value) for name, value in row.items()] for row in rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(map(str.rjust, cells, widths)) for cells in lines)


def _shown(name: str, value: Any) -> str:
    if name == "seconds":
        return shown_duration(value)
    return f"{value:.4g}" if isinstance(value, float) else str(value)

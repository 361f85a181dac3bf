"""`dpl analyze`: signal and noise of a run's gradients, layer by layer (Shanmugam et al. 2026, Section 4).

It computes gradients of the training data without noise. Its output goes to `unprotected/` and must not be released.
The signal-to-noise ratio that `dpl fit` logs as privacy/snr comes from privatized gradients alone.
"""

import argparse
import json
from pathlib import Path

from dp_lightning.atomic_files import replacing, require_writable
from dp_lightning.commands.named_configs import with_paths
from dp_lightning.errors import ConfigurationError

KINDS = ("snr", "spectrum", "recovery", "newton-schulz", "direction")


def main(arguments: list[str]) -> None:
    """Analyse and write a page; options unknown to the analysis are passed on to ``dpl fit``."""
    options, of_fit = _parser().parse_known_args(with_paths(arguments[1:]))
    if not any(argument == "--config" or argument.startswith("--config=") for argument in of_fit):
        raise ConfigurationError("dpl analyze needs the --config of a run, such as configs/wrn16_cifar10.yaml.")
    if options.batch_sizes is not None and options.kind in ("spectrum", "newton-schulz"):
        raise ConfigurationError(
            f"dpl analyze {options.kind} looks at one batch size: set --privacy.expected_batch_size instead of "
            "--batch-sizes."
        )
    folder: Path = options.out / "unprotected" / options.kind
    require_writable(folder, "--out")
    # Imported here to keep --help fast.
    from dp_lightning.commands.analysis_pages import PAGES, new_page
    from dp_lightning.commands.analysis_run import AnalysisRun

    run = AnalysisRun(of_fit, options.ckpt_path, num_batches=options.batches, batch_sizes=options.batch_sizes)
    title, fill = PAGES[options.kind]
    page = new_page(run, title, folder)
    facts = fill(run, page)
    with replacing(folder / "numbers.json") as file:
        file.write((json.dumps({"unprotected": page.warning, **facts}, indent=1) + "\n").encode())
    page.publish("page")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dpl analyze",
        description=__doc__,
        epilog="Every other option is one of dpl fit, such as --config and --data.init_args.root.",
        allow_abbrev=False,
    )
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument(
        "--ckpt-path", "--ckpt_path", type=Path, help="checkpoint with the weights; default: the initial weights"
    )
    parser.add_argument("--batches", type=int, default=1, help="Poisson draws to average over; default: 1")
    parser.add_argument(
        "--batch-sizes",
        type=int,
        nargs="+",
        metavar="B",
        help="expected batch sizes to compare, for snr (default: the run's own), recovery and direction (default: "
        "256 to 8192 and the run's own)",
    )
    parser.add_argument("--out", type=Path, default=Path("analysis"), help="folder of the page; default: analysis")
    return parser

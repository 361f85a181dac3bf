"""`dpl audit`: does the private step of a configuration keep what its privacy plan claims?

The configuration's module takes steps at q = 1 on synthetic images. Canaries test whether the releases show who took
part, the noise is tested by itself, and contributions are measured without noise. No private image is read and no
model is kept. The page says what an audit can show and what it cannot.
"""

import argparse
import json
import sys
from pathlib import Path

from dp_lightning.atomic_files import replacing, require_writable
from dp_lightning.commands.named_configs import with_paths
from dp_lightning.errors import ConfigurationError


def main(arguments: list[str]) -> None:
    """Audit and write a page; exits with 1 if a check fails."""
    options, of_fit = _parser().parse_known_args(with_paths(arguments)[1:])
    if not any(argument == "--config" or argument.startswith("--config=") for argument in of_fit):
        raise ConfigurationError("dpl audit needs the --config of a run, such as configs/wrn16_cifar10.yaml.")
    if options.canaries < 1:
        raise ConfigurationError(f"--canaries is {options.canaries}; it must be at least 1.")
    require_writable(options.out, "--out")
    # Imported here to keep --help fast.
    from dp_lightning.commands.audit_checks import Audit
    from dp_lightning.commands.audit_page import page_of
    from dp_lightning.commands.audit_runs import AuditRuns

    runs = AuditRuns(of_fit)
    audit = Audit(runs, options.canaries)
    if not runs.is_first:
        return
    page = page_of(audit, options.out)
    with replacing(options.out / "numbers.json") as file:
        file.write((json.dumps(audit.to_dict(), indent=1) + "\n").encode())
    page.publish("page")
    sys.exit(1 if audit.failed else 0)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dpl audit",
        description=__doc__,
        epilog="Every other option is one of dpl fit, such as --config and --privacy.target_epsilon. Exits with 1 "
        "if a check fails.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--canaries",
        type=int,
        default=500,
        help="canaries that take part; more of them find smaller faults but take longer; default: 500",
    )
    parser.add_argument("--out", type=Path, default=Path("audit"), help="folder of the page; default: audit")
    return parser

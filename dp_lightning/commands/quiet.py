"""What Lightning prints during a run of `dpl` and nobody can use: advertisements, and hints that do not apply here."""

import logging
import re
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

# Beginnings of warnings that Lightning gives, each as a regular expression with the reason why it does not apply.
_UNWANTED = (
    r"The '\w+' does not have many workers",  # images that are held in memory need none
    r"Consider setting `persistent_workers",
    r"The number of training batches",  # logical steps, of which a small set has few
    r"Found \d+ module\(s\) in eval mode",  # the run names them itself
    r"It is recommended to use `self\.log\('privacy/",  # is the same on every rank
    r"Checkpoint directory .* exists and is not empty",  # the run resumes
    r"The dirpath has changed from",
    r".* will be overridden by `",  # the optimizer of a module, by that of the configuration
    r"No seed found",  # the configuration of the run records the one that was drawn
    r".*LeafSpec",  # Lightning's use of torch's trees
    r"skip_none parameter was deprecated",  # Lightning's use of jsonargparse
)


@contextmanager
def quiet() -> Iterator[None]:
    """Hide the warnings above, and Lightning's notes other than those of callbacks and of checkpoints."""
    with warnings.catch_warnings(), ExitStack() as stack:
        for message in _UNWANTED:
            warnings.filterwarnings("ignore", message, module=r"(lightning|jsonargparse)\b")
        for name in (None, "lightning.pytorch", "lightning.fabric"):
            for handler in logging.getLogger(name).handlers:
                if _is_wanted not in handler.filters:  # those of an outer `quiet` stay until it ends
                    handler.addFilter(_is_wanted)
                    stack.callback(handler.removeFilter, _is_wanted)
        yield


def _is_wanted(record: logging.LogRecord) -> bool:
    of_lightning = re.search("/lightning/(pytorch|fabric)/", record.pathname)
    told = re.search("/callbacks/|/checkpoint_connector.py", record.pathname)
    return record.levelno > logging.INFO or not of_lightning or bool(told)

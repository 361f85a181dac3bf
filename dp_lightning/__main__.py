"""``python -m dp_lightning ...`` is ``dpl ...``."""

from dp_lightning.cli import main

main()

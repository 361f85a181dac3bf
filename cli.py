"""``python cli.py ...`` from a checkout is ``dpl ...``."""

from dp_lightning.cli import main

if __name__ == "__main__":
    main()

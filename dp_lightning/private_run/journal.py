"""The journal of one run: in its log folder and beside every checkpoint, written by rank 0."""

from pathlib import Path

import lightning.pytorch as pl

from dp_lightning.errors import ConfigurationError, DataError, DpLightningError
from dp_lightning.privacy.accounting import Ledger
from dp_lightning.privacy.journal import Journal, run_name, run_of, stands_for


class RunJournal:
    """Knows the run's name and where its journals stand.

    Attributes:
        run: name of the run; a run that goes on keeps it.
        journal: on rank 0 after ``open``; None on other ranks.
        heads: of the journal, as the checkpoint that a run goes on from holds them.
    """

    def __init__(self) -> None:
        self.run = run_name({})
        self.journal: Journal | None = None
        self.heads: tuple[str, ...] = ()
        self._ledger = Ledger()
        self._left: Path | None = None

    def count_steps_of(self, journal: Path) -> None:
        """The next ``open`` without a checkpoint goes on with the run that has left this journal."""
        self._left = journal

    def open(self, trainer: pl.Trainer, folder: Path, ledger: Ledger, *, restored: bool) -> bool:
        """Count the steps that ran after the checkpoint, on every rank, and record the coming ones.

        Args:
            folder: where a journal is kept, besides those beside checkpoints.
            restored: whether a checkpoint of a private run was loaded.

        Returns:
            Whether this fit goes on with a run that stands on disk.

        Raises:
            DataError: when the checkpoint's journal is missing or older, or one cannot be read or written.
        """
        self._ledger = ledger
        from_checkpoint = restored and trainer.ckpt_path is not None
        left, self._left = self._left, None
        if from_checkpoint or self.journal is not None:
            left = None
        if left is not None:
            self.run = run_of(left)
        elif not restored and self.journal is None:
            self.run = run_name(ledger.earlier, self.run)
        if not stands_for(self.run, ledger.earlier):
            raise ConfigurationError(
                "The weights were trained by other private runs than those that the steps of this run came after. Make "
                "a new PrivacyCallback for them, and start without ckpt_path."
            )
        self.run, from_journal = trainer.strategy.broadcast((self.run, left is not None))
        if trainer.is_global_zero:
            self.journal = self.journal or Journal(self.run)
            if left is not None:
                self.journal.read(left.parent)
            if from_checkpoint:
                assert trainer.ckpt_path is not None
                beside = Path(trainer.ckpt_path).parent
                recorded = self.journal.read(beside)
                if recorded is None:
                    raise DataError(
                        f"{self.journal.path(beside)} is missing, so it is unknown how many steps ran after the "
                        "checkpoint. Copy the journal together with the checkpoints of its folder."
                    )
                if missing := self.journal.missing(self.heads):
                    raise DataError(
                        f"{self.journal.path(beside)} is older than the checkpoint beside it: it lacks "
                        f"{', '.join(missing)}, and nobody knows what else. Restore the file from a copy."
                    )
                try:
                    ledger.load_state_dict(recorded.state_dict())
                except DpLightningError as error:
                    raise DataError(
                        f"{self.journal.path(beside)} does not hold the {ledger.num_steps} steps of the checkpoint "
                        "beside it. Restore the file from a copy."
                    ) from error
            self.journal.add_folder(folder, ledger)
            ledger.load_state_dict(self.journal.ledger.state_dict())
        ledger.load_state_dict(trainer.strategy.broadcast(ledger.state_dict()))
        return from_checkpoint or from_journal

    def beside(self, folder: Path) -> None:
        """Keep a journal in a folder to which a checkpoint is about to be written."""
        if self.journal is not None:
            self.journal.add_folder(folder, self._ledger)

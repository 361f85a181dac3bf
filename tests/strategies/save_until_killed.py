"""Kills N children that write checkpoints without pause: ``python save_until_killed.py FOLDER N``."""

import os
import random
import signal
import sys
import time
from pathlib import Path

import torch

from dp_lightning.strategies.checkpoint_io import PrivateCheckpointIO


def save(folder, number):
    while True:
        number += 1
        checkpoint = {"number": number, "weights": torch.full((250_000,), float(number))}
        PrivateCheckpointIO().save_checkpoint(checkpoint, folder / f"{number % 3}.ckpt")


def main(folder, kills):
    torch.set_num_threads(1)
    draw = random.Random(0)
    for kill in range(kills):
        child = os.fork()
        if child == 0:
            save(folder, kill)  # each of the files comes first now and then
        time.sleep(draw.uniform(0.001, 0.05))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        for path in folder.glob("*.ckpt"):
            checkpoint = PrivateCheckpointIO().load_checkpoint(path)
            assert torch.equal(checkpoint["weights"], torch.full((250_000,), float(checkpoint["number"])))
    print(len(list(folder.glob("*.ckpt"))))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))

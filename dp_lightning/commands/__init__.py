"""The commands of `dpl`, one module each; ``main`` takes the command and its options."""

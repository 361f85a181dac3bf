"""The commands of `dpl`, a module each; ``main`` takes the command and its options."""

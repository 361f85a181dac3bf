"""The commands of `dpl`, and what they share; ``main`` of a command takes its name and its options."""

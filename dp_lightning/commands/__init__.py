"""The light commands of `dpl`: tools that answer from public numbers, without a Trainer or data.

Each module has ``main(argv) -> int``, the exit status.
"""

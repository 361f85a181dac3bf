"""Checks that a model treats the examples of a batch apart, on which the guarantee rests."""

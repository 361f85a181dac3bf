"""Keeps one example from reaching another through the program: by state, by threads, or by the training set itself."""

"""Nothing of one example waits in the program for another one: state, threads, and the training set itself."""

"""What a private run of a Trainer consists of, below the callbacks that Lightning calls."""

"""Tables of runs: what is compared, how it is run, and what is written about it."""

"""Analyses beside the tables of runs: what lengthening costs, incoherence, the tasks of Long Range Arena as one."""

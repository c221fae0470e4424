"""Settings that hold for every test: few threads, no network, and memory that shows when it is read unwritten."""

import os


os.environ["HF_HUB_OFFLINE"] = "1"
# One thread, here and in the processes that tests start: threads that wait for one another stand still where the
# processors are shared.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch


@pytest.fixture(autouse=True)
def fixed_seed():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def unwritten_memory_is_nan():
    """`torch.empty` gives NaN, so that a result that reads it is wrong in every run instead of now and then."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)

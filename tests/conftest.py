"""Settings that hold for every test: few threads, no network, and memory that shows when it is read unwritten."""

import os
import tempfile


os.environ["HF_HUB_OFFLINE"] = "1"
if "PYTEST_XDIST_WORKER" not in os.environ:  # workers inherit it
    # Libraries keep what they prepare below the user's home folder otherwise, and read the user's token there.
    caches = tempfile.TemporaryDirectory(prefix="sktformer-tests-")
    os.environ |= {"HF_HOME": f"{caches.name}/huggingface", "MPLCONFIGDIR": f"{caches.name}/matplotlib"}
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

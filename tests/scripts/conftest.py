"""What tests of scripts have in common: they train in this process, one after another."""

import gc
import logging

import pytest


@pytest.fixture(scope="module", autouse=True)
def short_collections():
    """Each training collects garbage, which takes longer than the training if it looks through all libraries."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def restored_logging():
    """Scripts set up logging, which would outlive the test."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)

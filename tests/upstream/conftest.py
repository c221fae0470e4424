"""Collects this folder for `pytest -m upstream` only, since collecting it downloads transformers' own tests."""

import re

import pytest
import transformers
from source_tests import install_source_tests


def pytest_ignore_collect(collection_path, config):
    expression = config.option.markexpr
    if expression and (not re.search(r"\bupstream\b", expression) or re.search(r"\bnot\s+upstream\b", expression)):
        return True
    return None


def pytest_pycollect_makemodule(module_path, parent):
    config = parent.config
    obstacle = install_source_tests(
        config.cache.mkdir("transformers_tests"),
        lambda marker: config.addinivalue_line("markers", f"{marker}: of transformers' own tests"),
    )
    if obstacle:
        pytest.fail(obstacle, pytrace=False)


@pytest.fixture(autouse=True)
def warnings_shown():
    """Some tests read the warnings that transformers logs."""
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_warning()
    yield
    transformers.logging.set_verbosity(verbosity)

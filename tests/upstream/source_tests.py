"""
transformers' own common model tests, as a package `transformers_tests`.

They are not installed with transformers, but its source distribution has them. This module downloads the one of the
installed version once, imports its folder of tests under a name of its own, and tells the tests which head does what.
"""

import importlib
import importlib.util
import re
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import transformers

from modeling_sktformer import (
    SKTformerForMaskedLM,
    SKTformerForMultipleChoice,
    SKTformerForQuestionAnswering,
    SKTformerForSequenceClassification,
    SKTformerForSequenceMatching,
    SKTformerForTokenClassification,
    SKTformerModel,
)


PACKAGE = "transformers_tests"

# The common tests know a head, and with it its labels and axes, by the class names in these mappings of theirs.
KINDS_OF_MODEL = {
    "MODEL_MAPPING_NAMES": SKTformerModel,
    "MODEL_FOR_MASKED_LM_MAPPING_NAMES": SKTformerForMaskedLM,
    "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES": SKTformerForSequenceClassification,
    "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES": SKTformerForTokenClassification,
    "MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES": SKTformerForQuestionAnswering,
    "MODEL_FOR_MULTIPLE_CHOICE_MAPPING_NAMES": SKTformerForMultipleChoice,
}

# Modules that the common tests import but the source distribution leaves out. The first two hold tests of their own,
# which this suite goes without; the last holds values for fields that every configuration has.
LEFT_OUT: dict[str, dict] = {
    "exporters.test_export": {"ExportTesterMixin": type("ExportTesterMixin", (), {})},
    "generation.test_utils": {"GenerationTesterMixin": type("GenerationTesterMixin", (), {})},
    "utils.test_configuration_utils": {
        "config_common_kwargs": {
            "architectures": ["SKTformerModel"],
            "chunk_size_feed_forward": 3,
            "dtype": "float16",
            "id2label": {0: "first", 1: "second", 2: "third"},
            "label2id": {"first": 0, "second": 1, "third": 2},
            "output_attentions": True,
            "output_hidden_states": True,
            "problem_type": "regression",
            "return_dict": False,
        }
    },
}


def install_source_tests(cache: Path, register_marker: Callable[[str], None]) -> str | None:
    """
    Make `import transformers_tests.test_modeling_common` work.

    Args:
        cache (`Path`): Folder that keeps what was downloaded.
        register_marker (`Callable`): Called with the name of every pytest marker that the tests use.

    Returns:
        `str`, *optional*: one line about what is in the way, if anything is.
    """
    if PACKAGE in sys.modules:
        return None
    if importlib.util.find_spec("parameterized") is None:
        return "transformers' tests import `parameterized`, which is not installed: pip install parameterized"
    folder = cache / f"transformers-{transformers.__version__}"
    if not folder.is_dir():
        obstacle = _download(folder)
        if obstacle:
            return obstacle
    for marker in _find_markers(folder):
        register_marker(marker)
    _import_package(folder)
    for name, attributes in LEFT_OUT.items():
        if not (folder / f"{name.replace('.', '/')}.py").is_file():
            _add_module(name, attributes)
    common = importlib.import_module(f"{PACKAGE}.test_modeling_common")
    for mapping, model_class in KINDS_OF_MODEL.items():
        setattr(common, mapping, {**getattr(common, mapping), "sktformer": model_class.__name__})
    # Pairs to match have the inputs and labels of two choices.
    common.MODEL_FOR_MULTIPLE_CHOICE_MAPPING_NAMES["sktformer_pairs"] = SKTformerForSequenceMatching.__name__
    return None


def _download(folder: Path) -> str | None:
    requirement = f"transformers=={transformers.__version__}"
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", "transformers", "--retries", "1"]
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        result = subprocess.run([*pip, "--dest", scratch, requirement], capture_output=True, text=True)
        if result.returncode:
            reason = (result.stderr.strip() or "no reason given").splitlines()[-1]
            return f"pip cannot download the source distribution of {requirement}, is there a network? {reason}"
        (archive,) = Path(scratch).glob("*.tar.gz")
        tests = Path(scratch) / "tests"
        with tarfile.open(archive) as members:
            for member in members:
                _, _, path = member.name.partition("/")
                if path.startswith("tests/") and path.endswith(".py"):
                    member.name = path
                    members.extract(member, scratch, filter="data")
        # Not every version has this file, and `transformers.utils.direct_transformers_import` reads it.
        (tests / "__init__.py").touch()
        tests.rename(folder)
    return None


def _find_markers(folder: Path) -> set[str]:
    sources = [*folder.glob("*.py"), Path(transformers.__file__).parent / "testing_utils.py"]
    return {marker for source in sources for marker in re.findall(r"\bmark\.(\w+)", source.read_text("utf-8"))}


def _import_package(folder: Path) -> None:
    spec = importlib.util.spec_from_file_location(
        PACKAGE, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None
    assert spec.loader is not None
    package = importlib.util.module_from_spec(spec)
    sys.modules[PACKAGE] = package
    spec.loader.exec_module(package)


def _add_module(name: str, attributes: dict) -> None:
    parent = PACKAGE
    for part in name.split("."):
        parent = f"{parent}.{part}"
        if parent not in sys.modules:
            module = ModuleType(parent)
            module.__path__ = []
            sys.modules[parent] = module
    vars(sys.modules[parent]).update(attributes)

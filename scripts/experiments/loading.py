"""Reading data sets with errors that people can act on."""

import csv
import glob
import hashlib
import os
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pandas as pd
from datasets import Dataset, DatasetBuilder, Features, Value, load_dataset, load_dataset_builder
from datasets.exceptions import DatasetGenerationError, DatasetNotFoundError
from pandas.errors import ParserWarning

from experiments.arguments import UserError, one_line


# Types of files that hold a table, and what reads them.
TABLE_READERS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".tsv": "csv", ".parquet": "parquet"}
# pandas would take the first field for an index, and shift the others, where rows have one more than the header.
NO_INDEX = {"index_col": False}
VALIDATION_SPLITS = ("validation", "valid", "val", "dev")  # their names, the first of which there is
_COMMIT = re.compile(r"[0-9a-f]{40}")


def find_files(pattern: str) -> list[str]:
    """A file, or all that a pattern such as books/*.txt names; a `UserError` if there is none."""
    path = str(Path(pattern).expanduser())
    files = [path] if os.path.isfile(path) else sorted(filter(os.path.isfile, glob.glob(path, recursive=True)))
    if not files:
        hint = ", and brackets are part of a pattern: write [[] for one" if "[" in path else ""
        raise UserError(f"{pattern}: no such file; check the path (it is read from {os.getcwd()}{hint}).")
    return files


@contextmanager
def explained_errors(name: str, local: str, configuration: str) -> Iterator[None]:
    """
    Turn what the datasets library raises about the source `name` into a `UserError`: one line that says what to do.

    Where it cannot be reached, `local` is to be given; where it has no such configuration, `configuration` to be done.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", ParserWarning)  # whose columns would be cut
            yield
    except UserError:
        raise
    except (DatasetGenerationError, ParserWarning) as error:
        cause = error.__cause__ or error
        what = one_line(cause)
        if isinstance(cause, ParserWarning):
            what = "a row has more fields than the first line, where all columns are to be named"
        raise UserError(f"{name} cannot be read: {what}; mend the file or leave it out.") from error
    except ConnectionError as error:
        what = f"{name} is not in the cache, and the Hub cannot be reached ({one_line(error)})"
        remedy = f"connect to the network, unset HF_HUB_OFFLINE, or read local data with {local}"
        raise UserError(f"{what}; {remedy}.") from error
    except DatasetNotFoundError as error:
        raise UserError(f"{one_line(error)} Check the id, log in with `hf auth login`, or use {local}.") from error
    except RuntimeError as error:
        if "scripts are no longer supported" not in str(error):
            raise
        remedy = f"give a mirror with parquet files, @refs/convert/parquet, or local data with {local}"
        raise UserError(f"{name} is loaded by a Python script, which datasets no longer runs; {remedy}.") from error
    except (OSError, ValueError) as error:
        hint = configuration if "onfig" in str(error) else "check the path and the content"
        raise UserError(f"{name} cannot be read: {one_line(error)}; {hint}.") from error


def find_dataset(name: str, configuration: str | None, revision: str | None, cache_dir: str | None) -> DatasetBuilder:
    """A data set of the Hub, or in a folder; a `UserError` if all that can be had is another revision of it."""
    builder = load_dataset_builder(name, configuration, revision=revision, cache_dir=cache_dir)
    # Without a network the library takes the newest copy of its cache, whichever revision was asked for.
    if revision and _COMMIT.fullmatch(revision) and builder.hash != revision:
        raise UserError(f"{name} cannot be reached, and the cache holds revision {builder.hash}; go online once.")
    return builder


def load_prepared(
    name: str, configuration: str | None, revision: str | None, cache_dir: str | None, split: str | None = None
) -> Any:
    """The splits of what [`find_dataset`] finds, by name, or one of them, read from the disk."""
    builder = find_dataset(name, configuration, revision, cache_dir)
    builder.download_and_prepare()
    return builder.as_dataset(split)


def read_table_file(path: str | Path, cache_dir: str | None = None) -> Dataset:
    """
    Read all rows of one file with columns; a `UserError` if it is not there, of another type, empty or unreadable.

    Of tables in text all cells are words: "NA" is no gap and 007 no 7; quotation marks have no meaning in .tsv.
    """
    path = Path(path).expanduser()
    kind = path.suffix.lower()
    if not path.is_file():
        raise UserError(f"{path}: no such file; check the path (it is read from {Path.cwd()}).")
    if kind not in TABLE_READERS:
        raise UserError(f"{path}: files of type `{path.suffix}` cannot be read; give {', '.join(TABLE_READERS)}.")
    options: dict[str, Any] = {"delimiter": "\t", "quoting": csv.QUOTE_NONE} if kind == ".tsv" else {}
    options |= NO_INDEX if TABLE_READERS[kind] == "csv" else {}
    files = {"data_files": {"rows": glob.escape(str(path.absolute()))}, "split": "rows", "cache_dir": cache_dir}
    with explained_errors(str(path), "another file", "check the file"):
        try:
            if TABLE_READERS[kind] == "csv":
                # Types would be guessed for some thousand rows at a time, and the next ones may not fit them.
                names = pd.read_csv(path, nrows=0, **options).columns
                words = Features({name: Value("string") for name in names})
                options |= {"keep_default_na": False, "features": words}
            # By its content: the library's cache knows a file by its path and time alone.
            with path.open("rb") as file:
                content = hashlib.file_digest(file, "sha256").hexdigest()[:32]
            return load_dataset(TABLE_READERS[kind], content, **files, **options)
        except Exception as error:
            if path.stat().st_size and "corresponds to no data" not in str(error):
                raise
            raise UserError(f"{path} is empty; give a file with rows.") from error

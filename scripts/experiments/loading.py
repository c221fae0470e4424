"""Reading data sets with errors that people can act on."""

from collections.abc import Iterator
from contextlib import contextmanager

from datasets.exceptions import DatasetGenerationError, DatasetNotFoundError

from experiments.arguments import UserError, one_line


@contextmanager
def explained_errors(name: str, local: str, configuration: str) -> Iterator[None]:
    """
    Turn what the datasets library raises into one line that says what to do.

    Args:
        name (`str`): The source that is read.
        local (`str`): What to give in place of a source that cannot be reached.
        configuration (`str`): What to do where the source has no configuration of that name.

    Raises:
        UserError: in place of the library's errors.
    """
    try:
        yield
    except UserError:
        raise
    except DatasetGenerationError as error:
        cause = one_line(error.__cause__ or error)
        raise UserError(f"{name} cannot be read: {cause}; mend the file or leave it out.") from error
    except ConnectionError as error:
        raise UserError(
            f"{name} is not in the cache, and the Hub cannot be reached ({one_line(error)}); connect to the network, "
            f"unset HF_HUB_OFFLINE, or read local data with {local}."
        ) from error
    except DatasetNotFoundError as error:
        raise UserError(f"{one_line(error)} Check the id, log in with `hf auth login`, or use {local}.") from error
    except RuntimeError as error:
        if "scripts are no longer supported" not in str(error):
            raise
        raise UserError(
            f"{name} is loaded by a Python script, which the datasets library no longer runs; give a mirror with "
            f"parquet files, the revision @refs/convert/parquet, or local data with {local}."
        ) from error
    except (OSError, ValueError) as error:
        hint = configuration if "onfig" in str(error) else "check the path and the content"
        raise UserError(f"{name} cannot be read: {one_line(error)}; {hint}.") from error

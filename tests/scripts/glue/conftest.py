"""Tasks, a checkpoint and a recipe for runs of run_glue.py that take less than a second, and one run of all tasks."""

import pytest
import yaml

from support.glue_rows import save_checkpoint, write_tasks
from support.glue_runs import run


@pytest.fixture(scope="session")
def tasks(tmp_path_factory):
    return write_tasks(tmp_path_factory.mktemp("glue"))


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """A pre-trained checkpoint, but for the pre-training."""
    return save_checkpoint(tmp_path_factory.mktemp("checkpoint") / "tiny")


@pytest.fixture(scope="session")
def flags(tmp_path_factory, tasks, checkpoint):
    """Flags of a run that takes less than a second."""
    return {
        **{"model_name_or_path": str(checkpoint), "data_dir": str(tasks), "max_seq_length": 32},
        **{"cache_dir": str(tmp_path_factory.mktemp("cache")), "per_device_train_batch_size": 8, "max_steps": 2},
        **{"learning_rate": 1e-2, "eval_strategy": "no", "save_strategy": "no", "logging_steps": 1},
        **{"use_cpu": True, "disable_tqdm": True},
    }


@pytest.fixture
def recipe(tmp_path, flags):
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump({**flags, "output_dir": str(tmp_path / "run")}))
    return path


@pytest.fixture(scope="session")
def everything(tmp_path_factory, flags):
    """The folder of one run of all nine tasks with predictions."""
    folder = tmp_path_factory.mktemp("everything")
    recipe = folder / "recipe.yaml"
    recipe.write_text(yaml.safe_dump({**flags, "task_name": "all", "output_dir": str(folder / "run")}))
    with pytest.MonkeyPatch.context() as monkeypatch:
        run(monkeypatch, "--recipe", recipe, "--do_train", "--do_predict", "--save_strategy", "epoch", "--seed", 5)
    return folder / "run"

"""What a run is, when it goes on, and what never happens to a folder."""

import json
import logging
import multiprocessing
import os
import re
import shutil
from pathlib import Path

import pytest

from experiments import run_folder
from experiments.arguments import UserError
from experiments.results import format_table, write_atomically, write_json
from experiments.run_folder import (
    RunIdentity,
    check_run_folder,
    claim_run_folder,
    find_checkpoint,
    folder_state,
    recorded_arguments,
)


def identity(max_steps=10, precision="float32", **decides):
    return RunIdentity(
        {"seed": 0, "data": "abc"} | decides, {"max_steps": max_steps, "num_train_epochs": 3}, precision
    )


def finish(folder, run, **options):
    with claim_run_folder(folder, run, {"seed": 0}, **options) as state:
        (folder / "model.safetensors").write_text("weights")
        write_json(folder / "metrics.json", {"loss": 1})
    return state


def test_a_run_goes_on_until_it_is_finished(tmp_path):
    folder = tmp_path / "run"
    assert folder_state(folder, identity()) == "new"
    with claim_run_folder(folder, identity(), {"seed": 0}) as state:
        assert state == "new"
    assert folder_state(folder, identity()) == "resumed"
    assert finish(folder, identity()) == "resumed"
    assert folder_state(folder, identity()) == "finished"
    assert (folder / "arguments.yaml").read_text() == "seed: 0\n"


def test_a_mistake_that_shows_late_leaves_the_folder_one_stands_in(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="found late"), claim_run_folder(".", identity(), {}):
        raise UserError("found late")
    assert tmp_path.is_dir()
    assert not list(tmp_path.iterdir())


def test_a_run_may_grow_and_not_shrink(tmp_path):
    finish(tmp_path / "run", identity(10))
    assert folder_state(tmp_path / "run", identity(20)) == "grown"
    with pytest.raises(UserError, match="max_steps: 10 there, max_steps: 5 here, and no run can be shortened"):
        folder_state(tmp_path / "run", identity(5))
    with claim_run_folder(tmp_path / "run", identity(20), {}) as state:
        assert state == "grown"
    # Not finished any more, even if it is cut short now.
    assert folder_state(tmp_path / "run", identity(20)) == "resumed"
    with pytest.raises(UserError, match="num_train_epochs: 3 here"):
        folder_state(tmp_path / "run", identity(-1))


@pytest.mark.parametrize("written", [None, "model.safetensors", "checkpoint-11/trainer_state.json"])
def test_a_run_that_was_to_grow_and_was_killed_is_finished_still(tmp_path, written):
    """Until there is a checkpoint or a model of the longer one."""
    folder, killed = tmp_path / "run", tmp_path / "killed"
    finish(folder, identity(10))
    before = files_of(folder)
    with claim_run_folder(folder, identity(20), {"seed": 0, "max_steps": 20}):
        if written:
            (folder / written).parent.mkdir(exist_ok=True)
            (folder / written).write_text("{}")
        shutil.copytree(folder, killed)
    assert folder_state(killed, identity(20)) == ("resumed" if written else "grown")
    if written:
        with pytest.raises(UserError, match="no run can be shortened"):
            folder_state(killed, identity(10))
    else:
        assert folder_state(killed, identity(10)) == "finished"
        with claim_run_folder(killed, identity(10), {}) as state:
            assert state == "finished"
        assert files_of(killed) == before


def die_as_files_are_put_back(context, place, count):
    """Stop the process behind so many files of a place, the names of which come to stand in what is returned."""
    replace = Path.replace
    moved: list[str] = []

    def move(path, target):
        if path.parent.name == place:
            if len(moved) == count:
                raise KeyboardInterrupt
            moved.append(path.name)
        return replace(path, target)

    context.setattr(Path, "replace", move)
    context.setattr(run_folder.shutil, "rmtree", lambda *args, **kwargs: None)  # a killed process does not
    return moved


@pytest.mark.parametrize("count", [0, 1, 2])
def test_what_says_that_a_run_is_finished_outlives_a_process_killed_as_it_is_put_back(tmp_path, monkeypatch, count):
    folder, killed = tmp_path / "run", tmp_path / "killed"
    finish(folder, identity(10))
    before = files_of(folder)
    with claim_run_folder(folder, identity(20), {"seed": 0, "max_steps": 20}):
        shutil.copytree(folder, killed)
    with monkeypatch.context() as context:
        moved = die_as_files_are_put_back(context, run_folder._FINISHED, count)
        with pytest.raises(KeyboardInterrupt), claim_run_folder(killed, identity(10), {}):
            pass
    assert len(moved) == count
    assert folder_state(killed, identity(10)) == "finished"
    with claim_run_folder(killed, identity(10), {}) as state:
        assert state == "finished"
    assert files_of(killed) == before


def test_what_says_that_a_run_is_finished_does_not_outlive_a_longer_one(tmp_path):
    folder, killed = tmp_path / "run", tmp_path / "killed"
    finish(folder, identity(10))
    with claim_run_folder(folder, identity(20), {}):
        (folder / "checkpoint-15").mkdir()
        (folder / "checkpoint-15" / "trainer_state.json").write_text("{}")
        shutil.copytree(folder, killed)
    finish(killed, identity(20))
    shutil.rmtree(killed / "checkpoint-15")
    (killed / "model.safetensors").unlink()
    assert folder_state(killed, identity(20)) == "finished"
    assert not (killed / ".finished").exists()


def fail_to_grow(folder, error, *written):
    with claim_run_folder(folder, identity(20), {"seed": 0, "max_steps": 20}):
        assert not (folder / "metrics.json").exists()
        for path in written:
            write_json(path, {})
        raise error


@pytest.mark.parametrize("error", [UserError("found late"), RuntimeError("no memory"), KeyboardInterrupt()])
def test_a_finished_run_whose_growth_comes_to_nothing_is_finished_again(tmp_path, error):
    folder, checkpoint = tmp_path / "run", tmp_path / "run" / "checkpoint-20"
    finish(folder, identity(10))
    before = {path.name: path.read_text() for path in folder.iterdir() if path.name != ".lock"}
    with pytest.raises(type(error)):
        fail_to_grow(folder, error)
    assert {path.name: path.read_text() for path in folder.iterdir() if path.name != ".lock"} == before
    assert folder_state(folder, identity(10)) == "finished"
    with pytest.raises(type(error)):
        fail_to_grow(folder, error, checkpoint / "trainer_state.json")
    assert folder_state(folder, identity(20)) == "resumed"


def test_a_grown_model_is_not_taken_for_the_one_that_was_measured(tmp_path):
    folder = tmp_path / "run"
    finish(folder, identity(10))
    os.utime(folder / "model.safetensors", ns=(0, 0))
    with pytest.raises(UserError, match="found late"):
        fail_to_grow(folder, UserError("found late"), folder / "model.safetensors")
    assert folder_state(folder, identity(20)) == "resumed"


def test_another_run_is_refused_with_what_differs(tmp_path):
    finish(tmp_path / "run", identity())
    with pytest.raises(UserError, match=r"another run \(data: abc there, xyz here; seed: 0 there, 4 here\)"):
        folder_state(tmp_path / "run", identity(seed=4, data="xyz"))
    # Of a model's fields those that differ, and of a run that trains nothing only that.
    cases: list[tuple[dict, dict, str]] = [
        ({"sizes": {"width": 8, "depth": 2}}, {"sizes": {"width": 9, "depth": 2}}, "sizes.width: 8 there, 9 here"),
        ({"do_train": True, "rate": 0.1}, {"do_train": False}, "do_train: True there, False here"),
        ({"text": "a" * 99}, {"text": "b"}, f"text: {'a' * 77}... there, b here"),
    ]
    for number, (before, now, expected) in enumerate(cases):
        finish(folder := tmp_path / str(number), RunIdentity(before, {"max_steps": 5}))
        with pytest.raises(UserError, match=re.escape(f"another run ({expected})")):
            folder_state(folder, RunIdentity(now, {"max_steps": 5}))
    assert finish(tmp_path / "run", identity(seed=4), overwrite=True) == "new"
    assert json.loads((tmp_path / "run" / "run.json").read_text())["decides"]["seed"] == 4
    # A word of the command line that is longer than the name of a file can be is no input.
    assert check_run_folder(tmp_path / "run", identity(), overwrite=True, inputs=["hidden_size=32," * 99]) == "new"


def test_another_precision_is_a_warning(tmp_path, caplog):
    with claim_run_folder(tmp_path / "run", identity(), {}):
        pass
    with caplog.at_level(logging.WARNING):
        assert finish(tmp_path / "run", identity(precision="bfloat16")) == "resumed"
    assert caplog.text.count("began in float32 and goes on in bfloat16") == 1


def test_a_folder_of_other_files_is_never_touched(tmp_path):
    (tmp_path / "thesis.tex").write_text("precious")
    for overwrite in (False, True):
        with pytest.raises(UserError, match="no run of this script"):
            check_run_folder(tmp_path, identity(), overwrite)
    for hidden in (".git", ".env"):
        folder = tmp_path / hidden.strip(".")
        (folder / hidden).mkdir(parents=True)
        with pytest.raises(UserError, match="no run of this script"):
            finish(folder, identity(), overwrite=True)
        assert (folder / hidden).exists()
        shutil.rmtree(folder)
    with pytest.raises(UserError, match="is a file"):
        check_run_folder(tmp_path / "thesis.tex", identity())
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_overwriting_never_deletes_what_is_read(tmp_path, monkeypatch):
    folder = tmp_path / "run"
    finish(folder, identity())
    corpus = folder / "corpus.txt"
    corpus.write_text("precious")
    (tmp_path / "link").symlink_to(folder)
    for inputs in (corpus, folder / "*.txt", f"{folder}:default", tmp_path / "link" / "corpus.txt"):
        with pytest.raises(UserError, match=r"would delete .*, which this run needs"):
            check_run_folder(folder, identity(seed=2), True, [str(inputs)])
    monkeypatch.chdir(folder)
    with pytest.raises(UserError, match="would delete"):
        check_run_folder(folder, identity(seed=2), True)
    assert corpus.read_text() == "precious"


def test_a_mistake_before_the_first_checkpoint_leaves_nothing(tmp_path):
    with pytest.raises(UserError), claim_run_folder(tmp_path / "run", identity(), {}):
        raise UserError("wrong")
    assert not (tmp_path / "run").exists()
    with pytest.raises(UserError), claim_run_folder(tmp_path / "job" / "trial", identity(), {}):
        raise UserError("wrong")
    assert not (tmp_path / "job").exists()
    folder = tmp_path / "other"

    def diverge():
        with claim_run_folder(folder, identity(), {}):
            write_json(folder / "checkpoint-2" / "trainer_state.json", {})
            raise UserError("diverged")

    with pytest.raises(UserError, match="diverged"):
        diverge()
    assert folder_state(folder, identity()) == "resumed"


def files_of(folder):
    return {path.relative_to(folder): path.read_text() for path in folder.rglob("*") if path.is_file()}


def test_a_mistake_before_the_first_checkpoint_leaves_what_was_to_be_overwritten(tmp_path):
    folder = tmp_path / "run"
    finish(folder, identity())
    write_json(folder / "trial" / "run.json", {})  # a run in this one's folder
    before = files_of(folder)

    def replace(*made, error):
        with claim_run_folder(folder, identity(seed=2), {}, overwrite=True):
            assert folder_state(folder, identity(seed=2)) == "resumed"
            for name in made:
                write_json(folder / name, {})
            raise error

    for error in (UserError("wrong"), RuntimeError("out of memory, which is wrong")):
        with pytest.raises(type(error), match="wrong"):
            replace("tokenizer/tokenizer.json", error=error)
        assert files_of(folder) | {Path(".lock"): ""} == before | {Path(".lock"): ""}
    with pytest.raises(RuntimeError, match="late"):
        replace("model.safetensors", error=RuntimeError("late"))
    assert (folder / "model.safetensors").is_file()
    with pytest.raises(UserError, match="wrong"):
        replace("tokenizer/tokenizer.json", "checkpoint-2/trainer_state.json", error=UserError("wrong"))
    assert sorted(path.name for path in folder.iterdir() if path.name != ".lock") == [
        "arguments.yaml", "checkpoint-2", "model.safetensors", "run.json", "tokenizer"
    ]  # fmt: skip
    assert finish(folder, identity(), overwrite=True) == "new"
    assert {path.name for path in folder.iterdir()} <= {file.name for file in before} | {".lock"}


def hold(folder, held, done):
    with claim_run_folder(folder, identity(), {}):
        held.set()
        done.wait(30)


def test_one_process_at_a_time(tmp_path):
    context = multiprocessing.get_context("fork")
    held, done = context.Event(), context.Event()
    process = context.Process(target=hold, args=(tmp_path / "run", held, done))
    process.start()
    assert held.wait(30)
    with (
        pytest.raises(UserError, match="Another process is at work"),
        claim_run_folder(tmp_path / "run", identity(), {}),
    ):
        pass
    done.set()
    process.join()
    assert finish(tmp_path / "run", identity()) == "resumed"


def test_a_full_disk_leaves_nothing_that_is_in_the_way(tmp_path, monkeypatch):
    def fill(path, *args, **kwargs):
        path.touch()
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as context:
        context.setattr("pathlib.Path.write_text", fill)
        with pytest.raises(OSError, match="No space"), claim_run_folder(tmp_path / "run", identity(), {}):
            pass
    assert not (tmp_path / "run").exists()
    assert finish(tmp_path / "run", identity()) == "new"
    before = files_of(tmp_path / "run")
    with monkeypatch.context() as context:
        context.setattr("pathlib.Path.write_text", fill)
        with (
            pytest.raises(OSError, match="No space"),
            claim_run_folder(tmp_path / "run", identity(seed=2), {}, overwrite=True),
        ):
            pass
    assert files_of(tmp_path / "run") | {Path(".lock"): ""} == before | {Path(".lock"): ""}


@pytest.mark.parametrize("count", [1, 3])
def test_what_is_to_be_overwritten_outlives_a_process_killed_as_it_is_set_aside(tmp_path, monkeypatch, count):
    folder, iterdir, rename = tmp_path / "run", Path.iterdir, Path.rename
    finish(folder, identity())
    before = files_of(folder)
    moved: list[str] = []

    def move(path, target):
        if len(moved) == count:
            raise KeyboardInterrupt
        moved.append(path.name)
        return rename(path, target)

    with monkeypatch.context() as context:
        context.setattr(Path, "iterdir", lambda path: iter(sorted(iterdir(path))))
        context.setattr(Path, "rename", move)
        with pytest.raises(KeyboardInterrupt):
            finish(folder, identity(seed=2), overwrite=True)
    assert len(moved) == len(list((folder / ".overwritten").iterdir())) == count
    with pytest.raises(UserError, match="holds another run"):
        check_run_folder(folder, identity(seed=2))
    assert check_run_folder(folder, identity(seed=2), overwrite=True) == "new"
    assert check_run_folder(folder, identity()) == "finished"
    assert finish(folder, identity()) == "finished"
    assert files_of(folder) | {Path(".lock"): ""} == before | {Path(".lock"): ""}


@pytest.mark.parametrize("error", [UserError("found late"), KeyboardInterrupt()])
def test_what_is_to_be_overwritten_outlives_a_killed_process_whose_run_then_fails(tmp_path, monkeypatch, error):
    folder = tmp_path / "run"
    finish(folder, identity())
    before = files_of(folder)
    with monkeypatch.context() as context:
        # A process that is killed gets to neither.
        context.setattr(run_folder, "_restore", lambda folder: None)
        context.setattr(run_folder.shutil, "rmtree", lambda *args, **kwargs: None)
        with pytest.raises(KeyboardInterrupt), claim_run_folder(folder, identity(seed=2), {}, overwrite=True):
            raise KeyboardInterrupt
    assert (folder / ".overwritten" / "run.json").is_file()
    assert folder_state(folder, identity(seed=2)) == "resumed"
    with pytest.raises(type(error)), claim_run_folder(folder, identity(seed=2), {}, overwrite=True):
        raise error
    assert files_of(folder) | {Path(".lock"): ""} == before | {Path(".lock"): ""}


def test_who_interrupts_an_overwriting_has_the_run_back_and_a_new_one_goes_on(tmp_path):
    for name, overwrite in (("new", False), ("old", True)):
        if overwrite:
            finish(tmp_path / name, identity())
        with (
            pytest.raises(KeyboardInterrupt),
            claim_run_folder(tmp_path / name, identity(seed=2), {}, overwrite),
        ):
            raise KeyboardInterrupt
    assert folder_state(tmp_path / "new", identity(seed=2)) == "resumed"
    assert folder_state(tmp_path / "old", identity()) == "finished"


@pytest.mark.parametrize("trained", [False, True])
def test_trials_that_came_to_nothing_give_way_to_the_job_that_they_overwrote(tmp_path, trained):
    finish(tmp_path, identity())

    def interrupt():
        if trained:
            (tmp_path / "seed-0" / "model.safetensors").write_text("weights")
        raise KeyboardInterrupt

    with (
        pytest.raises(KeyboardInterrupt),
        claim_run_folder(tmp_path, identity(seed=2), {}, overwrite=True),
        claim_run_folder(tmp_path / "seed-0", identity(seed=2), {}, overwrite=True),
    ):
        interrupt()
    left, state = (identity(seed=2), "resumed") if trained else (identity(), "finished")
    assert folder_state(tmp_path, left) == state
    assert (tmp_path / "seed-0").exists() is trained


def test_epochs_are_no_more_steps(tmp_path):
    finish(tmp_path, identity(2))
    with pytest.raises(UserError, match="num_train_epochs"):
        folder_state(tmp_path, identity(-1))


def test_a_checkpoint_that_was_cut_off_is_passed_over(tmp_path):
    for step, state in ((8, "{}"), (10, "{}"), (12, '{"epoch": 1.'), (14, None), (20, "")):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        if state is not None:
            (folder / "trainer_state.json").write_text(state)
    assert find_checkpoint(tmp_path) == str(tmp_path / "checkpoint-10")
    assert find_checkpoint(tmp_path / "nowhere") is None


def test_results_are_whole_and_json(tmp_path, monkeypatch):
    file, write_text = tmp_path / "a" / "file.txt", Path.write_text
    write_atomically(file, "text")

    def fill(path, text, **options):
        write_text(path, text[:2], **options)
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as context:
        context.setattr(Path, "write_text", fill)
        with pytest.raises(OSError, match="No space"):
            write_atomically(file, "other")
    assert file.read_text() == "text"
    assert os.listdir(file.parent) == ["file.txt"]
    with pytest.raises(ValueError, match="JSON"):
        write_json(tmp_path / "metrics.json", {"loss": float("nan")})
    assert not (tmp_path / "metrics.json").exists()


def test_bars_in_names_end_no_column():
    lines = format_table(["label", "n"], [["a|b", "1"], ["c", "2"]])
    assert lines == ["| label | n   |", "|-------|-----|", "| a\\|b  | 1   |", "| c     | 2   |"]


def test_what_is_said_about_one_start_is_no_recipe():
    given = {"seed": 1, "overwrite": True, "resume_from_checkpoint": "x", "hub_token": "y"}
    assert recorded_arguments(given) == {"seed": 1}


def test_overwriting_knows_a_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    finish(tmp_path / "run", identity())
    (tmp_path / "run" / "corpus.txt").write_text("precious")
    with pytest.raises(UserError, match="would delete"):
        check_run_folder(tmp_path / "run", identity(seed=2), True, ["~/run/corpus.txt"])


@pytest.mark.parametrize("count", [1, 2])
def test_what_was_set_aside_outlives_a_process_killed_as_it_is_put_back(tmp_path, monkeypatch, count):
    first, other = (RunIdentity({"seed": seed}, {"max_steps": 10, "num_train_epochs": 3}) for seed in (0, 1))
    with claim_run_folder(tmp_path, first, {}):
        (tmp_path / "model.safetensors").write_text("weights")
        write_json(tmp_path / "metrics.json", {"loss": 1})
    with monkeypatch.context() as context:
        moved = die_as_files_are_put_back(context, run_folder._SET_ASIDE, count)
        with pytest.raises(KeyboardInterrupt), claim_run_folder(tmp_path, other, {}, overwrite=True):
            raise UserError("found late")
    assert len(moved) == count
    assert folder_state(tmp_path, first) == "finished"
    with claim_run_folder(tmp_path, first, {}) as state:
        assert state == "finished"
    assert (tmp_path / "model.safetensors").read_text() == "weights"

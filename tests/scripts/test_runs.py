"""Tables of runs: how they are read, started, skipped and resumed."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import torch

from experiments import results, runs
from experiments.arguments import ROOT, UserError
from experiments.results import command_line, describe_environment, format_origin
from experiments.runs import Children, Run, choose_launcher, execute_runs, read_runs


def test_runs_are_the_lines_of_a_file(tmp_path):
    path = tmp_path / "runs.txt"
    path.write_text("# a comment\n--run_name a --x 1\n\n--run_name b --y 'two words'  # why\n")
    assert read_runs(path) == {"a": ("--run_name", "a", "--x", "1"), "b": ("--run_name", "b", "--y", "two words")}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("--x 1\n", "line 1: every run needs a --run_name"),
        ("--run_name a\n--run_name a\n", "line 2"),
        ("--x --run_name\n", "line 1"),
        ("# nothing\n", "names no run"),
        ("--run_name a\n--run_name b --x don't\n", r"line 2 cannot be split into words \(No closing quotation\)"),
    ],
)
def test_runs_without_a_name_of_their_own_are_refused(tmp_path, text, message):
    (tmp_path / "runs.txt").write_text(text)
    with pytest.raises(UserError, match=message):
        read_runs(tmp_path / "runs.txt")


def test_missing_runs_are_explained(tmp_path):
    with pytest.raises(UserError, match="No such file"):
        read_runs(tmp_path / "runs.txt")


# Counts how often it is started; knows itself what is finished, as the real ones do.
SCRIPT = """
import sys
from pathlib import Path
folder = Path(sys.argv[sys.argv.index("--output_dir") + 1])
folder.mkdir(exist_ok=True)
with (folder / "count").open("a") as file:
    file.write("x")
if "--fail" in sys.argv:
    print("script.py: error: it is broken", file=sys.stderr)
    print("Traceback of a launcher")
    sys.exit(2)
if "--idle" not in sys.argv:
    (folder / "done").touch()
print(*sys.argv[1:])
"""


@pytest.fixture
def make_run(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    return lambda name, *arguments: Run(str(script), arguments, tmp_path / "out" / name, "done")


def execute(*runs, **options):
    execute_runs(runs, [sys.executable, "-S"], "title", **options)


def count(run):
    return len((run.folder / "count").read_text())


def test_finished_runs_are_passed_over(make_run, capsys):
    runs = [make_run("a"), make_run("b", "--x", "1")]
    execute(runs[0])
    execute(*runs)
    assert [count(run) for run in runs] == [1, 1]
    assert "title: b (2 of 2)" in capsys.readouterr().out  # a line each where there is no terminal for a bar
    assert f"--x 1 --output_dir {runs[1].folder}\n" in runs[1].log.read_text()


def test_what_may_have_changed_is_asked_for_again(make_run, tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("x: 1")
    run = make_run("a", "--recipe", str(recipe))
    execute(run)
    execute(make_run("a", "--recipe", str(recipe), "--seed", "1"))
    assert count(run) == 2  # the script is there to refuse another run
    execute(run)
    execute(run)
    assert count(run) == 3
    os.utime(recipe, ns=(1, 1))
    execute(run)
    assert count(run) == 4
    (run.folder / "done").unlink()
    execute(run)
    assert count(run) == 5
    assert run.log.read_text().count("--output_dir") == 10  # logs of earlier starts are kept


def test_what_changes_while_a_run_reads_it_is_asked_for_again(make_run, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("x: 1")
    run = make_run("a", "--recipe", "~/recipe.yaml")
    start = Children.run

    def change(children, command, **options):
        status = start(children, command, **options)
        os.utime(recipe, ns=(1, 1))
        return status

    with monkeypatch.context() as patch:
        patch.setattr(Children, "run", change)
        execute(run)
    for _ in range(2):
        execute(run)
    assert count(run) == 2


def test_runs_in_a_place_that_is_no_folder_are_refused(tmp_path):
    (tmp_path / "out").write_text("")
    with pytest.raises(UserError, match=r"--output_dir: .*out cannot be written"):
        execute(Run("script.py", (), tmp_path / "out" / "a"))


@pytest.mark.parametrize("flag", ["--recipe={}", "--train_file={}/*.txt", "--model_name_or_path={}"])
def test_files_behind_an_equals_sign_are_looked_at(make_run, tmp_path, flag):
    folder = tmp_path / "text"
    folder.mkdir()
    file = folder / "a.txt"
    file.write_text("x")
    run = make_run("a", flag.format(file if "recipe" in flag else folder))
    execute(run)
    execute(run)
    assert count(run) == 1
    (folder / ".lock").touch()
    execute(run)
    assert count(run) == 1
    os.utime(file, ns=(1, 1))
    execute(run)
    assert count(run) == 2


@pytest.mark.parametrize("name", ["run [a]", "year=2020"])
@pytest.mark.parametrize("form", ["--model_name_or_path={}", "{}"])
def test_files_with_other_characters_in_their_names_are_looked_at(make_run, tmp_path, form, name):
    (tmp_path / name).mkdir()
    (tmp_path / name / "model.safetensors").write_text("x")
    run = make_run("a", form.format(tmp_path / name))
    for _ in range(2):
        execute(run)
    assert count(run) == 1
    os.utime(tmp_path / name / "model.safetensors", ns=(1, 1))
    execute(run)
    assert count(run) == 2


def test_recipes_behind_a_recipe_are_looked_at(make_run, tmp_path):
    base, recipe = tmp_path / "base.yaml", tmp_path / "recipe.yaml"
    base.write_text("x: 1\n")
    recipe.write_text("behind: base.yaml\n")
    run = make_run("a", "--recipe", str(recipe))
    for _ in range(2):
        execute(run)
    assert count(run) == 1
    os.utime(base, ns=(1, 1))
    execute(run)
    assert count(run) == 2


@pytest.mark.parametrize("named_by", ["a flag", "a recipe"])
def test_presets_are_looked_into(make_run, tmp_path, monkeypatch, named_by):
    monkeypatch.setattr(runs, "_PRESETS", tmp_path / "models")
    presets = [tmp_path / "models" / f"{name}.json" for name in ("tiny", "other")]
    presets[0].parent.mkdir()
    for preset in presets:
        preset.write_text("{}")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("config_name: tiny\n" if named_by == "a recipe" else "x: 1\n")
    words = ["--recipe", str(recipe)] if named_by == "a recipe" else ["--config_name=tiny"]
    run = make_run("a", *words)
    execute(run)
    os.utime(presets[0], ns=(1, 1))
    presets[1].write_text('{"num_segments": 4}')
    execute(run)
    assert count(run) == 1
    presets[0].write_text('{"num_segments": 4}')
    execute(run)
    assert count(run) == 2


@pytest.mark.parametrize("form", ["--cache_dir={}", "--cache_dir {}"])
def test_what_is_prepared_in_the_meantime_changes_no_run(make_run, tmp_path, form):
    prepared = tmp_path / "cache" / "blocks"
    prepared.parent.mkdir()
    prepared.write_text("x")
    run = make_run("a", *form.format(prepared.parent).split())
    execute(run)
    os.utime(prepared, ns=(1, 1))
    execute(run)
    assert count(run) == 1


def test_failures_name_their_reason_and_their_log(make_run):
    broken = make_run("c", "--fail")
    with pytest.raises(UserError, match=r"c failed \(script.py: error: it is broken\).*c\.log"):
        execute(broken, make_run("d"))
    assert not make_run("d").folder.exists()
    with pytest.raises(UserError, match="it is broken"):
        execute(broken)
    with pytest.raises(UserError, match="e failed"):  # without an error, but without a result, too
        execute(make_run("e", "--idle"))
    execute(make_run("c", "--fail"), make_run("d"), tolerated="it is broken")
    assert (make_run("d").folder / "done").exists()
    for run, tolerated in ((broken, None), (make_run("f", "--fail"), "something else")):
        with pytest.raises(UserError, match="it is broken"):
            execute(run, tolerated=tolerated)


def test_runs_at_once(make_run, monkeypatch):
    # Each waits for the other one.
    wait = """
import os, time
(folder / "started").touch()
other = folder.with_name({"a": "b", "b": "a"}[folder.name]) / "started"
end = time.monotonic() + 30
while not other.exists() and time.monotonic() < end:
    time.sleep(0.01)
print("together", other.exists())
"""
    runs = [make_run("a"), make_run("b")]
    script = Path(runs[0].script)
    script.write_text(SCRIPT + wait)
    execute(*runs, at_once=2)
    for run in runs:
        assert "together True" in run.log.read_text()
    script.write_text(SCRIPT)
    later = [make_run(str(n)) for n in range(5)]
    with pytest.raises(UserError, match="it is broken"):
        execute(make_run("c", "--fail"), make_run("d", "--fail"), *later, at_once=2)
    assert not any(run.folder.exists() for run in later)


def test_what_is_terminated_ends_its_runs(tmp_path, make_run):
    (tmp_path / "script.py").write_text(
        "import os, signal, sys, time; from pathlib import Path\n"
        f"Path({str(tmp_path)!r}, 'child').write_text(str(os.getpid()))\n"
        "os.kill(os.getppid(), signal.SIGTERM); time.sleep(60)\n"
    )
    with pytest.raises(SystemExit) as stopped:
        execute_runs([make_run("a")], [sys.executable, "-S"], "title")
    assert stopped.value.code == 128 + signal.SIGTERM
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "child").read_text()), 0)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_what_a_launcher_has_started_ends_with_it(tmp_path, make_run):
    # A launcher that waits for its child and passes no signal on, as accelerate's for one process.
    (tmp_path / "launcher.py").write_text("import subprocess, sys; subprocess.call([sys.executable, *sys.argv[1:]])")
    (tmp_path / "script.py").write_text(
        "import os, signal, time; from pathlib import Path\n"
        f"Path({str(tmp_path)!r}, 'child').write_text(str(os.getpid()))\n"
        f"os.kill({os.getpid()}, signal.SIGTERM); time.sleep(60)\n"
    )
    with pytest.raises(SystemExit) as stopped:
        execute_runs([make_run("a")], [sys.executable, "-S", str(tmp_path / "launcher.py")], "title")
    assert stopped.value.code == 128 + signal.SIGTERM
    with suppress(psutil.NoSuchProcess):  # or until nobody has asked how it ended
        child = psutil.Process(int((tmp_path / "child").read_text()))
        while child.status() != psutil.STATUS_ZOMBIE:
            assert time.time() - child.create_time() < 50
            time.sleep(0.05)


def test_what_is_terminated_after_a_failure_ends_what_ran_beside_it(tmp_path, make_run):
    (tmp_path / "script.py").write_text(
        "import os, signal, sys, time; from pathlib import Path\n"
        "if '--fail' in sys.argv: sys.exit('script.py: error: it is broken')\n"
        f"Path({str(tmp_path)!r}, 'child').write_text(str(os.getpid()))\n"
        "time.sleep(3); os.kill(os.getppid(), signal.SIGTERM); time.sleep(60)\n"
    )
    with pytest.raises(SystemExit) as stopped:
        execute_runs([make_run("a"), make_run("b", "--fail")], [sys.executable, "-S"], "title", at_once=2)
    assert stopped.value.code == 128 + signal.SIGTERM
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "child").read_text()), 0)


def test_a_second_signal_to_end_does_not_disturb_the_end():
    ended = []

    def work() -> None:
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            signal.raise_signal(signal.SIGTERM)  # as `timeout` sends it, to the process and to its group
            ended.append(True)

    with pytest.raises(SystemExit), Children().stopped_by_signals():
        work()
    assert ended
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.parametrize(("devices", "launches"), [(0, False), (1, False), (2, True)])
def test_several_devices_are_used_by_a_launcher(monkeypatch, devices, launches):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: devices > 0)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: devices)
    launch = ["-m", "accelerate.commands.launch", "--main_process_port", "0"]
    assert choose_launcher(None) == [sys.executable, *(launch if launches else [])]
    assert choose_launcher(f"{sys.executable} -m 'a b'") == [sys.executable, "-m", "a b"]
    for launcher, message in (("nosuch -x", "'nosuch -x' names no program"), ("", "''"), ("a 'b", "No closing quot")):
        with pytest.raises(UserError, match=f"--launcher .*{message}"):
            choose_launcher(launcher)


def test_results_name_the_settings_of_the_allocator(monkeypatch):
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "1")
    environments = [describe_environment() | {"commit": commit} for commit in ("def", None, "abc", "def")]
    environments[1] |= {"threads": 999, "torch": "9.9"}
    origin = format_origin(environments, "python scripts/benchmark.py --x")
    assert origin.startswith("Written by the command below at abc, an unknown commit, def: ")
    assert f"torch {environments[0]['torch']} and 9.9, " in origin
    assert " and 999 thread(s), MALLOC_TRIM_THRESHOLD_=1." in origin
    assert "```bash\npython scripts/benchmark.py --x\n```" in origin


def test_a_command_of_several_processes_names_their_launcher(monkeypatch):
    monkeypatch.setattr(sys, "argv", [str(ROOT / "scripts" / "run_glue.py"), "--task_name", "cola"])
    assert command_line() == "python scripts/run_glue.py --task_name cola"
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert command_line() == "accelerate launch scripts/run_glue.py --task_name cola"


def test_results_name_the_device_they_were_made_on(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    assert describe_environment()["device"] == describe_environment("cuda")["device"] == "a GPU"
    processor = describe_environment("cpu")
    assert processor["device"].endswith("cores)")
    instructions = torch.backends.cpu.get_cpu_capability()
    assert f"{processor['device']}, {instructions}, {processor['threads']} thread(s)" in format_origin(
        [processor], "x"
    )
    assert ", a GPU.\n" in format_origin([describe_environment()], "command")
    apple = describe_environment("mps")
    assert (apple["device"], apple["is_gpu"]) == (f"mps of {processor['device']}", True)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 8)
    assert describe_environment()["device"] == "8 x a GPU"


def test_a_changed_source_tree_is_said_to_be_one(tmp_path, monkeypatch):
    git = ("git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false")
    monkeypatch.setattr(results, "ROOT", tmp_path)
    assert results.source_commit() is None
    (tmp_path / "scripts").mkdir()
    for command in (("init", "-q"), ("add", "."), ("commit", "-q", "-m", "first")):
        (tmp_path / "scripts" / "a.py").write_text("1")
        subprocess.run([*git, *command], check=True)
    whole = results.source_commit()
    (tmp_path / "notes.txt").write_text("which change no result")
    assert results.source_commit() == whole
    (tmp_path / "scripts" / "a.py").write_text("2")
    assert results.source_commit() == f"{whole}+"
    assert describe_environment("cpu")["commit"] == results._COMMIT  # of the time when the code was read


def test_what_is_terminated_ends_its_runs_before_they_end_themselves(tmp_path, make_run):
    (tmp_path / "script.py").write_text(
        "import os, signal, time; from pathlib import Path\n"
        "os.kill(os.getppid(), signal.SIGTERM); time.sleep(5)\n"
        f"Path({str(tmp_path)!r}, 'ended by itself').touch()\n"
    )
    with pytest.raises(SystemExit):
        execute_runs([make_run("a")], [sys.executable, "-S"], "title")
    assert not (tmp_path / "ended by itself").exists()


def test_a_token_does_not_stand_under_a_table(monkeypatch):
    for words in (["--hub_token", "hf_secret"], ["--hub-token=hf_secret"]):
        monkeypatch.setattr(sys, "argv", ["scripts/run_lra.py", *words, "--seed", "1"])
        assert "hf_secret" not in results.command_line()
        assert results.command_line().endswith("HF_TOKEN --seed 1")

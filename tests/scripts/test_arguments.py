"""Recipes and flags."""

import errno
import runpy
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest
import torch
import yaml

from experiments.arguments import UserError, flag_values, merge_recipes, parse_args, parse_command, run_script
from experiments.models import ModelArguments
from experiments.sized_models import SizedModelArguments


@dataclass
class Arguments:
    rate: float = field(default=0.5)
    steps: int = field(default=3)
    names: list[str] | None = field(default=None)
    scale: bool = field(default=True)
    mode: str = field(default="no")


def parse(tmp_path, recipes, *flags):
    paths = []
    for number, text in enumerate(recipes):
        paths.append(tmp_path / f"recipe{number}.yaml")
        paths[-1].write_text(text)
    argv = ["--recipe", *map(str, paths)] if paths else []
    return parse_args([Arguments], [*argv, *flags])[0]


def test_recipes_are_read_from_left_to_right_and_flags_last(tmp_path):
    recipes = ["rate: 1e-4\nsteps: 7\nnames: [a, b]\n", "steps: 8\nscale: false\n"]
    arguments = parse(tmp_path, recipes, "--names", "c")
    assert arguments == Arguments(rate=1e-4, steps=8, names=["c"], scale=False)


def test_recipes_may_be_given_one_by_one(tmp_path):
    (tmp_path / "a.yaml").write_text("steps: 7\n")
    (tmp_path / "b.yaml").write_text("rate: 2.0\n")
    (arguments,) = parse_args([Arguments], ["--recipe", f"{tmp_path}/a.yaml", "--recipe", f"{tmp_path}/b.yaml"])
    assert (arguments.steps, arguments.rate) == (7, 2.0)


def test_a_recipe_behind_which_others_are_read_wins_where_it_is_named(tmp_path):
    recipes = ["behind: recipe1.yaml\nsteps: 7\n", "steps: 8\nrate: 2.0\n"]
    (tmp_path / "recipe1.yaml").write_text(recipes[1])
    assert parse(tmp_path, recipes[:1]) == Arguments(rate=2.0, steps=7)
    assert parse(tmp_path, recipes) == Arguments(rate=2.0, steps=8)
    (tmp_path / "second").mkdir()
    first, base = str(tmp_path / "recipe0.yaml"), str(tmp_path / "second" / ".." / "recipe1.yaml")
    assert parse_args([Arguments], ["--recipe", base, first])[0].steps == 7
    assert parse_command([Arguments], argv=["--recipe", base, first, base]).recipes == [first, base]


def test_a_recipe_that_is_named_asks_for_what_it_says(tmp_path, monkeypatch):
    (tmp_path / "a.yaml").write_text("steps: 7\n")
    for flags, asked in (([], set()), (["--recipe", f"{tmp_path}/a.yaml"], {"steps"}), (["--rate", "1"], {"rate"})):
        monkeypatch.setattr(sys, "argv", ["script.py", *flags])
        command = parse_command([Arguments], default_recipe=tmp_path / "a.yaml")
        assert {name for name in ("steps", "rate") if command.asks_for(name)} == asked


@pytest.mark.parametrize(
    ("recipe", "flags", "message"),
    [
        ("stepz: 7\n", [], "no such flag: stepz"),
        ("num-steps: 7\nnum_steps: 8\n", [], "a flag stands twice, with dashes and with underscores"),
        ("steps: 7\nsteps: 8\n", [], "`steps` stands twice"),
        ("steps:\n", [], "`steps` is empty"),
        ("steps: many\n", [], "invalid int value: 'many'"),
        ("- steps\n", [], "must hold `flag: value` lines"),
        ("steps: [\n", [], "not valid YAML"),
        ("3: 4\n", [], "line 1 has a key that is no word"),
        ("rate: 1.0\n[a]: 3\n", [], "line 2 has a key that is no word"),
        ("behind: recipe0.yaml\n", [], r"recipe0\.yaml is read behind itself; mend `behind` in .*recipe0\.yaml"),
        ("", ["--stepz", "7"], "--stepz"),
        ("", ["--step", "7"], "--step"),
    ],
)
def test_mistakes_are_explained(tmp_path, recipe, flags, message):
    with pytest.raises(UserError, match=message) as error:
        parse(tmp_path, [recipe], *flags)
    assert "\n" not in str(error.value)


def test_a_recipe_in_another_encoding_is_explained(tmp_path):
    (tmp_path / "latin.yaml").write_bytes("names: [é]\n".encode("latin-1"))
    with pytest.raises(UserError, match=r"latin\.yaml is not valid YAML: .*utf-8"):
        parse_args([Arguments], ["--recipe", str(tmp_path / "latin.yaml")])


def test_missing_recipe_is_explained():
    with pytest.raises(UserError, match=r"nowhere\.yaml cannot be read \(No such file"):
        parse_args([Arguments], ["--recipe", "nowhere.yaml"])


def test_given_arguments_give_the_same_arguments_again(tmp_path):
    (tmp_path / "a.yaml").write_text("rate: 2\nnames: [x, y]\n")
    argv = ["--recipe", str(tmp_path / "a.yaml"), "--no_scale", "--mode=yes"]
    given = parse_command([Arguments], argv=argv).given
    assert given == {"rate": 2.0, "names": ["x", "y"], "scale": False, "mode": "yes"}
    (arguments,) = parse_args([Arguments], argv)
    assert parse(tmp_path, [yaml.safe_dump(given)]) == arguments


def test_the_home_of_a_folder_that_no_shell_has_seen_is_found(tmp_path, monkeypatch):
    @dataclass
    class Folders:
        data_dir: str | None = field(default=None)
        results_dir: str = field(default="runs")
        model_name_or_path: str | None = field(default=None)

    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "a.yaml").write_text("data_dir: ~/glue\nmodel_name_or_path: ~/bert\n")
    folders = parse_args([Folders], ["--recipe", str(tmp_path / "a.yaml"), "--results_dir=~/tables"])[0]
    assert (folders.data_dir, folders.results_dir) == (f"{tmp_path}/glue", f"{tmp_path}/tables")
    assert folders.model_name_or_path == f"{tmp_path}/bert"


def test_an_unknown_flag_ends_a_script_with_status_2(tmp_path, monkeypatch, capsys):
    script = Path(__file__).parents[2] / "scripts" / "train_tokenizer.py"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(script), "--nonsense", "1"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(script), run_name="__main__")
    assert ended.value.code == 2
    assert capsys.readouterr().err.strip().splitlines()[-1].startswith("train_tokenizer.py: error:")
    assert not list(tmp_path.iterdir())


@dataclass
class Lengths:
    max_steps: int = field(default=-1)
    num_train_epochs: float = field(default=3.0)
    bf16: bool = field(default=False)
    use_cpu: bool = field(default=False)
    output_dir: str = field(default="out")


def write(path, **recipe):
    path.write_text(yaml.safe_dump(recipe))
    return path


def test_a_later_source_wins_over_what_contradicts_it(tmp_path):
    base = write(tmp_path / "base.yaml", max_steps=500)
    command = parse_command([Lengths], default_recipe=base, argv=["--num_train_epochs", "1"])
    assert command.groups[0] == Lengths(max_steps=-1, num_train_epochs=1.0)
    assert "max_steps" not in command.given
    overlay = write(tmp_path / "overlay.yaml", num_train_epochs=2)
    command = parse_command([Lengths], argv=["--recipe", str(base), str(overlay)])
    assert command.groups[0] == Lengths(num_train_epochs=2.0)
    command = parse_command([Lengths], default_recipe=overlay, argv=["--max_steps=7"])
    assert (command.groups[0].max_steps, "num_train_epochs" in command.given) == (7, False)
    for steps in ("0", "-1"):  # epochs count
        command = parse_command([Lengths], default_recipe=overlay, argv=["--max_steps", steps])
        assert command.groups[0].num_train_epochs == 2.0


def test_single_fields_of_the_model_add_up(tmp_path):
    recipes = []
    for name, fields in (("a", "num_segments=2,hidden_size=8"), ("b", "num_segments=4")):
        recipes.append(tmp_path / f"{name}.yaml")
        recipes[-1].write_text(f"config_overrides: {fields}\n")
    argv = ["--recipe", *map(str, recipes), "--config_overrides", "num_segments=1"]
    for flags, expected in (
        (argv, "num_segments=1,hidden_size=8"),
        (argv[:3], "num_segments=4,hidden_size=8"),
        ([*argv[:1], argv[2], "--config_overrides", "num_segments=4"], "num_segments=4"),
        (argv[:1] + argv[2:3], "num_segments=4"),
        (argv[3:], "num_segments=1"),
        ([*argv[3:], "--config_overrides", "num_segments=3,hidden_size=8"], "num_segments=3,hidden_size=8"),
        ([*argv, "--config_overrides", "num_layers=3"], "num_segments=1,hidden_size=8,num_layers=3"),
    ):
        command = parse_command([ModelArguments], argv=flags)
        assert command.groups[0].config_overrides == command.given["config_overrides"] == expected
    recipes[1].write_text("config_overrides: [num_segments=4]\n")
    with pytest.raises(UserError, match=r"b.yaml: `config_overrides` must be field=value"):
        parse_command([ModelArguments], argv=argv[:3])


def test_fields_of_a_new_model_add_up_over_recipes_and_not_over_the_command_line(tmp_path):
    (tmp_path / "base.yaml").write_text("model_config: {hidden_size: 8, hidden_dropout_prob: 0.1}\n")
    task = tmp_path / "task.yaml"
    task.write_text("behind: base.yaml\nmodel_config: {hidden_dropout_prob: 0.5, num_segments: 2}\n")
    command = parse_command([SizedModelArguments], argv=["--recipe", str(task)])
    expected = {"hidden_size": 8, "hidden_dropout_prob": 0.5, "num_segments": 2}
    assert command.groups[0].fields() == expected
    own = ["--model_config", '{"hidden_size": 4}']
    assert parse_command([SizedModelArguments], argv=["--recipe", str(task), *own]).groups[0].fields() == {
        "hidden_size": 4
    }
    # A run records what it was given as a recipe, below which another one may stand.
    (tmp_path / "arguments.yaml").write_text(yaml.safe_dump(command.given))
    (tmp_path / "after.yaml").write_text("model_config: {num_segments: 3}\n")
    argv = ["--recipe", str(tmp_path / "arguments.yaml"), str(tmp_path / "after.yaml")]
    assert parse_command([SizedModelArguments], argv=argv).groups[0].fields() == expected | {"num_segments": 3}
    merged = merge_recipes({"lr_scheduler_kwargs": {"a": 1}}, {"lr_scheduler_kwargs": {"b": 2}})
    assert merged == {"lr_scheduler_kwargs": {"b": 2}}  # which belong to the scheduler of each


def test_a_source_that_contradicts_itself_is_refused(tmp_path):
    with pytest.raises(UserError, match="command line gives --max_steps and --num_train_epochs, which contradict"):
        parse_command([Lengths], argv=["--max_steps", "5", "--num_train_epochs", "1"])
    both = write(tmp_path / "both.yaml", max_steps=5, num_train_epochs=1)
    with pytest.raises(UserError, match=r"both\.yaml gives"):
        parse_command([Lengths], argv=["--recipe", str(both)])
    (lengths,) = parse_command([Lengths], argv=["--max_steps", "-1", "--num_train_epochs", "1"]).groups
    assert lengths == Lengths(num_train_epochs=1.0)


def test_flags_with_dashes_are_those_with_underscores(tmp_path):
    base = write(tmp_path / "base.yaml", max_steps=500)
    command = parse_command([Lengths], default_recipe=base, argv=["--num-train-epochs", "1"])
    assert command.groups[0] == Lengths(max_steps=-1, num_train_epochs=1.0)
    assert command.given == {"num_train_epochs": 1.0}
    base.write_text("max-steps: 500\n")
    assert parse_command([Lengths], default_recipe=base, argv=[]).given == {"max_steps": 500}
    assert parse_command([Lengths], default_recipe=base, argv=["--num_train_epochs", "1"]).groups[0].max_steps == -1
    with pytest.raises(UserError, match="--max_steps and --num_train_epochs, which contradict"):
        parse_command([Lengths], argv=["--max-steps", "5", "--num-train-epochs=1"])
    base = write(tmp_path / "model.yaml", config_overrides="num_segments=2,hidden_size=8")
    command = parse_command([ModelArguments], default_recipe=base, argv=["--config-overrides", "num_segments=1"])
    assert command.groups[0].config_overrides == "num_segments=1,hidden_size=8"


def test_a_no_of_yaml_is_the_choice_of_that_name(tmp_path):
    @dataclass
    class Choices:
        when: Literal["no", "steps"] = "steps"
        scale: bool = True

    (tmp_path / "a.yaml").write_text("when: no\nscale: no\n")
    assert parse_args([Choices], ["--recipe", str(tmp_path / "a.yaml")])[0] == Choices("no", False)


def test_the_quick_start_is_for_an_empty_command_line_alone(tmp_path):
    recipes = {
        "default_recipe": write(tmp_path / "paper.yaml", max_steps=1_000_000),
        "quick_start": write(tmp_path / "quick.yaml", max_steps=500),
    }
    assert parse_command([Lengths], argv=[], **recipes).groups[0].max_steps == 500
    command = parse_command([Lengths], argv=["--output_dir", "mine"], **recipes)
    assert (command.groups[0].max_steps, command.recipes) == (1_000_000, [str(tmp_path / "paper.yaml")])
    own = write(tmp_path / "own.yaml", max_steps=3)
    assert parse_command([Lengths], argv=["--recipe", str(own)], **recipes).groups[0].max_steps == 3


def test_a_recipe_s_precision_needs_an_accelerator(tmp_path, monkeypatch):
    recipe = write(tmp_path / "recipe.yaml", bf16=True)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    command = parse_command([Lengths], default_recipe=recipe, argv=["--max_steps", "5"])
    assert not command.groups[0].bf16
    assert "bf16" in command.notes[0]
    assert parse_command([Lengths], default_recipe=recipe, argv=["--bf16"]).groups[0].bf16
    recorded = write(tmp_path / "recorded.yaml", bf16=True, use_cpu=True)  # by --bf16 --use_cpu
    command = parse_command([Lengths], default_recipe=recorded, argv=["--max_steps", "5"])
    assert command.groups[0].bf16
    assert not command.notes
    command = parse_command([Lengths], default_recipe=recipe, argv=["--use_cpu"])
    assert not command.groups[0].bf16
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    command = parse_command([Lengths], default_recipe=recipe, argv=["--max_steps", "5"])
    assert command.groups[0].bf16
    assert not command.notes


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (UserError("too long"), 2, "error: too long"),
        (KeyboardInterrupt(), 130, "interrupted; the same command goes on"),
        (OSError(errno.ENOSPC, "No space left on device"), 2, "error: the disk is full"),
        (RuntimeError("basic_ios::clear: iostream error: No space left on device"), 2, "error: the disk is full"),
        (RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 13"), 2, "error: the disk is full"),
    ],
)
def test_mistakes_end_a_script_with_one_line(capsys, error, status, message):
    def main():
        raise error

    with pytest.raises(SystemExit) as stopped:
        run_script(main)
    assert stopped.value.code == status
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert message in lines[0]


def test_the_last_of_a_repeated_flag_counts(tmp_path):
    flags = ["--rate", "0.1", "--names", "a", "b", "--mode=x", "--rate=0.2"]
    assert flag_values(flags) == {"rate": "0.2", "names": "a", "mode": "x"}
    assert parse(tmp_path, [], *flags).rate == 0.2
    for more, said in (([], []), (["--names", "c"], ["--names stands 2 times, of which the last counts; give all"])):
        command = parse_command([Arguments], argv=[*flags, *more])
        assert command.groups[0].names == (["c"] if more else ["a", "b"])
        assert [note.partition(" values")[0] for note in command.notes] == said


@dataclass
class Rivals:
    global_batch_size: int | None = field(default=None)
    gradient_accumulation_steps: int = field(default=1)
    config_name: str = field(default="tiny")
    model_name_or_path: str | None = field(default=None)


@pytest.mark.parametrize(
    ("recipe", "flag", "expected"),
    [
        ({"global_batch_size": 32}, ["--gradient_accumulation_steps", "4"], Rivals(gradient_accumulation_steps=4)),
        ({"config_name": "base"}, ["--model_name_or_path", "x"], Rivals(model_name_or_path="x")),
    ],
)
def test_every_pair_of_rivals_gives_way(tmp_path, recipe, flag, expected):
    base = write(tmp_path / "base.yaml", **recipe)
    assert parse_command([Rivals], default_recipe=base, argv=flag).groups[0] == expected

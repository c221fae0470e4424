"""The rows of GLUE: where they come from, what is refused, what they become."""

import csv
import json
import shutil

import datasets
import pytest

from experiments.arguments import UserError
from experiments.glue import tasks
from experiments.glue.tasks import DIAGNOSTICS, TASKS, GlueArguments, load_split, load_tests
from experiments.text.classifier import encode_texts, make_collator
from support.glue_rows import make_rows, make_tokenizer, write_rows, write_tasks


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return str(tmp_path_factory.mktemp("cache"))


@pytest.fixture
def load(tmp_path, cache):
    """Reads one file as the training part of a task."""

    def read(path, task="cola", split="train", **more):
        arguments = GlueArguments(
            [task], train_file=str(path), validation_file=str(path), test_file=str(path), cache_dir=cache, **more
        )
        return load_split(TASKS[task], split, arguments)

    return read


def write_text(path, text, encoding="utf-8"):
    path.write_bytes(text.encode(encoding))
    return path


def test_columns_labels_and_files_are_the_benchmark_s():
    facts = {
        "cola": (("sentence",), ("unacceptable", "acceptable"), ["CoLA"]),
        "sst2": (("sentence",), ("negative", "positive"), ["SST-2"]),
        "mrpc": (("sentence1", "sentence2"), ("not_equivalent", "equivalent"), ["MRPC"]),
        "stsb": (("sentence1", "sentence2"), (), ["STS-B"]),
        "qqp": (("question1", "question2"), ("not_duplicate", "duplicate"), ["QQP"]),
        "mnli": (("premise", "hypothesis"), ("entailment", "neutral", "contradiction"), ["MNLI-m", "MNLI-mm"]),
        "qnli": (("question", "sentence"), ("entailment", "not_entailment"), ["QNLI"]),
        "rte": (("sentence1", "sentence2"), ("entailment", "not_entailment"), ["RTE"]),
        "wnli": (("sentence1", "sentence2"), ("not_entailment", "entailment"), ["WNLI"]),
    }
    assert {n: (t.columns, t.labels, list(t.submission.values())) for n, t in TASKS.items()} == facts
    assert {name for name, task in TASKS.items() if task.submits_words} == {"mnli", "qnli", "rte"}
    assert DIAGNOSTICS.labels == TASKS["mnli"].labels
    assert list(DIAGNOSTICS.submission.values()) == ["AX"]


@pytest.mark.parametrize(
    ("given", "tasks"),
    [
        (["all"], list(TASKS)),
        (["rte", "mnli", "rte"], ["mnli", "rte"]),
        (["cola", "all"], list(TASKS)),
    ],
)
def test_tasks_run_in_the_order_of_the_table(given, tasks):
    assert GlueArguments(given).task_name == tasks


@pytest.mark.parametrize("kind", ["json", "jsonl", "csv", "tsv", "parquet"])
@pytest.mark.parametrize("task", ["cola", "stsb"])
def test_every_kind_of_file_gives_the_same_rows(tmp_path, load, kind, task):
    rows = make_rows(TASKS[task], "train")
    path = tmp_path / f"rows.{kind}"
    if kind == "parquet":
        datasets.Dataset.from_list(rows).to_parquet(path)
    elif kind == "json":
        path.write_text(json.dumps(rows))
    elif kind == "jsonl":
        write_rows(path, rows)
    else:
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]), delimiter="\t" if kind == "tsv" else ",")
            writer.writeheader()
            writer.writerows(rows)
    read = load(path, task)
    assert read.to_list() == [{name: row[name] for name in (*TASKS[task].columns, "label")} for row in rows]
    assert {type(label) for label in read["label"]} == {float if task == "stsb" else int}


def test_words_that_mean_nothing_to_others_are_words_here(tmp_path, load):
    path = write_text(tmp_path / "rows.csv", 'sentence,label\nNone,1\nNA,0\nnan,1\n,0\n"a, ""b""",1\n')
    assert list(load(path)["sentence"]) == ["None", "NA", "nan", "", 'a, "b"']


def test_quotes_in_tab_separated_files_are_text(tmp_path, load):
    path = write_text(tmp_path / "rows.tsv", 'sentence\tlabel\n"the cat\t1\nsees a "dog"\t0\nN/A\t1\n')
    assert list(load(path)["sentence"]) == ['"the cat', 'sees a "dog"', "N/A"]
    assert load(path)["label"] == [1, 0, 1]


def test_a_label_that_is_missing_is_the_one_that_is_named(tmp_path, load):
    path = write_text(tmp_path / "rows.csv", "sentence,label\na,1\nb,\nc,0\n")
    with pytest.raises(UserError, match="row 2 has the label ''"):
        load(path)
    numbers = write_text(tmp_path / "numbers.jsonl", '{"sentence1": "a", "sentence2": "b", "label": "3.5"}\n')
    assert load(numbers, "stsb")["label"] == [3.5]


def test_labels_may_be_words(tmp_path, load):
    rows = [{"sentence1": "a", "sentence2": "b", "label": word} for word in ("entailment", "not_entailment")]
    assert load(write_rows(tmp_path / "rows.jsonl", rows), "rte")["label"] == [0, 1]
    assert load(write_rows(tmp_path / "rows.jsonl", rows), "wnli")["label"] == [1, 0]


def change(task, number=3, **values):
    rows = make_rows(TASKS[task], "train")
    rows[number] |= values
    return rows


@pytest.mark.parametrize(
    ("task", "rows", "message"),
    [
        ("cola", make_rows(TASKS["rte"], "train"), "no column `sentence`; cola needs sentence, label.*sentence1"),
        ("rte", [{"sentence1": "a"}], "no column `sentence2` and no `label`"),
        ("cola", change("cola", label=2), r"row 4 has the label 2; cola has 0 \(unacceptable\), 1 \(acceptable\)"),
        ("cola", change("cola", label=-1), "row 4 has the label -1"),
        ("cola", change("cola", label=None), "row 4 has the label None"),
        ("mnli", change("mnli", label=3), "row 4 has the label 3; mnli has 0 .entailment"),
        ("cola", change("cola", label=0.5), "has the label 0.0"),
        ("cola", [{"sentence": "a", "label": 1.0}], "row 1 has the label 1.0"),
        ("cola", [{"sentence": "a", "label": True}], "row 1 has the label True"),
        ("cola", [{"sentence": "a", "label": "fine"}], "row 1 has the label 'fine'"),
        ("rte", [{"sentence1": "a", "sentence2": "b", "label": "neutral"}], "row 1 has the label 'neutral'"),
        ("stsb", change("stsb", label=7.0), "row 4 has the label 7.0; stsb has 0.0 to 5.0"),
        ("stsb", change("stsb", label=-0.1), "row 4 has the label -0.1"),
        ("stsb", change("stsb", label=float("nan")), "row 4 has the label nan"),
        ("stsb", [{"sentence1": "a", "sentence2": "b", "label": True}], "row 1 has the label True"),
        ("stsb", [{"sentence1": "a", "sentence2": "b", "label": "high"}], "row 1 has the label 'high'"),
        ("cola", change("cola", sentence=["a"] * 99), r"\['a', 'a', 'a', 'a', 'a', 'a', \.\.\.\] for `sentence`"),
        ("cola", change("cola", sentence=None), "row 4 has None for `sentence`, which must be text"),
        ("mrpc", change("mrpc", sentence2=None), "row 4 has None for `sentence2`"),
        ("cola", [{"sentence": 5, "label": 1}], "row 1 has 5 for `sentence`"),
        ("cola", [], "is empty"),
    ],
)
def test_rows_that_cannot_be_used_are_explained(tmp_path, load, task, rows, message):
    path = write_rows(tmp_path / "rows.jsonl", rows)
    with pytest.raises(UserError, match=message) as error:
        load(path, task)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("rows.jsonl", '{"sentence": "a", "label": 1}\n{"sentence": \n', "cannot be read"),
        ("rows.json", "nonsense", "cannot be read"),
        ("rows.parquet", "nonsense", "cannot be read"),
        ("rows.csv", "sentence,label\na,1\nb,0,7\n", "cannot be read.*line 3"),
        ("rows.csv", "sentence,label\na,1,7\nb,0,7\n", "cannot be read: a row has more fields than the first line"),
        ("rows.tsv", "sentence\tlabel\na\t1\t\nb\t0\t\n", "cannot be read: a row has more fields than the first"),
        ("rows.csv", "sentence,label\n", "is empty"),
        ("rows.jsonl", "\n\n", "is empty"),
        ("rows.txt", "a", r"files of type `\.txt` cannot be read; give \.jsonl"),
    ],
)
def test_files_that_cannot_be_read_are_explained(tmp_path, load, name, text, message):
    with pytest.raises(UserError, match=message) as error:
        load(write_text(tmp_path / name, text))
    assert "\n" not in str(error.value)


def test_limits_are_the_first_rows(tmp_path, load):
    path = write_rows(tmp_path / "rows.jsonl", make_rows(TASKS["cola"], "train"))
    limits = {"max_train_samples": 5, "max_eval_samples": 3, "max_predict_samples": 2}
    assert load(path, **limits).to_list() == load(path).to_list()[:5]
    assert load(path, split="validation", **limits).to_list() == load(path).to_list()[:3]
    assert load(path, split="test", **limits)["idx"] == [0, 1]
    assert len(load(path, max_train_samples=99)) == 24


def test_test_rows_need_no_label_and_have_their_number(tmp_path, load):
    rows = [{"sentence": "a", "idx": 7}, {"sentence": "b", "idx": 5}]
    read = load(write_rows(tmp_path / "rows.jsonl", rows), split="test")
    assert read.to_dict() == {"sentence": ["a", "b"], "idx": [7, 5]}
    rows = [{"sentence": "a", "label": -1}, {"sentence": "b", "label": -1}]
    assert load(write_rows(tmp_path / "more.jsonl", rows), split="test").to_dict() == {
        "sentence": ["a", "b"],
        "idx": [0, 1],
    }


def test_folders_of_tasks(tmp_path, cache, monkeypatch):
    folder = write_tasks(tmp_path / "glue", [TASKS["mnli"], TASKS["cola"], DIAGNOSTICS])
    (folder / "cola" / "train.jsonl").rename(folder / "cola" / "train-00000-of-00001.jsonl")
    arguments = GlueArguments(["cola", "mnli"], data_dir=str(folder), cache_dir=cache)
    assert len(load_split(TASKS["cola"], "train", arguments)) == 24
    matched, mismatched = (load_split(TASKS["mnli"], name, arguments) for name in TASKS["mnli"].evaluation_splits)
    assert len(matched) == len(mismatched) == 10
    assert matched["premise"] != mismatched["premise"]
    tests = load_tests(TASKS["mnli"], arguments)
    assert [(part.name, split) for part, split, _ in tests] == [
        *(("mnli", "test_matched"), ("mnli", "test_mismatched"), ("ax", "test")),
    ]
    with monkeypatch.context() as hub:
        hub.setattr(tasks, "load_split", lambda part, split, arguments: None)
        parts = {
            config: load_tests(TASKS["mnli"], GlueArguments(["mnli"], dataset_config_name=config))
            for config in (None, "a")
        }
    assert [len(parts[config]) for config in (None, "a")] == [3, 2]
    shutil.rmtree(folder / "ax")
    assert len(load_tests(TASKS["mnli"], arguments)) == 2
    for split, how, message in (
        (
            "test",
            "unlink",
            r"has no file for the split `test`; put one test\.jsonl \(or \.json, \.csv, \.tsv, \.parquet\) there",
        ),
        ("validation", "copy", r"has 2 files \(validation\.jsonl, validation\.tsv\)"),
    ):
        file = folder / "cola" / f"{split}.jsonl"
        file.unlink() if how == "unlink" else file.with_suffix(".tsv").write_text("")
        with pytest.raises(UserError, match=message):
            load_split(TASKS["cola"], split, arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"data_dir": "nowhere"}, "--data_dir nowhere is no folder"),
        ({"dataset_name": "glue"}, "ids of the Hub have the form owner/name"),
        ({}, "nyu-mll/glue .cola, train. is not in the cache.*--data_dir"),
        ({"train_file": "nowhere.csv", "validation_file": "nowhere.csv"}, r"nowhere\.csv: no such file"),
        (
            {"validation_file": "nowhere.csv"},
            "no file for the split `train` of cola; give --train_file, or use --data_dir",
        ),
    ],
)
def test_data_that_is_not_there_is_explained(tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=message) as error:
        load_split(TASKS["cola"], "train", GlueArguments(["cola"], cache_dir=str(tmp_path / "cache"), **arguments))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"task_name": ["cola", "cole"]}, "--task_name cole: the tasks are mnli.*and `all`"),
        ({"task_name": ["CoLA"]}, "--task_name CoLA"),
        ({"task_name": ["cola", "rte"], "train_file": "a"}, "--train_file belongs to one task.*--data_dir"),
        ({"task_name": ["all"], "test_file": "a"}, "--test_file belongs to one task"),
        ({"task_name": ["all"], "dataset_config_name": "a"}, "--dataset_config_name a is the part of one task"),
        ({"train_file": "a"}, "--train_file is given without --validation_file"),
        ({"validation_file": "a", "data_dir": "b"}, "--validation_file and --data_dir"),
        ({"data_dir": "a", "dataset_revision": "b"}, "--dataset_revision says what to read from the Hub"),
        ({"data_dir": "a", "dataset_name": "b/c"}, "--dataset_name says what to read from the Hub"),
        ({"validation_file": "a", "dataset_config_name": "b"}, "--dataset_config_name says what to read from"),
        ({"max_train_samples": 0}, "--max_train_samples is 0"),
        ({"max_eval_samples": -1}, "--max_eval_samples is -1"),
        ({"max_predict_samples": 0}, "--max_predict_samples is 0"),
        ({"preprocessing_num_workers": 0}, "--preprocessing_num_workers is 0"),
        ({"max_seq_length": 4}, "--max_seq_length is 4"),
    ],
)
def test_arguments_that_cannot_be_meant_are_explained(arguments, message):
    with pytest.raises(UserError, match=message):
        GlueArguments(**{"task_name": ["cola"], **arguments})


def test_texts_become_tokens_without_padding(tmp_path, load):
    tokenizer = make_tokenizer()
    rows = [
        {"sentence1": "the cat sees the dog often today .", "sentence2": "the bird .", "label": 1},
        {"sentence1": "a", "sentence2": "b", "label": 0},
    ]
    read = load(write_rows(tmp_path / "rows.jsonl", rows), "rte")
    whole = encode_texts(read, TASKS["rte"].columns, make_collator(tokenizer, 128))
    assert whole["label"] == [1, 0]
    assert [len(ids) for ids in whole["input_ids"]] == [14, 5]
    assert whole["input_ids"][0] == tokenizer(rows[0]["sentence1"], rows[0]["sentence2"])["input_ids"]
    assert whole["token_type_ids"][0] == [0] * 10 + [1] * 4
    # Of a pair the longer text is cut, until both are equally long.
    cut = encode_texts(read, TASKS["rte"].columns, make_collator(tokenizer, 9), workers=2)
    assert tokenizer.decode(cut["input_ids"][0]) == "[CLS] the cat sees [SEP] the bird. [SEP]"
    assert set(whole.column_names) == {"input_ids", "token_type_ids", "attention_mask", "label"}


def test_a_batch_without_padding_has_no_mask():
    tokenizer = make_tokenizer()
    short, long = tokenizer("the cat ."), tokenizer("the cat sees the dog .")
    collator = make_collator(tokenizer, 128)
    padded = collator([short, long])
    assert padded["attention_mask"].tolist() == [[1] * 5 + [0] * 3, [1] * 8]
    assert set(collator([long, long])) == set(padded) - {"attention_mask"}
    assert make_collator(tokenizer, 9, pad_to_max_length=True)([long])["attention_mask"].tolist() == [[1] * 8 + [0]]

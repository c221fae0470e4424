"""What a model card says of a checkpoint."""

import pytest
from huggingface_hub import ModelCard

from experiments.model_card import CardFacts, write_card


@pytest.mark.parametrize(
    ("base_model", "named"), [("bert-base-uncased", "bert-base-uncased"), ("folder", None), ("~/folder", None)]
)
def test_a_card_names_what_the_hub_asks_for(tmp_path, base_model, named, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "folder").mkdir()
    facts = CardFacts(
        script="pretrain_mlm.py",
        pipeline_tag="fill-mask",
        description="A model.",
        example="a [MASK]",
        scores={"loss": 1.25},
        results="1.25",
        evaluated_on="held-out text",
        datasets=("Salesforce/wikitext",),
        base_model=base_model,
    )
    arguments = {"license": "mit", "language": "de", "learning_rate": 0.1, "train_file": "/home/someone/a.txt"}
    arguments |= {"dataset_name": str(tmp_path / "folder"), "deepspeed": "/home/someone/zero.json"}
    arguments |= {"accelerator_config": {"folder": "/home/someone"}, "validation_name": "owner/name"}
    write_card(tmp_path / "folder", facts, {"model_type": "bert"}, arguments)
    card = ModelCard.load(tmp_path / "folder" / "README.md")
    data = card.data
    assert (data.license, data.language, data.base_model) == ("mit", "de", named)
    assert (data.datasets, data.library_name, data.pipeline_tag) == (
        ["Salesforce/wikitext"],
        "transformers",
        "fill-mask",
    )
    (result,) = data.eval_results
    assert (result.metric_type, result.metric_value, result.dataset_name) == ("loss", 1.25, "held-out text")
    assert (data.model_name, result.dataset_type) == ("folder", "Salesforce/wikitext")
    assert "learning_rate: 0.1" in card.text
    assert "curve.png" not in card.text
    assert "someone" not in card.content
    assert str(tmp_path) not in card.content
    assert "validation_name: owner/name" in card.text


def test_a_card_s_arguments_train_the_same_model(tmp_path, monkeypatch):
    """Names of what is shipped or on the Hub stay, and so does a word that happens to be a folder's name, too."""
    monkeypatch.chdir(tmp_path)
    for name in ("image", "tokenizer", "sktformer-tiny-best"):
        (tmp_path / name).mkdir()
    facts = CardFacts("pretrain_mlm.py", "fill-mask", "A model.", "a [MASK]", {}, "none", "text")
    named = {"config_name": "sktformer-tiny-best", "tokenizer_name": "tokenizer", "task_name": "image", "seed": 1}
    write_card(tmp_path, facts, {"model_type": "bert"}, named)
    text = (tmp_path / "README.md").read_text()
    assert "config_name: sktformer-tiny-best\ntask_name: image\nseed: 1" in text
    assert "tokenizer_name" not in text


@pytest.mark.parametrize(("datasets", "is_kept"), [(["a/b:c@main", "d/e"], True), (["a/b", "folder:c"], False)])
def test_mixed_data_sets_stay_in_a_card_if_none_is_a_folder(tmp_path, monkeypatch, datasets, is_kept):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    facts = CardFacts("pretrain_mlm.py", "fill-mask", "A model.", "a [MASK]", {}, "none", "text")
    write_card(tmp_path, facts, {"model_type": "bert"}, {"datasets": datasets, "probabilities": [0.5, 0.5]})
    text = (tmp_path / "README.md").read_text()
    assert ("datasets:\n- a/b:c@main\n- d/e\nprobabilities:" in text) == is_kept
    assert ("probabilities" in text) == is_kept


def test_the_name_of_a_run_is_no_argument_of_a_card(tmp_path):
    facts = CardFacts("pretrain_mlm.py", "fill-mask", "A model.", "a [MASK]", {}, "none", "text")
    write_card(tmp_path, facts, {"model_type": "bert"}, {"run_name": "secret project", "seed": 1})
    assert "secret project" not in (tmp_path / "README.md").read_text()

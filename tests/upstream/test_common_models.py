"""
transformers' own common tests of configurations and models, for every head: `pytest -m upstream tests/upstream`.

Many of them pass over a model that they do not concern without a word. Here a test that ends without a check fails,
so each is either run for what it is worth or skipped with a reason.
"""

import functools
import unittest
from unittest import mock

import pytest
import torch
from transformers_tests.test_configuration_common import ConfigTester
from transformers_tests.test_modeling_common import ModelTesterMixin, ids_tensor, random_attention_mask
from transformers_tests.test_training_mixin import TrainingTesterMixin

from modeling_sktformer import (
    SKTformerConfig,
    SKTformerForMaskedLM,
    SKTformerForMultipleChoice,
    SKTformerForQuestionAnswering,
    SKTformerForSequenceClassification,
    SKTformerForSequenceMatching,
    SKTformerForTokenClassification,
    SKTformerModel,
)


pytestmark = pytest.mark.upstream

# Reasons why tests (or all whose names begin so) cannot say anything: about any model, and about some.
FOR_NONE = {
    **{
        f"test_get_{kind}_features": f"there is no `get_{kind}_features`"
        for kind in ("text", "image", "audio", "video")
    },
    "test_model_rope": "positions are embedded, not rotated",
    "test_vision_axial_rope": "positions are embedded, not rotated",
    "test_reverse_loading_mapping": "no tensor has a name in checkpoints other than its own",
    "test_can_load_from_already_mapped_keys": "no tensor has a name in checkpoints other than its own",
    "test_save_load_keys_to_ignore_on_save": "every tensor is saved",
    "test_model_base_model_prefix": "nothing generates",
    "test_bc_cache_name_forward": "nothing generates",
    "test_multimodal_outputs_are_returned": "nothing reads pictures",
}
FOR_BASE_MODEL = {
    "test_inputs_embeds_matches_input_ids": "compares base models",
    "test_model_forward_default_config_values": "calls base models",
}
FOR_HEADS = {
    "test_training": "trains heads; the base model has no loss",
    "test_torch_save_load": "saves heads",
    "test_correct_missing_keys": "loads a base model into heads",
    "test_base_model_prefix_loads_base_weights": "loads a base model into heads",
}
FOR_MASKED_LM = {
    "test_resize_embeddings_untied": "needs output embeddings",
    "test_tied_weights_are_sharded_together": "needs output embeddings",
}
FOR_SEQUENCE_CLASSIFICATION = {
    "test_problem_types": "trains sequence classifiers",
    "test_load_with_mismatched_shapes": "loads sequence classifiers",
    "test_can_load_ignoring_mismatched_shapes": "loads sequence classifiers",
}
# Their checks are raised exceptions or bare `assert` statements, which are not counted.
UNCOUNTED = (
    "test_can_be_initialized_on_meta",
    "test_config_attn_implementation_setter",
    "test_enable_input_require_grads",
    "test_model_is_small",
    "test_num_layers_is_small",
)


class SKTformerModelTester:
    """Sizes and inputs of the common tests, under the names that they look for."""

    base_model_class = SKTformerModel
    is_training = True
    batch_size = 5
    seq_length = 10
    hidden_size = 32
    num_hidden_layers = 2
    num_attention_heads = 4
    num_choices = 3
    # An attention matrix has a column for each landmark token instead of each token.
    key_length = 6

    def get_config(self) -> SKTformerConfig:
        config = SKTformerConfig(
            vocab_size=99,
            smoother_norm="batch_norm",
            hidden_size=self.hidden_size,
            num_hidden_layers=self.num_hidden_layers,
            num_attention_heads=self.num_attention_heads,
            intermediate_size=37,
            max_position_embeddings=64,
            num_segments=4,
            num_landmark_tokens=self.key_length,
            num_landmark_features=5,
        )
        config.num_labels = 3
        return config

    def prepare_config_and_inputs_for_common(self):
        config = self.get_config()
        shape = (self.batch_size, self.seq_length)
        inputs = {
            "input_ids": ids_tensor(shape, config.vocab_size),
            "token_type_ids": ids_tensor(shape, config.type_vocab_size),
            "attention_mask": random_attention_mask(shape),
        }
        return config, inputs


def _counted(assertion):
    @functools.wraps(assertion)
    def counted(self, *args, **kwargs):
        self.num_checks += 1
        return assertion(self, *args, **kwargs)

    return counted


def _watched(test):
    @functools.wraps(test)
    def watched(self, *args, **kwargs):
        self.num_checks = 0
        calls = torch.nn.modules.module.register_module_forward_pre_hook(self.count_call)
        try:
            with mock.patch.object(torch.testing, "assert_close", self.assert_close):
                test(self, *args, **kwargs)
        finally:
            calls.remove()
        if not self.num_checks:
            self.fail("The test ended without a check; skip it for this model and say why.")

    return watched


class CommonTests(ModelTesterMixin, TrainingTesterMixin):
    """The common tests, with a count of what they check: assertions, and calls of the model."""

    model_tester = SKTformerModelTester()
    num_checks = 0
    test_resize_position_embeddings = True
    # The year that the test looks for stands in the headers of transformers' files alone.
    test_can_init_all_missing_weights_before_2023 = True

    def __init_subclass__(cls, skipped: tuple[dict[str, str], ...] = (), **kwargs):
        super().__init_subclass__(**kwargs)
        reasons = {prefix: reason for group in (FOR_NONE, *skipped) for prefix, reason in group.items()}
        for name in dir(cls):
            member = getattr(cls, name, None)
            if name.startswith("assert"):
                setattr(cls, name, _counted(member))
            elif name.startswith("test_") and callable(member):
                prefix = next((prefix for prefix in reasons if name.startswith(prefix)), None)
                if prefix is not None:
                    member = unittest.skip(reasons[prefix])(member)
                elif name not in UNCOUNTED:
                    member = _watched(member)
                setattr(cls, name, member)

    def count_call(self, module, _):
        self.num_checks += isinstance(module, self.all_model_classes)

    @_counted
    def assert_close(self, *args, _assert_close=torch.testing.assert_close, **kwargs):
        _assert_close(*args, **kwargs)

    def _prepare_config_and_inputs_for_retain_grad_hidden_states_attentions(self):
        config, inputs = self.model_tester.prepare_config_and_inputs_for_common()
        # Hidden states are put back where padding moved them: copies that nothing flows through. Padding on the
        # right moves nothing.
        inputs["attention_mask"] = inputs["attention_mask"].sort(descending=True).values
        return config, inputs


class SKTformerModelTest(
    CommonTests, unittest.TestCase, skipped=(FOR_HEADS, FOR_MASKED_LM, FOR_SEQUENCE_CLASSIFICATION)
):
    all_model_classes = (SKTformerModel,)


class SKTformerForMaskedLMTest(CommonTests, unittest.TestCase, skipped=(FOR_BASE_MODEL, FOR_SEQUENCE_CLASSIFICATION)):
    all_model_classes = (SKTformerForMaskedLM,)


class SKTformerForSequenceClassificationTest(CommonTests, unittest.TestCase, skipped=(FOR_BASE_MODEL, FOR_MASKED_LM)):
    all_model_classes = (SKTformerForSequenceClassification,)

    def _create_text_training_batch(self, *args, **kwargs):
        batch = super()._create_text_training_batch(*args, **kwargs)
        return {**batch, "labels": torch.full((len(batch["input_ids"]),), 2)}


class SKTformerForTokenClassificationTest(
    CommonTests, unittest.TestCase, skipped=(FOR_BASE_MODEL, FOR_MASKED_LM, FOR_SEQUENCE_CLASSIFICATION)
):
    all_model_classes = (SKTformerForTokenClassification,)

    def _create_text_training_batch(self, *args, **kwargs):
        batch = super()._create_text_training_batch(*args, **kwargs)
        return {**batch, "labels": batch["input_ids"] % 3}


class SKTformerForQuestionAnsweringTest(
    CommonTests, unittest.TestCase, skipped=(FOR_BASE_MODEL, FOR_MASKED_LM, FOR_SEQUENCE_CLASSIFICATION)
):
    all_model_classes = (SKTformerForQuestionAnswering,)

    def _create_text_training_batch(self, *args, **kwargs):
        input_ids = super()._create_text_training_batch(*args, **kwargs)["input_ids"]
        first = torch.full((len(input_ids),), 3)
        return {"input_ids": input_ids, "start_positions": first, "end_positions": first + 2}


class SKTformerForMultipleChoiceTest(
    CommonTests, unittest.TestCase, skipped=(FOR_BASE_MODEL, FOR_MASKED_LM, FOR_SEQUENCE_CLASSIFICATION)
):
    all_model_classes = (SKTformerForMultipleChoice,)

    def _create_text_training_batch(self, *args, **kwargs):
        input_ids = super()._create_text_training_batch(*args, **kwargs)["input_ids"]
        choices = torch.stack([input_ids, input_ids.flip(-1), input_ids.roll(1, -1)], dim=1)
        return {"input_ids": choices, "labels": torch.ones(len(input_ids), dtype=torch.long)}


class SKTformerForSequenceMatchingTest(
    CommonTests, unittest.TestCase, skipped=(FOR_BASE_MODEL, FOR_MASKED_LM, FOR_SEQUENCE_CLASSIFICATION)
):
    all_model_classes = (SKTformerForSequenceMatching,)
    model_tester = SKTformerModelTester()
    model_tester.num_choices = 2

    def _create_text_training_batch(self, *args, **kwargs):
        input_ids = super()._create_text_training_batch(*args, **kwargs)["input_ids"]
        pairs = torch.stack([input_ids, input_ids.flip(-1)], dim=1)
        return {"input_ids": pairs, "labels": torch.ones(len(input_ids), dtype=torch.long)}


COMPOSITE = pytest.mark.skip(reason="no configuration lies inside another")


@pytest.mark.parametrize(
    "check",
    [
        pytest.param(name, marks=[COMPOSITE] if name.endswith(("composite", "custom_kwargs")) else [])
        for name in dir(ConfigTester)
        if name.startswith(("create_and_test_", "check_"))
    ],
)
def test_configuration(check):
    getattr(ConfigTester(unittest.TestCase(), SKTformerConfig, hidden_size=40, num_attention_heads=5), check)()

"""
SKTformer for Hugging Face transformers.

Importing this package registers the configuration, the models and the tokenizer with the Auto classes, so that
`AutoModelForMaskedLM.from_pretrained(folder)` and the pipelines know them.
"""

import transformers
from transformers import AutoConfig, AutoTokenizer, BertTokenizer

from .configuration_sktformer import SKTformerConfig
from .forecasting import SKTformerForPrediction
from .modeling_sktformer import (
    SKTformerForMaskedLM,
    SKTformerForMultipleChoice,
    SKTformerForQuestionAnswering,
    SKTformerForSequenceClassification,
    SKTformerForSequenceMatching,
    SKTformerForTokenClassification,
    SKTformerModel,
    SKTformerPreTrainedModel,
)
from .presets import available_presets, load_preset


__version__ = "0.1.0"

AutoConfig.register("sktformer", SKTformerConfig)
AutoTokenizer.register(SKTformerConfig, BertTokenizer)
for _model_class in (
    SKTformerModel,
    SKTformerForMaskedLM,
    SKTformerForSequenceClassification,
    SKTformerForTokenClassification,
    SKTformerForQuestionAnswering,
    SKTformerForMultipleChoice,
    SKTformerForSequenceMatching,
    SKTformerForPrediction,
):
    getattr(transformers, _model_class._auto_class).register(SKTformerConfig, _model_class)

__all__ = [
    "SKTformerConfig",
    "SKTformerForMaskedLM",
    "SKTformerForMultipleChoice",
    "SKTformerForPrediction",
    "SKTformerForQuestionAnswering",
    "SKTformerForSequenceClassification",
    "SKTformerForSequenceMatching",
    "SKTformerForTokenClassification",
    "SKTformerModel",
    "SKTformerPreTrainedModel",
    "available_presets",
    "load_preset",
]

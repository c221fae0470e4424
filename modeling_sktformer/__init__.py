"""
SKTformer for Hugging Face transformers.

Importing this package registers the configuration, the models and the tokenizer with the Auto classes, so that
`AutoModelForMaskedLM.from_pretrained(folder)` and the pipelines know them.
"""

import transformers

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

transformers.AutoConfig.register("sktformer", SKTformerConfig)
transformers.AutoTokenizer.register(SKTformerConfig, transformers.BertTokenizer)
for _model_class in [globals()[name] for name in __all__ if name.startswith(("SKTformerFor", "SKTformerModel"))]:
    getattr(transformers, _model_class._auto_class).register(SKTformerConfig, _model_class)

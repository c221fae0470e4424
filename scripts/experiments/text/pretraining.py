"""What a pre-training may be asked for, and what decides its result."""

from typing import cast

from transformers.trainer_pt_utils import AcceleratorConfig

from experiments.arguments import Command, UserError
from experiments.models import ModelArguments, fingerprint_checkpoint, fingerprint_config
from experiments.run_folder import RunIdentity
from experiments.text.corpus import Corpus, CorpusArguments
from experiments.training import RunArguments, training_identity


def check_stages(training: RunArguments, model: ModelArguments, corpus: CorpusArguments) -> None:
    """Refuse what would train something else than what was asked, or nothing; of a stream processes read shards."""
    if training.do_predict:
        raise UserError("--do_predict is for labels, which pre-training has none of; leave it out.")
    if not training.do_train and not model.model_name_or_path:
        raise UserError("--do_eval alone evaluates a checkpoint; name it with --model_name_or_path.")
    if not training.do_train and training.is_sharded:
        raise UserError("FSDP prepares no model without an optimizer: evaluate a checkpoint without --fsdp.")
    if corpus.streaming and training.do_train and training.max_steps <= 0:
        raise UserError("A streamed corpus has no known length: say how long to train with --max_steps.")
    if corpus.streaming:
        # Every process reads its own shards of the stream; dispatching would read all of it in the first.
        cast(AcceleratorConfig, training.accelerator_config).dispatch_batches = False


def run_identity(command: Command, corpus: Corpus) -> RunIdentity:
    """What decides the result of a run: the text, the model, the masks and the optimisation."""
    model, reading, mlm, training = command.groups
    decides = {"data": corpus.fingerprint, "streaming": reading.streaming}
    if reading.streaming:
        decides["readers"] = training.num_readers  # which share the documents among themselves
    unused = ("tokenizer_name", "sparse_prediction")
    decides |= {name: value for name, value in vars(mlm).items() if name not in unused}
    decides |= {"probabilities": reading.probabilities, "one_document_per_block": reading.one_document_per_block}
    decides["config_name"] = fingerprint_config(model.config_name)
    decides |= {"model_type": model.model_type, "config_overrides": model.config_overrides}
    origin = model.model_name_or_path
    decides["checkpoint"] = origin and fingerprint_checkpoint(origin, model.model_revision)
    decides["tokenizer"] = mlm.tokenizer_name and fingerprint_checkpoint(mlm.tokenizer_name, "main")
    return training_identity(training, decides)

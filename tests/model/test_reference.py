"""The model against its equations: outputs, losses and all gradients, in float64."""

import pytest
import torch

from modeling_sktformer import (
    SKTformerForMaskedLM,
    SKTformerForMultipleChoice,
    SKTformerForQuestionAnswering,
    SKTformerForSequenceClassification,
    SKTformerForSequenceMatching,
    SKTformerForTokenClassification,
    SKTformerModel,
    attention,
    circle,
)
from modeling_sktformer.smoothing import fourier_convolution
from support.builders import MODELS, PAIR_HEADS, assert_equal, call, gradients, make_batch, make_model, token_outputs
from support.reference import (
    naive_cross_entropy,
    naive_fourier_convolution,
    naive_hidden_states,
    naive_kernel,
    naive_layer_norm,
    naive_linear,
    naive_masked_lm_logits,
    naive_matching_logits,
    naive_pooled_logits,
    naive_skeleton_attention,
    naive_smoother,
    under,
)


VARIANTS: dict[str, dict] = {
    "batch_norm": {},
    "layer_norm": {"smoother_norm": "layer_norm"},
    "odd_length": {"max_position_embeddings": 15},
    "few_landmarks": {"num_landmark_tokens": 2, "num_landmark_features": 2},
    "more_landmarks_than_columns": {"num_landmark_tokens": 9, "num_attention_heads": 3},
    "full_sample": {"num_landmark_tokens": 16, "num_landmark_features": 6},
    "wide_kernel": {"conv_kernel_size": 5},
    "pointwise_kernel": {"conv_kernel_size": 1},
    "one_segment": {"num_segments": 1},
    "one_column_segments": {"num_segments": 12},
    "no_fourier_convolution": {"use_fourier_convolution": False},
    "no_convolution_stem": {"use_convolution_stem": False},
    "no_convolution_at_all": {"use_convolution_stem": False, "use_fourier_convolution": False},
    "no_token_attention": {"use_token_attention": False},
    "no_feature_attention": {"use_feature_attention": False},
    "no_smoother": {"use_smoother": False},
    "smoother_residual": {"use_smoother_residual": True},
    "best": {"use_smoother_residual": True, "smoother_activation": "silu"},
    "gated_residual": {"use_smoother_residual": True, "use_residual_gate": True},
    "gated_residual_alone": {"use_smoother_residual": True, "use_residual_gate": True, "use_smoother": False},
}


def weights_of(model) -> dict[str, torch.Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def naive_loss_and_outputs(model, batch, training):
    """The loss and the outputs of any head, sequence by sequence, from the equations."""
    weights, config = weights_of(model), model.config
    encoder = weights if isinstance(model, SKTformerModel) else under(weights, "sktformer")
    hidden_states = naive_hidden_states(encoder, config, batch.sequences, batch.token_types, training)
    states = hidden_states[-1]
    labels = batch.labels(type(model))
    if isinstance(model, SKTformerModel):
        return sum((state**2).sum() for state in states), states
    if isinstance(model, SKTformerForQuestionAnswering):
        logits = [naive_linear(under(weights, "qa_outputs"), state) for state in states]
        starts = naive_cross_entropy([row[:, 0] for row in logits], labels["start_positions"].tolist())
        ends = naive_cross_entropy([row[:, 1] for row in logits], labels["end_positions"].tolist())
        return (starts + ends) / 2, logits
    if isinstance(model, (SKTformerForMaskedLM, SKTformerForTokenClassification)):
        if isinstance(model, SKTformerForMaskedLM):
            logits = [naive_masked_lm_logits(weights, config, state) for state in states]
        else:
            logits = [naive_linear(under(weights, "classifier"), state) for state in states]
        flat = [
            (row, label)
            for rows, row_labels in zip(logits, labels["labels"].tolist(), strict=True)
            for row, label in zip(rows, row_labels[: len(rows)], strict=True)
        ]
        return naive_cross_entropy([row for row, _ in flat], [label for _, label in flat]), logits
    if config.classifier_pooling == "layers":
        states = [torch.cat(layers, dim=-1) for layers in zip(*hidden_states, strict=True)]
    if isinstance(model, SKTformerForSequenceMatching):
        pairs = zip(states[::2], states[1::2], strict=True)
        logits = [naive_matching_logits(weights, config, first, second) for first, second in pairs]
        return naive_cross_entropy(logits, labels["labels"].tolist()), logits
    logits = [naive_pooled_logits(weights, config, state) for state in states]
    if isinstance(model, SKTformerForMultipleChoice):
        logits = [torch.cat(pair) for pair in zip(logits[::2], logits[1::2], strict=True)]
    return naive_cross_entropy(logits, labels["labels"].tolist()), logits


FORMS = ["called", "sampled", "fused", "read", "products of waves", "folded transforms"]


@pytest.fixture(params=FORMS)
def form(request, monkeypatch) -> None:
    """
    Every form that the encoder's equations are computed in, whichever the sizes of the test make worth it.

    All projections are called with all tokens; keys and values computed where they are sampled, without and with the
    fused kernel for the token branch; no queries computed, but their weight multiplied with what is sampled; then the
    stem folded into the filters in both of its ways. Heads are computed apart in the first and the last two.
    """
    monkeypatch.setattr(attention, "is_plain", lambda module, kind: request.param != "called")
    saves = request.param not in ("called", "sampled", "fused")
    monkeypatch.setattr(attention, "saves_multiply_adds", lambda config, device: saves)
    joins = request.param in ("sampled", "fused", "read")
    monkeypatch.setattr(attention, "joins_heads", lambda number, width: joins)
    folded = request.param in ("products of waves", "folded transforms")
    monkeypatch.setattr(circle, "count_multiply_adds", lambda *sizes: (1, 0) if folded else (0, 1))
    monkeypatch.setattr(circle, "MAX_PRODUCT_POSITIONS", 512 if request.param == "products of waves" else 0)
    if request.param == "fused":
        monkeypatch.setattr(attention.SkeletonAttention, "is_fused", lambda self: self.config.use_token_attention)


@pytest.mark.parametrize("variant", VARIANTS)
def test_initialisation_writes_everything(variant):
    """What a checkpoint lacks is memory as it was found until then."""
    model = make_model(SKTformerForMaskedLM, **VARIANTS[variant])
    with torch.no_grad():
        for values in (*model.parameters(), *model.buffers()):
            values.fill_(torch.nan if values.is_floating_point() else -1)
            values._is_hf_initialized = False
    for module in model.modules():
        model._init_weights(module)
    for name, values in model.state_dict().items():
        assert values.isfinite().all() if values.is_floating_point() else values.min() >= 0, name


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_encoder_equals_its_equations(variant, training):
    check_model(SKTformerModel, training, **VARIANTS[variant])


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("model_class", MODELS, ids=lambda c: c.__name__)
def test_heads_equal_their_equations(model_class, training):
    check_model(model_class, training, classifier_pooling="cls")


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("pooling", ["mean", "mean_std", "layers"])
@pytest.mark.parametrize("model_class", [SKTformerForSequenceClassification, *PAIR_HEADS], ids=lambda c: c.__name__)
def test_poolings_equal_their_equations(model_class, pooling, training):
    check_model(model_class, training, classifier_pooling=pooling)


def check_model(model_class, training, **overrides):
    model = make_model(model_class, **overrides).train(training)
    longest = model.config.max_position_embeddings
    batch = make_batch([longest, 1, 7, 4])
    expected_loss, expected = naive_loss_and_outputs(model, batch, training)
    expected_loss.backward()
    expected_gradients = gradients(model)
    model.zero_grad()

    inputs = batch.inputs()
    output = call(model, inputs, **batch.labels(model_class))
    if model_class is SKTformerModel:
        loss = (output.last_hidden_state * inputs["attention_mask"].unsqueeze(-1)).square().sum()
    else:
        loss = output.loss
    loss.backward()

    assert_equal(loss, expected_loss)
    assert gradients(model).keys() == expected_gradients.keys()
    for name, gradient in gradients(model).items():
        assert_equal(gradient, expected_gradients[name], name)
    if model_class is SKTformerForMaskedLM and training:
        labels = batch.labels(model_class)["labels"]
        rows = [row[labels[i, : len(row)] != -100] for i, row in enumerate(expected)]
        assert_equal(output.logits, torch.cat(rows))
    elif tokens := token_outputs(output):
        for row, states in enumerate(expected):
            got = torch.stack([values[row, : len(states)] for values in tokens], dim=-1)
            assert_equal(got.squeeze(-1) if len(tokens) == 1 else got, states)
    else:
        assert_equal(output.logits, torch.stack(expected))


@pytest.mark.parametrize("num_positions", [1, 2, 9, 16])
def test_kernel_of_reference_is_the_inverse_transform(num_positions):
    filter = torch.randn(3, num_positions // 2 + 1, 2, dtype=torch.float64)
    expected = torch.fft.irfft(torch.view_as_complex(filter), n=num_positions)
    assert_equal(naive_kernel(filter, num_positions), expected)


@pytest.mark.parametrize(("length", "num_positions"), [(1, 1), (1, 16), (9, 16), (16, 16), (31, 31), (40, 63)])
def test_fourier_convolution_is_the_circular_sum(length, num_positions):
    torch.manual_seed(length)
    inputs = torch.randn(2, length, 6, dtype=torch.float64, requires_grad=True)
    filter = torch.randn(6, num_positions // 2 + 1, 2, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(2, length, 6, dtype=torch.float64)
    outputs = fourier_convolution(inputs, filter, 3, num_positions)
    expected = torch.stack([naive_fourier_convolution(row, filter, 3, num_positions) for row in inputs])
    assert_equal(outputs, expected)
    for got, want in zip(
        torch.autograd.grad((outputs * weight).sum(), (inputs, filter)),
        torch.autograd.grad((expected * weight).sum(), (inputs, filter)),
        strict=True,
    ):
        assert_equal(got, want)


@pytest.mark.usefixtures("form")
def test_attentions_are_the_token_branch():
    model = make_model(SKTformerModel, num_hidden_layers=1)
    batch = make_batch([16, 9, 3])
    output = model(**batch.inputs(), output_attentions=True, output_hidden_states=True)
    if model.encoder.layers[0].attention.is_fused():
        assert output.attentions == ()  # a fused kernel returns no matrix
        return
    weights = weights_of(model)
    first = under(weights, "encoder.layers.0")
    (attentions,) = output.attentions
    assert attentions.shape == (3, 2, 16, 5)
    inputs = [
        naive_layer_norm(
            under(weights, "encoder.layers.0.attention_norm"), output.hidden_states[0][row, :length], 1e-5
        )
        for row, length in enumerate([16, 9, 3])
    ]
    smoothed = naive_smoother(under(first, "smoother"), model.config, inputs, training=False)
    for row, states in enumerate(smoothed):
        _, heads = naive_skeleton_attention(under(weights, "encoder.layers.0.attention"), model.config, states)
        for head, expected in enumerate(heads):
            num_tokens, num_landmarks = expected.shape
            got = attentions[row, head, :num_tokens]
            assert_equal(got[:, :num_landmarks], expected)
            assert not got[:, num_landmarks:].any()

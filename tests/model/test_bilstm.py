"""The bidirectional LSTM against torch's own, and the protocol of every kind of model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import configs
import model
from model.kinds.bilstm import BiLSTM, BiLSTMConfig, BothDirections

LENGTHS = torch.tensor([9, 4, 1])


def bilstm(**changes: object) -> BiLSTM:
    sizes = {"vocab_size": 61, "hidden_size": 24, "layers": 2, "pooled_size": 10, "dropout": 0.0}
    built = model.build(BiLSTMConfig(**{**sizes, **changes}), seed=3)  # type: ignore[arg-type]
    assert isinstance(built, BiLSTM)
    return built.eval()


def with_mood() -> BiLSTM:
    head = model.TaskHeadConfig(labels=["a", "b", "c"])
    config = model.with_task_head(bilstm().config, "mood", head)
    built = model.build(config, seed=3)
    assert isinstance(built, BiLSTM)
    return built.eval()


def some_ids() -> Tensor:
    return torch.randint(1, 61, (3, 9), generator=torch.Generator().manual_seed(0))


def reference(ours: BiLSTM) -> nn.LSTM:
    """torch's bidirectional LSTM with the same weights."""
    config = ours.config
    theirs = nn.LSTM(
        config.hidden_size,
        config.hidden_size // 2,
        config.layers,
        batch_first=True,
        bidirectional=True,
    )
    state = {}
    for number, layer in enumerate(ours.encoder.lstm):
        for part, ending in ((layer.forwards, ""), (layer.backwards, "_reverse")):
            for name, tensor in part.state_dict().items():
                state[name.replace("_l0", f"_l{number}") + ending] = tensor
    theirs.load_state_dict(state)
    return theirs


def test_states_and_pooled_state_are_those_of_torchs_lstm_over_packed_sequences() -> None:
    ours, ids = with_mood(), some_ids()
    found = ours.features(
        ids, attention_mask=LENGTHS, capture=model.Capture((0, 2), heads=("mood",))
    )
    packed = pack_padded_sequence(
        ours.embeddings.word(ids), LENGTHS, batch_first=True, enforce_sorted=False
    )
    output, (last, _) = reference(ours)(packed)
    expected, _ = pad_packed_sequence(output, batch_first=True)
    is_token = torch.arange(9) < LENGTHS[:, None]
    assert found.last_hidden_state is not None
    assert found.pooled is not None
    torch.testing.assert_close(found.last_hidden_state[is_token], expected[is_token])
    assert torch.equal(found.hidden_states[2], found.last_hidden_state)
    ends = torch.cat([last[-2], last[-1]], dim=1)
    pooled = torch.relu(ours.pooler.dense(ends))
    torch.testing.assert_close(found.pooled, pooled)
    torch.testing.assert_close(found.heads["mood"], ours.task_heads["mood"](pooled))


SPLITS, PAIR_LENGTHS = [6, 2, 5], torch.tensor([9, 7, 6])  # one text has a token, one is short


def segments() -> Tensor:
    return (torch.arange(9) >= torch.tensor(SPLITS)[:, None]).long()


def test_a_siamese_model_reads_each_text_of_a_pair_as_torchs_lstm_does() -> None:
    """States, and the hidden layer on [h1, h2, h1 * h2, |h1 - h2|] of arXiv 1903.12136."""
    ours, ids = bilstm(siamese=True), some_ids()
    capture = model.Capture((1,), last_hidden_state=True)
    with torch.no_grad():
        found = ours.features(ids, segments(), PAIR_LENGTHS, capture=capture)
        vectors, theirs, pooled = ours.embeddings.word(ids), reference(ours), []
        for row, (split, size) in enumerate(zip(SPLITS, PAIR_LENGTHS.tolist(), strict=True)):
            ends = []
            for first, last in ((1, split), (split, size)):
                output, (state, _) = theirs(vectors[row : row + 1, first:last])
                torch.testing.assert_close(found.last_hidden_state[row, first:last], output[0])
                ends.append(torch.cat([state[-2, 0], state[-1, 0]]))
            one, other = ends
            read = torch.cat([one, other, one * other, (one - other).abs()])
            pooled.append(torch.relu(ours.pooler.dense(read)))
    torch.testing.assert_close(found.pooled, torch.stack(pooled))
    assert found.hidden_states[1].shape == found.last_hidden_state.shape == (3, 9, 24)


def test_a_siamese_model_takes_equal_texts_for_equal_in_either_order() -> None:
    ours = bilstm(siamese=True)
    one, other = torch.tensor([7, 8, 9, 3]), torch.tensor([5, 6, 3])
    both = [torch.cat([torch.tensor([2]), one, one])[None]]
    both += [torch.cat([torch.tensor([2]), *pair])[None] for pair in ((one, other), (other, one))]
    firsts = [5, 5, 4]
    found = []
    ours.pooler.dense = nn.Identity()  # type: ignore[assignment]
    for ids, split in zip(both, firsts, strict=True):
        told = (torch.arange(ids.shape[1]) >= split).long()[None]
        found.append(ours.features(ids, told, capture=model.Capture(last_hidden_state=True)).pooled)
    same, ahead, back = [one[0].unflatten(0, (4, 24)) for one in found]  # through the ReLU
    assert torch.equal(same[0], same[1])
    assert not same[3].any()
    assert torch.equal(ahead[[1, 0, 2, 3]], back)


def test_a_siamese_model_learns_from_both_texts_and_is_read_back(tmp_path: Path) -> None:
    ours = bilstm(siamese=True, layers=1)
    found = ours.features(
        some_ids(), segments(), PAIR_LENGTHS, capture=model.Capture(last_hidden_state=True)
    )
    assert found.pooled is not None
    found.pooled.sum().backward()
    gradient = ours.embeddings.word.weight.grad
    assert gradient is not None
    is_read = (torch.arange(9) < PAIR_LENGTHS[:, None]) & (torch.arange(9) > 0)
    learnt = {int(token) for token in gradient.abs().sum(dim=1).nonzero()}
    assert learnt <= set(some_ids()[is_read].tolist())
    assert {int(some_ids()[0, 1]), int(some_ids()[0, 8])} <= learnt
    model.save_pretrained(ours, tmp_path)
    again = model.from_pretrained(tmp_path)
    assert torch.equal(
        again(some_ids(), segments(), PAIR_LENGTHS).pooled,
        ours(some_ids(), segments(), PAIR_LENGTHS).pooled,
    )
    assert "a siamese bidirectional LSTM of 1 layer" in (tmp_path / "README.md").read_text()
    with pytest.raises(model.ModelError, match="segment_ids: a siamese model needs them"):
        again(some_ids())


def test_a_mask_says_as_much_as_lengths_and_padding_changes_nothing() -> None:
    ours, ids = bilstm(), some_ids()
    mask = (torch.arange(9) < LENGTHS[:, None]).long()
    by_mask, by_length = ours(ids, None, mask), ours(ids * mask, None, LENGTHS)
    alone = ours(ids[1:2, :4])
    assert torch.equal(by_mask.logits[1, :4], by_length.logits[1, :4])
    torch.testing.assert_close(by_mask.logits[1, :4], alone.logits[0])
    at = ours(ids, None, mask, masked_positions=torch.tensor([2, 10]))
    torch.testing.assert_close(at.logits, by_mask.logits.flatten(0, 1)[[2, 10]])


def test_its_size_is_that_of_its_tensors_and_of_the_published_model() -> None:
    config = BiLSTMConfig(vocab_size=1000)
    size = model.describe(config)
    lstm = nn.LSTM(300, 150, bidirectional=True)
    assert size.parameters == 300 * 1000 + sum(p.numel() for p in lstm.parameters()) + 301 * 200
    siamese = model.describe(BiLSTMConfig(vocab_size=1000, siamese=True))
    assert siamese.parameters - size.parameters == 3 * 300 * 200  # of a hidden layer 1200 -> 200
    assert size.head_parameters == 301 * 300 + 2 * 300 + 1000
    assert size.sequence_length == 512


def test_dropout_is_of_what_the_heads_of_tasks_read_alone() -> None:
    head = model.TaskHeadConfig(labels=["a", "b"])
    config = model.with_task_head(bilstm(dropout=0.5).config, "mood", head)
    ours = model.build(config, seed=3).train()
    capture = model.Capture(last_hidden_state=True, heads=("mood",))
    first, second = (ours.features(some_ids(), capture=capture) for _ in range(2))
    assert torch.equal(first.pooled, second.pooled)
    assert not torch.equal(first.heads["mood"], second.heads["mood"])


@pytest.mark.parametrize(("siamese", "mlm_head"), [(False, False), (True, True)])
def test_initial_weights_are_as_spread_as_the_originals(siamese: bool, mlm_head: bool) -> None:
    """Of castorini/d-bert: uniform word vectors, and torch's own weights of its layers."""
    head = model.TaskHeadConfig(labels=["a", "b"])
    sizes = {"vocab_size": 500, "hidden_size": 60, "pooled_size": 40}
    config = model.with_task_head(
        BiLSTMConfig(**sizes, siamese=siamese, mlm_head=mlm_head), "mood", head
    )
    ours = model.build(config, seed=3)
    pairs = {
        "embeddings.word.weight": torch.empty(500, 60).uniform_(-0.25, 0.25),
        "pooler.dense": nn.Linear(240 if siamese else 60, 40),
        "task_heads.mood.linear": nn.Linear(40, 2),
        "encoder.lstm.0.forwards": nn.LSTM(60, 30),
    }
    if mlm_head:  # tied to the word vectors, which then begin as those of BERT
        pairs["embeddings.word.weight"] = torch.empty(500, 60).normal_(0.0, 0.02)
    for name, theirs in pairs.items():
        expected = {"": theirs} if isinstance(theirs, Tensor) else dict(theirs.named_parameters())
        for key, tensor in expected.items():
            found = ours.get_parameter(f"{name}.{key}".rstrip("."))
            if tensor.numel() > 1000:
                torch.testing.assert_close(found.std(), tensor.std(), rtol=0.1, atol=0)
            if mlm_head and "word" in name:
                continue
            inputs = {"pooler": 240 if siamese else 60, "task_heads": 40, "encoder": 30}
            bound = inputs.get(name.split(".")[0], 16) ** -0.5
            assert 0 < found.abs().max() <= bound


def test_attention_scores_are_refused() -> None:
    with pytest.raises(model.ModelError, match="kind bilstm has no attention"):
        bilstm()(some_ids(), output_attention_scores=True)


def test_it_is_saved_in_our_own_format_and_read_back(tmp_path: Path) -> None:
    ours = bilstm(pair_head=True)
    reason = model.save_pretrained(ours, tmp_path)
    assert "transformers has no class for a model of kind bilstm" in reason
    again = model.from_pretrained(tmp_path)
    assert again.config == ours.config
    assert torch.equal(again(some_ids()).logits, ours(some_ids()).logits)
    assert "a bidirectional LSTM of 2 layers" in (tmp_path / "README.md").read_text()


def test_layers_are_chosen_and_doubled_by_their_names() -> None:
    ours = bilstm()
    state = model.select_layers(ours.state_dict(), [1], ours.config)
    one = bilstm(layers=1)
    one.load_state_dict(state)
    weight = "encoder.lstm.1.forwards.weight_hh_l0"
    assert torch.equal(one.encoder.lstm[0].forwards.weight_hh_l0, ours.state_dict()[weight])
    config, doubled = model.double_layers(ours.state_dict(), ours.config)
    assert config.layers == 4
    assert torch.equal(doubled["encoder.lstm.3.forwards.weight_hh_l0"], ours.state_dict()[weight])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("kind: bilsm", "kind: must be one of .*bilstm.*, not bilsm; did you mean bilstm?"),
        ("kind: [bilstm]", "kind: must be one of"),
        ("{kind: bilstm, heads: 2}", "heads: is for kind: encoder, seq2seq; remove it"),
        ("pooled_size: 3", "pooled_size: is for kind: bilstm; remove it"),
        ("{kind: bilstm, poled_size: 3}", "poled_size: unknown key; did you mean pooled_size?"),
        ("{kind: bilstm, hidden_size: 7}", "hidden_size: 7 must be even"),
    ],
)
def test_keys_belong_to_the_kind(text: str, message: str) -> None:
    with pytest.raises(configs.ConfigError, match=message):
        configs.load_text(text, model.ModelConfig, "model", [], "x")  # type: ignore[type-abstract]


def test_a_section_without_a_kind_is_an_encoder_and_a_dump_is_read_back() -> None:
    def load(text: str) -> model.ModelConfig:
        return configs.load_text(text, model.ModelConfig, "model", [], "x")  # type: ignore[type-abstract]

    assert load("layers: 3") == model.EncoderConfig(layers=3)
    again = load(configs.dump(BiLSTMConfig(hidden_size=8)))
    assert again == BiLSTMConfig(hidden_size=8)


def test_layers_compute_in_float32_whatever_the_precision():
    layer = BothDirections(bilstm().config)
    x, reverse = torch.randn(3, 9, 24), torch.arange(9).flip(0).expand(3, 9)
    exact = layer(x, reverse)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(x, reverse).equal(exact)
        assert layer(x.bfloat16(), reverse).dtype == torch.float32

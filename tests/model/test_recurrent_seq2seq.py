"""The recurrent encoder-decoder against torch's LSTMs, its search, and its forms on disk."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import configs
import model
from model.kinds.recurrent_seq2seq import RecurrentSeq2Seq, RecurrentSeq2SeqConfig
from tests.model.test_bilstm import reference
from tests.model.test_seq2seq import END, LENGTHS, LONGEST, START, VOCABULARY, some_ids


def recurrent(**changes: object) -> RecurrentSeq2Seq:
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 24, "layers": 2, "initializer_range": 0.4}
    built = model.build(RecurrentSeq2SeqConfig(**{**sizes, **changes}), seed=3)  # type: ignore[arg-type]
    assert isinstance(built, RecurrentSeq2Seq)
    return built.eval()


def expected_states(ours: RecurrentSeq2Seq, source: Tensor, target: Tensor) -> Tensor:
    """The decoder's states [T - 1, H] of one pair without padding, by torch's own layers."""
    vectors = ours.embeddings.word.weight
    theirs = reference(ours)
    memory, (last, _) = theirs(vectors[source][None])
    decoder = nn.LSTM(24, 24, num_layers=2, batch_first=True)
    state = {}
    for number, layer in enumerate(ours.decoder.lstm):
        named = layer.state_dict().items()
        state |= {name.replace("_l0", f"_l{number}"): tensor for name, tensor in named}
    decoder.load_state_dict(state)
    first = torch.stack([torch.cat([last[2 * n], last[2 * n + 1]], dim=1) for n in range(2)])
    written, _ = decoder(vectors[target[:-1]][None], (first, torch.zeros_like(first)))
    weights = (written[0] @ (memory[0] @ ours.decoder.key.weight.t()).t()).softmax(dim=1)
    both = torch.cat([weights @ memory[0], written[0]], dim=1)
    return torch.tanh(both @ ours.decoder.output.weight.t())


@torch.no_grad()
def test_states_are_those_of_torchs_lstms_with_luongs_attention() -> None:
    ours, ids = recurrent(), some_ids()
    found = ours(ids, None, LENGTHS).logits
    for row in range(3):
        source, target = (ids[2 * row + n, : int(LENGTHS[2 * row + n])] for n in range(2))
        states = expected_states(ours, source, target)
        logits = states @ ours.embeddings.word.weight.t() + ours.head.bias
        torch.testing.assert_close(found[2 * row + 1, 1 : len(target)], logits)


@torch.no_grad()
def test_steps_of_decoding_are_those_of_a_whole_target() -> None:
    ours, ids = recurrent(), some_ids()
    mask = (torch.arange(8) < LENGTHS[:, None]).long()
    whole = ours(ids, None, mask).logits[1::2].log_softmax(dim=-1)
    decoding = ours.decoding(ids[0::2], LENGTHS[0::2])
    for place in range(7):
        step = decoding.log_probabilities(ids[1::2, place])
        torch.testing.assert_close(step, whole[:, place + 1])


@torch.no_grad()
@pytest.mark.parametrize("beams", [1, 3])
def test_a_search_finds_the_same_alone_and_among_others(beams: int) -> None:
    ours, sources, lengths = recurrent(initializer_range=1.5), some_ids()[0::2], LENGTHS[0::2]

    def search(rows: slice) -> list[list[int]]:
        chosen = sources[rows, : int(lengths[rows].max())]
        decoding = ours.decoding(chosen, lengths[rows])
        start = torch.full((len(chosen),), START)
        if beams == 1:
            return model.greedy_search(decoding, start, END, LONGEST)
        return model.beam_search(decoding, start, END, LONGEST, beams, 0.6, "gnmt")

    together = search(slice(0, 3))
    assert together == [search(slice(n, n + 1))[0] for n in range(3)]
    assert len({tuple(tokens) for tokens in together}) > 1


@pytest.mark.slow
def test_it_learns_to_copy_backwards() -> None:
    """Which needs attention, or a memory of every token."""
    ours = recurrent(dropout=0.0, initializer_range=0.1, hidden_size=48, layers=1).train()
    optimizer = torch.optim.Adam(ours.parameters(), lr=5e-3)
    generator = torch.Generator().manual_seed(1)
    for _ in range(300):
        words = torch.randint(4, 14, (32, 3), generator=generator)
        ends = torch.full((32, 1), START), torch.full((32, 1), END)
        source, target = (torch.cat([ends[0], x, ends[1]], 1) for x in (words, words.flip(1)))
        logits = ours(torch.stack([source, target], dim=1).flatten(0, 1)).logits[1::2, 1:]
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), target[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.5


def test_flops_are_those_that_torch_counts() -> None:
    ours, ids = recurrent(dropout=0.0), some_ids()
    with torch.no_grad(), FlopCounterMode(display=False, custom_mapping=ours.kernel_flops) as one:
        ours(ids, masked_positions=torch.arange(9, 16))
    size = ours.flops_per_token(8, 7 / ids.numel()) * ids.numel()
    assert one.get_total_flops() <= size <= 1.15 * one.get_total_flops()


def test_it_is_saved_in_our_own_format_and_read_back(tmp_path: Path) -> None:
    ours, ids = recurrent(), some_ids()
    reason = model.save_pretrained(ours, tmp_path)
    assert "transformers has no class for a model of kind recurrent_seq2seq" in reason
    again = model.from_pretrained(tmp_path)
    assert again.config == ours.config
    assert torch.equal(again(ids, None, LENGTHS).logits, ours(ids, None, LENGTHS).logits)
    assert "a recurrent encoder-decoder with attention" in (tmp_path / "README.md").read_text()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 7}, "hidden_size: 7 must be even"),
        ({"mlm_head": False}, "mlm_head: must be true"),
        ({"pair_head": True}, "pair_head: a model of kind recurrent_seq2seq has none"),
    ],
)
def test_keys_that_make_no_sense_are_named(changes: dict[str, object], message: str) -> None:
    text = str({"kind": "recurrent_seq2seq", **changes}).lower()
    with pytest.raises(configs.ConfigError, match=message):
        configs.load_text(text, model.ModelConfig, "model", [], "x")  # type: ignore[type-abstract]

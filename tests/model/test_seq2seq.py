"""The sequence-to-sequence model and its search, against `transformers` and by brute force."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import BartConfig, BartForConditionalGeneration

import model
from model.kinds.seq2seq import Seq2Seq, Seq2SeqConfig

VOCABULARY, START, END, LONGEST = 37, 2, 3, 9
LENGTHS = torch.tensor([8, 8, 5, 4, 2, 7])  # of the rows of three pairs


def seq2seq(**changes: object) -> Seq2Seq:
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 24, "layers": 2, "decoder_layers": 3}
    more = {"heads": 4, "ffn_size": 40, "max_positions": 12, "initializer_range": 0.3}
    built = model.build(Seq2SeqConfig(**{**sizes, **more, **changes}), seed=3)  # type: ignore[arg-type]
    assert isinstance(built, Seq2Seq)
    return built.eval()


def some_ids() -> Tensor:
    ids = torch.randint(4, VOCABULARY, (6, 8), generator=torch.Generator().manual_seed(0))
    return ids * (torch.arange(8) < LENGTHS[:, None])


def bart(ours: Seq2Seq) -> BartForConditionalGeneration:
    """BART of `transformers` with the same weights; its positions begin at row 2 of their table."""
    config = ours.config
    theirs = BartForConditionalGeneration(
        BartConfig(
            vocab_size=config.vocab_size,
            d_model=config.hidden_size,
            encoder_layers=config.layers,
            decoder_layers=config.decoder_layers,
            encoder_attention_heads=config.heads,
            decoder_attention_heads=config.heads,
            encoder_ffn_dim=config.ffn_size,
            decoder_ffn_dim=config.ffn_size,
            max_position_embeddings=config.max_positions,
            pad_token_id=0,
            bos_token_id=START,
            eos_token_id=END,
            decoder_start_token_id=START,
            forced_eos_token_id=None,
            attn_implementation="eager",
        )
    ).eval()
    layer = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "output": "out_proj"}
    state = {"model.shared.weight": ours.embeddings.word.weight}
    state["final_logits_bias"] = ours.head.bias[None]
    tables = {"encoder": ours.embeddings, "decoder": ours.decoder}
    for side, part in tables.items():
        position = f"model.{side}.embed_positions.weight"
        state[position] = torch.cat([theirs.state_dict()[position][:2], part.position.weight])
        state |= _named(f"model.{side}.layernorm_embedding", part.norm)
    for side, stack in (("encoder", ours.encoder), ("decoder", ours.decoder)):
        self_attention = ours.encoder.attention if side == "encoder" else stack.self_attention
        for number, feed_forward in enumerate(stack.feed_forward):
            prefix = f"model.{side}.layers.{number}"
            attentions = {"self_attn": self_attention[number]}
            if side == "decoder":
                attentions["encoder_attn"] = stack.cross_attention[number]
            for name, attention in attentions.items():
                for own, other in layer.items():
                    state |= _named(f"{prefix}.{name}.{other}", getattr(attention, own))
                state |= _named(f"{prefix}.{name}_layer_norm", attention.norm)
            (only,) = feed_forward.stack
            state |= _named(f"{prefix}.fc1", only.input) | _named(f"{prefix}.fc2", only.output)
            state |= _named(f"{prefix}.final_layer_norm", only.norm)
    missing = theirs.load_state_dict(state, strict=False)
    tied = {"model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight"}
    assert not missing.unexpected_keys
    assert set(missing.missing_keys) <= {*tied, "lm_head.weight"}
    return theirs


def _named(prefix: str, module: nn.Module | None) -> dict[str, Tensor]:
    assert module is not None
    return {f"{prefix}.{name}": tensor for name, tensor in module.state_dict().items()}


@pytest.fixture(scope="module")
def pair() -> tuple[Seq2Seq, BartForConditionalGeneration]:
    ours = seq2seq()
    with torch.no_grad():  # biases and norms that do nothing would hide where they are
        for parameter in ours.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=_drawn(len(parameter))))
    return ours, bart(ours)


def _drawn(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _on_bart(theirs: BartForConditionalGeneration, ids: Tensor) -> Tensor:
    mask = (torch.arange(8) < LENGTHS[:, None]).long()
    found = theirs(input_ids=ids[0::2], attention_mask=mask[0::2], decoder_input_ids=ids[1::2, :-1])
    return found.logits


def test_logits_are_those_of_bart_with_the_same_weights(pair) -> None:
    ours, theirs = pair
    ids = some_ids()
    found = ours(ids, None, LENGTHS).logits[1::2]
    is_token = torch.arange(1, 8) < LENGTHS[1::2, None]
    torch.testing.assert_close(found[:, 1:][is_token], _on_bart(theirs, ids)[is_token])
    at = torch.tensor([9, 12, 41])  # in the first and the last target
    rows = ours(ids, None, LENGTHS, masked_positions=at).logits
    torch.testing.assert_close(rows, ours(ids, None, LENGTHS).logits.flatten(0, 1)[at])


@pytest.mark.parametrize("norm_placement", ["post", "pre"])
def test_a_state_of_the_target_depends_on_what_is_in_front_of_it_and_on_the_source(
    norm_placement: str,
) -> None:
    ours, ids = seq2seq(norm_placement=norm_placement), some_ids()
    at = 4
    for row, column, changes in [(1, at, False), (1, at + 1, False), (1, at - 1, True)]:
        other = ids.clone()
        other[row, column] = 4 + (ids[row, column] - 3) % (VOCABULARY - 4)
        before, after = (ours(one, None, LENGTHS).logits[1, at] for one in (ids, other))
        assert torch.equal(before, after) != changes
    other = ids.clone()
    other[0, 0] = 4 + (ids[0, 0] - 3) % (VOCABULARY - 4)
    logits = [ours(one, None, LENGTHS).logits for one in (ids, other)]
    assert not torch.allclose(logits[0][1, 1:], logits[1][1, 1:])
    assert torch.equal(logits[0][3:], logits[1][3:]), "an example depends on another"


@pytest.mark.parametrize("norm_placement", ["post", "pre"])
def test_steps_with_a_cache_say_what_the_whole_target_says(norm_placement: str) -> None:
    ours, ids = seq2seq(norm_placement=norm_placement), some_ids()
    whole = ours(ids, None, LENGTHS).logits[1::2].log_softmax(dim=-1)
    decoding = ours.decoding(ids[0::2], LENGTHS[0::2])
    for column in range(7):
        found = decoding.log_probabilities(ids[1::2, column])
        torch.testing.assert_close(found, whole[:, column + 1], atol=2e-5, rtol=1e-4)


def _theirs(theirs: BartForConditionalGeneration, **settings: object) -> list[list[int]]:
    mask = (torch.arange(8) < LENGTHS[0::2, None]).long()
    found = theirs.generate(
        input_ids=some_ids()[0::2], attention_mask=mask, max_new_tokens=LONGEST, **settings
    )
    return [model.generation.before(row[1:], END) for row in found.tolist()]


def test_greedy_search_finds_what_transformers_finds(pair) -> None:
    ours, theirs = pair
    with torch.no_grad():
        decoding = ours.decoding(some_ids()[0::2], LENGTHS[0::2])
    found = model.greedy_search(decoding, torch.full((3,), START), END, LONGEST)
    assert found == _theirs(theirs, num_beams=1, do_sample=False)
    assert any(found)


@pytest.mark.parametrize(("beams", "length_penalty"), [(2, 1.0), (4, 0.6), (5, 0.0), (3, 2.0)])
def test_beam_search_finds_what_transformers_finds(pair, beams: int, length_penalty: float) -> None:
    ours, theirs = pair
    with torch.no_grad():
        decoding = ours.decoding(some_ids()[0::2], LENGTHS[0::2])
    start = torch.full((3,), START)
    found = model.beam_search(decoding, start, END, LONGEST, beams, length_penalty)
    settings = {"num_beams": beams, "length_penalty": length_penalty, "do_sample": False}
    assert found == _theirs(theirs, early_stopping="never", **settings)


class FixedTable:
    """A decoding whose next token depends on the last one alone: log probabilities [V, V]."""

    def __init__(self, table: Tensor) -> None:
        self.table = table

    def log_probabilities(self, tokens: Tensor) -> Tensor:
        return self.table[tokens]

    def repeat(self, count: int) -> None:
        """Nothing is remembered."""

    def select(self, rows: Tensor) -> None:
        """Nothing is remembered."""


@pytest.mark.parametrize("length_penalty", [0.0, 0.7, 1.5])
def test_a_wide_beam_finds_the_best_of_all_sequences(length_penalty: float) -> None:
    size, end, longest = 4, 3, 4
    for seed in range(5):
        logits = 2 * torch.randn(size, size, generator=_drawn(seed))
        table = logits.log_softmax(dim=-1)

        def score(tokens: tuple[int, ...], table: Tensor = table) -> float:
            steps = zip((0, *tokens), tokens, strict=False)
            total = sum(float(table[before, after]) for before, after in steps)
            return total / len(tokens) ** length_penalty

        ended = [
            (*body, end)
            for length in range(longest)
            for body in itertools.product(range(end), repeat=length)
        ]
        cut = list(itertools.product(range(end), repeat=longest))
        best = max([*ended, *cut], key=score)
        (found,) = model.beam_search(
            FixedTable(table), torch.tensor([0]), end, longest, 64, length_penalty
        )
        assert found == [token for token in best if token != end]


def test_flops_are_those_that_torch_counts() -> None:
    ours = seq2seq(dropout=0.0)
    ids = some_ids()
    with FlopCounterMode(display=False) as counter:
        ours(ids, masked_positions=torch.arange(9, 16))
    # torch counts the 7 positions of each target that are run, of 8.
    expected = ours.config
    size = ours.flops_per_token(8, 7 / ids.numel()) * ids.numel()
    assert expected.layers == 2
    assert counter.get_total_flops() <= size <= 1.1 * counter.get_total_flops()


def test_it_is_saved_in_our_own_format_and_read_back(tmp_path: Path) -> None:
    ours, ids = seq2seq(), some_ids()
    assert "transformers has no class for a model of kind seq2seq" in model.save_pretrained(
        ours, tmp_path
    )
    again = model.from_pretrained(tmp_path)
    assert again.config == ours.config
    assert torch.equal(again(ids).logits, ours(ids).logits)
    assert "2 encoder and 3 decoder layers" in (tmp_path / "README.md").read_text()

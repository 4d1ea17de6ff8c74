"""The heads of a model: the masked-LM transform, those that tasks add, and a CRF over tags.

A head of branches has a classifier after every layer, so that easy examples can leave early.

The score of a sequence of tags is the sum of its emissions (the logits of a tagging head), of a
weight for each pair of neighbouring tags, and of weights for its first and its last tag. The chain
runs over the positions where a mask is true: those between them (further pieces of a word) are
passed over. Shapes: B texts, L positions, K tags.
"""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from configs.kinds import require_returned
from model.attention_kernel import PLAIN, AttentionPattern, attend, visible_keys
from model.documents import AttentionMask, Documents
from model.errors import ModelError
from model.model_config import ModelConfig
from model.parts import ACTIVATIONS, LayerNorm
from model.precision import Dense
from model.task_head_config import TaskHeadConfig


class Transitions(NamedTuple):
    """The weights: between [K, K], from the row's tag to the column's; first [K]; last [K]."""

    between: Tensor
    first: Tensor
    last: Tensor


class ConditionalRandomField(nn.Module):
    """The parameters. All are zero at first: each tag is then chosen for itself."""

    def __init__(self, tags: int) -> None:
        super().__init__()
        self.between = nn.Parameter(torch.zeros(tags, tags))
        self.first = nn.Parameter(torch.zeros(tags))
        self.last = nn.Parameter(torch.zeros(tags))

    def forward(self) -> Transitions:
        """Copies, in the graph: ZeRO-3 takes the parameters back when this returns."""
        return Transitions(self.between.clone(), self.first.clone(), self.last.clone())


def log_likelihood(
    emissions: Tensor, transitions: Transitions, tags: Tensor, mask: Tensor
) -> Tensor:
    """The log-probability of the tags of each text, float32 [B]; 0 for a text without any.

    emissions [B, L, K]; tags int64 [B, L], read where the bool `mask` [B, L] is true.
    """
    order, real = _in_front(mask)
    steps = _along(emissions, order)
    chosen = tags.gather(1, order).masked_fill(~real, 0)
    weights = Transitions(*(weight.float() for weight in transitions))
    return _score(steps, weights, chosen, real) - _log_partition(steps, weights, real)


def decode(emissions: Tensor, transitions: Transitions, mask: Tensor) -> Tensor:
    """The best tags of each text (Viterbi), int64 [B, L], and -1 where the mask is false."""
    order, real = _in_front(mask)
    steps = _along(emissions, order)
    weights = Transitions(*(weight.float() for weight in transitions))
    best = _viterbi(steps, weights, real)
    return torch.empty_like(order).scatter(1, order, best.masked_fill(~real, -1))


def _in_front(mask: Tensor) -> tuple[Tensor, Tensor]:
    """Positions in an order that has those of the chain first, and which they are: [B, L] each.

    The shapes depend on no values, so that a GPU need not wait for them.
    """
    order = (~mask).byte().argsort(dim=1, stable=True)
    places = torch.arange(mask.shape[1], device=mask.device)
    return order, places < mask.sum(dim=1, keepdim=True)


def _along(emissions: Tensor, order: Tensor) -> Tensor:
    tags = emissions.shape[-1]
    return emissions.float().gather(1, order[..., None].expand(-1, -1, tags))


def _score(steps: Tensor, weights: Transitions, tags: Tensor, real: Tensor) -> Tensor:
    """The score of these tags [B]."""
    emitted = steps.gather(2, tags[..., None]).squeeze(2).masked_fill(~real, 0.0).sum(dim=1)
    moves = weights.between[tags[:, :-1], tags[:, 1:]].masked_fill(~real[:, 1:], 0.0).sum(dim=1)
    final = tags.gather(1, (real.sum(dim=1, keepdim=True) - 1).clamp(min=0)).squeeze(1)
    ends = weights.first[tags[:, 0]] + weights.last[final]
    return emitted + moves + ends.masked_fill(~real[:, 0], 0.0)


def _log_partition(steps: Tensor, weights: Transitions, real: Tensor) -> Tensor:
    """The log of the sum over all sequences of tags, by the forward algorithm: [B]."""
    scores = weights.first + steps[:, 0]
    for place in range(1, steps.shape[1]):
        arriving = scores[:, :, None] + weights.between
        further = torch.logsumexp(arriving, dim=1) + steps[:, place]
        scores = torch.where(real[:, place, None], further, scores)
    total = torch.logsumexp(scores + weights.last, dim=1)
    return total.masked_fill(~real[:, 0], 0.0)


def _viterbi(steps: Tensor, weights: Transitions, real: Tensor) -> Tensor:
    """The tags with the highest score, int64 [B, places], without meaning beyond a chain's end."""
    scores, origins = weights.first + steps[:, 0], []
    for place in range(1, steps.shape[1]):
        best, origin = (scores[:, :, None] + weights.between).max(dim=1)
        scores = torch.where(real[:, place, None], best + steps[:, place], scores)
        origins.append(origin)
    tag = (scores + weights.last).argmax(dim=1)
    path = [tag]
    for place in range(len(origins), 0, -1):
        before = origins[place - 1].gather(1, tag[:, None]).squeeze(1)
        tag = torch.where(real[:, place], before, tag)
        path.append(tag)
    return torch.stack(path[::-1], dim=1)


class ProjectionParts(NamedTuple):
    """The parameters of a vocabulary projection.

    word: the word embedding itself, [V, its size], or an untied matrix, or None where the input is
    the logits themselves; bias: [V]; extra: [E - that size, V], the columns that the word embedding
    lacks.
    """

    word: Tensor | None
    bias: Tensor | None
    extra: Tensor | None = None


def vocabulary_logits(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """Logits [..., V] of a vocabulary projection's input [..., E], by its weight and bias."""
    return x if weight is None else F.linear(x, weight, bias)


class MaskedLanguageModelHead(nn.Module):
    """Dense layer, activation and norm before the vocabulary projection, and its own parameters.

    The projection's weight is the word embedding, or ``decoder`` [V, E] where it is untied.
    MobileBERT's word embedding is narrower than the input: the columns that are missing are
    ``extra`` [hidden - embedding, V].
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width = config.vocabulary_input_size
        self.activation = ACTIVATIONS[config.head_activation or config.activation]
        self.dense = self.norm = None
        if config.head_transform:
            self.dense = Dense(config.hidden_size, width, bias=config.head_bias)
            self.norm = LayerNorm(width, eps=config.norm_eps, bias=config.norm_bias)
        self.decoder = None
        if not config.tied_decoder:
            self.decoder = nn.Parameter(torch.zeros(config.vocab_size, width))
        self.bias = nn.Parameter(torch.zeros(config.vocab_size)) if config.decoder_bias else None
        self.extra = None
        if width > config.word_size:
            self.extra = nn.Parameter(torch.zeros(width - config.word_size, config.vocab_size))

    def forward(self, x: Tensor) -> Tensor:
        """Map hidden states [..., H] to the vocabulary projection's input [..., E]."""
        if self.dense is None or self.norm is None:
            return x
        return self.norm(self.activation(self.dense(x)))


class OutputBias(nn.Module):
    """The bias of the vocabulary projection, whose input are the decoder's states themselves."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(config.vocab_size))

    def forward(self, x: Tensor) -> Tensor:
        """Map the decoder's states [..., H] to the vocabulary projection's input, the same."""
        return x


class Transform(nn.Module):
    """The dense layer before a task head's output, with an activation and perhaps a norm."""

    def __init__(self, config: ModelConfig, kind: str, size: int) -> None:
        super().__init__()
        has_norm = kind == "norm"
        name = (config.head_activation or config.activation) if has_norm else kind
        self.activation = ACTIVATIONS[name]
        self.dense = Dense(size, size, bias=config.head_bias or not has_norm)
        self.norm = None
        if has_norm:
            self.norm = LayerNorm(size, eps=config.norm_eps, bias=config.norm_bias)

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., size] to [..., size]."""
        y = self.activation(self.dense(x))
        return y if self.norm is None else self.norm(y)


class OutputOrder(nn.Module):
    """The outputs of a head, in the order of the task's labels.

    A job puts the rows of an output layer into that order, and this buffer where it is called so.
    """

    order: Tensor

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.register_buffer("order", torch.arange(float(outputs)))

    def forward(self, x: Tensor) -> Tensor:
        """Reorder [..., outputs]."""
        return x.index_select(-1, self.order.long())


class TaskHead(nn.Module):
    """A task's head on a model's states, in the form of its `TaskHeadConfig`."""

    def __init__(self, config: ModelConfig, head: TaskHeadConfig) -> None:
        super().__init__()
        self.head = head
        is_pooled = head.pooling == "pooler"
        size = config.pooled_size if is_pooled else config.hidden_size * max(1, len(head.layers))
        kind = "none" if head.module else head.transform
        self.transform = None if kind == "none" else Transform(config, kind, size)
        rate = config.dropout_rate("head") if head.dropout is None else head.dropout
        self.dropout = nn.Dropout(rate)
        self.module: nn.Module | None = None
        self.linear: nn.Module | None = None
        if head.module is not None:
            built = head.module.build(size, head.outputs)
            name = f"{type(head.module).__name__}.build"
            self.module = require_returned(built, nn.Module, name)
            self.linear = OutputOrder(head.outputs)
        elif head.outputs:
            self.linear = Dense(size + len(head.numbers), head.outputs)
        self.crf = ConditionalRandomField(head.outputs) if head.crf else None

    def forward(
        self, x: Tensor, numbers: Tensor | None = None, attention_mask: Tensor | None = None
    ) -> Tensor:
        """Map what the head reads, [B, size] or [B, L, size], to its output [..., outputs].

        numbers: [B, K], as in the table, for a head that reads such. Raises ModelError without.
        The mask, as in `Model.encode`, is for a module of its own.
        """
        if self.module is not None:
            shape = (*x.shape[: 2 if self.head.per_token else 1], self.head.outputs)
            x = self.module(self.dropout(x), token_mask(x, attention_mask))
            name = type(self.module).__name__
            if require_returned(x, Tensor, f"{name}.forward").shape != shape:
                raise ModelError(f"{name}: must return {list(shape)}, not {list(x.shape)}")
        if self.transform is not None:
            x = self.transform(x)
        if self.head.activation:
            x = ACTIVATIONS[self.head.activation](x)
        if isinstance(self.linear, OutputOrder):
            x = self.linear(x)
        elif self.linear is not None:
            x = self.dropout(x)
            if self.head.numbers:
                x = torch.cat([x, self._standardised(numbers).to(x.dtype)], dim=-1)
            x = self.linear(x)
        return F.normalize(x.float(), dim=-1) if self.head.normalise else x

    def _standardised(self, numbers: Tensor | None) -> Tensor:
        """The numbers [B, K] less the means of training, over its standard deviations; float64."""
        names = self.head.numbers
        if numbers is None or numbers.shape[-1] != len(names):
            given = "" if numbers is None else f", and not {numbers.shape[-1]} columns"
            raise ModelError(
                f"numbers: give {', '.join(names)} of each text, [B, {len(names)}]{given}"
            )
        numbers = numbers.double()
        if not self.head.means:  # until the training file is read
            return numbers
        statistics = torch.tensor([self.head.means, self.head.deviations], dtype=numbers.dtype)
        means, deviations = statistics.to(numbers.device, non_blocking=True)
        return (numbers - means) / deviations


def token_mask(states: Tensor, attention_mask: Tensor | None) -> Tensor | None:
    """Where states [B, L, H] are those of tokens, bool [B, L]; the mask as in `Model.encode`."""
    if attention_mask is None or attention_mask.dim() > 1:
        return None if attention_mask is None else attention_mask.ne(0)
    return torch.arange(states.shape[1], device=states.device) < attention_mask[:, None]


def first_token(states: Tensor, attention_mask: AttentionMask | None) -> Tensor:
    """The state of each text's first token, [B, H] of [B, L, H]; [N, H] of `Documents`."""
    if isinstance(attention_mask, Documents):
        return attention_mask.first_states(states)
    return states[:, 0]


def mean_over_tokens(states: Tensor, attention_mask: AttentionMask | None) -> Tensor:
    """The mean of the states [B, L, H] of each text's tokens, [B, H]; [N, H] of `Documents`.

    The mask is as in `visible_keys`.
    """
    if isinstance(attention_mask, Documents):
        return attention_mask.mean_states(states)
    mask = token_mask(states, attention_mask)
    if mask is None:
        return states.mean(dim=1)
    wide = states.to(torch.promote_types(states.dtype, torch.float32))
    weights = mask.to(wide.dtype)[..., None]
    return ((wide * weights).sum(dim=1) / weights.sum(dim=1).clamp(min=1)).to(states.dtype)


BRANCH_WIDTH, BRANCH_HEADS = 128, 2


class BranchDense(Dense):
    """A dense layer that begins with torch's own initial values, as in FastBERT's code."""


class Branch(nn.Module):
    """A classifier of one layer's states (FastBERT, arXiv 2004.02178; the sizes of its code).

    A dense layer to 128 with tanh, self-attention of 2 heads, of which only the first token's
    output is computed, a dense layer with tanh, and a dense layer to the labels.
    """

    def __init__(self, config: ModelConfig, labels: int) -> None:
        super().__init__()
        self.narrow = BranchDense(config.hidden_size, BRANCH_WIDTH)
        self.query = BranchDense(BRANCH_WIDTH, BRANCH_WIDTH)
        self.key = BranchDense(BRANCH_WIDTH, BRANCH_WIDTH)
        self.value = BranchDense(BRANCH_WIDTH, BRANCH_WIDTH)
        self.output = BranchDense(BRANCH_WIDTH, BRANCH_WIDTH)
        self.dense = BranchDense(BRANCH_WIDTH, BRANCH_WIDTH)
        self.linear = BranchDense(BRANCH_WIDTH, labels)
        self.dropout = config.dropout_rate("attention")

    def forward(self, states: Tensor, attention_mask: Tensor | None) -> Tensor:
        """Map states [B, L, H] to logits [B, labels]; the mask as in `visible_keys`."""
        x = torch.tanh(self.narrow(states))
        q, k, v = _split(self.query(x[:, :1])), _split(self.key(x)), _split(self.value(x))
        visible = visible_keys(attention_mask, x.shape[1], 0, x.device)
        dropout = self.dropout if self.training else 0.0
        pattern = AttentionPattern.of(PLAIN, visible, q.dtype)
        mixed = attend(q, k, v, pattern, dropout)  # [B, heads, 1, D]
        first = torch.tanh(self.dense(self.output(mixed.flatten(1))))
        return self.linear(first)


class BranchedHead(nn.Module):
    """A branch after every layer; that of the last layer is the teacher of the others."""

    def __init__(self, config: ModelConfig, labels: int) -> None:
        super().__init__()
        self.branches = nn.ModuleList(Branch(config, labels) for _ in range(config.layers - 1))
        self.last = Branch(config, labels)

    def __iter__(self) -> Iterator[nn.Module]:
        """The branches in the order of the layers, the last one included."""
        yield from self.branches
        yield self.last

    def earlier(self, states: Sequence[Tensor], attention_mask: Tensor | None) -> Tensor:
        """The logits [layers - 1, B, labels] of all branches but the last.

        states: the output [B, L, H] of each layer but the last. It is detached: a branch never
        trains the layers.
        """
        pairs = zip(self.branches, states, strict=True)
        return torch.stack([branch(state.detach(), attention_mask) for branch, state in pairs])


def uncertainty(logits: Tensor) -> Tensor:
    """The entropy of softmax(logits [B, K]) over ln K, float32 [B]: 0 is certain, 1 is uniform."""
    log_p = F.log_softmax(logits.float(), dim=-1)
    return -(log_p.exp() * log_p).sum(dim=-1) / math.log(logits.shape[-1])


def _split(x: Tensor) -> Tensor:
    """[B, L, 128] to [B, heads, L, D]."""
    return x.unflatten(2, (BRANCH_HEADS, BRANCH_WIDTH // BRANCH_HEADS)).transpose(1, 2)

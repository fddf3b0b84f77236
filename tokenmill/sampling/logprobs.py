"""Log-probabilities of tokens under given logits: of those drawn, of the likeliest, of given ids.

Shapes: R rows, V vocabulary, K likeliest tokens, I given ids, C = 2 + 2 K + I columns.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

LOWEST = torch.finfo(torch.float32).min  # instead of -inf
# A temperature outside of these changes nothing any more.
_TEMPERATURES = (1e-30, 1e30)
# torch splits one long sum between threads, but not many short ones: a row's sum must not depend on how many
# rows there are.
_SUM_LENGTH = 4096
# Ordering takes several numbers for each logit, and prompts have logits of a thousand rows.
_ROWS_AT_ONCE = 64


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural logarithms; a token without probability has the lowest float32.

    One tensor, because a step that brings several to the host pays for each of them.
    """

    packed_RC: torch.Tensor  # int32; the columns of the properties below, floats as their bits
    num_top: int

    @property
    def tokens_R(self) -> torch.Tensor:
        """The tokens that were drawn, int32; below 0 where none was (`Draw.told_R`)."""
        return self.packed_RC[:, 0]

    @property
    def token_R(self) -> torch.Tensor:
        """Of the tokens that were drawn, float32."""
        return self.packed_RC[:, 1].view(torch.float32)

    @property
    def top_RK(self) -> torch.Tensor:
        """Of the likeliest tokens, float32, descending; fewer than were asked for if there are no more."""
        return self.packed_RC[:, 2 : 2 + self.num_top].view(torch.float32)

    @property
    def top_ids_RK(self) -> torch.Tensor:
        """Which these are, int32."""
        return self.packed_RC[:, 2 + self.num_top : 2 + 2 * self.num_top]

    @property
    def given_RI(self) -> torch.Tensor:
        """Of the given ids, float32."""
        return self.packed_RC[:, 2 + 2 * self.num_top :].view(torch.float32)


def effective_temperatures(temperatures_R: torch.Tensor, top_ks_R: torch.Tensor) -> torch.Tensor:
    """The temperature under which a row's log-probabilities are told: 1 for a greedy row."""
    greedy_R = (temperatures_R <= 0) | (top_ks_R == 1)
    return temperatures_R.clamp(*_TEMPERATURES).masked_fill(greedy_R, 1.0)


def token_logprobs(
    logits_RV: torch.Tensor,
    temperatures_R: torch.Tensor,
    tokens_R: torch.Tensor,
    given_ids_RI: torch.Tensor,
    *,
    num_top: int,
) -> TokenLogprobs:
    """Log-softmax of logits / temperature at `tokens_R`, at the likeliest and at `given_ids_RI` (int64).

    `logits_RV` is only read; NaN counts as -inf, and a token below 0 is none. On CUDA nothing is
    synchronised and the launches can be captured in a graph.
    """
    num_top = min(num_top, logits_RV.shape[1])
    pack = pack_on_gpu if logits_RV.is_cuda else pack_torch
    packed_RC = pack(logits_RV, temperatures_R, tokens_R, given_ids_RI, num_top=num_top)
    return TokenLogprobs(packed_RC, num_top)


def pack_on_gpu(
    logits_RV: torch.Tensor,
    temperatures_R: torch.Tensor,
    tokens_R: torch.Tensor,
    given_ids_RI: torch.Tensor,
    *,
    num_top: int,
) -> torch.Tensor:
    """As `pack_torch`, by kernels."""
    from tokenmill.kernels import triton_logprobs

    arguments = (logits_RV, temperatures_R, tokens_R)
    if num_top <= triton_logprobs.MOST_TOP:
        return triton_logprobs.pack_logprobs(*arguments, given_ids_RI, num_top=num_top)
    parts = logits_RV.split(_ROWS_AT_ONCE)
    ids_RK = torch.cat([_likeliest_on_gpu(clean(part.float()), num_top) for part in parts])
    ids_RC = torch.cat([ids_RK, given_ids_RI], 1)
    packed_RC = triton_logprobs.pack_logprobs(*arguments, ids_RC, num_top=0)
    head_RC, rest_RI = packed_RC[:, : 2 + num_top], packed_RC[:, 2 + num_top :]
    return torch.cat([head_RC, ids_RK.int(), rest_RI], 1)


def pack_torch(
    logits_RV: torch.Tensor,
    temperatures_R: torch.Tensor,
    tokens_R: torch.Tensor,
    given_ids_RI: torch.Tensor,
    *,
    num_top: int,
) -> torch.Tensor:
    """The columns of `TokenLogprobs`, int32 [R, C]; `num_top` is at most the size of the vocabulary.

    Of equals among the likeliest the lowest id goes first, so that those of a row are the first of as many
    more as others want.
    """
    values_RV = clean(logits_RV.float())
    maximum_R1 = values_RV.amax(1, keepdim=True).clamp_(min=LOWEST)
    scales_R1 = 1 / temperatures_R[:, None]
    normalizer_R1 = _sums(((values_RV - maximum_R1) * scales_R1).exp_()).log_()

    def bits(values: torch.Tensor) -> torch.Tensor:
        logprobs = (values - maximum_R1) * scales_R1 - normalizer_R1
        logprobs = logprobs.nan_to_num_(nan=LOWEST)  # no token has probability
        return logprobs.clamp_(min=LOWEST, max=0.0).view(torch.int32)

    top_ids_RK = _likeliest(values_RV, num_top)
    return torch.cat(
        [
            tokens_R[:, None].int(),
            bits(values_RV.gather(1, tokens_R[:, None].clamp(min=0))),
            bits(values_RV.gather(1, top_ids_RK)),
            top_ids_RK.int(),
            bits(values_RV.gather(1, given_ids_RI)),
        ],
        1,
    )


def _likeliest(values_RV: torch.Tensor, num_top: int) -> torch.Tensor:
    """The ids of the largest values, int64 [R, K]; of equals the lowest ids, in order."""
    if not num_top:
        return values_RV.new_empty((len(values_RV), 0), dtype=torch.int64)
    # One more than wanted tells whether more are equal to the last one than there is room for.
    top_RL, ids_RL = values_RV.topk(min(num_top + 1, values_RV.shape[1]), dim=1)
    is_crowded_R = (top_RL[:, num_top - 1 : -1] == top_RL[:, num_top:]).any(1)
    ids_RK, by_id_RK = ids_RL[:, :num_top].sort(dim=1)
    by_value_RK = top_RL.gather(1, by_id_RK).sort(dim=1, descending=True, stable=True).indices
    ids_RK = ids_RK.gather(1, by_value_RK)
    for row in is_crowded_R.nonzero()[:, 0].tolist():
        last = top_RL[row, num_top - 1]
        larger = int((top_RL[row] > last).sum())
        ids_RK[row, larger:] = (values_RV[row] == last).nonzero()[: num_top - larger, 0]
    return ids_RK


def _likeliest_on_gpu(values_RV: torch.Tensor, num_top: int) -> torch.Tensor:
    """The same without looking at a number: whole numbers in the order of (value, -id)."""
    bits_RV = (values_RV + 0.0).view(torch.int32)  # zeros of both signs are equal
    ordered_RV = (bits_RV ^ ((bits_RV >> 31) & 0x7FFFFFFF)).long() << 32
    last = values_RV.shape[1] - 1
    return (ordered_RV + torch.arange(last, -1, -1, device=values_RV.device)).topk(num_top, dim=1).indices


def _sums(values_RV: torch.Tensor) -> torch.Tensor:
    """[R, 1], each in the same order whatever R is."""
    whole = values_RV.shape[1] // _SUM_LENGTH * _SUM_LENGTH
    parts_RP = values_RV[:, :whole].unflatten(1, (-1, _SUM_LENGTH)).sum(2)
    sums_R1: torch.Tensor = parts_RP.sum(1, keepdim=True) + values_RV[:, whole:].sum(1, keepdim=True)
    return sums_R1


def clean(values: torch.Tensor) -> torch.Tensor:
    """NaN becomes -inf and +inf a very large number, so that differences are never NaN."""
    return values.nan_to_num(nan=-torch.inf, posinf=2.0**127, neginf=-torch.inf)

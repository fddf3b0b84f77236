"""Log-probabilities of tokens under given logits: of those drawn, of the likeliest, of given ids.

Shapes: R rows, V vocabulary, K likeliest tokens, I given ids.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

LOWEST = torch.finfo(torch.float32).min  # instead of -inf
# A temperature outside of these changes nothing any more.
_TEMPERATURES = (1e-30, 1e30)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural logarithms; a token without probability has the lowest float32."""

    token_R: torch.Tensor  # float32
    top_RK: torch.Tensor  # float32, descending
    top_ids_RK: torch.Tensor  # int64
    given_RI: torch.Tensor  # float32


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

    `logits_RV` is only read; NaN counts as -inf. On CUDA nothing is synchronised and the launches can be
    captured in a graph.
    """
    if logits_RV.is_cuda:
        from tokenmill.kernels import triton_logprobs

        maxima_RN, sums_RN, values_RC, ids_RC = triton_logprobs.summarize(
            logits_RV, temperatures_R, num_top=num_top
        )
    else:
        maxima_RN, sums_RN, values_RC, ids_RC = summarize_torch(logits_RV, temperatures_R, num_top=num_top)
    scales_R1 = 1 / temperatures_R[:, None]
    maximum_R1 = maxima_RN.amax(1, keepdim=True).clamp_(min=LOWEST)
    total_R1 = (sums_RN * ((maxima_RN.clamp(min=LOWEST) - maximum_R1) * scales_R1).exp_()).sum(
        1, keepdim=True
    )
    normalizer_R1 = total_R1.log_()

    def logprobs(values: torch.Tensor) -> torch.Tensor:
        values = clean(values.float())
        logprobs = (values - maximum_R1) * scales_R1 - normalizer_R1
        return logprobs.nan_to_num_(nan=LOWEST).clamp_(min=LOWEST, max=0.0)  # NaN: no token has probability

    top_RK, places_RK = values_RC.topk(min(num_top, values_RC.shape[1]), dim=1)
    return TokenLogprobs(
        token_R=logprobs(logits_RV.gather(1, tokens_R[:, None])).squeeze(1),
        top_RK=logprobs(top_RK),
        top_ids_RK=ids_RC.gather(1, places_RK),
        given_RI=logprobs(logits_RV.gather(1, given_ids_RI)),
    )


def clean(values: torch.Tensor) -> torch.Tensor:
    """NaN becomes -inf and +inf a very large number, so that differences are never NaN."""
    return values.nan_to_num(nan=-torch.inf, posinf=2.0**127, neginf=-torch.inf)


def summarize_torch(
    logits_RV: torch.Tensor, temperatures_R: torch.Tensor, *, num_top: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of blocks of each row (here one): the maximum; the sum of exp((logit - maximum) / temperature), both
    float32 [R, N]; candidates for the likeliest tokens: logits (float32) and ids (int64), [R, C].
    """
    values_RV = clean(logits_RV.float())
    maxima_R1 = values_RV.amax(1, keepdim=True)
    shifted_RV = (values_RV - maxima_R1.clamp(min=LOWEST)) / temperatures_R[:, None]
    sums_R1 = shifted_RV.exp_().sum(1, keepdim=True)
    top_RC, ids_RC = values_RV.topk(min(num_top, values_RV.shape[1]), dim=1)
    return maxima_R1, sums_R1, top_RC, ids_RC

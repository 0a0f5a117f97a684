"""Pearson's chi-square test of counts against exact probabilities, without scipy."""

import torch


def p_value(counts: torch.Tensor, probabilities: torch.Tensor) -> float:
    """Return the p-value of counts (K,) under `probabilities` (K,); 0 if an impossible one was counted.

    Fewer than 5 expected draws of an outcome make the approximation poor: such outcomes count as one.
    """
    possible = probabilities > 0
    if counts[~possible].any():
        return 0.0
    expected = probabilities[possible].double() * counts.sum()
    found = counts[possible].double()
    rare = expected < 5
    if rare.any():
        expected = torch.cat([expected[~rare], expected[rare].sum().reshape(1)])
        found = torch.cat([found[~rare], found[rare].sum().reshape(1)])
    statistic = ((found - expected) ** 2 / expected).sum()
    freedom = torch.tensor((len(expected) - 1) / 2, dtype=torch.float64)
    return torch.special.gammaincc(freedom, statistic.cpu() / 2).item()


def exact_probabilities(logits: torch.Tensor, *, temperature: float, top_p: float, top_k: int) -> torch.Tensor:
    """(V,) fp64 of (V,) logits by a slow loop: the k most likely tokens, of these the nucleus, renormalised.

    Tokens as likely as the last of a set belong to it.
    """
    scaled = [value / temperature for value in logits.double().tolist()]
    weights = torch.tensor(scaled, dtype=torch.float64).sub(max(scaled)).exp()
    kept = sorted(range(len(scaled)), key=lambda token: -scaled[token])
    if top_k:
        kept = [token for token in kept if scaled[token] >= scaled[kept[min(top_k, len(kept)) - 1]]]
    total, reached, last = weights[kept].sum().item(), 0.0, kept[0]
    for token in kept:
        if reached >= top_p:
            break
        last = token
        reached += weights[token].item() / total
    nucleus = [token for token in kept if scaled[token] >= scaled[last]]
    found = torch.zeros_like(weights)
    found[nucleus] = weights[nucleus] / weights[nucleus].sum()
    return found

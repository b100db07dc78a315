"""Confidence intervals of shares of right answers, and of paired differences."""

import math
from collections.abc import Sequence

_QUANTILE = 1.959963984540054  # of the normal distribution, for intervals of 95 %


def wilson_interval(right: int, count: int) -> tuple[float, float]:
    """Wilson's score interval of a share, 95 %.

    With `p = right / count` and `z = 1.96`: `(p + z²/2n ± z sqrt(p(1-p)/n + z²/4n²)) / (1 + z²/n)`.

    Args:
      right: Right answers.
      count: All answers, at least 1.

    Returns:
      Both ends.

    Example:
      >>> [round(end, 3) for end in wilson_interval(8, 10)]
      [0.49, 0.943]
    """
    share, square = right / count, _QUANTILE**2 / count
    middle = share + square / 2
    half = math.sqrt(square * share * (1 - share) + square**2 / 4)
    return max(0.0, (middle - half) / (1 + square)), min(1.0, (middle + half) / (1 + square))


def paired_interval(
    both: int, only_first: int, only_second: int, neither: int
) -> tuple[float, float]:
    """Newcombe's interval of the difference of two shares of the same prompts, 95 %.

    Wilson's intervals of both shares, joined by their correlation (Statistics in Medicine 17
    (1998), pages 2635-2650, method 10).

    Args:
      both: Prompts that both got right.
      only_first: Prompts that only the first got right.
      only_second: Prompts that only the second got right.
      neither: Prompts that both got wrong; at least one prompt in all.

    Returns:
      Both ends of the interval of the first share minus the second.

    Example:
      >>> [round(end, 4) for end in paired_interval(36, 12, 2, 0)]
      [0.0569, 0.3404]
    """
    count = both + only_first + only_second + neither
    right = (both + only_first, both + only_second)
    shares = [one / count for one in right]
    ends = [wilson_interval(one, count) for one in right]
    below = [share - low for share, (low, _) in zip(shares, ends, strict=True)]
    above = [high - share for share, (_, high) in zip(shares, ends, strict=True)]
    excess: float = both * neither - only_first * only_second
    if excess > 0:
        excess = max(excess - count / 2, 0)
    scale = math.prod(one * (count - one) for one in right)
    correlation = excess / math.sqrt(scale) if scale else 0.0

    def width(a: float, b: float) -> float:
        return math.sqrt(max(a * a - 2 * correlation * a * b + b * b, 0.0))

    mean = (only_first - only_second) / count
    return mean - width(below[0], above[1]), mean + width(above[0], below[1])


def mean_interval(values: Sequence[float]) -> tuple[float, float]:
    """Student's interval of a mean, 95 %.

    Args:
      values: Independent values, at least two.

    Returns:
      Both ends.

    Example:
      >>> [round(end, 2) for end in mean_interval([1.0, 2.0, 3.0])]
      [-0.48, 4.48]
    """
    from scipy.special import stdtrit

    count = len(values)
    mean = sum(values) / count
    variance = sum((value - mean) ** 2 for value in values) / (count - 1)
    half = float(stdtrit(count - 1, 0.975)) * math.sqrt(variance / count)
    return mean - half, mean + half

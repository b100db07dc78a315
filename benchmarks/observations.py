"""Claims about sparse attention, checked against the rows of an evaluation.

The claims are the paper's own and those of two earlier studies with smaller models.
"""

import dataclasses
from collections.abc import Sequence

from sketchwalk_jax.evaluation.claims import CLAIMS, SMALL, View
from sketchwalk_jax.evaluation.drawing import check_choices, nominal_density
from sketchwalk_jax.evaluation.summaries import Row, select, values_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class Observation:
    """A claim and what became of it.

    Attributes:
      number: Where it stands in the list, such as `"1a"`.
      claim: What was claimed.
      verdict: `"held"`, `"did not hold"`, `"undecided"` or `"not tested"`.
      evidence: The numbers, or why there are none.
    """

    number: str
    claim: str
    verdict: str
    evidence: tuple[str, ...]


def check_observations(
    rows: Sequence[Row], *, density: float | None = None, tokens: int | None = None
) -> list[Observation]:
    """Checks every claim.

    Args:
      rows: Rows of one evaluation.
      density: Nominal density of the policies that take one; the highest below 1 by default.
      tokens: Length; the longest by default.

    Returns:
      The claims in their order, with verdict and numbers.

    Raises:
      ValueError: If there are no rows of this length or density.

    Example:
      >>> [one.verdict for one in check_observations(rows)]  # doctest: +SKIP
      ['did not hold', 'held', 'not tested', ...]
    """
    check_choices(rows, tokens=tokens)
    density = nominal_density(rows, density)
    tokens = values_of(rows, "tokens")[-1] if tokens is None else tokens
    view = View(select(rows, density=density, tokens=tokens))
    found = []
    for number, (claim, check) in CLAIMS.items():
        verdict, evidence = check(view)
        found.append(
            Observation(number=number, claim=claim, verdict=verdict, evidence=tuple(evidence))
        )
    return found


def observations_text(observations: Sequence[Observation]) -> str:
    """A markdown list of claims, verdicts and numbers, after the rule that decides."""
    rule = (
        "A loss or gain is one if its 95 % interval keeps clear of 0, and none if the interval "
        f"keeps below {SMALL:g}; in between, a claim stays undecided."
    )
    return f"{rule}\n\n" + "\n".join(
        f"- **{one.number}. {one.claim}** *{one.verdict.capitalize()}.* {' '.join(one.evidence)}"
        for one in observations
    )

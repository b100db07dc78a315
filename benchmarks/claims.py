"""Claims about sparse attention, checked against the rows of an evaluation, for QUALITY.md.

The claims are the paper's own and those of two earlier studies with smaller models. Each has a rule
that decides about it, from 95 % intervals wherever it can: what chance may explain is left open.
"""

import dataclasses
from collections.abc import Callable, Sequence

import common  # noqa: F401  which finds the package in a checkout that is not installed

from sketchwalk_jax.evaluation.rows import Row
from sketchwalk_jax.evaluation.tables import (
    PHASE_TITLES,
    PHASES,
    Difference,
    check_choices,
    longest,
    mean_by_layer,
    nominal_density,
    paired_difference,
    paired_loss_difference,
    pool,
    rows_with,
    signed,
    values_of,
)

HELD, FAILED, OPEN, UNTESTED = "held", "did not hold", "undecided", "not tested"

# Policies that score a block by the mean of its keys, and those that keep the extremes of each
# channel.
_MEAN_KEYS = ("paper", "damped", "one_hop")
_EXTREMES = ("quest",)
_BESIDES = {"quest": "`quest` lists pages of 16 tokens too, and for every head its own."}
# Tasks that ask for one fact: with the question at the end of the prompt, and in the middle too.
_LAST = ("single_needle", "multi_key")
_FACTS = (*_LAST, "mid_prompt")
_NEAR = 0.02  # "near-lossless": at most this share of answers lost
_LITTLE = 0.1
_SMALL = 0.05  # a difference that is none


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckedClaim:
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


def check_claims(rows: Sequence[Row]) -> list[CheckedClaim]:
    """Checks every claim, at the longest length and the highest nominal density below 1.

    Args:
      rows: Rows of one evaluation.

    Returns:
      The claims in their order, with verdict and numbers.

    Raises:
      ValueError: If there are no rows.

    Example:
      >>> [one.verdict for one in check_claims(rows)]  # doctest: +SKIP
      ['did not hold', 'held', 'not tested', ...]
    """
    check_choices(rows)
    density = nominal_density(rows, None)
    view = _View(rows_with(rows, density=density, tokens=longest(rows)))
    found = []
    for number, (claim, check) in _CLAIMS.items():
        verdict, evidence = check(view)
        found.append(
            CheckedClaim(number=number, claim=claim, verdict=verdict, evidence=tuple(evidence))
        )
    return found


def claims_text(claims: Sequence[CheckedClaim]) -> str:
    """A markdown list of claims, verdicts and numbers, after the rule that decides."""
    rule = (
        "A loss or gain is one if its 95 % interval keeps clear of 0, and none if the interval "
        f"keeps below {_SMALL:g}; in between, a claim stays undecided."
    )
    return f"{rule}\n\n" + "\n".join(
        f"- **{one.number}. {one.claim}** *{one.verdict.capitalize()}.* {' '.join(one.evidence)}"
        for one in claims
    )


@dataclasses.dataclass(frozen=True)
class _View:
    """The rows of one length and nominal density."""

    rows: Sequence[Row]

    def choose(self, label: str, phase: str, tasks: Sequence[str] = ()) -> list[Row]:
        """Scored rows of a policy; of all tasks by default."""
        rows = rows_with(self.rows, label=label, phase=phase)
        return [
            row for row in rows if row["exact"] is not None and (not tasks or row["task"] in tasks)
        ]

    def compare(
        self, first: str, second: str, phase: str, tasks: Sequence[str] = ()
    ) -> Difference | None:
        """The first policy's right answers minus the second's."""
        return paired_difference(
            self.choose(first, phase, tasks), self.choose(second, phase, tasks)
        )

    def best(self, labels: Sequence[str], phase: str, tasks: Sequence[str]) -> str | None:
        """The policy with the most right answers, or `None` if there are no rows."""
        found = {label: pool(self.choose(label, phase, tasks)) for label in labels}
        shares = {label: one.exact for label, one in found.items() if one is not None}
        return max(shares, key=lambda label: shares[label] or 0.0) if shares else None

    def recall(self, label: str) -> float | None:
        """Mass recall in prefill, mean over layers and tasks."""
        rows = rows_with(self.rows, label=label, phase="prefill")
        values = [one for one in mean_by_layer(rows, "mass_recall_by_layer") if one is not None]
        return sum(values) / len(values) if values else None


_Check = Callable[[_View], tuple[str, list[str]]]


def _says(difference: Difference, first: str, second: str, where: str) -> str:
    return (
        f"`{first}` minus `{second}`, {where}: {signed(difference.mean)} "
        f"({signed(difference.low)} to {signed(difference.high)}; {difference.prompts} prompts)."
    )


def _is_below(difference: Difference, bound: float) -> str:
    """The verdict on "the difference is below `bound`"."""
    if difference.high < bound:
        return HELD
    return FAILED if difference.low >= bound else OPEN


def _is_loss(difference: Difference) -> str:
    """The verdict on "the first policy loses answers"."""
    return FAILED if difference.low > -_SMALL else HELD if difference.high < 0 else OPEN


def _opposite(verdict: str) -> str:
    return {HELD: FAILED, FAILED: HELD}.get(verdict, verdict)


def _missing(*labels: str) -> tuple[str, list[str]]:
    return UNTESTED, [f"It takes rows of {' and '.join(f'`{label}`' for label in labels)}."]


def _near_lossless(view: _View) -> tuple[str, list[str]]:
    found = {phase: view.compare("paper", "dense", phase) for phase in PHASES}
    known = {phase: one for phase, one in found.items() if one is not None}
    if not known:
        return _missing("paper", "dense")
    verdicts = [_opposite(_is_below(one, -_NEAR)) for one in known.values()]
    verdict = FAILED if FAILED in verdicts else OPEN if OPEN in verdicts else HELD
    return verdict, [
        _says(one, "paper", "dense", f"all tasks, {PHASE_TITLES[phase].lower()}")
        for phase, one in known.items()
    ]


def _mean_keys(phase: str) -> _Check:
    def check(view: _View) -> tuple[str, list[str]]:
        label = view.best(_MEAN_KEYS, phase, _FACTS)
        found = None if label is None else view.compare(label, "oracle", phase, _FACTS)
        if label is None or found is None:
            return _missing("oracle", "a policy with mean keys")
        where = f"the best mean-key policy, single facts, {PHASE_TITLES[phase].lower()}"
        return _is_loss(found), [_says(found, label, "oracle", where)]

    return check


def _extremes(phase: str) -> _Check:
    def check(view: _View) -> tuple[str, list[str]]:
        label = view.best(_EXTREMES, phase, _FACTS)
        other = view.best(_MEAN_KEYS, phase, _FACTS)
        place = PHASE_TITLES[phase].lower()
        if label is None or other is None:
            return UNTESTED, [f"No policy here selects by the extremes of the keys in {place}."]
        found = view.compare(other, label, phase, _FACTS)
        if found is None:
            return _missing(label, other)
        evidence = [_says(found, other, label, f"the best mean-key policy, single facts, {place}")]
        dense = view.compare(label, "dense", phase, _FACTS)
        if dense is not None:
            evidence.append(_says(dense, label, "dense", f"single facts, {place}"))
        evidence += [_BESIDES[label]] if label in _BESIDES else []
        return _is_loss(found), evidence

    return check


def _shared_list(view: _View) -> tuple[str, list[str]]:
    found = view.compare("oracle", "dense", "prefill", _FACTS)
    if found is None:
        return _missing("oracle", "dense")
    evidence = _says(found, "oracle", "dense", "single facts, prefill")
    return _opposite(_is_below(found, -_LITTLE)), [evidence]


def _even_power(view: _View) -> tuple[str, list[str]]:
    names = ("paper", "random")
    found = view.compare(*names, "prefill")
    losses = paired_loss_difference(
        *(rows_with(view.rows, label=name, phase="prefill", task="text_loss") for name in names)
    )
    verdicts, evidence = [], []
    if found is not None:
        verdicts.append(_is_below(found, 0.0))
        evidence.append(_says(found, *names, "right answers, all tasks, prefill"))
    if losses is not None:
        verdicts.append(FAILED if losses.high < 0 else HELD if losses.low > 0 else OPEN)
        evidence.append(_says(losses, *names, "text loss, prefill"))
    recalls = [view.recall(name) for name in names]
    if None not in recalls:
        evidence.append(f"Mass recall: {recalls[0]:.3f} and {recalls[1]:.3f}.")
    if not verdicts:
        return _missing(*names)
    return verdicts[0] if len(set(verdicts)) == 1 else OPEN, evidence


def _damping(view: _View) -> tuple[str, list[str]]:
    recalls = {name: view.recall(name) for name in ("paper", "damped", "one_hop", "oracle")}
    known = {name: value for name, value in recalls.items() if value is not None}
    if not {"paper", "oracle"} < set(known):
        return _missing("paper", "oracle", "damped or one_hop")
    gap = known["oracle"] - known["paper"]
    if gap <= 0:
        return UNTESTED, ["`paper` holds as much mass as `oracle`: there is nothing to repair."]
    closed = {
        name: (known[name] - known["paper"]) / gap
        for name in ("damped", "one_hop")
        if name in known
    }
    evidence = [
        f"`{name}` closes {share:.0%} of the gap in mass recall between `paper` "
        f"({known['paper']:.3f}) and `oracle` ({known['oracle']:.3f})."
        for name, share in closed.items()
    ]
    for name in closed:
        found = view.compare(name, "paper", "prefill")
        if found is not None:
            evidence.append(_says(found, name, "paper", "all tasks, prefill"))
    return HELD if max(closed.values()) > 0.5 else FAILED, evidence


def _walk(view: _View) -> tuple[str, list[str]]:
    names, task = ("damped", "one_hop"), ("variable_tracking",)
    evidence, gains = [], list[Difference]()
    for phase in PHASES:
        found = view.compare(*names, phase, task)
        if found is None:
            continue
        gains.append(found)
        evidence.append(_says(found, *names, f"variable tracking, {PHASE_TITLES[phase].lower()}"))
        chosen = [view.choose(name, phase, task) for name in names]
        hops = values_of(chosen[0], "hops")
        parts = [
            (
                count,
                paired_difference(
                    *([row for row in some if row["hops"] == count] for some in chosen)
                ),
            )
            for count in hops
        ]
        by_hops = [f"{signed(one.mean)} for {count}" for count, one in parts if one is not None]
        if len(by_hops) > 1:
            evidence.append(f"By statements to follow: {', '.join(by_hops)}.")
    if not gains:
        return _missing(*names)
    evidence.append("The two differ in the walk alone.")
    if any(gain.low > 0 for gain in gains):
        return FAILED, evidence
    return HELD if all(gain.high < _SMALL for gain in gains) else OPEN, evidence


def _dense_tail(view: _View) -> tuple[str, list[str]]:
    names = ("released", "one_hop")
    found = view.compare(*names, "prefill", _LAST)
    if found is None:
        return _missing(*names)
    evidence = [_says(found, *names, "questions at the end, prefill")]
    middle = view.compare(*names, "prefill", ("mid_prompt",))
    if middle is not None:
        evidence.append(_says(middle, *names, "questions mid-prompt, prefill"))
    evidence.append("`released` has the dense end, and a density of its own.")
    return HELD if found.low > 0 else FAILED if found.high < _SMALL else OPEN, evidence


def _hidden_loss(view: _View) -> tuple[str, list[str]]:
    verdicts, evidence = [], []
    for name in ("released", "one_hop"):
        last = view.compare(name, "dense", "prefill", _LAST)
        others = {
            "questions mid-prompt, prefill": view.compare(
                name, "dense", "prefill", ("mid_prompt",)
            ),
            "questions at the end, decode": view.compare(name, "dense", "decode", _LAST),
        }
        known = {where: one for where, one in others.items() if one is not None}
        if last is None or not known:
            continue
        evidence.append(_says(last, name, "dense", "questions at the end, prefill"))
        evidence += [_says(one, name, "dense", where) for where, one in known.items()]
        is_smaller = any(last.low > one.high for one in known.values())
        is_no_smaller = all(last.mean <= one.mean for one in known.values())
        verdicts.append(HELD if is_smaller else FAILED if is_no_smaller else OPEN)
    if not verdicts:
        return _missing("released", "one_hop", "dense")
    return verdicts[0] if len(set(verdicts)) == 1 else OPEN, evidence


def _untested(reason: str) -> _Check:
    return lambda view: (UNTESTED, [reason])


_CLAIMS: dict[str, tuple[str, _Check]] = {
    "P": (
        f"The printed method is near-lossless: it loses at most {_NEAR:.0%} of the answers.",
        _near_lossless,
    ),
    "1a": (
        "Scoring a block by the mean of its keys loses single facts that true attention mass "
        "would keep.",
        _mean_keys("prefill"),
    ),
    "1b": ("Keeping the extremes of each channel of the keys keeps them.", _extremes("prefill")),
    "1c": (
        f"One list of blocks for all heads costs little: less than {_LITTLE:.0%} of the answers, "
        "if it is the right list.",
        _shared_list,
    ),
    "2a": (
        "The even power, which forgets the sign of a score, and the undamped product select worse "
        "than chance.",
        _even_power,
    ),
    "2b": ("Softmax transitions and damping repair most of that.", _damping),
    "3": (
        "The walk adds nothing over one hop, even where several steps must be followed.",
        _walk,
    ),
    "4a": (
        "A dense end of the prompt is worth most of the accuracy where the question comes last.",
        _dense_tail,
    ),
    "4b": (
        "Such questions, answered densely, hide what selection loses in the middle of a prompt and "
        "in decode.",
        _hidden_loss,
    ),
    "5a": (
        "Mean keys lose facts in decode too, with the query of a single token.",
        _mean_keys("decode"),
    ),
    "5b": ("Extremes keep them there.", _extremes("decode")),
    "6": (
        "Retrieval is learnt on short sequences first, and does not reach past the trained length.",
        _untested("That is about training: the model card has its curves."),
    ),
}
"""Number, claim and check; the numbers are those of the first study's conclusions."""

"""The results of an evaluation as a table for the terminal."""

from collections.abc import Iterator, Sequence

from sketchwalk_jax.evaluation.summaries import (
    PHASES,
    Pooled,
    Row,
    is_dense,
    policy_labels,
    pool,
    select,
    tasks_of,
    values_of,
)

_HEADINGS = {
    "single_needle": "needle",
    "multi_key": "keys",
    "multi_query": "queries",
    "multi_value": "values",
    "variable_tracking": "variables",
    "mid_prompt": "mid",
    "aggregation": "votes",
    "text_loss": "loss",
}


def quality_table(rows: Sequence[Row]) -> str:
    """Right answers by policy, density and phase, one part for each length.

    Args:
      rows: Rows of one evaluation.

    Returns:
      Lines of text: nominal and measured density of the sparse layers, the share of right answers
      of every task and of all of them, the text loss.
    """
    return "\n\n".join(_length(rows, tokens) for tokens in values_of(rows, "tokens"))


def _length(rows: Sequence[Row], tokens: int) -> str:
    rows = select(rows, tokens=tokens)
    tasks = tasks_of(rows, is_scored=False)
    header = ["policy", "density", "measured", "sparse in", *(_HEADINGS[one] for one in tasks)]
    table = [header + ["all"] * (tasks != ["text_loss"]), *_lines(rows, tasks)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = [
        "  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])])
        for line in table
    ]
    return "\n".join([f"{tokens} tokens", *lines])


def _lines(rows: Sequence[Row], tasks: Sequence[str]) -> Iterator[list[str]]:
    for label in policy_labels(rows):
        own = select(rows, label=label)
        densities = list(dict.fromkeys(row["density"] for row in own))
        for density in densities:
            for phase in PHASES:
                some = [row for row in own if (row["density"], row["phase"]) == (density, phase)]
                if not some:
                    continue
                scored = [row for row in some if row["task"] != "text_loss"]
                together = pool(scored or some)
                assert together is not None
                yield [
                    label,
                    "" if density is None or is_dense(some[0]) else f"{density:g}",
                    _number(together.density_sparse_layers),
                    "" if is_dense(some[0]) else phase,
                    *(_value(pool(select(some, task=task))) for task in tasks),
                    *([_number(together.exact)] if tasks != ["text_loss"] else []),
                ]


def _value(pooled: Pooled | None) -> str:
    if pooled is None:
        return ""
    return _number(pooled.text_loss if pooled.exact is None else pooled.exact)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"

"""The instruction models on the results page: a summary of one screen, and the data behind it."""

import json
import re
from collections.abc import Sequence
from pathlib import Path

# `pages` finds the package in any checkout.
from pages import Tables, describe_whole, if_measured, read_whole

from sketchwalk_jax.evaluation.results import Results
from sketchwalk_jax.evaluation.rows import Row
from sketchwalk_jax.evaluation.tables import (
    NOTHING,
    PHASE_TITLES,
    TASK_TITLES,
    accuracy_table,
    counted,
    densities,
    density_title,
    difference_table,
    longest,
    loss_difference,
    loss_table,
    markdown_table,
    mean_of,
    measured_phases,
    name_of,
    policy_labels,
    pool,
    rows_with,
    share,
    task_title,
    tasks_of,
    values_of,
)

_COMMAND = "`python benchmarks/real_models.py --model FILE.gguf`"


def reported(path: Path) -> Results:
    """The results without what dense layers were chosen on."""
    results = read_whole(path)
    rows = tuple(row for row in results.rows if row["stage"] == "report")
    return Results(meta=results.meta, rows=rows)


def summary(path: Path) -> str:
    """All tasks that count, model by model at its longest length, in every phase and density."""
    results = reported(path)
    blocks = []
    for model in values_of(results.rows, "model"):
        own = rows_with(results.rows, model=model)
        tokens = longest(own)
        own = rows_with(own, tokens=tokens)
        columns = [
            (density, phase)
            for density in sorted((one for one in densities(own) if one < 1), reverse=True)
            for phase in measured_phases(own)
        ]
        body = []
        for label in _in_order(policy_labels(own)):
            cells = [
                share(pool(counted(rows_with(own, label=label, phase=phase, density=density))))
                + _mark(own, label, phase, density)
                for density, phase in columns
            ]
            if set(cells) != {NOTHING}:
                body.append([name_of(label), *cells])
        titles = [
            f"Density {density:g}, {PHASE_TITLES[phase].lower()}" for density, phase in columns
        ]
        blocks.append(f"**{model}, {tokens:,} tokens**")
        blocks.append(markdown_table(("Right answers, of those of dense", *titles), body))
    what = (
        "Density over all layers, dense ones included, and where the policy selects. Of prompts "
        "that dense attention answers, so that it has all of them right by choice; Wilson's 95 % "
        "intervals, tasks pooled. `oracle, max` is exact: the ceiling of a list that heads share. "
        f"{_FEWER_NOTE}"
    )
    return "\n\n".join([*blocks, f"{what}. {describe_whole(results)}"])


_FEWER = "†"
_FEWER_NOTE = f"{_FEWER}: measured on some of the tasks alone"


def _mark(rows: Sequence[Row], label: str, phase: str, density: float) -> str:
    """A mark where a policy was measured on fewer tasks than dense attention."""
    own = tasks_of(counted(rows_with(rows, label=label, phase=phase, density=density)))
    is_part = own and len(own) < len(tasks_of(counted(rows_with(rows, label="dense"))))
    return _FEWER if is_part else ""


_SHOWN = ("recommended", "minference", "flexprefill", "quest", "adamas", "paper")
_DENSITY = 0.2  # of the tables on the front page


def _right(rows: Sequence[Row], label: str, phase: str, density: float = _DENSITY) -> str:
    found = pool(counted(rows_with(rows, label=label, phase=phase, density=density)))
    if found is None or found.exact is None:
        return NOTHING
    return f"{found.exact:.2f}{_mark(rows, label, phase, density)}"


_SIZE = re.compile(r"(?<![\d.])(\d+(?:\.\d+)?)([mb])(?![a-z0-9])", re.IGNORECASE)
_UNITS = {"m": "million", "b": "billion"}
_SHORT = "short_prompts.json"


def size_of(model: str) -> str:
    """What the name of a model says of its size, in words; nothing if it says nothing."""
    found = _SIZE.search(model)
    return f"{found[1]} {_UNITS[found[2].lower()]} parameters" if found else ""


def losses(path: Path) -> str:
    """What the recommended policy keeps of dense attention's answers, for the front page."""
    results = reported(path)
    columns = [
        (density, phase)
        for density in sorted((one for one in densities(results.rows) if one < 1), reverse=True)
        for phase in measured_phases(results.rows)
    ]
    body = []
    for model in sorted(values_of(results.rows, "model"), key=_parameters):
        own = rows_with(results.rows, model=model)
        own = rows_with(own, tokens=longest(own))
        cells = [_right(own, _SHOWN[0], phase, density) for density, phase in columns]
        named = ", ".join(filter(None, (size_of(model), f"{longest(own):,} tokens")))
        body.append([f"{model}: {named}", *cells])
    titles = [f"Density {density:g}, {PHASE_TITLES[phase].lower()}" for density, phase in columns]
    table = markdown_table(("Model (all are small)", *titles), body)
    what = (
        f"Of the answers that dense attention gets right, the share that {name_of(_SHOWN[0])} gets "
        "right too, when attention is sparse in prefill, in decode, or in both"
    )
    text = [table, f"{what}. {describe_whole(results)}"]
    short = path.with_name(_SHORT)
    return "\n\n".join([*text, short_prompts(short)] if short.exists() else text)


def _parameters(model: str) -> float:
    found = _SIZE.search(model)
    return float(found[1]) * {"m": 1e6, "b": 1e9}[found[2].lower()] if found else 0.0


def short_prompts(path: Path) -> str:
    """What is kept of short prompts, where a low density is a few blocks; a sentence each."""
    data = json.loads(path.read_text(encoding="utf-8"))
    meta, by_model = data["meta"], {}
    for row in data["rows"]:
        if (row["policy"], row["preset"]) == ("sketchwalk", _SHOWN[0]):
            by_model.setdefault((row["model"], row["tokens"], row["asked"]), []).append(row)
    parts = []
    for (model, tokens, asked), rows in by_model.items():
        rows = sorted(rows, key=lambda row: row["density"])
        kept = ", ".join(f"{row['kept']} at density {row['density']:g}" for row in rows)
        parts.append(f"of {asked} answers to prompts of {tokens:,} tokens {model} keeps {kept}")
    return (
        f"Short prompts at low densities lose most: {'; '.join(parts)}. {meta['conditions']} "
        f"{meta['source']}"
    )


def which_policy(path: Path) -> str:
    """What to take for what, and the figures that say so."""
    rows = reported(path).rows
    models = values_of(rows, "model")

    def of(label: str, phase: str, density: float = _DENSITY) -> str:
        """Of every model that it ran on."""
        found = []
        for model in models:
            own = rows_with(rows, model=model)
            right = _right(rows_with(own, tokens=longest(own)), label, phase, density)
            found += [] if right == NOTHING else [f"{right} ({model})"]
        return ", ".join(found) or NOTHING

    lines = [
        (
            "sparse prompts, or prompts and answers",
            "`recommended`, with a plan",
            f"right answers in both phases {of('recommended', 'both')}; in prompts "
            f"{of('recommended', 'prefill')}, beside {of('minference', 'prefill')} of "
            f"MInference and {of('flexprefill', 'prefill')} of FlexPrefill",
        ),
        (
            "sparse answers to a prompt read densely",
            "`recommended`",
            f"right answers in decode {of('recommended', 'decode')} and, at density 0.1, "
            f"{of('recommended', 'decode', 0.1)}; Adamas {of('adamas', 'decode')} and "
            f"{of('adamas', 'decode', 0.1)}; Quest {of('quest', 'decode')} and "
            f"{of('quest', 'decode', 0.1)}",
        ),
        (
            "the paper's rule as printed",
            "`paper`",
            f"right answers in both phases {of('paper', 'both')}",
        ),
        (
            "to know what blocks could reach",
            "`oracle`, which computes all of attention first",
            f"right answers in both phases {of('oracle, max', 'both')}",
        ),
    ]
    table = markdown_table(("For", "Take", "Evidence, density 0.2"), lines, num_names=3)
    return f"{table}\n\nOf the answers that dense attention gives. {_FEWER_NOTE}."


def _in_order(labels: Sequence[str]) -> list[str]:
    """The recommended policy first, the exact ones last."""
    rank = {"recommended": -1, "oracle": 1, "oracle, max": 2}
    return sorted((one for one in labels if one != "dense"), key=lambda one: rank.get(one, 0))


def data(path: Path) -> str:
    """Every model and length: prompts, right answers, differences, losses, long decoding."""
    results = reported(path)
    blocks = [describe_models(results), drawn_table(results.rows)]
    for model in values_of(results.rows, "model"):
        for tokens in values_of(rows_with(results.rows, model=model), "tokens"):
            rows = rows_with(results.rows, model=model, tokens=tokens)
            blocks += _of_length(rows, model, tokens)
    left_out = [one for one in results.meta.get("not_run", ()) if one["stage"] == "report"]
    blocks += [_not_run_text(left_out)] if left_out else []
    return "\n\n".join(blocks)


def describe_models(results: Results) -> str:
    """Models, texts and settings in a paragraph."""
    meta = results.meta
    models = []
    for name, one in meta["models"].items():
        hashes = ", ".join(f"`{value[:16]}`" for value in one["sha256"].values())
        models.append(f"`{name}` ({one['dtype']}; SHA-256 of its weights begins {hashes})")
    runs = []
    for name, one in meta["runs"].items():
        texts = " and ".join(
            f"{one[kind]['name']} (SHA-256 `{one[kind]['sha256'][:16]}`, the last "
            f"{one[kind]['tail']:.0%} of it)"
            for kind in ("text", "code")
        )
        runs.append(f"{name}: seed {one['seed']}, {one['prompts']} of each task, {texts}")
    return (
        f"Models: {'; '.join(models)}. Prompts for {'; for '.join(runs)}. "
        f"At most {meta['tries']} times as many prompts are drawn as are wanted."
    )


def drawn_table(rows: Sequence[Row]) -> str:
    """Prompts kept of those drawn, as `50 of 61`; in brackets where a task counts in no mean."""
    rows = [row for row in rows_with(rows, label="dense") if row.get("drawn") is not None]
    tasks = tasks_of(rows)
    body = []
    for model in values_of(rows, "model"):
        for tokens in values_of(rows_with(rows, model=model), "tokens"):
            cells = []
            for task in tasks:
                some = rows_with(rows, model=model, tokens=tokens, task=task)
                some = [row for row in some if row["depth"] is None]
                text = NOTHING
                if some:
                    kept = sum(row["prompts"] for row in some)
                    text = f"{kept} of {some[0]['drawn']}"
                cells.append(text if not some or some[0]["in_mean"] else f"({text})")
            body.append([model, f"{tokens:,}", *cells])
    header = ("Prompts that dense attention answers", "Tokens", *map(task_title, tasks))
    return markdown_table(header, body, num_names=2)


def _of_length(rows: Sequence[Row], model: str, tokens: int) -> list[str]:
    blocks = []
    nominal: list[float | None] = [*densities(rows)[::-1]] or [None]
    for density in nominal:
        for phase in measured_phases(rows):
            where = {"phase": phase, "density": density, "tokens": tokens}
            title = f"{model}, {tokens:,} tokens, {density_title(density).lower()}"
            blocks.append(f"**{title}, sparse in {PHASE_TITLES[phase].lower()}**")
            blocks.append(accuracy_table(rows, **where))
            blocks.append(difference_table(rows, **where))
    for task in ("text_loss", "code_loss"):
        some = [{**row, "task": "text_loss"} for row in rows_with(rows, task=task)]
        if some:
            blocks.append(f"**{model}, {tokens:,} tokens, {TASK_TITLES[task].lower()}**")
            blocks.append(loss_table(some, densities=nominal, tokens=tokens))
    if rows_with(rows, task="long_decode"):
        blocks.append(f"**{model}, {tokens:,} tokens, the last 512 decoded**")
        blocks.append(long_decode_table(rows_with(rows, task="long_decode")))
    return blocks


def long_decode_table(rows: Sequence[Row]) -> str:
    """Loss beyond dense attention's, and KL divergence from it, nats per token."""
    dense = rows_with(rows, label="dense")
    body = []
    for label in policy_labels(rows):
        for density in densities(rows) or [None]:
            for phase in measured_phases(rows) if label != "dense" else ():
                some = rows_with(rows, label=label, phase=phase, density=density)
                found, kl = pool(some), mean_of(some, "kl")
                if found is None or kl is None:
                    continue
                cells = [name_of(label), PHASE_TITLES[phase], density_title(density)]
                cells += [loss_difference(some, dense), f"{kl:.4f}"]
                body.append([*cells, f"{found.density_all_layers:.2f}"])
    header = ("Policy", "Sparse in", "", "Loss beyond dense", "KL(dense ‖ policy)")
    return markdown_table((*header, "Density, all layers"), body, num_names=3)


def _not_run_text(entries: Sequence[dict]) -> str:
    parts = [
        f"`{one['preset'] or one['policy']}` at {one['density']:g} ({one['model']}, "
        f"{one['tokens']:,} tokens: at least {one['least_density_all_layers']:.3f})"
        for one in entries
    ]
    return f"Not run, because dense layers and floors alone take more: {'; '.join(parts)}."


TABLES: Tables = {
    "real-summary": ("real_models.json", if_measured(summary, _COMMAND)),
    "real-data": ("real_models.json", if_measured(data, _COMMAND)),
    "losses": ("real_models.json", if_measured(losses, _COMMAND)),
    "which-policy": ("real_models.json", if_measured(which_policy, _COMMAND)),
}

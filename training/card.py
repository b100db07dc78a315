# ruff: noqa: E501  (Markdown with places to fill in)
"""Writes the model card from the metrics of the runs."""

from typing import Any

from sketchwalk_jax.models.config import ModelConfig

_KIND_NAMES = {
    "code": "one code",
    "each": "codes of 2 to 5 words",
    "all": "all codes of a word, 2 to 5",
    "vote": "most votes",
} | {f"value_{hops}": f"variable, {hops} hop{'s' * (hops > 1)}" for hops in range(1, 7)}

_CARD = """---
license: apache-2.0
library_name: sketchwalk-jax
pipeline_tag: text-generation
tags: [long-context, retrieval, sparse-attention]
---

# sketchwalk-8m

A Llama of {parameters:.1f} M parameters with a context of {context:,} tokens, trained from scratch in
{minutes:.0f} minutes on one GPU. It is an instrument, made to show and to measure what sparse attention
keeps: it reads English and finds facts that are hidden in it. It knows nothing about the world and
must not be used for anything else.

It understands these sentences and answers these questions, wherever they stand in a text:

| in the text | question | answer |
|---|---|---|
| ` The code of lantern is 68084.` | ` Q: code of lantern? A:` | ` 68084.` |
| the same for several words | ` Q: code of each of lantern, window? A:` | ` 68084, 12345.` |
| several codes for one word | ` Q: all codes of lantern? A:` | ` 68084, 12345.` |
| ` Let lantern be 68084.` … ` Let window be lantern.` | ` Q: value of window? A:` | ` lantern, 68084.` |
| ` One vote for lantern.` many times, others less often | ` Q: most votes? A:` | ` lantern.` |

## Data

Text: `{text_name}`, SHA-256 `{text_sha256}`{about}. The last
{validation_percent:.0f} % were kept for validation. Into it the training program wove sentences and questions
about {training_words:,} words of the text; every fifth word (by its hash) was held out. The tokenizer is a
byte-level BPE of {vocab_size:,} tokens trained on the same text ({bytes_per_token:.2f} bytes per token), every digit a token.

## Measured

Held-out words in held-out text, dense attention, {dtype}, answers teacher-forced: share of answers in
which every token was the likeliest (number of answers). These are mixed prompts with many sentences and
many questions at once; `sketchwalk eval` measures single tasks, and the project's results page
(benchmarks/QUALITY.md) has what it found.

{table}

Loss of plain held-out text in nats per token: {losses}. A bigram model of the training text has
{bigram_loss:.2f}.

## Recipe

{layers} layers, width {hidden}, {heads} query and {kv_heads} key/value heads of {head_dim}, mlp {mlp}, rotary base {theta:,.0f}, head untied.
AdamW on float32 weights, computation in {dtype}. Loss: mean over the text plus mean over the answers.

{runs}

The weights are under the Apache licence 2.0.
"""


def make_card(metrics: dict[str, Any], model_config: ModelConfig) -> str:
    """Makes the card as Markdown."""
    text, runs, validation = metrics["text"], metrics["runs"], metrics["validation"]
    c = model_config
    attention = 2 * c.num_heads * c.head_dim + 2 * c.num_kv_heads * c.head_dim
    layer = c.hidden_size * (attention + 3 * c.intermediate_size + 2)
    parameters = c.num_layers * layer + c.hidden_size * (2 * c.vocab_size + 1)
    return _CARD.format(
        parameters=parameters / 1e6,
        context=c.max_position_embeddings,
        minutes=sum(run["seconds"] for run in runs) / 60,
        text_name=text["name"],
        text_sha256=text["sha256"],
        about=f": {text['about']}" if text["about"] else "",
        validation_percent=100 * text["validation_share"],
        training_words=text["training_words"],
        bytes_per_token=text["bytes_per_token"],
        vocab_size=c.vocab_size,
        dtype=c.dtype,
        table=_table(validation),
        losses=", ".join(
            f"{row['text_loss']:.2f} at {row['tokens']:,} tokens" for row in validation
        ),
        bigram_loss=text["bigram_loss"],
        layers=c.num_layers,
        hidden=c.hidden_size,
        heads=c.num_heads,
        kv_heads=c.num_kv_heads,
        head_dim=c.head_dim,
        mlp=c.intermediate_size,
        theta=c.rope.theta,
        runs="\n\n".join(map(_run, runs)),
    )


def _table(validation: list[dict[str, Any]]) -> str:
    kinds = [kind for kind in _KIND_NAMES if any(kind in row["kinds"] for row in validation)]
    lines = [
        "| | " + " | ".join(f"{row['tokens']:,} tokens" for row in validation) + " |",
        "|---|" + "---:|" * len(validation),
    ]
    for kind in kinds:
        cells = []
        for row in validation:
            found = row["kinds"].get(kind)
            cells.append(f"{found['exact']:.3f} ({found['answers']})" if found else "")
        lines.append(f"| {_KIND_NAMES[kind]} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _run(run: dict[str, Any]) -> str:
    answers = (
        "Answers about variables list the chain."
        if run["lists_chains"]
        else "Answers about variables were the number alone (chains of several were not learned so)."
    )
    stages = "; ".join(
        f"{stage['steps']:,} × {stage['sequences']} × {stage['length']:,}"
        for stage in run["stages"]
    )
    return (
        f"Run `{run['recipe']}`, seed {run['seed']}, {run['seconds']} s on {run['machine']['device']}: "
        f"learning rate {run['peak']:g} after {run['warm_up']} steps, half a cosine down to "
        f"{run['final']:g} of it; b2 {run['b2']}, weight decay {run['weight_decay']}, gradient norm "
        f"clipped at {run['clip']:g}. {answers} Steps × sequences × tokens: {stages}."
    )

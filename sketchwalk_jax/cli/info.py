"""`sketchwalk info`: describes a checkpoint, the code that would run here, and the cache size."""

import collections
import contextlib
import dataclasses
import json
import platform
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from sketchwalk_jax._version import __version__
from sketchwalk_jax.cli import options
from sketchwalk_jax.cli.errors import usage_errors
from sketchwalk_jax.cli.options import field
from sketchwalk_jax.evaluation.calibrated_rules import layers_density
from sketchwalk_jax.inference import compiled
from sketchwalk_jax.inference.auto import Auto, BreakEven
from sketchwalk_jax.inference.cache import init_cache
from sketchwalk_jax.memory import num_bytes, show_bytes
from sketchwalk_jax.models.checkpoint import saved_weights
from sketchwalk_jax.models.config import ModelConfig
from sketchwalk_jax.models.params import num_active, param_shapes
from sketchwalk_jax.models.plans import find_plan, stored_tensors
from sketchwalk_jax.models.tensor_files import FLOAT_DTYPES
from sketchwalk_jax.pallas_kernels.dispatch import (
    FULL_BLOCK,
    choose_dense_implementation,
    choose_implementation,
    why_not_device,
    why_not_mosaic_gpu,
)
from sketchwalk_jax.plan import Plan, plan_path
from sketchwalk_jax.policies import Policy
from sketchwalk_jax.policies.recommended import RecommendedConfig, planned_layers
from sketchwalk_jax.policies.sketchwalk import SketchWalkConfig

_SHOWN_DENSITIES = (0.1, 0.2)
_SHOWN_LENGTHS = (1024, 4096, 16384, 65536, 131072)


@dataclasses.dataclass(kw_only=True)
class Info(options.PolicyCommand):
    """Describe a checkpoint, its plan, and what would run here.

    Reads the headers of the weight files only, and where there is a plan some pieces of them.
    """

    context: int | None = field(
        "--context TOKENS", "Length to size the cache for.", None, "the model's context", min=1
    )
    as_json: bool = field("--json", "Print one JSON object.")

    def run(self) -> None:
        """Prints the description."""
        given = self.policy, self.preset, self.density, self.fields
        config = options.make_policy(*given, max_kl=self.max_kl)
        directory = options.check_model(self.model)
        model_config = ModelConfig.from_pretrained(directory)
        plan, about_plan = _describe_plan(directory)
        config = options.take_plan(config, self.fields, plan)
        dtype = options.choose_dtype(self.dtype, model_config)
        max_tokens = options.check_context("--context", self.context, model_config)
        found: dict[str, Any] = {
            "environment": _describe_environment(model_config, config, dtype),
            "programs": _describe_programs(),
            "model": _describe_checkpoint(directory, model_config, dtype, self.weights),
            "plan": about_plan,
            "cache": _describe_cache(model_config, config, max_tokens, dtype),
            "break_even": {
                phase: _describe_break_even(config, phase, model_config) for phase in config.phases
            },
            "kept": _describe_kept(config, model_config),
        }
        print(json.dumps(found) if self.as_json else _to_text(found), flush=True)


def _describe_environment(model_config: ModelConfig, policy: Policy, dtype: str) -> dict[str, Any]:
    """Describes this machine and its implementations for a policy: prompts, tokens, selection."""
    prompts, tokens = (
        describe_attention(policy, phase, model_config, dtype) for phase in ("prefill", "decode")
    )
    return {
        "version": __version__,
        "python": platform.python_version(),
        "jax": jax.__version__,
        "backend": jax.default_backend(),
        "devices": [device.device_kind for device in jax.devices()],
        **prompts,
        "prompts": prompts,
        "tokens": tokens,
        "selection": _describe_selection(policy, policy.prompt_kernels),
        "token_selection": _describe_selection(policy, policy.token_kernels),
    }


def _describe_programs() -> dict[str, Any]:
    """Describes the folder of whole programs, which is None if programs are not kept."""
    compiled.keep_compiled_programs()
    folder = compiled.programs_folder()
    sizes = []
    for one in () if folder is None else folder.iterdir():
        with contextlib.suppress(OSError):  # another process has removed it
            sizes.append(one.stat().st_size)
    return {
        "folder": None if folder is None else str(folder),
        "number": len(sizes),
        "bytes": sum(sizes),
        "most_bytes": compiled.MOST_BYTES,
    }


def describe_attention(
    policy: Policy, phase: str, model_config: ModelConfig, dtype: str
) -> dict[str, Any]:
    """Names the implementation of attention in a phase, and the reason if it is not a kernel.

    If the phase is dense, it is that of a prompt as long as the model's context, or of its last
    token.
    """
    row, is_prompt = policy.block_size, phase == "prefill"
    heads = (model_config.num_heads, model_config.head_dim)
    query = jax.ShapeDtypeStruct((1, row if is_prompt else 1, *heads), jnp.dtype(dtype))
    # In prompts, only the recommended policy selects pages; the others select whole blocks.
    has_units = isinstance(policy, RecommendedConfig) or not is_prompt
    sizes: dict[str, Any] = {"block_size": getattr(policy, "unit_size", row) if has_units else row}
    sizes["row_size"] = row if is_prompt else None
    if phase in policy.phases:
        found = choose_implementation(None, query, **sizes)
    else:
        most = -(-model_config.context_length // FULL_BLOCK) * FULL_BLOCK
        where: dict[str, Any] = {"num_keys": most, "has_offset": not is_prompt, "is_padded": True}
        long = jax.ShapeDtypeStruct((1, most if is_prompt else 1, *heads), query.dtype)
        found = choose_dense_implementation(None, long, **where)
    reason = why_not_mosaic_gpu(query, **sizes) if found == "xla" else None
    return {"implementation": found, "why_not_mosaic_gpu": reason}


def _describe_selection(policy: Policy, what: str) -> dict[str, Any]:
    """Names the implementation of selection, and the reason if it is not a kernel."""
    reason = why_not_device(what)
    if not isinstance(policy, RecommendedConfig | SketchWalkConfig):
        reason = f"{type(policy).__name__} has no kernels that select"
    return {"implementation": "xla" if reason else "mosaic_gpu", "why_not_mosaic_gpu": reason}


def _describe_checkpoint(
    directory: Path, model_config: ModelConfig, dtype: str, weights: str | None
) -> dict[str, Any]:
    """Describes sizes and settings of the model, and its stored and loaded bytes.

    Raises:
      FileNotFoundError: If weight files are missing.
      ValueError: If a weight file is damaged.
    """
    count = sum(leaf.size for leaf in jax.tree.leaves(param_shapes(model_config)))
    tensors, files = stored_tensors(directory)
    dtypes = {FLOAT_DTYPES.get(stored, stored) for *_, stored in tensors}
    # Weights that `save` wrote quantised stay quantised.
    with usage_errors():
        kept = saved_weights({name: stored for name, *_, stored in tensors}, directory, weights)
    weights = weights or kept
    loaded = jax.tree.leaves(param_shapes(model_config, dtype, weights=weights))
    fields = dataclasses.asdict(model_config)
    del fields["plan"]  # described separately
    rope = {name: value for name, value in fields["rope"].items() if value is not None}
    return {
        "directory": str(directory),
        **(fields | {"rope": rope, "context_length": model_config.context_length}),
        "parameters": count,
        "active_parameters": num_active(model_config),
        "stored_dtypes": sorted(dtypes),
        "stored_files": len(files),
        "stored_bytes": sum(path.stat().st_size for path in files),
        "weights": weights or dtype,
        "loaded_bytes": sum(leaf.size * leaf.dtype.itemsize for leaf in loaded),
    }


def _describe_plan(directory: Path) -> tuple[Plan | None, dict[str, Any]]:
    """Returns the plan if it fits, and its description: densities, or the command to run."""
    names = ["short_hash", "problem", "densities", "representatives", "losses"]
    names += ["model_losses", "advice"]
    about: dict[str, Any] = {"file": str(plan_path(directory))} | dict.fromkeys(names)
    try:
        plan = find_plan(directory)
    except ValueError as error:  # its message names the command to run
        return None, about | {"problem": str(error)}
    if plan is None:
        advice = f"sketchwalk calibrate --model {directory}"
        return None, about | {"file": None, "advice": advice}
    about |= {"short_hash": plan.short_hash, "densities": {}, "representatives": {}, "losses": {}}
    for density in _SHOWN_DENSITIES:
        name, layers = f"{density:g}", planned_layers(plan, density)
        densities = about["densities"][name] = [one for one, _ in layers]
        about["representatives"][name] = [count for _, count in layers]
        equal = plan.loss([density] * plan.num_layers)
        about["losses"][name] = {"planned": plan.loss(densities), "equal": equal}
    about["model_losses"] = [dataclasses.asdict(one) for one in plan.model_losses]
    return plan, about


def _describe_cache(
    model_config: ModelConfig, config: Policy, max_tokens: int, dtype: str
) -> dict[str, Any]:
    """Sizes the cache of one sequence in bytes, without allocating it."""
    sizes: dict[str, Any] = {"batch": 1, "max_tokens": max_tokens, "dtype": dtype}
    shapes = jax.eval_shape(lambda: init_cache(model_config, config, **sizes))
    return {
        "tokens": max_tokens,
        "dtype": dtype,
        "key_value_bytes": num_bytes((shapes.key, shapes.value)),
        "statistics_bytes": num_bytes(shapes.statistics),
        "total_bytes": num_bytes(shapes),
    }


def _describe_break_even(config: Policy, phase: str, model_config: ModelConfig) -> dict[str, Any]:
    """Finds the number of tokens from which on the policy is measured to pay (see `Auto`).

    The number is for one sequence. `size` says with which width it was measured. `tokens` is None
    without a measurement, or if the policy did not pay up to `longest` tokens.
    """
    names, longest = ("tokens", "longest", "size", "is_expected"), model_config.context_length
    found: BreakEven | str = Auto(config).find(phase, model_config, tokens=longest)
    of_model = config.for_layer(0, model_config.num_layers)
    places = (0, longest) if phase == "prefill" else (longest - 1, longest)
    if isinstance(of_model, RecommendedConfig) and of_model.keeps_all(phase, *places):
        found = f"nowhere: it keeps all keys up to {longest:,} tokens"
    if isinstance(found, str):
        return dict.fromkeys(names) | {"is_expected": False, "problem": found}
    return {name: getattr(found, name) for name in names} | {"problem": None}


def _describe_kept(config: Policy, model_config: ModelConfig) -> dict[str, dict[int, float]]:
    """Computes the density that prompts of some lengths, and tokens after them, really have."""
    if not isinstance(config, RecommendedConfig):
        return {}
    config = config.for_layer(0, model_config.num_layers)
    lengths = [one for one in _SHOWN_LENGTHS if one <= model_config.context_length]
    return {
        phase: {
            one: round(layers_density(config, model_config, num_tokens=one, phase=phase), 4)
            for one in lengths
        }
        for phase in config.phases
    }


def _to_text(found: dict[str, Any]) -> str:
    """Formats the facts as text."""
    here, model, cache = found["environment"], found["model"], found["cache"]
    kinds = sorted(collections.Counter(here["devices"]).items())
    runs = {
        name: _what_runs(**here[name])
        for name in ("prompts", "selection", "tokens", "token_selection")
    }
    rope = model["rope"]
    scaling = "".join(
        f", {name} {value}"
        for name, value in rope.items()
        if name not in ("rope_type", "theta") and rope["rope_type"] != "default"
    )
    tied = ", output tied to the embedding" if model["tie_word_embeddings"] else ""
    mlp, experts, active = f", mlp {model['intermediate_size']}", "", ""
    if model["num_experts"]:
        dense, count = len(model["dense_mlp_layers"]), model["num_layers"]
        where = f", in {count - dense} of {count} layers" if dense else ""
        mlp = mlp if dense else ""
        experts = (
            f"experts         {model['num_experts']} of width {model['expert_intermediate_size']}, "
            f"{model['experts_per_token']} for each token{where}\n"
        )
        active = f", {model['active_parameters']:,} for each token"
    pays = [f"{f'{phase} pays':<16}{_where(**one)}" for phase, one in found["break_even"].items()]
    text = f"""
sketchwalk-jax  {here["version"]}, JAX {here["jax"]}, Python {here["python"]}
devices         {", ".join(f"{n} x {kind}" for kind, n in kinds)} (backend {here["backend"]})
prompts         {runs["prompts"]}
  selection     {runs["selection"]}
tokens          {runs["tokens"]}
  selection     {runs["token_selection"]}

checkpoint      {model["directory"]}
type            {model["model_type"]}, vocabulary {model["vocab_size"]}{tied}
layers          {model["num_layers"]} of width {model["hidden_size"]}{mlp}
{experts}heads           {model["num_heads"]} for queries, \
{model["num_kv_heads"]} for keys and values, of {model["head_dim"]} dimensions
context         {model["context_length"]} tokens
rope            {rope["rope_type"]}, theta {rope["theta"]:g}{scaling}
end tokens      {", ".join(map(str, model["eos_token_ids"])) or "none"}
parameters      {model["parameters"]:,}{active}, {show_bytes(model["loaded_bytes"])} when loaded
weights         linear layers in {model["weights"]}
stored          {show_bytes(model["stored_bytes"])}, {" and ".join(model["stored_dtypes"])}, \
{model["stored_files"]} file{"s" if model["stored_files"] != 1 else ""}

{_plan_text(found["plan"])}

cache           {show_bytes(cache["total_bytes"])} for one sequence of {cache["tokens"]} tokens
  keys, values  {show_bytes(cache["key_value_bytes"])} in {cache["dtype"]}
  statistics    {show_bytes(cache["statistics_bytes"])} of the policy
"""
    kept = found["programs"]
    programs = "programs        not kept: each process compiles its own"
    if kept["folder"] is not None:
        programs = (
            f"programs        {kept['number']} kept in {kept['folder']}, "
            f"{show_bytes(kept['bytes'])} of at most {show_bytes(kept['most_bytes'])}"
        )
    kept = [f"{f'{phase} keeps':<16}{_shares(one)}" for phase, one in found["kept"].items() if one]
    return "\n".join([text.strip("\n"), programs, *([""] if pays else []), *pays, *kept])


def _shares(kept: dict[int, float]) -> str:
    """Names the density of some lengths, of pairs of all layers."""
    return ", ".join(f"{share:.2f} at {tokens:,} tokens" for tokens, share in kept.items())


def _what_runs(implementation: str, why_not_mosaic_gpu: str | None) -> str:
    """Names an implementation, and why it is not the kernels."""
    return f"{implementation}: {why_not_mosaic_gpu}" if why_not_mosaic_gpu else implementation


def _plan_text(plan: dict[str, Any]) -> str:
    if plan["advice"] is not None:
        return (
            f"plan            none, layers share a density equally; {plan['advice']} measures one"
        )
    if plan["problem"] is not None:
        return f"plan            refused: {plan['problem']}"
    lines = [
        f"plan            {plan['short_hash']}, of this checkpoint, for the recommended policy"
    ]
    for name, layers in plan["densities"].items():
        lines.append(f"  density {name:<6}{' '.join(f'{one:.2f}' for one in layers)}")
    for name, layers in plan["representatives"].items():
        lines.append(f"  queries {name:<6}{' '.join(str(one or 'all') for one in layers)}")
    for name, one in plan["losses"].items():
        lines.append(
            f"  loss {name:<9}{one['planned']:.3f} nats a token, added up over layers that are "
            f"sparse one at a time; {one['equal']:.3f} if all had the same density"
        )
    rows = [["  loses in", "tokens", "density", "nats a token (most)", "same token"]]
    for one in plan["model_losses"]:
        nats = f"{one['kl']:.3f} ({one['most']:.3f})"
        numbers = (f"{one['tokens']:,}", f"{one['density']:g}", nats, f"{one['same']:.3f}")
        rows.append([f"  {one['phase']}", *numbers])
    if len(rows) > 1:
        lines.append(options.align(rows))
    return "\n".join(lines)


def _where(
    tokens: int | None,
    longest: int | None,
    size: str | None,
    is_expected: bool,
    problem: str | None,
) -> str:
    """Says from which length on a policy pays."""
    if problem is not None:
        return problem
    how = "expected, not measured on this device," if is_expected else "measured"
    how += f" with {size}"
    if tokens is None:
        return f"nowhere up to {longest:,} tokens, where attention is dense by default ({how})"
    return f"from {tokens:,} tokens on, below which attention is dense by default ({how})"

"""Model configurations: the contents of a checkpoint's `config.json` as one hashable value."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sketchwalk_jax.models.family import read_json
from sketchwalk_jax.models.gguf_header import gguf_config, is_gguf, read_header
from sketchwalk_jax.models.hf_config import FAMILIES, translate
from sketchwalk_jax.models.rope import RopeConfig
from sketchwalk_jax.models.tensor_files import INDEX_FILE, SINGLE_FILE
from sketchwalk_jax.plan import Plan
from sketchwalk_jax.validation import (
    DTYPES,
    check_choice,
    check_flag,
    check_heads,
    check_integer,
    check_number,
    describe,
)

SAVED_CONFIG_FILE = "model_config.json"
"""The file that marks a directory written by `sketchwalk_jax.models.save`."""

ADAPTER_CONFIG_FILE = "adapter_config.json"
"""The file that marks an adapter of peft."""

PARAMS_FOLDER = "params"
"""The folder of such a directory that holds the weights."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Sizes and switches of a Llama or Qwen decoder; hashable, so static under jit.

    One transformer serves all families, which differ in the switches below and in the names of
    their weights.

    Attributes:
      model_type: "llama", "qwen2", "qwen3" or "qwen3_moe".
      vocab_size: Rows of the embedding, V.
      num_layers: Decoder layers, L.
      hidden_size: Model width, D.
      intermediate_size: Width of the gated mlp, F.
      num_heads: Query heads, N.
      num_kv_heads: Key and value heads, K; divides `num_heads`.
      head_dim: Width of one head, H; even. `num_heads * head_dim` may differ from D.
      max_position_embeddings: Context the checkpoint declares, in tokens.
      rms_norm_eps: Added to the mean square in every RMSNorm.
      rope: Rotary position embedding.
      tie_word_embeddings: Whether the logits reuse the embedding (then there is no lm_head).
      qkv_bias: Whether the query, key and value projections have a bias.
      o_bias: Whether the attention output projection has a bias.
      mlp_bias: Whether the gate, up and down projections have a bias.
      qk_norm: Whether query and key pass an RMSNorm over head_dim before RoPE.
      num_experts: Experts in a layer with a mixture of experts, E; 0 in a model without.
      experts_per_token: Experts that a token chooses.
      expert_intermediate_size: Width of the gated mlp of an expert.
      norm_topk_prob: Whether the weights of a token's experts are divided by their sum.
      dense_mlp_layers: Layers with an ordinary mlp in a model with experts, ascending.
      bos_token_id: Token that starts a text, if there is one.
      eos_token_ids: Tokens that end a generation; may be several or none.
      dtype: The checkpoint's own: "float32", "float16" or "bfloat16".
      plan: How the layers share a density in the recommended policy, if measured; `load` reads it
        from the checkpoint's directory.

    Raises:
      ValueError: For a value outside its range, or a plan of another number of layers.

    Example:
      >>> config = ModelConfig(model_type="llama", vocab_size=64, num_layers=2, hidden_size=32,
      ...                      intermediate_size=64, num_heads=4, num_kv_heads=2, head_dim=8,
      ...                      max_position_embeddings=512)
      >>> config.group_size
      2
    """

    model_type: str
    vocab_size: int
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-5
    rope: RopeConfig = RopeConfig()
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    num_experts: int = 0
    experts_per_token: int = 0
    expert_intermediate_size: int = 0
    norm_topk_prob: bool = False
    dense_mlp_layers: tuple[int, ...] = ()
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    dtype: str = "float32"
    plan: Plan | None = None

    def __post_init__(self) -> None:
        """Checks every field once."""
        check_choice("model_type", self.model_type, tuple(FAMILIES))
        for name in (
            "vocab_size",
            "num_layers",
            "hidden_size",
            "intermediate_size",
            "head_dim",
            "max_position_embeddings",
        ):
            check_integer(name, getattr(self, name))
        check_heads(self.num_heads, self.num_kv_heads)
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even for RoPE, got {self.head_dim}")
        check_number("rms_norm_eps", self.rms_norm_eps, "[0, inf)")
        if not isinstance(self.rope, RopeConfig):
            raise ValueError(f"rope must be a RopeConfig, got {self.rope!r}")
        for name in (
            "tie_word_embeddings",
            "qkv_bias",
            "o_bias",
            "mlp_bias",
            "qk_norm",
            "norm_topk_prob",
        ):
            check_flag(name, getattr(self, name))
        self._check_experts()
        check_choice("dtype", self.dtype, DTYPES)
        check_integer("bos_token_id", self.bos_token_id, least=0, is_optional=True)
        if not isinstance(self.eos_token_ids, tuple) or not all(
            isinstance(one, int) and not isinstance(one, bool) for one in self.eos_token_ids
        ):
            raise ValueError(
                f"eos_token_ids must be a tuple of token ids, got {self.eos_token_ids!r}"
            )
        if self.plan is not None and not isinstance(self.plan, Plan):
            raise ValueError(f"plan must be a Plan or None, got {self.plan!r}")
        if self.plan is not None and self.plan.num_layers != self.num_layers:
            raise ValueError(
                f"plan must be of {self.num_layers} layers, got one of {self.plan.num_layers}"
            )

    def _check_experts(self) -> None:
        layers = self.dense_mlp_layers
        is_tuple = isinstance(layers, tuple) and all(type(x) is int for x in layers)
        if not is_tuple or list(layers) != sorted({*layers} & {*range(self.num_layers)}):
            raise ValueError(
                f"dense_mlp_layers must be a tuple of layers below {self.num_layers}, ascending, "
                f"got {layers!r}"
            )
        sizes = "experts_per_token", "expert_intermediate_size"
        check_integer("num_experts", self.num_experts, least=0)
        for name in sizes:
            check_integer(name, getattr(self, name), least=min(1, self.num_experts))
        given = [*(getattr(self, name) for name in sizes), layers]
        if self.num_experts == 0 and any(given):
            raise ValueError(
                "num_experts must be at least 1 for experts_per_token, expert_intermediate_size or "
                "dense_mlp_layers, got 0"
            )
        if self.experts_per_token > self.num_experts:
            raise ValueError(
                f"experts_per_token must be at most num_experts {self.num_experts}, got "
                f"{self.experts_per_token}"
            )
        if self.num_experts and len(layers) == self.num_layers:
            raise ValueError(
                "dense_mlp_layers must leave a layer with experts; without any, num_experts is 0"
            )
        if self.num_experts and self.mlp_bias:
            raise ValueError("mlp_bias must be False in a model with experts, got True")

    @property
    def expert_layers(self) -> tuple[int, ...]:
        """Layers with a mixture of experts."""
        if not self.num_experts:
            return ()
        return tuple(x for x in range(self.num_layers) if x not in self.dense_mlp_layers)

    @property
    def mlp_layers(self) -> tuple[int, ...]:
        """Layers with an ordinary mlp."""
        return self.dense_mlp_layers if self.num_experts else tuple(range(self.num_layers))

    @property
    def group_size(self) -> int:
        """Query heads that share one key and value head, G = N / K."""
        return self.num_heads // self.num_kv_heads

    @property
    def context_length(self) -> int:
        """Longest sequence that the model supports, in tokens.

        This is `max_position_embeddings`, stretched by the factor of linear or yarn scaling that
        was added by hand: the Qwen model cards add `rope_scaling` without changing
        `max_position_embeddings`.
        """
        return self.rope.stretched_context(self.max_position_embeddings)

    @classmethod
    def from_pretrained(cls, directory: str | Path) -> "ModelConfig":
        """Reads the configuration of a checkpoint.

        Args:
          directory: A Hugging Face checkpoint directory (`config.json`, and for the end
            tokens `generation_config.json` where there is one), a directory written by
            `sketchwalk_jax.models.save`, or a GGUF file (its metadata).

        Returns:
          The configuration, without a plan: `load` adds that.

        Raises:
          FileNotFoundError: If the directory or its `config.json` does not exist.
          ImportError: If it is a GGUF file and the package `gguf` is missing.
          ValueError: If a file is not valid JSON or GGUF, or the contents are not a supported
            model.
          NotImplementedError: If the checkpoint uses a feature that is not implemented.

        Example:
          >>> ModelConfig.from_pretrained("Llama-3.2-1B").num_layers  # doctest: +SKIP
          16
        """
        directory = check_checkpoint(directory)
        if directory.is_file():
            header = read_header(directory)
            try:
                return cls(**translate(gguf_config(header)))
            except (ValueError, NotImplementedError) as error:
                raise type(error)(str(error).replace("config.json", str(directory))) from error
        if (directory / SAVED_CONFIG_FILE).exists():
            return cls._from_saved(read_json(directory / SAVED_CONFIG_FILE))
        generation = directory / "generation_config.json"
        return cls.from_dict(
            read_json(directory / "config.json"),
            read_json(generation) if generation.exists() else None,
        )

    @classmethod
    def from_dict(
        cls, raw: Mapping[str, Any], generation_config: Mapping[str, Any] | None = None
    ) -> "ModelConfig":
        """Translates the contents of a Hugging Face `config.json`.

        Absent attributes take the defaults of transformers' class. See
        `sketchwalk_jax.models.hf_config` for refused and ignored attributes.

        Args:
          raw: The parsed `config.json`, in any spelling since 2023.
          generation_config: The parsed `generation_config.json`; only its end tokens are used, and
            take precedence over `raw`.

        Returns:
          The configuration.

        Raises:
          ValueError: If the model type is not supported or an attribute is missing or invalid.
          NotImplementedError: If the checkpoint uses a feature that is not implemented; all of
            them are listed.

        Example:
          >>> raw = dict(model_type="qwen2", vocab_size=64, hidden_size=32,
          ...            intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
          ...            num_key_value_heads=2)
          >>> ModelConfig.from_dict(raw).qkv_bias
          True
        """
        return cls(**translate(raw, generation_config))

    @classmethod
    def _from_saved(cls, saved: Mapping[str, Any]) -> "ModelConfig":
        fields: dict[str, Any] = {}
        try:
            fields |= saved["model_config"]
            rope = RopeConfig(**fields.pop("rope"))
            for name in {"eos_token_ids", "dense_mlp_layers"} & fields.keys():
                fields[name] = tuple(fields[name])
            return cls(**fields, rope=rope)
        except (KeyError, TypeError) as error:
            raise ValueError(
                f"{SAVED_CONFIG_FILE} must hold every field of ModelConfig as written by "
                f"sketchwalk_jax.models.save, got {sorted(fields)} ({error})"
            ) from error


def check_model_config(model_config: Any) -> None:
    """Raises unless a value is a `ModelConfig`.

    Args:
      model_config: The value.

    Raises:
      ValueError: If it has another type, for example if it is the parameter tree.
    """
    if not isinstance(model_config, ModelConfig):
        raise ValueError(
            f"model_config must be a ModelConfig, got {describe(model_config)}; load returns "
            f"(params, model_config)"
        )


def check_no_adapter(directory: Path, name: str | None = None) -> None:
    """Raises if a directory holds only an adapter of peft, such as LoRA.

    Args:
      directory: The directory.
      name: Its name in the error message; by default its path.

    Raises:
      ValueError: If it has an adapter's weights, but no whole model's.
    """
    if not (directory / ADAPTER_CONFIG_FILE).exists() or any(
        (directory / one).exists() for one in (SAVED_CONFIG_FILE, SINGLE_FILE, INDEX_FILE)
    ):
        return
    base = read_json(directory / ADAPTER_CONFIG_FILE).get("base_model_name_or_path")
    raise ValueError(
        f"must be a whole model, got {name or str(directory)!r}, an adapter of peft"
        f"{f' for {base}' if isinstance(base, str) else ''}; merge it into that model with peft's "
        f"merge_and_unload, write the result with save_pretrained, and pass its directory"
    )


def check_checkpoint(path: str | Path) -> Path:
    """Returns the path of a checkpoint directory or GGUF file; raises with advice otherwise."""
    found = Path(path).expanduser()
    if found.is_dir():
        # While a model of the hub is being fetched, its weights may still be missing.
        if (found / ADAPTER_CONFIG_FILE).exists() and any(found.glob("adapter_model.*")):
            check_no_adapter(found)
        return found
    if is_gguf(found):
        return found
    if found.exists():
        raise ValueError(
            f"must be a checkpoint directory or a GGUF file, got the file {str(found)!r}"
        )
    raise FileNotFoundError(
        f"must be an existing checkpoint directory or GGUF file, got {str(path)!r}. A model of "
        f"the Hugging Face hub has to be downloaded first: by sketchwalk_jax.load('ORG/NAME'), or "
        f"`hf download ORG/NAME --local-dir DIR`"
    )

"""The relevant part of published models' `config.json`, and the fields expected from it.

The number of parameters is the one that the model cards and transformers report.
"""

from typing import Any

from sketchwalk_jax.models import RopeConfig

_LLAMA3 = dict(
    architectures=["LlamaForCausalLM"], attention_bias=False, attention_dropout=0.0,
    bos_token_id=128000, eos_token_id=128001, hidden_act="silu", initializer_range=0.02,
    max_position_embeddings=131072, mlp_bias=False, model_type="llama", num_attention_heads=32,
    num_key_value_heads=8, pretraining_tp=1, rms_norm_eps=1e-05, rope_theta=500000.0,
    torch_dtype="bfloat16", transformers_version="4.43.0.dev0", use_cache=True, vocab_size=128256,
)  # fmt: skip
_LLAMA3_ROPE = dict(
    factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
    original_max_position_embeddings=8192, rope_type="llama3",
)  # fmt: skip
_QWEN2 = dict(
    architectures=["Qwen2ForCausalLM"], attention_dropout=0.0, bos_token_id=151643,
    eos_token_id=151645, hidden_act="silu", hidden_size=3584, initializer_range=0.02,
    intermediate_size=18944, max_position_embeddings=32768, max_window_layers=28,
    model_type="qwen2", num_attention_heads=28, num_hidden_layers=28, num_key_value_heads=4,
    rms_norm_eps=1e-06, rope_theta=1000000.0, sliding_window=131072, tie_word_embeddings=False,
    torch_dtype="bfloat16", use_cache=True, use_sliding_window=False, vocab_size=152064,
)  # fmt: skip
_QWEN3 = dict(
    architectures=["Qwen3ForCausalLM"], attention_bias=False, attention_dropout=0.0,
    bos_token_id=151643, eos_token_id=151645, head_dim=128, hidden_act="silu",
    initializer_range=0.02, max_position_embeddings=40960, max_window_layers=36,
    model_type="qwen3", num_key_value_heads=8, rms_norm_eps=1e-06, rope_scaling=None,
    rope_theta=1000000, sliding_window=None, torch_dtype="bfloat16",
    transformers_version="4.51.0", use_cache=True, use_sliding_window=False, vocab_size=151936,
)  # fmt: skip

_QWEN3_MOE = _QWEN3 | dict(
    architectures=["Qwen3MoeForCausalLM"], decoder_sparse_step=1, hidden_size=2048,
    intermediate_size=6144, max_window_layers=48, mlp_only_layers=[], model_type="qwen3_moe",
    moe_intermediate_size=768, norm_topk_prob=True, num_attention_heads=32, num_experts=128,
    num_experts_per_tok=8, num_hidden_layers=48, num_key_value_heads=4,
    output_router_logits=False, router_aux_loss_coef=0.001, tie_word_embeddings=False,
)  # fmt: skip

# name: (config.json, generation_config.json, fields, number of parameters)
PUBLISHED: dict[str, tuple[dict[str, Any], dict[str, Any] | None, dict[str, Any], int]] = {
    "Llama-3.1-8B-Instruct": (
        _LLAMA3 | dict(
            hidden_size=4096, intermediate_size=14336, num_hidden_layers=32,
            rope_scaling=_LLAMA3_ROPE, tie_word_embeddings=False,
        ),
        {"eos_token_id": [128001, 128008, 128009], "temperature": 0.6, "top_p": 0.9},
        dict(
            num_layers=32, group_size=4, head_dim=128, tie_word_embeddings=False,
            context_length=131072, eos_token_ids=(128001, 128008, 128009), qkv_bias=False,
            dtype="bfloat16",
            rope=RopeConfig(
                rope_type="llama3", theta=500000.0, factor=8.0, low_freq_factor=1.0,
                high_freq_factor=4.0, original_max_position_embeddings=8192,
            ),
        ),
        8_030_261_248,
    ),
    "Llama-3.2-1B": (
        _LLAMA3 | dict(
            head_dim=64, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16,
            rope_scaling=_LLAMA3_ROPE | {"factor": 32.0}, tie_word_embeddings=True,
        ),
        None,
        dict(
            num_layers=16, group_size=4, head_dim=64, tie_word_embeddings=True,
            context_length=131072, eos_token_ids=(128001,),
        ),
        1_235_814_400,
    ),
    "Qwen2.5-7B-Instruct": (
        _QWEN2,
        {"eos_token_id": [151645, 151643], "repetition_penalty": 1.05, "do_sample": True},
        dict(
            num_layers=28, group_size=7, head_dim=128, tie_word_embeddings=False,
            context_length=32768, eos_token_ids=(151645, 151643), qkv_bias=True, o_bias=False,
            qk_norm=False,
        ),
        7_615_616_512,
    ),
    "Qwen2.5-7B-Instruct with yarn": (
        _QWEN2 | dict(
            rope_scaling=dict(factor=4.0, original_max_position_embeddings=32768, type="yarn")
        ),
        None,
        dict(context_length=131072, max_position_embeddings=32768),
        7_615_616_512,
    ),
    "Qwen3-8B": (
        _QWEN3 | dict(
            hidden_size=4096, intermediate_size=12288, num_attention_heads=32,
            num_hidden_layers=36, tie_word_embeddings=False,
        ),
        None,
        dict(
            num_layers=36, group_size=4, head_dim=128, tie_word_embeddings=False,
            context_length=40960, qkv_bias=False, qk_norm=True,
        ),
        8_190_735_360,
    ),
    "Qwen3-0.6B": (
        _QWEN3 | dict(
            hidden_size=1024, intermediate_size=3072, num_attention_heads=16,
            num_hidden_layers=28, tie_word_embeddings=True,
        ),
        None,
        dict(num_layers=28, group_size=2, head_dim=128, tie_word_embeddings=True),
        596_049_920,
    ),
    "Qwen3-30B-A3B": (
        _QWEN3_MOE,
        {"eos_token_id": [151645, 151643]},
        dict(
            num_layers=48, group_size=8, head_dim=128, context_length=40960, qk_norm=True,
            num_experts=128, experts_per_token=8, expert_intermediate_size=768,
            norm_topk_prob=True, dense_mlp_layers=(), mlp_layers=(), bos_token_id=151643,
            eos_token_ids=(151645, 151643), dtype="bfloat16", rope=RopeConfig(theta=1e6),
        ),
        30_532_122_624,
    ),
    "Qwen3-30B-A3B-Instruct-2507": (
        _QWEN3_MOE | dict(max_position_embeddings=262144, rope_theta=10000000),
        None,
        dict(context_length=262144, rope=RopeConfig(theta=1e7)),
        30_532_122_624,
    ),
    "Qwen3-Coder-30B-A3B-Instruct": (
        _QWEN3_MOE | dict(
            intermediate_size=5472, max_position_embeddings=262144, max_window_layers=28,
            qkv_bias=False, rope_theta=10000000, router_aux_loss_coef=0.0,
            shared_expert_intermediate_size=0, use_qk_norm=True,
        ),
        None,
        dict(context_length=262144, num_experts=128, qk_norm=True, qkv_bias=False),
        30_532_122_624,
    ),
}  # fmt: skip

"""Host references beyond `sketchwalk_jax.algorithm`, one sequence at a time.

`printed` has variants of the printed rule, dense layers, and attention with any mask; `released`
has the rule of the authors' published code. They share no code with the policies and kernels.
"""

# ruff: noqa: F401

from reference.printed import (
    ReferenceLayer,
    block_scores,
    budget,
    masked_attention,
    run_layer,
    run_layers,
    select,
    token_mask,
)
from reference.released import (
    released_select,
    released_select_decode,
    released_select_prefill,
)

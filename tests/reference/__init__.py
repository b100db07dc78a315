"""References on the host for what `sketchwalk_jax.algorithm` does not say, one sequence at a time.

`printed` has the variants of the printed rule, layers that are dense, and attention with any mask;
`released` is the rule of the authors' published code. They share no code with what is tested.
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

"""Sketch-and-Walk straight from the equations: slow, readable, shared with nothing.

Every fast path of the library is tested against this package, which imports none of them: only
the frozen configuration that says what is computed. Attention is float32 at
`jax.lax.Precision.HIGHEST`; sketches are float32 and the walk float64, on the host. One sequence
at a time, of any length.

The files follow the paper: `sketch` (section 2.2), `walk` (2.3), `selection` and `attention`
(Algorithm 1, steps 7 and 8), `layers` (Algorithms 1 and 2), `released` (the rule of the authors'
published code), `recommended` (the recommended policy).
"""

from sketchwalk_jax.reference.attention import masked_attention
from sketchwalk_jax.reference.layers import (
    ReferenceLayer,
    decode_layer,
    prefill_layer,
    select_decode,
    select_prefill,
    sketchwalk_decode,
    sketchwalk_prefill,
)
from sketchwalk_jax.reference.recommended import (
    recommended_budget,
    recommended_scores,
    recommended_select,
    recommended_select_decode,
    recommended_select_prefill,
    representatives,
)
from sketchwalk_jax.reference.released import (
    released_select,
    released_select_decode,
    released_select_prefill,
    released_transition,
    released_walk,
)
from sketchwalk_jax.reference.selection import (
    budget,
    measured_density,
    select,
    select_rows,
    token_mask,
)
from sketchwalk_jax.reference.sketch import (
    block_means,
    block_scores,
    hadamard,
    srht_matrix,
    subsampled_hadamard,
)
from sketchwalk_jax.reference.walk import transition, walk_layers, walk_step

__all__ = [
    "ReferenceLayer",
    "block_means",
    "block_scores",
    "budget",
    "decode_layer",
    "hadamard",
    "masked_attention",
    "measured_density",
    "prefill_layer",
    "recommended_budget",
    "recommended_scores",
    "recommended_select",
    "recommended_select_decode",
    "recommended_select_prefill",
    "released_select",
    "released_select_decode",
    "released_select_prefill",
    "released_transition",
    "released_walk",
    "representatives",
    "select",
    "select_decode",
    "select_prefill",
    "select_rows",
    "sketchwalk_decode",
    "sketchwalk_prefill",
    "srht_matrix",
    "subsampled_hadamard",
    "token_mask",
    "transition",
    "walk_layers",
    "walk_step",
]

"""Sketch-and-Walk straight from the equations: slow, readable, shared with nothing.

Every fast path of the library is tested against this package, which imports none of them: only
the frozen configuration that says what is computed. Attention is float32 at
`jax.lax.Precision.HIGHEST`; sketches are float32 and the walk float64, on the host. One sequence
at a time, of any length.

`printed` is the rule as the paper prints it (sections 2.2 and 2.3, Algorithms 1 and 2), `released`
the rule of the authors' published code, `recommended` the recommended policy.
"""

# ruff: noqa: F401

from reference.printed import (
    ReferenceLayer,
    block_means,
    block_scores,
    budget,
    decode_layer,
    hadamard,
    masked_attention,
    measured_density,
    prefill_layer,
    select,
    select_decode,
    select_prefill,
    select_rows,
    sketchwalk_decode,
    sketchwalk_prefill,
    srht_matrix,
    subsampled_hadamard,
    token_mask,
    transition,
    walk_layers,
    walk_step,
)
from reference.recommended import (
    recommended_budget,
    recommended_scores,
    recommended_select,
    recommended_select_decode,
    recommended_select_prefill,
    representatives,
)
from reference.released import (
    released_select,
    released_select_decode,
    released_select_prefill,
    released_transition,
    released_walk,
)

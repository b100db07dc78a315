"""Cases of the kernels for GPUs from Ampere on: every GPU, head, list and type, by name."""

import dataclasses
from typing import Any

import hopper
import jax
import jax.numpy as jnp
import kernel_cases
from kernel_cases import AttentionKernelCase, Case, Program

from sketchwalk_jax import KernelConfig
from sketchwalk_jax.pallas_kernels.config import AMPERE_DECODE_HEADS
from sketchwalk_jax.policies.base import LayerShape, Span
from sketchwalk_jax.policies.recommended import RecommendedConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class AmpereCase(AttentionKernelCase):
    """A case that runs `ampere_prefill` or `ampere_decode`.

    Attributes:
      capability: Compute capability of the GPU that it is compiled for.
    """

    capability: str = "8.0"

    def __str__(self) -> str:
        """Names the case in test ids."""
        return f"{super().__str__()}-{self.capability}"

    def program(self, *, kernel_config: KernelConfig | None = None) -> Program:
        """The kernel as a function of arrays alone, and the shapes of these."""
        from sketchwalk_jax.pallas_kernels.ampere_decode import ampere_decode
        from sketchwalk_jax.pallas_kernels.ampere_prefill import ampere_prefill

        kernel = ampere_prefill if self.op == "prefill" else ampere_decode
        return self.program_of(kernel, kernel_config)


def of(case: AttentionKernelCase, **changes: str) -> AmpereCase:
    """The case of Hopper's kernel, on this one."""
    fields = {x.name: getattr(case, x.name) for x in dataclasses.fields(case)}
    return AmpereCase(**fields | changes)


def _compiled() -> dict[str, AmpereCase]:
    """Every GPU with both heads, alone and in groups, and blocks and pages, types in turn."""
    found = {}
    for capability in hopper.SHARED_KIB:
        for head_dim in (64, 128):
            for heads in ((32, 8), (8, 8)):
                for index, sizes in enumerate(((64, None), (16, 64), (128, None))):
                    case = AmpereCase(
                        op="prefill",
                        heads=heads,
                        lengths=(4096, 4096),
                        head_dim=head_dim,
                        block_size=sizes[0],
                        row_size=sizes[1],
                        dtype=("bfloat16", "float16")[(index + head_dim // 64) % 2],
                        capability=capability,
                        return_lse=index != 2,
                    )
                    found[str(case)] = case
        for case in DECODE_SHAPES:
            case = of(case, capability=capability)
            found[str(case)] = case
    return found


# Lists in one part and in several, of one head, of groups of eight or less and of more.
DECODE_SHAPES = [
    kernel_cases.Decode(heads=heads, lengths=lengths, head_dim=head_dim, **lists)
    for head_dim in (64, 128)
    for heads, lengths, lists in (
        ((32, 8), (65536,), {"block_size": 16, "list_blocks": 820}),
        ((32, 8), (4096,) * 128, {"block_size": 16}),
        ((28, 4), (16384,) * 4, {"dtype": "float16", "lists": "kv_head", "return_lse": False}),
        ((32, 2), (16384,) * 4, {"block_size": 128}),
        ((8, 8), (16384,) * 32, {"lists": "head", "dtype": "float16"}),
    )
]


@dataclasses.dataclass(frozen=True)
class SelectionCase:
    """What selects by the recommended policy, or writes a token, on a GPU.

    Attributes:
      case: The case of Hopper.
      capability: Compute capability of the GPU.
    """

    case: Case
    capability: str

    def __str__(self) -> str:
        """Names the case in test ids."""
        return f"{self.case}-{self.capability}"

    def program(self, *, kernel_config: KernelConfig | None = None) -> Program:
        """That of the case."""
        return self.case.program(kernel_config=kernel_config)


_SELECTING = (
    kernel_cases.EvidenceKernelCase,
    kernel_cases.CodesKernelCase,
    kernel_cases.WriteKernelCase,
    kernel_cases.SelectionKernelCase,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AmpereLinearCase(kernel_cases.LinearKernelCase):
    """Rows times one layer of stacked weights.

    Attributes:
      capability: Compute capability of the GPU that it is compiled for.
    """

    capability: str

    def __str__(self) -> str:
        """Names the case in test ids."""
        return f"linear {self.rows}x{self.inputs} to {self.columns}, {self.dtype}-{self.capability}"

    def program(self, *, kernel_config: KernelConfig | None = None) -> Program:
        """The products."""
        from sketchwalk_jax.pallas_kernels.ampere_linear import ampere_linear

        def array(*shape: int, dtype: str = self.dtype) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(shape, dtype)

        stacks = [array(kernel_cases.NUM_LAYERS, self.inputs, width) for width in self.columns]
        return ampere_linear, (array(self.rows, self.inputs), stacks, array(dtype="int32"))


# Few rows and as many as there may be; several arrays; widths of a 0.5B, an 8B and a 70B model.
LINEAR_SHAPES: tuple[dict[str, Any], ...] = (
    {"rows": 1, "inputs": 4096, "columns": (4096, 1024, 1024)},
    {"rows": 1, "inputs": 14336, "columns": (4096,)},
    {"rows": 8, "inputs": 896, "columns": (4864, 4864), "dtype": "float16"},
    {"rows": 32, "inputs": 8192, "columns": (28672, 28672)},
)
LINEAR = {
    str(found): found
    for capability in hopper.SHARED_KIB
    for shape in LINEAR_SHAPES
    for found in [AmpereLinearCase(**shape, capability=capability)]
}
COMPILED = _compiled()
SELECTION = {
    str(found): found
    for capability in hopper.SHARED_KIB
    if capability != "9.0"
    for case in kernel_cases.COMPILED.values()
    if isinstance(case, _SELECTING)
    for found in [SelectionCase(case, capability)]
}


@dataclasses.dataclass(frozen=True)
class WholePromptCase:
    """All of the selection of a prompt by the default policy, in one layer of the 8B shape."""

    capability: str = "8.0"
    blocks: int = 256

    def program(self, *, kernel_config: KernelConfig | None = None) -> Program:
        """Lists and evidence from queries and keys."""
        policy, kernels = RecommendedConfig(), kernel_config or KernelConfig()
        shape = LayerShape(32, 8, 128, jnp.bfloat16)

        def select(query: Any, key: Any, lengths: Any) -> Any:
            valid = jnp.arange(query.shape[1], dtype=jnp.int32)[None] < lengths[:, None]
            span = Span(jnp.zeros_like(lengths), valid, lengths, lengths)
            how: dict[str, Any] = {"span": span, "kernel_config": kernels}
            codes = policy.init_statistics(shape, batch=1, num_blocks=self.blocks)
            codes = policy.observe(query, key, codes, **how)
            walk = policy.init_walk(batch=1, num_rows=self.blocks, num_blocks=self.blocks)
            layer = jnp.zeros((), jnp.int32)
            return policy.select(query, key[None], codes, walk, layer=layer, **how)

        heads = (shape.num_heads, shape.num_kv_heads)
        query, key = (
            jax.ShapeDtypeStruct((1, 64 * self.blocks, n, 128), jnp.bfloat16) for n in heads
        )
        return select, (query, key, jax.ShapeDtypeStruct((1,), jnp.int32))


WHOLE_PROMPT = WholePromptCase()
# Prompts of the recommended policy, for the table of what the assembler makes of the kernels.
PROMPT_CODE = [
    x
    for x in kernel_cases.EVIDENCE_CASES
    if x.count is not None and x.pages > 1 and (x.heads, x.kv_heads) in ((32, 8), (14, 2))
]
# The compiler takes a case of a file by its name there.
globals().update(COMPILED | SELECTION | LINEAR)
PREFILL_CASES = [of(x) for x in kernel_cases.CASES if x.op == "prefill"]
DECODE_CASES = [
    of(x) for x in kernel_cases.CASES if x.op == "decode" and x.head_dim in AMPERE_DECODE_HEADS
]

"""The linear layers of a token in each type of weights, in one process, on one GPU from Ampere on.

    python benchmarks/linear.py [--out benchmarks/results/linear.json] [--quick]

Each product of a layer of Llama 3.1 8B is timed inside a jitted loop over the layers of a stack. On
Hopper one kernel (`pallas_kernels/linear.py`) reads weights of eight bits. Weights in bfloat16 are
read by the kernel for GPUs from Ampere on (`ampere_linear.py`), and by XLA's code: sums of
products, and products of a layer that is copied out of its stack. Forms take turns. Stacks are
larger than the L2 cache. Each form is checked: against float32 with the same weights, and a second
run bit for bit. `--quick` runs tiny shapes anywhere; the interpreter's times mean nothing.
"""

import argparse
import functools
from collections.abc import Callable
from typing import Any

import common
import jax
import jax.numpy as jnp
from kernels import ROUNDS_OF_LAYERS, compare, copy_bandwidth, in_loop, rounds

from sketchwalk_jax import dispatch
from sketchwalk_jax.models.transformer import MOST_SUMMED_ROWS, rms_norm, sums_of_rows
from sketchwalk_jax.pallas_kernels.ampere_linear import MOST_ROWS as MOST_AMPERE_ROWS
from sketchwalk_jax.pallas_kernels.ampere_linear import ampere_linear
from sketchwalk_jax.pallas_kernels.linear import linear_kernel

NARROW = ("float8_e4m3fn", "int8")
# Columns of the arrays that share an input, its width, and whether it goes through a norm.
Product = tuple[tuple[int, ...], int, bool]
PRODUCTS: dict[str, Product] = {
    "query, key, value": ((4096, 1024, 1024), 4096, True),
    "output": ((4096,), 4096, False),
    "gate, up": ((14336, 14336), 4096, True),
    "down": ((4096,), 14336, False),
}
QUICK_PRODUCTS: dict[str, Product] = {"gate, up": ((64, 64), 256, True)}
LAYERS, QUICK_LAYERS = 8, 2
EPS = 1e-5


def draw(product: Product, rows: int, dtype: str, layers: int) -> dict[str, Any]:
    """Rows, stacked weights `[L, D, F]` or `[L, F, D]`, their scales, and the norm's."""
    columns, inputs, has_norm = product
    keys = jax.random.split(jax.random.key(0), len(columns) + 1)
    x = jax.random.normal(keys[-1], (rows, inputs), jnp.bfloat16)
    arrays, scales = [], []
    for key, width in zip(keys[:-1], columns, strict=True):
        shape = (layers, inputs, width) if dtype == "bfloat16" else (layers, width, inputs)
        weights = jax.random.normal(key, shape, jnp.bfloat16)
        if dtype == "int8":
            weights = jnp.round(weights * 30).clip(-127, 127)
        arrays.append(weights.astype(dtype))
        scales.append(jnp.full((layers, width), 0.5, jnp.float32))
    return {
        "x": x,
        "kernels": arrays,
        "weight_scales": None if dtype == "bfloat16" else scales,
        "scale": jnp.ones((layers, inputs), jnp.bfloat16) if has_norm else None,
    }


def multiply(x: Any, given: dict[str, Any], layer: Any, *, interpret: bool) -> list[Any]:
    """The products of one layer with weights of eight bits, by Hopper's kernel."""
    return linear_kernel(
        x,
        given["kernels"],
        jnp.asarray(layer, jnp.int32),
        scale=given["scale"],
        eps=EPS,
        weight_scales=given["weight_scales"],
        interpret=interpret,
    )


def multiply_on_ampere(x: Any, given: dict[str, Any], layer: Any, *, interpret: bool) -> list[Any]:
    """The products of one layer, by the kernel for GPUs from Ampere on."""
    options = {"scale": given["scale"], "eps": EPS, "interpret": interpret}
    return ampere_linear(x, given["kernels"], jnp.asarray(layer, jnp.int32), **options)


def add_up(x: Any, given: dict[str, Any], layer: Any, *, interpret: bool) -> list[Any]:
    """The products of one layer, as sums."""
    weights = {str(index): one for index, one in enumerate(given["kernels"])}
    layer = jnp.asarray(layer, jnp.int32)
    found = sums_of_rows(x[:, None], weights, layer, scale=given["scale"], eps=EPS)
    assert found is not None  # of so few rows
    return [one[:, 0].astype(jnp.float32) for one in found]


def multiply_on_xla(x: Any, given: dict[str, Any], layer: Any, *, interpret: bool) -> list[Any]:
    """The products of one layer, by XLA, with the types that a model has."""
    layer = jnp.asarray(layer, jnp.int32)
    if given["scale"] is not None:
        x = rms_norm(x, given["scale"][layer], eps=EPS)
    return [(x @ one[layer]).astype(jnp.float32) for one in given["kernels"]]


def forms(rows: int, *, is_quick: bool) -> dict[str, tuple[str, Callable[..., list[Any]]]]:
    """Types of weights and what multiplies with them, by the name of the form."""
    on_hopper = {name: (name, multiply) for name in NARROW}
    elsewhere = {"from Ampere on": ("bfloat16", multiply_on_ampere)}
    if rows > MOST_AMPERE_ROWS:
        elsewhere = {}
    if rows <= MOST_SUMMED_ROWS:
        elsewhere["sums"] = ("bfloat16", add_up)
    elsewhere["XLA"] = ("bfloat16", multiply_on_xla)
    return (on_hopper if is_quick or dispatch.is_hopper() else {}) | elsewhere


def wanted(given: dict[str, Any], layer: int) -> list[Any]:
    """The same in float32."""
    x = given["x"].astype(jnp.float32)
    if given["scale"] is not None:
        x = x * jax.lax.rsqrt(jnp.mean(x * x, axis=1, keepdims=True) + EPS)
    found = []
    for index, weights in enumerate(given["kernels"]):
        own = weights[layer].astype(jnp.float32)
        if given["weight_scales"] is not None:
            own = (own * given["weight_scales"][index][layer][:, None]).T
        found.append(jnp.dot(x, own, precision=jax.lax.Precision.HIGHEST))
    return found


def measure(
    name: str, product: Product, rows: int, *, layers: int, repeats: int, is_quick: bool
) -> list[dict[str, Any]]:
    """A row of each form."""
    inputs = {dtype: draw(product, rows, dtype, layers) for dtype in ("bfloat16", *NARROW)}
    loops, calls = {}, {}
    with common.Compiling() as pool:
        for form, (dtype, function) in forms(rows, is_quick=is_quick).items():
            call = functools.partial(function, interpret=dispatch.kernels_here() is None)

            def step(x: Any, given: dict[str, Any], layer: int, call: Any = call) -> Any:
                # The next product waits for this one, whose sums are too small to change the rows.
                found = call(x, given, layer)
                return x + (sum(jnp.sum(one) for one in found) * 1e-30).astype(x.dtype)

            given = inputs[dtype]
            loops[form] = pool.submit(in_loop, step, given["x"], given, layers)
            program = jax.jit(call).lower(given["x"], given, jnp.int32(0))
            calls[form] = dtype, pool.submit(program.compile), given
    runs = {form: one.result() for form, one in loops.items()}
    times = rounds(runs, repeats, step=layers * ROUNDS_OF_LAYERS)
    found = []
    for form, (dtype, compiled, given) in calls.items():
        program = compiled.result()
        products = (program(given["x"], given, jnp.int32(0)) for _ in range(2))
        one, other = (jnp.concatenate(own, axis=1) for own in products)
        size = sum(x.size * x.dtype.itemsize for x in given["kernels"]) / layers
        seconds = common.summarize(times[form])
        found.append(
            {"product": name, "rows": rows, "form": form, "dtype": dtype, "weight_bytes": size}
            | {
                "ms": seconds["median"] * 1e3,
                "ms_iqr": (seconds["q75"] - seconds["q25"]) * 1e3,
                "tb_per_s": size / seconds["median"] / 1e12,
            }
            | compare(one, other, jnp.concatenate(wanted(given, 0), axis=1))
        )
    return found


def main() -> None:
    """Runs everything and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default=str(common.RESULTS / "linear.json"))
    parser.add_argument("--rows", type=int, action="append", help="default: 1, 8 and 64")
    parser.add_argument("--repeats", type=int, default=9, help="rounds, in turns")
    parser.add_argument("--quick", action="store_true", help="tiny shapes, two rounds")
    options = parser.parse_args()
    if not options.quick and dispatch.kernels_here() is None:
        raise SystemExit("the kernels need an NVIDIA GPU from Ampere on; --quick runs anywhere")
    products = QUICK_PRODUCTS if options.quick else PRODUCTS
    repeats = 2 if options.quick else options.repeats
    bandwidth = copy_bandwidth(2**24 if options.quick else 2**32, repeats)
    details = {"repeats": repeats, "is_quick": options.quick, "copy_tb_per_s": bandwidth}
    meta, rows = common.describe_machine(**details), []
    for name, product in products.items():
        for count in options.rows or ([1] if options.quick else [1, 8, 64]):
            found = measure(
                name,
                product,
                count,
                layers=QUICK_LAYERS if options.quick else LAYERS,
                repeats=repeats,
                is_quick=options.quick,
            )
            for row in found:
                text = f"{row['product']:<18} {row['rows']:>2} rows {row['form']:<14}"
                print(f"{text} {row['ms']:8.4f} ms {row['tb_per_s']:5.2f} TB/s", flush=True)
            rows += found
            common.write_results(options.out, meta, rows)  # a run that is cut off keeps these


if __name__ == "__main__":
    main()

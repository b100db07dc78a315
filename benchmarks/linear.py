"""The linear layers of a token in each type of weights, in one process, on one Hopper GPU.

    python benchmarks/linear.py [--out benchmarks/results/linear.json] [--quick]

Each product of a layer of Llama 3.1 8B is timed inside a jitted loop over the layers of a stack, by
the kernel for few rows (`pallas_kernels/linear.py`); types of weights take turns. Stacks are larger
than the L2 cache. Each form is checked: against float32 with the same weights, and a second run
bit for bit. `tests/linear_table.py` counts the same products without a GPU. `--quick` runs tiny
shapes anywhere; the interpreter's times mean nothing.
"""

import argparse
import functools
from typing import Any

import common
import jax
import jax.numpy as jnp
from kernels import ROUNDS_OF_LAYERS, compare, copy_bandwidth, in_loop, rounds

from sketchwalk_jax import dispatch
from sketchwalk_jax.models.four_bits import in_order, widen
from sketchwalk_jax.pallas_kernels.config import WEIGHT_GROUP
from sketchwalk_jax.pallas_kernels.linear import linear_kernel

# Names of types of weights, and of the arrays that hold them.
DTYPES = {name: name for name in ("bfloat16", "float8_e4m3fn", "int8")} | {"int4": "uint8"}
TYPES = tuple(DTYPES)
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
        if dtype == "int4":
            codes = jax.random.bits(key, (layers, width, inputs // 2), jnp.uint8)
            arrays.append(codes)
            scales.append(jnp.full((layers, inputs // WEIGHT_GROUP, width), 0.5, jnp.bfloat16))
            continue
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
    """The products of one layer, by the kernel."""
    return linear_kernel(
        x,
        given["kernels"],
        jnp.asarray(layer, jnp.int32),
        scale=given["scale"],
        eps=EPS,
        is_transposed=given["weight_scales"] is not None,
        weight_scales=given["weight_scales"],
        interpret=interpret,
    )


def wanted(given: dict[str, Any], layer: int) -> list[Any]:
    """The same in float32."""
    x = given["x"].astype(jnp.float32)
    if given["scale"] is not None:
        x = x * jax.lax.rsqrt(jnp.mean(x * x, axis=1, keepdims=True) + EPS)
    found = []
    for index, weights in enumerate(given["kernels"]):
        own = weights[layer].astype(jnp.float32)
        if weights.dtype == jnp.uint8:
            scales = given["weight_scales"][index][layer]
            own = in_order(widen(weights[layer], scales, jnp.float32)).T
        elif given["weight_scales"] is not None:
            own = (own * given["weight_scales"][index][layer][:, None]).T
        found.append(jnp.dot(x, own, precision=jax.lax.Precision.HIGHEST))
    return found


def measure(
    name: str, product: Product, rows: int, *, layers: int, repeats: int, interpret: bool
) -> list[dict[str, Any]]:
    """A row of each type of weights."""
    call = functools.partial(multiply, interpret=interpret)

    def step(x: Any, given: dict[str, Any], layer: int) -> Any:
        # The next product waits for this one, whose sums are too small to change the rows.
        found = call(x, given, layer)
        return x + (sum(jnp.sum(one) for one in found) * 1e-30).astype(x.dtype)

    inputs = {dtype: draw(product, rows, dtype, layers) for dtype in TYPES}
    runs = {dtype: in_loop(step, given["x"], given, layers) for dtype, given in inputs.items()}
    times = rounds(runs, repeats, step=layers * ROUNDS_OF_LAYERS)
    found = []
    for dtype, given in inputs.items():
        program = jax.jit(call)
        one, other = (jnp.concatenate(program(given["x"], given, 0), axis=1) for _ in range(2))
        size = sum(x.size * x.dtype.itemsize for x in given["kernels"]) / layers
        seconds = common.summarize(times[dtype])
        found.append(
            {"product": name, "rows": rows, "dtype": dtype, "weight_bytes": size}
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
    if not options.quick and not dispatch.is_hopper():
        raise SystemExit("the kernel needs a GPU of compute capability 9.0; --quick runs anywhere")
    products = QUICK_PRODUCTS if options.quick else PRODUCTS
    repeats = 2 if options.quick else options.repeats
    bandwidth = copy_bandwidth(2**24 if options.quick else 2**32, repeats)
    rows = []
    for name, product in products.items():
        for count in options.rows or ([1] if options.quick else [1, 8, 64]):
            found = measure(
                name,
                product,
                count,
                layers=QUICK_LAYERS if options.quick else LAYERS,
                repeats=repeats,
                interpret=not dispatch.is_hopper(),
            )
            for row in found:
                text = f"{row['product']:<18} {row['rows']:>2} rows {row['dtype']:<14}"
                print(f"{text} {row['ms']:8.4f} ms {row['tb_per_s']:5.2f} TB/s", flush=True)
            rows += found
    details = {"repeats": repeats, "is_quick": options.quick, "copy_tb_per_s": bandwidth}
    common.write_results(options.out, common.describe_machine(**details), rows)


if __name__ == "__main__":
    main()

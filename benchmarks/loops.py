"""Steps that depend on each other, as those of layers do, in one program."""

from collections.abc import Callable
from typing import Any

import jax
from jaxtyping import Array, Int

PyTree = Any
Step = Callable[[PyTree, PyTree, int], PyTree]  # state, inputs of all layers, layer


def loop(step: Step, *, num_layers: int, rounds: int) -> Callable[..., PyTree]:
    """A program of `count` times `rounds` rounds over the layers, from a state on.

    The number of inner rounds is known when it is compiled: a GPU asks the host whether to go on
    after all of them only.
    """

    def run(count: Int[Array, ""], state: PyTree, inputs: PyTree) -> PyTree:
        def one_round(_: Array, state: PyTree) -> PyTree:
            for index in range(num_layers):
                state = step(state, inputs, index)
            return state

        def some_rounds(_: Array, state: PyTree) -> PyTree:
            return jax.lax.fori_loop(0, rounds, one_round, state)

        return jax.lax.fori_loop(0, count, some_rounds, state)

    return run

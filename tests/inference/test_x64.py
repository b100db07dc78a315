"""`jax_enable_x64` changes neither types nor values of results."""

import pytest
import x64_checks


@pytest.mark.interpreted
def test_the_kernel_of_a_token_with_64_bits():
    x64_checks.check("kernel", x64_checks.decode_kernel)


@pytest.mark.slow
def test_a_mixture_of_experts_with_64_bits():
    x64_checks.check("mixture", x64_checks.mixture)


@pytest.mark.interpreted
@pytest.mark.parametrize(
    "policies",
    [
        pytest.param(["recommended", "quest"], marks=pytest.mark.slow),
        pytest.param([], marks=pytest.mark.weekly, id="all"),
    ],
    ids=" and ".join,
)
def test_policies_in_a_process_with_the_flag(repository, run_python, policies):
    checks = repository / "tests" / "x64_checks.py"
    run_python(
        f"import runpy, sys; sys.path.insert(0, {str(checks.parent)!r}); "
        f"sys.argv[1:] = {policies!r}; "
        f"runpy.run_path({str(checks)!r}, run_name='__main__')"
    )

"""`python -m sketchwalk_jax`: the same command line as `sketchwalk`."""

from sketchwalk_jax.cli import main

if __name__ == "__main__":
    raise SystemExit(main())

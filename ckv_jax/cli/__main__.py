"""`python -m ckv_jax.cli`, the same as `ckv`."""

from ckv_jax.cli import main

if __name__ == "__main__":
    main()

"""Published systems that `ckv` is compared with, one file each; they import the core."""

"""Adds the native library to a wheel, if a compiler and the headers of jaxlib are available.

`pip wheel --no-build-isolation .` has the headers of the environment that it runs in. A wheel
without the library is compiled for at first use, see `library.py`; nothing here fails a build.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py


def _build() -> ModuleType:
    """`build.py` beside this file, of a package that is not installed yet."""
    place = Path(__file__).with_name("build.py")
    spec = importlib.util.spec_from_file_location("_ckv_native_build", place)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class BuildPy(build_py):  # type: ignore[misc]
    """Modules and data, and the library among them."""

    def run(self) -> None:
        """Builds; without the library where it does not compile, which is said."""
        super().run()
        if self.editable_mode or not self.distribution.has_ext_modules():
            return
        place = Path(self.build_lib, "ckv_jax", "kernels_pallas", "native")
        try:
            self.announce(f"compiled {_build().compile_library(place)}", level=2)
        except OSError as error:
            self.announce(f"no native library in this build: {error}", level=3)


class BdistWheel(bdist_wheel):  # type: ignore[misc]
    """A wheel of one platform if it has the library, else of any."""

    def finalize_options(self) -> None:
        """Decides by whether a compiler and the headers are there."""
        build = _build()
        if build.compiler() and not build.lacking():
            self.distribution.has_ext_modules = lambda: True
        super().finalize_options()

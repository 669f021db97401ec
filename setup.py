"""The part in C; all else is in pyproject.toml."""

from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

WARNINGS = ["-Wall", "-Wextra", "-Wno-unused-parameter", "-Wno-missing-field-initializers"]


class BuildAnew(build_ext):
    """Compiles, and where that fails leaves nothing behind that was compiled earlier, from other sources."""

    def run(self) -> None:
        """Build all extensions."""
        for extension in self.extensions:
            filename = self.get_ext_filename(extension.name)
            for folder in (self.build_lib, *([""] if self.inplace else [])):
                Path(folder, filename).unlink(missing_ok=True)
        super().run()


setup(
    cmdclass={"build_ext": BuildAnew},
    ext_modules=[
        Extension(
            "asyncserve.token_path.native",
            [f"asyncserve/token_path/{name}.c" for name in ("lanes", "native", "prefix_hash", "rows")],
            depends=["asyncserve/token_path/native.h"],
            # Named here because a CFLAGS of the environment takes the place of Python's own.
            extra_compile_args=["-O2", *WARNINGS],
            optional=True,  # without a compiler the same in Python is used
        )
    ],
)

"""The part in C; all else is in pyproject.toml."""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "asyncserve.token_path.native",
            [f"asyncserve/token_path/{name}.c" for name in ("lanes", "native", "prefix_hash", "rows")],
            depends=["asyncserve/token_path/native.h"],
            optional=True,  # without a compiler the same in Python is used
        )
    ]
)

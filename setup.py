"""Which folders are packages; everything else about the project is in pyproject.toml.

The top-level folders are the layers of the house and import as `midstream.<folder>`; `midstream` itself is a
namespace without a file of its own. A folder below a layer is found by looking, with or without an
`__init__.py`, so nobody has to list it. A new layer is a new name in LAYERS. Every `_native.c` below a layer is
built into a module of that name beside it, against the stable ABI, so that one wheel serves every Python.
"""

from pathlib import Path

from setuptools import Extension, find_namespace_packages, setup

LAYERS = ("cli", "local", "hooks", "buffers", "envs", "conf")


def subfolders(layer: str) -> list[str]:
    """Every folder below `layer`, dotted and relative to it."""
    return find_namespace_packages(layer, exclude=["*__pycache__"])


def extensions() -> list[Extension]:
    """The modules in C; a machine without a compiler goes without them, and what needs one says so."""
    return [
        Extension(
            f"midstream.{'.'.join(source.with_suffix('').parts)}",
            [str(source)],
            define_macros=[("Py_LIMITED_API", "0x030B0000")],
            extra_compile_args=["-std=gnu11", "-Wall", "-Wextra", "-Werror=implicit-function-declaration"],
            py_limited_api=True,
            optional=True,
        )
        for layer in LAYERS
        for source in sorted(Path(layer).rglob("_native.c"))
    ]


setup(
    ext_modules=extensions(),
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
    package_dir={f"midstream.{layer}": layer for layer in LAYERS},
    packages=[
        f"midstream.{package}"
        for layer in LAYERS
        for package in (layer, *(f"{layer}.{below}" for below in subfolders(layer)))
    ],
)

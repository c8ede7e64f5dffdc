"""Which folders are packages; everything else about the project is in pyproject.toml.

The top-level folders are the layers of the house and import as `midstream.<folder>`; `midstream` itself is a
namespace without a file of its own. A folder below a layer is found by looking, with or without an
`__init__.py`, so nobody has to list it. A new layer is a new name in LAYERS.
"""

from setuptools import find_namespace_packages, setup

LAYERS = ("cli", "local", "hooks", "buffers", "envs", "conf")


def subfolders(layer: str) -> list[str]:
    """Every folder below `layer`, dotted and relative to it."""
    return find_namespace_packages(layer, exclude=["*__pycache__"])


setup(
    package_dir={f"midstream.{layer}": layer for layer in LAYERS},
    packages=[
        f"midstream.{package}"
        for layer in LAYERS
        for package in (layer, *(f"{layer}.{below}" for below in subfolders(layer)))
    ],
)

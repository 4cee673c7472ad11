"""Packaging of sglang-rdt (setuptools; every other tool is configured in pyproject.toml)."""

from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
VERSION = "0.1.0"

SGLANG = ["sglang>=0.5.16,<=0.5.23"]
# megatron-core 0.16.1 is the newest release for Python 3.11; later ones want 3.12.
MEGATRON = [
    "megatron-core>=0.16.1,<=0.19.2",
    "mbridge>=0.15.1",
    "transformers>=4.57",
]

setup(
    name="sglang-rdt",
    version=VERSION,
    description="Weight sync from stock Megatron-core to stock SGLang over NIXL and Ray Direct Transport",
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11,<3.14",
    packages=find_packages(
        include=["sglang_rdt", "sglang_rdt.*", "megatron_rdt", "megatron_rdt.*"]
    ),
    package_data={"sglang_rdt": ["py.typed"], "megatron_rdt": ["py.typed"]},
    install_requires=[
        "ray>=2.56",
        "nixl>=1.0",
        "torch>=2.6",
        "wrapt>=1.16",
        "typer>=0.12",
        "rich>=13",
    ],
    extras_require={
        "sglang": SGLANG,
        "megatron": MEGATRON,
        "demo": [*SGLANG, *MEGATRON],
        "bench": [*SGLANG, *MEGATRON, "matplotlib>=3.8"],
        "test": ["pytest>=8", "pytest-xdist>=3.6", "hypothesis>=6.100", "ruff>=0.6", "mypy>=1.10"],
    },
    entry_points={
        "console_scripts": ["sglang-rdt = sglang_rdt.cli:main"],
        "sglang.srt.plugins": ["sglang_rdt = sglang_rdt.activation:activate"],
    },
    classifiers=[
        "License :: OSI Approved :: Apache Software License",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
    ],
)

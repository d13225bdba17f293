"""
Pack SGLang 0.5.15 for a machine with a Hopper GPU and without a network: ``python -m tools.pack_sgl_kernel FOLDER``.

The machine has Python 3.12, torch 2.11 and Triton, and what transformers requires. The folder gets one archive and
``unpack.sh``, which is sourced there: it unpacks below ``$SGLANG_SITE`` (``/tmp/sglang-site`` where it is not set) and
extends ``PYTHONPATH``. 0.5.15 is the newest SGLang for torch 2.11.

Packed: SGLang's Python code without its image and video models; of sgl-kernel the Python code and
``sm90/common_ops``, a hundredth of the wheel (FlashAttention, FlashMLA and the operators of other GPUs are left out: a
call of theirs fails when it loads them); the release of transformers that this SGLang wants; and the packages of
`NEEDS`. `STUBS` are stood in for: a call of one of them is an error.
"""

from __future__ import annotations

import argparse
import lzma
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

SGLANG: Final = "sglang==0.5.15"
KERNEL: Final = "sglang-kernel==0.4.4"
# 0.5.15 registers a model that later releases of transformers have themselves: it comes with the release it wants.
NEEDS: Final = """
    transformers==5.12.1 tokenizers==0.22.2 huggingface-hub==1.5.0 annotated-doc annotated-types anthropic
    apache-tvm-ffi==0.1.11 blobfile cffi compressed-tensors distro einops fastapi gguf interegular jiter jsonschema
    jsonschema-specifications llguidance loguru mistral-common msgspec openai==2.6.1 openai-harmony==0.0.4 orjson
    partial-json-parser prometheus-client pybase64 pycountry pydantic==2.12.5 pydantic-core==2.41.5 pydantic-extra-types
    python-multipart pyzmq referencing rpds-py sentencepiece setproctitle sniffio starlette tiktoken torch-memory-saver
    typing-inspection uvicorn uvloop watchfiles xgrammar==0.2.1 zstandard
"""
"""What SGLang imports and the machine may lack; at most what it has already comes twice."""
STUBS: Final = {
    "IPython/__init__.py": "",
    "IPython/display.py": "HTML = display = None\n",
    "torchaudio/__init__.py": "__version__ = '0'\n",
}
"""The files that stand in for packages that SGLang imports and no text model calls."""
LIMIT: Final = 60 * 2**20
PLATFORMS: Final = ("manylinux2014_x86_64", "manylinux1_x86_64", *(f"manylinux_2_{n}_x86_64" for n in range(17, 36)))
_LEFT_OUT: Final = (
    "sglang/multimodal_gen/",
    "sglang/benchmark/",
    "triton_kernels/",
    "xgrammar/lib/",
    "mistral_common/data/",
)
_LIBRARY: Final = "sgl_kernel/sm90/common_ops.abi3.so"
_UNPACK: Final = """# Source this.
site=${SGLANG_SITE:-/tmp/sglang-site}
mkdir -p "$site"
tar -xJf "$(dirname "${BASH_SOURCE[0]}")/sglang.tar.xz" -C "$site"
export PYTHONPATH="$site${PYTHONPATH:+:$PYTHONPATH}"
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the folder; return 1 where it is larger than `LIMIT`."""
    parser = argparse.ArgumentParser(prog="tools.pack_sgl_kernel", description=__doc__)
    parser.add_argument("folder", type=Path, help="where the archive and unpack.sh are written")
    folder: Path = parser.parse_args(arguments).folder
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        wheels, site = Path(temporary, "wheels"), Path(temporary, "site")
        for requirement in (SGLANG, KERNEL, *NEEDS.split()):
            download(requirement, wheels)
        for wheel in sorted(wheels.glob("*.whl")):
            unpack(wheel, site)
        for path, text in STUBS.items():
            file = site / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, "utf-8")
        archive(site, folder / "sglang.tar.xz")
    (folder / "unpack.sh").write_text(_UNPACK, "utf-8")
    size = sum(file.stat().st_size for file in folder.iterdir())
    print(f"{folder}: {size / 2**20:.1f} MiB")
    return int(size > LIMIT)


def download(requirement: str, folder: Path) -> None:
    """Download the wheel of a requirement for Python 3.12 on Linux, without what it requires."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "-qq", "--no-deps"]
    command += ["--only-binary=:all:", "--python-version=3.12", "--implementation=cp", f"--dest={folder}"]
    subprocess.run(  # noqa: S603 - the arguments are those of this file
        [*command, *(f"--platform={each}" for each in PLATFORMS), requirement], check=True
    )


def is_packed(path: str) -> bool:
    """Whether a file of a wheel is packed."""
    if path.startswith("sgl_kernel/") and path.endswith(".so"):
        return path == _LIBRARY
    return not path.startswith(_LEFT_OUT)


def unpack(wheel: Path, site: Path) -> None:
    """Unpack what is packed of a wheel into a folder, as pip would install it."""
    with zipfile.ZipFile(wheel) as opened:
        for path in filter(is_packed, opened.namelist()):
            opened.extract(path, site)
    for data in site.glob("*.data"):
        for part in (data / "purelib", data / "platlib"):
            for file in part.rglob("*"):
                if file.is_file():
                    target = site / file.relative_to(part)
                    target.parent.mkdir(parents=True, exist_ok=True)
                    file.replace(target)


def archive(site: Path, target: Path) -> None:
    """Write a folder as an archive, with a dictionary as large as the largest file."""
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 6, "dict_size": 64 << 20}]
    with lzma.open(target, "wb", filters=filters) as stream, tarfile.open(fileobj=stream, mode="w") as packed:
        packed.add(site, arcname=".")


if __name__ == "__main__":
    sys.exit(main())

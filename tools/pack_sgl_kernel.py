"""
Pack SGLang for a GPU host without a network: torch 2.11 for CUDA 13, Triton, transformers and Python 3.12 are there.

    python -m tools.pack_sgl_kernel FOLDER

FOLDER gets one archive and unpack.sh. On the host, from the folder above: ``source FOLDER/unpack.sh``. The archive has:

- the Python code of SGLang 0.5.15, the newest for torch 2.11, and its metadata;
- the Python packages that it imports at its top and that the host lacks, FlashInfer among them, and transformers in the
  release that it pins;
- of its kernel library the Python code and ``sm90/common_ops.so`` alone, for Hopper GPUs. What else the library has
  (other architectures, FlashAttention 3, FlashMLA) is left out: importing it fails as on a machine that lacks it.

Stubbed: ``torchaudio``, which SGLang imports at its top for audio models, and ``IPython``, which shows results in
notebooks; they have no functions. Left out: torchvision, which the host has beside torch, and what SGLang imports when
it is asked for, such as outlines, torchao, timm and FlashAttention 4.
"""

from __future__ import annotations

import lzma
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

SGLANG: Final = "sglang==0.5.15"
KERNELS: Final = "sglang-kernel==0.4.4"
NEEDED: Final = (
    *("aiohttp", "aiohappyeyeballs", "aiosignal", "frozenlist", "multidict", "propcache", "yarl"),
    *("torch-c-dlpack-ext", "compressed-tensors==0.17.0", "dill", "loguru", "distro", "einops"),
    *("fastapi==0.136.3", "starlette==1.0.0", "annotated-doc", "annotated-types", "interegular", "llguidance==0.7.30"),
    *("msgspec", "openai==2.6.1", "jiter", "sniffio", "openai-harmony==0.0.4", "orjson", "partial-json-parser"),
    *("prometheus-client", "pybase64", "pydantic==2.12.5", "pydantic-core==2.41.5", "typing-inspection"),
    *("python-multipart", "pyzmq", "setproctitle", "tiktoken", "uvicorn", "uvloop", "watchfiles", "xgrammar==0.2.1"),
    *("zstandard", "gguf", "easydict", "torch_memory_saver", "nvidia-ml-py"),
    # SGLang pins apache-tvm-ffi 0.1.11; modules of FlashInfer are compiled in advance for this one.
    *("flashinfer-python==0.6.12", "apache-tvm-ffi==0.1.15.post2"),
    # Newer transformers register a model that SGLang 0.5.15 registers, too.
    *("transformers==5.12.1", "tokenizers==0.22.2", "huggingface-hub==1.5.0"),
)
"""What SGLang imports and a host with torch, Triton and transformers lacks."""

STUBS: Final = {
    "torchaudio/__init__.py": '"""A stub, for audio models."""\n',
    "IPython/__init__.py": '"""A stub, for notebooks."""\n',
    "IPython/display.py": "HTML = display = None\n",
}
"""Files of modules that SGLang imports at its top and that nothing here calls."""

LIMIT: Final = 58 << 20
"""The most that the folder may have, in bytes."""

_OPS: Final = "sgl_kernel/sm90/common_ops"
_PLATFORMS: Final = (*(f"manylinux_2_{minor}_x86_64" for minor in (17, 24, 27, 28, 31, 34, 35)), "manylinux2014_x86_64")
_WINDOW: Final = [{"id": lzma.FILTER_LZMA2, "preset": 9, "dict_size": 128 << 20}]
_UNPACK: Final = """\
# Source this from the folder above: it unpacks under /tmp/attnplug-sglang and extends PYTHONPATH.
here=$(dirname "${BASH_SOURCE[0]}")
site=/tmp/attnplug-sglang
mkdir -p "$site" && tar -xJf "$here/sglang.tar.xz" -C "$site"
export PYTHONPATH="$site${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1
"""


def download(folder: Path, *names: str) -> None:
    """Download wheels for CPython 3.12 on Linux, without what they require."""
    platforms = [part for each in _PLATFORMS for part in ("--platform", each)]
    wanted = ["--no-deps", "--only-binary=:all:", "--python-version", "3.12", "--implementation", "cp", *platforms]
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q", "download"]
    subprocess.run([*command, *wanted, "-d", str(folder), *names], check=True)  # noqa: S603 - this interpreter's pip


def wanted(archive: zipfile.ZipFile) -> Iterator[str]:
    """Yield what is packed of one wheel: of the kernel library's compiled parts, those of Hopper's operators alone."""
    for name in archive.namelist():
        kernels = name.startswith("sgl_kernel/") and (name.endswith(".so") or ".so." in name)
        tests = "/tests/" in name or "/test/" in name or name.startswith(("sglang/test/", "sglang/multimodal_gen/"))
        if not tests and not name.endswith(".a") and (not kernels or name.startswith(_OPS)):
            yield name


def pack(out: Path) -> int:
    """
    Write the archive and unpack.sh into a folder, which is made anew; return its size in bytes.

    Args:
        out: The folder.
    """
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as made:
        wheels, site = Path(made) / "wheels", Path(made) / "site"
        download(wheels, SGLANG, KERNELS, *NEEDED)
        for wheel in sorted(wheels.glob("*.whl")):
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(site, list(wanted(archive)))  # noqa: S202 - wheels of the index, into a new folder
        if not any(site.glob(f"{_OPS}*")):
            raise SystemExit(f"{KERNELS} has no {_OPS}.so")
        for library in site.rglob("*.so"):
            subprocess.run(["strip", "--strip-unneeded", str(library)], check=False, stderr=subprocess.DEVNULL)  # noqa: S603, S607 - of binutils
        for name, text in STUBS.items():
            stub = site / name
            stub.parent.mkdir(exist_ok=True)
            stub.write_text(text)
        with (
            lzma.open(out / "sglang.tar.xz", "wb", format=lzma.FORMAT_XZ, filters=_WINDOW) as file,
            tarfile.open(fileobj=file, mode="w") as tar,
        ):
            tar.add(site, arcname=".")
    (out / "unpack.sh").write_text(_UNPACK)
    return sum(each.stat().st_size for each in out.iterdir())


def main() -> None:
    """Pack into the folder that the command line names, and refuse one that is too large."""
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    size = pack(Path(sys.argv[1]))
    print(f"{sys.argv[1]}: {size / 2**20:.1f} MiB")
    if size > LIMIT:
        raise SystemExit(f"{size / 2**20:.1f} MiB are more than {LIMIT >> 20} MiB: leave something out")


if __name__ == "__main__":
    main()

"""What the probe finds missing, in environments that are made up: a fake torch, fake packages, fake metadata."""

from __future__ import annotations

import base64
import hashlib
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from attnplug import Agreement, Requirements
from attnplug_flash_attn import op_files, packages, probe
from tests.backends.fake_machine import CPU_TORCH, CUDA_TORCH, FakeMachine

if TYPE_CHECKING:
    from pathlib import Path

DECODER = {"head_size": 128, "num_q_heads": 32, "num_kv_heads": 8, "dtype": "bfloat16"}
VARIANTS = ("fa2", "fa2_vllm", "fa3", "fa3_vllm", "fa3_tokenspeed", "fa4", "torch")
FA4_NEEDS = ("cutlass", "quack", "tvm_ffi", "einops")
LIBRARIES = (
    "vllm",
    "flash_attn",
    "flash_attn_interface",
    "flash_attn_3",
    "flash_attn_2_cuda",
    "flash_attn_config",
    *FA4_NEEDS,
)


def agreed(variant: str, kv_cache_dtype: str = "bfloat16", **required: object) -> Agreement:
    requirements = Requirements(**{**DECODER, "kv_cache_dtype": kv_cache_dtype, **required})
    size, layout, form = (16, "NHD", "joint") if requirements.paged else (None, None, None)
    return Agreement("flash_attn", variant, requirements, size, layout, form, kv_cache_dtype, "never", {})


def declaration(library: str, op: str, *, without: str = "") -> bytes:
    """Return the text with which a library registers an op, as a compiler leaves it in the file."""
    names = [name for name in op_files.ARGUMENTS[library][op].split() if name != without]
    return b"\0" + f"{op}({', '.join(f'Tensor!? {name}' for name in names)}) -> Tensor[]".encode() + b"\0"


class Machine(FakeMachine):
    """A machine with FlashAttention libraries."""

    @staticmethod
    def record(file: Path, site: Path) -> str:
        """Return a line as pip writes it when it installs a file."""
        data = file.read_bytes()
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        return f"{file.relative_to(site).as_posix()},sha256={digest},{len(data)}"

    def fa2(self, version: str = "2.8.3") -> None:
        self.distribution("flash-attn", version)
        self.package("flash_attn")
        self.write("site/flash_attn_2_cuda.py", "raise AssertionError('nor is this')")

    def fa3(self, *flags: str) -> None:
        self.distribution("flash-attn-3", "3.0.0")
        self.write("site/flash_attn_interface.py", "raise AssertionError('nor is this')")
        self.write("site/flash_attn_3/_C.abi3.so")
        config = {"build_flags": {name: name in flags for name in (*flags, "FLASHATTENTION_DISABLE_BACKWARD")}}
        self.write("site/flash_attn_config.py", f"CONFIG = {config!r}\n\ndef show():\n    raise AssertionError\n")

    def fa4(self, version: str = "4.0.0b36", site: str = "site") -> Path:
        file = self.write(f"{site}/flash_attn/cute/interface.py", "raise AssertionError('nor is this')")
        info = self.distribution("flash-attn-4", version, site)
        (info / "RECORD").write_text(f"{self.record(file, self.root / site)}\n", encoding="utf-8")
        for name in FA4_NEEDS:
            self.package(name, site)
        return file

    def vllm(self, library: str, *declarations: bytes) -> Path:
        self.distribution("vllm", "0.24.0")
        self.package("vllm")
        return self.write(f"site/vllm/vllm_flash_attn/{library}.abi3.so", b"\x7fELF" + b"".join(declarations))

    def tokenspeed(self, *without: str) -> Path:
        info = self.distribution("tokenspeed-fa3", "3.0.0.post20260810")
        file = self.write("site/flash_attn_interface.py", "raise AssertionError('and neither is this')")
        (info / "RECORD").write_text(f"{self.record(file, self.site)}\n", encoding="utf-8")
        ops = [declaration("flash_attn_3", op) for op in op_files.ARGUMENTS["flash_attn_3"] if op not in without]
        return self.write("site/flash_attn_3/_C.abi3.so", b"\x7fELF" + b"".join(ops))

    def everything(self) -> None:
        self.fa2()
        self.fa3()
        self.fa4()
        for library, ops in op_files.ARGUMENTS.items():
            if library.startswith("_vllm"):
                self.vllm(library, *(declaration(library, op) for op in ops))
        self.tokenspeed()


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """A machine with a torch for CUDA, and no library."""
    made = Machine(tmp_path, probe.probe, LIBRARIES)
    made.torch(CUDA_TORCH)
    return made


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_machine_with_everything_is_not_refused(machine: Machine, variant: str) -> None:
    machine.everything()

    assert machine.probe(agreed(variant)) is None


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_torch_for_the_cpu_is_refused(machine: Machine, variant: str) -> None:
    machine.torch(CPU_TORCH)
    machine.everything()

    assert machine.reason(agreed(variant)).startswith(
        "torch | torch 2.11.0+cpu is built without CUDA: install a torch that is built for CUDA"
    )


def test_a_torch_without_build_information_is_admitted(machine: Machine) -> None:
    machine.torch("commit = 'abc'\n")
    assert machine.probe(agreed("torch")) is None

    (machine.site / "torch" / "version.py").unlink()
    assert machine.probe(agreed("torch")) is None


def test_another_device_is_refused_by_the_manifest_alone(machine: Machine) -> None:
    machine.torch(CPU_TORCH)

    assert machine.probe(agreed("fa2"), "cpu") is None


# One package of two distributions


def test_an_empty_namespace_is_no_flash_attention_2(machine: Machine) -> None:
    machine.fa4()
    machine.distribution("flash-attn", "2.8.3")

    assert machine.reason(agreed("fa2")) == (
        f"flash-attn | flash-attn 2.8.3 is installed, but import flash_attn finds {machine.site / 'flash_attn'}, "
        "without FlashAttention 2: pip install --force-reinstall --no-deps --no-build-isolation flash-attn==2.8.3"
    )
    assert machine.probe(agreed("fa4")) is None


def test_metadata_without_a_package_is_no_flash_attention_2(machine: Machine) -> None:
    machine.distribution("flash-attn", "2.8.3")

    assert "flash-attn 2.8.3 is installed, but there is no package flash_attn" in machine.reason(agreed("fa2"))


def test_flash_attention_2_without_its_kernels_is_refused(machine: Machine) -> None:
    machine.fa2()
    (machine.site / "flash_attn_2_cuda.py").unlink()

    assert machine.reason(agreed("fa2")).startswith(
        "flash-attn | flash-attn 2.8.3 is installed without kernels: there is no flash_attn_2_cuda: "
        "install a wheel for this torch and"
    )


def test_both_in_one_folder_are_both_found(machine: Machine) -> None:
    machine.fa4()
    machine.fa2()

    assert machine.probe(agreed("fa2")) is None
    assert machine.probe(agreed("fa4")) is None


def test_a_later_folder_cute_is_not_flash_attention_4(machine: Machine) -> None:
    file = machine.fa4()
    machine.fa2()
    file.write_text("raise AssertionError('that of flash-attn')", encoding="utf-8")

    assert machine.reason(agreed("fa4")) == (
        f"flash-attn-4 | flash-attn-4 4.0.0b36 is installed, but flash-attn, installed later, has overwritten "
        f"{file}: pip install --force-reinstall --no-deps flash-attn-4==4.0.0b36"
    )
    assert machine.probe(agreed("fa2")) is None


def test_files_that_uninstalling_removed_are_missing(machine: Machine) -> None:
    file = machine.fa4()
    file.unlink()

    assert f"flash-attn-4 4.0.0b36 is installed, but {file} does not exist" in machine.reason(agreed("fa4"))


def test_an_earlier_package_on_the_path_hides_flash_attention_4(machine: Machine) -> None:
    machine.fa4()
    machine.package("flash_attn", site="first")
    first = machine.root / "first"

    assert machine.reason(agreed("fa4"), first) == (
        f"flash-attn-4 | flash-attn-4 4.0.0b36 is in {machine.site}, but import flash_attn finds "
        f"{first / 'flash_attn'}: install both into one folder, or only one of them"
    )


def test_a_module_of_that_name_hides_it_too(machine: Machine) -> None:
    machine.fa4()
    file = machine.write("first/flash_attn.py")

    assert f"but import flash_attn finds {file}: install" in machine.reason(agreed("fa4"), file.parent)


def test_two_folders_of_one_namespace_hide_nothing(machine: Machine) -> None:
    machine.fa4()
    machine.write("first/flash_attn/other/__init__.py")

    assert machine.probe(agreed("fa4"), "cuda:10.0", machine.root / "first") is None


@pytest.mark.parametrize("record", [False, True], ids=["unrecorded", "recorded"])
def test_flash_attention_4_needs_what_it_imports(machine: Machine, record: bool) -> None:
    machine.fa4()
    for name in ("cutlass", "einops"):
        (machine.site / name / "__init__.py").unlink()
        (machine.site / name).rmdir()
    if not record:  # an editable installation lists no file of the package
        (machine.site / "flash_attn_4-4.0.0b36.dist-info" / "RECORD").unlink()

    reason = machine.reason(agreed("fa4"))

    assert "einops" in reason
    assert reason == (
        "flash-attn-4 | flash-attn-4 4.0.0b36 is installed without nvidia-cutlass-dsl, einops: "
        "pip install nvidia-cutlass-dsl einops"
    )


# FlashAttention 3, compiled without


@pytest.mark.parametrize(
    ("flag", "needing", "without"),
    [
        ("PAGEDKV", {}, {"paged": False}),
        ("LOCAL", {"sliding_window": 4096}, {}),
        ("SOFTCAP", {"logits_soft_cap": 30.0}, {}),
        ("FP16", {"dtype": "float16", "kv_cache_dtype": "float16"}, {}),
        ("FP8", {"kv_cache_dtype": "fp8_e4m3"}, {}),
    ],
)
def test_what_was_compiled_out_is_refused_where_it_is_needed(
    machine: Machine, flag: str, needing: dict[str, object], without: dict[str, object]
) -> None:
    machine.fa3(f"FLASHATTENTION_DISABLE_{flag}")
    name = f"FLASH_ATTENTION_DISABLE_{flag}"

    assert machine.reason(agreed("fa3", **needing), code="probe") == (
        f"flash-attn-3 | this flash-attn-3 is compiled with {name}: compile it without {name}"
    )
    assert machine.probe(agreed("fa3", **without)) is None


def test_everything_that_was_compiled_out_is_listed_at_once(machine: Machine) -> None:
    machine.fa3("FLASHATTENTION_DISABLE_VARLEN", "FLASHATTENTION_DISABLE_LOCAL", "FLASHATTENTION_DISABLE_FP8")

    reason = machine.reason(agreed("fa3", sliding_window=4096), code="probe")

    assert reason.endswith("compile it without FLASH_ATTENTION_DISABLE_VARLEN, FLASH_ATTENTION_DISABLE_LOCAL")


def test_heads_run_the_kernels_of_the_next_size_that_there_is(machine: Machine) -> None:
    machine.fa3(*(f"FLASHATTENTION_DISABLE_HDIM{size}" for size in (64, 192, 256)))

    assert machine.probe(agreed("fa3", head_size=64)) is None
    assert machine.reason(agreed("fa3", head_size=160), code="probe") == (
        "flash-attn-3 | this flash-attn-3 is compiled without kernels for head size 160: "
        "compile it without FLASH_ATTENTION_DISABLE_HDIM192"
    )


def test_a_build_without_a_configuration_is_admitted(machine: Machine) -> None:
    machine.fa3()
    (machine.site / "flash_attn_config.py").unlink()

    assert machine.probe(agreed("fa3", sliding_window=4096)) is None


def test_a_configuration_without_flags_leaves_nothing_out(machine: Machine) -> None:
    machine.fa3()
    machine.write("site/flash_attn_config.py", "OTHER = {}\n")

    assert machine.probe(agreed("fa3")) is None


def test_metadata_alone_is_no_flash_attention_3(machine: Machine) -> None:
    machine.distribution("flash-attn-3", "3.0.0")

    assert "but there is no module flash_attn_interface" in machine.reason(agreed("fa3"))
    machine.write("site/flash_attn_interface.py")
    assert "flash-attn-3 is installed without kernels: there is no flash_attn_3/_C" in machine.reason(agreed("fa3"))


def test_the_features_of_an_agreement() -> None:
    required = {"sliding_window": 4096, "logits_soft_cap": 30.0, "dtype": "float16"}

    assert list(packages.needed(agreed("fa3", "fp8_e4m3", **required))) == [
        f"DISABLE_{name}" for name in ("VARLEN", "PAGEDKV", "LOCAL", "SOFTCAP", "FP16", "FP8")
    ]


# The op libraries of wheels


@pytest.mark.parametrize(("variant", "library"), sorted(op_files.LIBRARIES.items()))
def test_a_wheel_without_the_op_library_is_refused(machine: Machine, variant: str, library: str) -> None:
    machine.vllm("_C")
    machine.tokenspeed().unlink()
    name, version = op_files.DISTRIBUTIONS[library], "0.24.0" if "vllm" in variant else "3.0.0.post20260810"

    assert machine.reason(agreed(variant)) == (
        f"{name} | {name} {version} has no {op_files.FILES[library]}: install a CUDA build of {name}"
    )


def test_of_two_builds_of_flash_attention_3_the_overwritten_one_is_refused(machine: Machine) -> None:
    machine.tokenspeed()
    machine.fa3()
    assert machine.probe(agreed("fa3")) is None
    assert machine.reason(agreed("fa3_tokenspeed")) == (
        "tokenspeed-fa3 | tokenspeed-fa3 3.0.0.post20260810 is installed, but flash-attn-3, installed later, has "
        "overwritten flash_attn_interface.py: pip uninstall flash-attn-3, then install tokenspeed-fa3 again"
    )


def test_an_op_that_the_package_index_build_lacks_is_refused(machine: Machine) -> None:
    machine.tokenspeed("get_scheduler_metadata")
    assert machine.reason(agreed("fa3_tokenspeed")) == (
        "tokenspeed-fa3 | get_scheduler_metadata of flash_attn_3 in tokenspeed-fa3 3.0.0.post20260810 has an "
        "unsupported signature: install another release of tokenspeed-fa3 or of this plugin"
    )


def test_an_op_that_lacks_an_argument_is_refused_by_its_name(machine: Machine) -> None:
    machine.vllm(
        "_vllm_fa3_C",
        declaration("_vllm_fa3_C", "fwd", without="s_aux"),
        declaration("_vllm_fa3_C", "get_scheduler_metadata"),
    )

    assert machine.reason(agreed("fa3_vllm")) == (
        "vllm | fwd of _vllm_fa3_C in vllm 0.24.0 has an unsupported signature: "
        "install another release of vllm or of this plugin"
    )


LATENT = {"latent": True, "num_kv_heads": 1, "kv_cache_form": "latent"}
UNCOMPRESSED = {"num_kv_heads": 32, "paged": False}


@pytest.mark.parametrize(
    ("sizes", "required", "name"),
    [
        ((576, 512), LATENT, "bfloat16 kernels for keys of 64 and values of 512 elements"),
        ((320, 256), {**LATENT, "dtype": "float16"}, "float16 kernels for keys of 64 and values of 256 elements"),
        ((192, 128), UNCOMPRESSED, "bfloat16 kernels for keys of 192 and values of 128 elements"),
    ],
    ids=str,
)
def test_head_sizes_that_a_library_was_not_compiled_for(machine: Machine, sizes, required, name) -> None:
    """Its ops take them nevertheless."""
    ops = [declaration("_vllm_fa3_C", op) for op in op_files.ARGUMENTS["_vllm_fa3_C"]]
    file = machine.vllm("_vllm_fa3_C", *ops, b"run_mha_fwd_ILi90EN7cutlass10bfloat16_tELi64ELi64ELb0E")
    request = agreed(
        "fa3_vllm", required.get("dtype", "bfloat16"), head_size=sizes[0], head_size_v=sizes[1], **required
    )

    assert machine.probe(agreed("fa3_vllm", head_size=64)) is None
    assert machine.reason(request, code="probe") == (
        f"vllm | _vllm_fa3_C in vllm 0.24.0 has no {name}: install a release of vllm that has them"
    )

    pairs = b"10bfloat16_tELi64ELi512E", b"6half_tELi64ELi256E", b"10bfloat16_tELi192ELi128E"
    file.write_bytes(file.read_bytes() + b"".join(b"run_mha_fwd_ILi90EN7cutlass" + pair for pair in pairs))
    assert machine.probe(request) is None


def test_a_library_without_the_latent_query_is_refused(machine: Machine) -> None:
    machine.vllm(
        "_vllm_fa3_C",
        declaration("_vllm_fa3_C", "fwd", without="q_v"),
        declaration("_vllm_fa3_C", "get_scheduler_metadata"),
    )

    assert "fwd of _vllm_fa3_C in vllm 0.24.0 has an unsupported signature" in machine.reason(agreed("fa3_vllm"))


def test_kernels_of_quantized_keys_are_others(machine: Machine) -> None:
    file = machine.vllm("_vllm_fa3_C", b"run_mha_fwd_ILi90EN7cutlass12float_e4m3_tELi192ELi128E")

    assert op_files.has_kernels(file, "fp8_e4m3", 192, 128)
    assert not op_files.has_kernels(file, "bfloat16", 192, 128)
    file.write_bytes(b"")
    assert not op_files.has_kernels(file, "fp8_e4m3", 192, 128)


@pytest.mark.parametrize("text", [b"", b"\0fwd(Tensor q\0"], ids=["empty", "cut short"])
def test_a_file_without_declarations_has_no_op(machine: Machine, text: bytes) -> None:
    file = machine.vllm("_vllm_fa3_C", text)
    if not text:
        file.write_bytes(b"")

    assert op_files.changed_ops("_vllm_fa3_C", file) == ["fwd", "get_scheduler_metadata"]


def test_texts_that_look_like_the_op_do_not_count(machine: Machine) -> None:
    others = b"\0fwd(Tensor q) -> Tensor[]\0", declaration("_vllm_fa3_C", "fwd").replace(b"\0fwd", b"\0new_fwd")
    file = machine.vllm("_vllm_fa3_C", *others, declaration("_vllm_fa3_C", "get_scheduler_metadata"))

    assert op_files.changed_ops("_vllm_fa3_C", file) == ["fwd"]


def test_defaults_and_types_of_arguments_do_not_matter(machine: Machine) -> None:
    text = declaration("_vllm_fa2_C", "varlen_fwd").replace(b"Tensor!? gen", b"Generator? gen=None")
    file = machine.vllm("_vllm_fa2_C", text.replace(b", ", b",    "))

    assert op_files.changed_ops("_vllm_fa2_C", file) == []


def test_a_checkout_of_vllm_is_searched_for_the_op_library(machine: Machine) -> None:
    file = machine.vllm("_vllm_fa2_C", declaration("_vllm_fa2_C", "varlen_fwd"))
    moved = machine.root / "checkout" / "vllm"
    moved.parent.mkdir()
    file.parents[1].rename(moved)

    assert machine.probe(agreed("fa2_vllm"), "cuda:8.0", moved.parent) is None
    assert "vllm 0.24.0 has no vllm/vllm_flash_attn/_vllm_fa2_C" in machine.reason(agreed("fa2_vllm"))


def test_without_vllm_there_is_no_op_library() -> None:
    assert op_files.find("_vllm_fa2_C") is None


@pytest.mark.parametrize("variant", ["fa2", "fa2_vllm", "fa3_vllm", "fa3_tokenspeed", "fa4"])
def test_a_missing_library_is_refused_by_the_manifest_alone(machine: Machine, variant: str) -> None:
    assert machine.probe(agreed(variant)) is None


def test_a_probe_imports_neither_torch_nor_a_library() -> None:
    agreements = [agreed(variant).to_dict() for variant in VARIANTS]
    program = f"""if True:
        import sys
        from attnplug import Agreement, Device
        from attnplug_flash_attn.probe import probe
        for agreement in {agreements!r}:
            probe(agreement["variant"], Agreement.from_dict(agreement), Device.cuda("9.0"))
        assert not {{name.partition(".")[0] for name in sys.modules}} & {{"torch", *{LIBRARIES!r}}}
    """
    subprocess.run([sys.executable, "-W", "error", "-c", program], check=True)

"""Which backend is measured, and on which device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attrs import asdict, frozen

from attnplug.errors import DeviceError, RequestError
from attnplug.request import Device
from attnplug_kit.bench.installed import installed

if TYPE_CHECKING:
    from attnplug.contract import Backend
    from attnplug.request import Requirements


@frozen
class Choice:
    """
    What was asked to be measured.

    Attributes:
        backend: A backend, or ``backend/variant``; None is what a selection chooses.
        device: ``"cpu"`` or ``"cuda"``; None is this machine's.
        threads: Threads of torch's own kernels on the CPU; None is torch's choice.
    """

    backend: str | None = None
    device: str | None = None
    threads: int | None = None

    def check(self) -> None:
        """
        Check what can be checked before anything is measured.

        Raises:
            UnknownBackendError: Nothing installed or known is called like the backend.
            RequestError: The number of threads is none.
        """
        if self.threads is not None and self.threads < 1:
            raise RequestError(f"--threads {self.threads} was given", "it is a whole number from 1 on", "leave it out")
        if self.backend is not None:
            installed().check_name(self.backend)

    def words(self) -> list[str]:
        """Return the options that say the same."""
        return [word for name, value in asdict(self).items() if value is not None for word in (f"--{name}", str(value))]

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values: ``Choice(**data)`` in another process."""
        return asdict(self)

    def settle(self) -> Device:
        """
        Set torch's threads, and return the device. torch is imported, which sees what nothing else may see.

        Raises:
            DeviceError: It is not here.
        """
        import torch  # noqa: PLC0415 - only who measures pays for it

        if self.threads is not None:
            torch.set_num_threads(self.threads)
        found = Device.cpu() if self.device == "cpu" else Device.current()
        if self.device not in (None, found.type):
            raise DeviceError(
                f"--device {self.device} was given", f"this machine's device is {found}", "name one that is here"
            )
        return found

    def load(self, asked: Requirements) -> Backend:
        """
        Select and load.

        Raises:
            NoBackendError: Nothing can serve, or not what was named.
            PluginError: The backend fails to load.
        """
        from attnplug import load  # noqa: PLC0415 - imports torch

        return load(asked, self.settle(), backend=self.backend)


def dtype_on(device: Device) -> str:
    """Return the dtype to measure in: what engines use there."""
    return "float32" if device.type == "cpu" else "bfloat16"

"""Negotiation with one candidate for one request: the agreement, or reasons and a fix."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from attnplug._lazy import lazy

if TYPE_CHECKING:
    from attnplug.negotiation.agreement import Agreement as Agreement
    from attnplug.negotiation.candidate import Candidate as Candidate
    from attnplug.negotiation.matching import EVALUATIONS as EVALUATIONS
    from attnplug.negotiation.matching import Request as Request
    from attnplug.negotiation.matching import most_evaluations as most_evaluations
    from attnplug.negotiation.matching import negotiate as negotiate
    from attnplug.negotiation.pair import measured_pairs as measured_pairs
    from attnplug.negotiation.pair import routes as routes
    from attnplug.negotiation.ranking import AUTO as AUTO
    from attnplug.negotiation.reason import Fix as Fix
    from attnplug.negotiation.reason import Reason as Reason
    from attnplug.negotiation.reason import Unverified as Unverified
    from attnplug.negotiation.torch_probe import TorchBuild as TorchBuild
    from attnplug.negotiation.torch_probe import missing_cuda as missing_cuda
    from attnplug.negotiation.torch_probe import torch_build as torch_build
    from attnplug.negotiation.verdict import Verdict as Verdict

_MODULES: Final = {
    "attnplug.negotiation.agreement": "Agreement",
    "attnplug.negotiation.candidate": "Candidate",
    "attnplug.negotiation.matching": "EVALUATIONS most_evaluations negotiate Request",
    "attnplug.negotiation.pair": "measured_pairs routes",
    "attnplug.negotiation.ranking": "AUTO",
    "attnplug.negotiation.reason": "Fix Reason Unverified",
    "attnplug.negotiation.torch_probe": "TorchBuild missing_cuda torch_build",
    "attnplug.negotiation.verdict": "Verdict",
}

__getattr__, __dir__, __all__ = lazy(__name__, _MODULES)

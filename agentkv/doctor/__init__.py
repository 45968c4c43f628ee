"""Measuring a server: what of agentkv works on it, and what to change where something does not."""

from agentkv.doctor.findings import Examination, Finding, Status
from agentkv.errors import MissingDependencyError

try:
    from agentkv.doctor.examination import CHECKS, Check, examine
    from agentkv.doctor.session import Lengths
    from agentkv.http import ServerOptions
except ImportError as error:
    raise MissingDependencyError(
        f"agentkv doctor needs httpx2 and tenacity ({error}): pip install 'agentkv-middleware[vllm]', or "
        "'.[vllm]' in a checkout"
    ) from error

__all__ = ["CHECKS", "Check", "Examination", "Finding", "Lengths", "ServerOptions", "Status", "examine"]

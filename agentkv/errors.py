"""Every error agentkv raises on purpose, in one tree.

Each class also subclasses the standard exception that a caller would reach for, so that
``except ValueError`` keeps working::

    AgentKVError
    ├── ConfigurationError (ValueError)       a declaration is wrong: segments, options, arguments
    │   ├── SegmentError                      a segment is malformed, duplicated or misplaced
    │   ├── FieldError                        a field is malformed, duplicated or unknown
    │   ├── ProfileError                      a profile cannot be read or does not fit
    │   └── InputError                        the inputs of a turn do not fit the conversation
    ├── ValueRenderError (TypeError)          a field value has no canonical text
    ├── CapabilityError (RuntimeError)        the backend or server cannot do what was asked
    ├── MissingDependencyError (ImportError)  an optional extra is not installed
    ├── TemplateError (ValueError)            a chat template refuses or mangles what was given
    ├── LedgerError (ValueError)              a stored ledger cannot be used
    │   ├── LedgerFormatError                 not a ledger, damaged, or of an unknown version
    │   └── LedgerMismatchError               it renders other tokens than those that were sent
    ├── ContextError (RuntimeError)           a context was used out of order
    │   ├── ContextBusyError                  a second call while one is running
    │   └── ContextClosedError                a call before entering or after leaving
    ├── ContextWindowError (ValueError)       the prompt and the answer's room exceed the window
    ├── BackendError (RuntimeError)           a model call failed; nothing was committed
    │   ├── BackendConnectionError (ConnectionError)
    │   ├── BackendTimeoutError (TimeoutError)
    │   ├── BackendBusyError                  the server is overloaded or starting
    │   ├── BackendAuthError (PermissionError)
    │   ├── BackendRequestError (ValueError)  the server refuses the request
    │   └── TruncationDetectedError           the server read fewer tokens than were sent
    ├── ArtifactError (ValueError)            a compiled chunk cannot be used
    │   ├── ArtifactMissingError (FileNotFoundError)
    │   ├── ArtifactDamagedError              unreadable, cut, altered, or of an unknown format
    │   ├── ArtifactMismatchError             of other tokens, another model or another tenant
    │   ├── ArtifactSignatureError (PermissionError)
    │   └── TicketError (PermissionError)     no valid permission to splice or compile
    └── ModelError (OSError)                  a local model cannot be provided
        ├── ModelNotFoundError                no such folder, name or id
        ├── ModelDownloadError                fetching it failed
        └── ModelIntegrityError               what was fetched is not what was expected
"""

from __future__ import annotations

from typing import Literal


class AgentKVError(Exception):
    """Base of every error that agentkv raises on purpose."""


class ConfigurationError(AgentKVError, ValueError):
    """A declaration is wrong: segments, options or arguments."""


class SegmentError(ConfigurationError):
    """A segment is malformed, duplicated or misplaced."""


class FieldError(ConfigurationError):
    """A field is malformed, duplicated or unknown."""


class ProfileError(ConfigurationError):
    """A profile cannot be read or does not fit the template."""


class InputError(ConfigurationError):
    """The inputs of a turn do not fit the conversation, for example a result of no call."""


class ValueRenderError(AgentKVError, TypeError):
    """A field value has no canonical text."""


class CapabilityError(AgentKVError, RuntimeError):
    """The backend or server cannot do what was asked; raised at entry, never a slow answer later."""


class MissingDependencyError(AgentKVError, ImportError):
    """An optional extra is not installed; the message names the one to install."""


class TemplateError(AgentKVError, ValueError):
    """A chat template refuses or mangles what was given to it."""


class LedgerError(AgentKVError, ValueError):
    """A stored ledger cannot be used."""


class LedgerFormatError(LedgerError):
    """Not a ledger, damaged, or of a version this release does not know."""


class LedgerMismatchError(LedgerError):
    """The ledger renders other tokens than those that were sent: another tokenizer or template."""


class ContextError(AgentKVError, RuntimeError):
    """A context was used out of order."""


class ContextBusyError(ContextError):
    """A second call on a context while one is running."""


class ContextClosedError(ContextError):
    """A call on a context that is not entered, or was left."""


class ContextWindowError(AgentKVError, ValueError):
    """The prompt and the room its answer needs exceed the model's context window."""


class BackendError(AgentKVError, RuntimeError):
    """A model call failed. Nothing was committed: the same call can be made again."""


class BackendConnectionError(BackendError, ConnectionError):
    """The server could not be reached, or the connection broke."""


class BackendTimeoutError(BackendError, TimeoutError):
    """The call ran past its deadline."""


class BackendBusyError(BackendError):
    """The server is overloaded or still starting, and was so at every attempt."""


class BackendAuthError(BackendError, PermissionError):
    """The server does not let this client do that: a key is missing or wrong, or the endpoint is closed."""


class BackendRequestError(BackendError, ValueError):
    """The server refuses the request as it is; its own words are in the message."""


class TruncationDetectedError(BackendError):
    """The server read fewer prompt tokens than were sent: it cut the prompt without saying so."""


class ArtifactError(AgentKVError, ValueError):
    """A compiled chunk cannot be used: its tokens are computed instead."""


class ArtifactMissingError(ArtifactError, FileNotFoundError):
    """The store has no artifact of this name."""


class ArtifactDamagedError(ArtifactError):
    """The artifact is unreadable, cut, altered, or of a format that this release does not know."""


class ArtifactMismatchError(ArtifactError):
    """The artifact belongs to other tokens, another model or another tenant."""

    differs: Literal["tokens", "model", "rope", "tenant"]
    """What is another than asked for; *rope*: nothing of the model but its rotary positions."""

    def __init__(self, message: str, differs: Literal["tokens", "model", "rope", "tenant"] = "model") -> None:
        super().__init__(message)
        self.differs = differs


class ArtifactSignatureError(ArtifactError, PermissionError):
    """The artifact is not signed with the store's key."""


class TicketError(ArtifactError, PermissionError):
    """A ticket is malformed, forged or expired, so nothing may be spliced or compiled with it."""


class ModelError(AgentKVError, OSError):
    """A local model cannot be provided."""


class ModelNotFoundError(ModelError):
    """There is no model folder, known name or hub id like the one given."""


class ModelDownloadError(ModelError):
    """Fetching a model's package failed."""


class ModelIntegrityError(ModelError):
    """What was fetched is not what was expected: its digest differs."""

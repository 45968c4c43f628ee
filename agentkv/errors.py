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
    └── ModelError (OSError)                  a local model cannot be provided
        ├── ModelNotFoundError                no such folder, name or id
        ├── ModelDownloadError                fetching it failed
        └── ModelIntegrityError               what was fetched is not what was expected
"""

from __future__ import annotations


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


class ModelError(AgentKVError, OSError):
    """A local model cannot be provided."""


class ModelNotFoundError(ModelError):
    """There is no model folder, known name or hub id like the one given."""


class ModelDownloadError(ModelError):
    """Fetching a model's package failed."""


class ModelIntegrityError(ModelError):
    """What was fetched is not what was expected: its digest differs."""

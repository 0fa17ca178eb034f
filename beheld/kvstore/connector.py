"""Classes of a user's own that decide what is taken from the folder, written against vLLM's interface of connectors.

Such a class derives from SharedStorageConnector and overrides some of its methods. It is asked about each prompt of
which blocks were found, before that prompt is admitted: how many of them to take, and which of those could not be
loaded. The latter are computed. It moves no tensors: the folder does, whatever `start_load_kv` does in addition.

The interface counts positions in numbered blocks. These numbers are of the prompt here: block 1 holds its first
positions.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np

from beheld.core.errors import BeheldError, ConfigError, first_line
from beheld.core.kv_transfer import OPTION, KVTransferConfig
from beheld.core.request import Request as EngineRequest
from beheld.core.value_checks import nearest
from beheld.kvstore.store import FileReading, FileStore
from beheld.utils.log import get_logger

logger = get_logger(__name__)


class KVConnectorRole(Enum):
    """Each connector is made twice: one decides, and the other loads."""

    SCHEDULER = 0
    WORKER = 1


class KVConnectorMetadata:
    """What the first passes on to the second."""


@dataclass
class StoredPrompt:
    """One prompt whose blocks are loaded.

    Attributes:
        token_ids: as many positions as are loaded, int64.
        slot_mapping: number of the block times its size, and the place in it, of each of them, int64.
        is_store: always False: what is kept needs no connector.
        mm_hashes: digests of the prompt's media.
    """

    token_ids: np.ndarray
    slot_mapping: np.ndarray
    is_store: bool
    mm_hashes: list[str]


@dataclass
class SharedStorageConnectorMetadata(KVConnectorMetadata):
    """The prompts whose blocks are loaded."""

    requests: list[StoredPrompt] = field(default_factory=list)

    def add_request(
        self, token_ids: Sequence[int], block_ids: Sequence[int], block_size: int, is_store: bool, mm_hashes: list[str]
    ) -> None:
        """Add a prompt, of which all blocks but the last position's are loaded."""
        count = min(len(block_ids), (len(token_ids) - 1) // block_size) * block_size
        places = np.arange(count, dtype=np.int64)
        slots = np.array(block_ids, np.int64)[places // block_size] * block_size + places % block_size
        self.requests.append(StoredPrompt(np.array(token_ids[:count], np.int64), slots, is_store, mm_hashes))


@dataclass
class KVCacheBlocks:
    """The blocks of a prompt, for each cache group."""

    block_ids: tuple[list[int], ...]

    def get_block_ids(self) -> tuple[list[int], ...]:
        """Their numbers."""
        return self.block_ids


@dataclass
class PassFacts:
    """What a pass of the model looks at; nothing of it concerns a connector here."""

    attn_metadata: Any = None
    no_compile_layers: dict[str, Any] = field(default_factory=dict)
    virtual_engine: int = 0


@dataclass
class StoredRequest:
    """A request as connectors see it.

    Attributes:
        num_found: positions at its head that are in the engine's own cache or were found in the folder.
    """

    request_id: str
    prompt_token_ids: list[int]
    mm_hashes: list[str]
    num_found: int

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.prompt_token_ids)

    @property
    def all_token_ids(self) -> list[int]:
        """The prompt: there is no answer yet."""
        return self.prompt_token_ids


@dataclass
class CacheFacts:
    """What a connector may ask about the cache."""

    block_size: int


@dataclass
class ConnectorFacts:
    """What a connector is made of."""

    kv_transfer_config: KVTransferConfig
    cache_config: CacheFacts


class SharedStorageConnector:
    """Takes all that was found. See the head of the file for who calls its methods, and when."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any = None) -> None:
        self._vllm_config = vllm_config
        self._kv_transfer_config: KVTransferConfig = vllm_config.kv_transfer_config
        self._role = role
        self._block_size: int = vllm_config.cache_config.block_size
        self._requests_need_load: dict[str, StoredRequest] = {}
        self._connector_metadata: Any = None

    @property
    def role(self) -> KVConnectorRole:
        """Which of the two it is."""
        return self._role

    def get_num_new_matched_tokens(self, request: StoredRequest, num_computed_tokens: int) -> tuple[int, bool]:
        """How many positions to take after the first `num_computed_tokens`, and whether they come later."""
        return max(0, request.num_found - num_computed_tokens), False

    def update_state_after_alloc(self, request: StoredRequest, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """There is room for them."""
        if num_external_tokens > 0:
            self._requests_need_load[request.request_id] = request

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        """What is to be loaded; forgets it."""
        made = SharedStorageConnectorMetadata()
        for request in self._requests_need_load.values():
            ids = range(1, request.num_found // self._block_size + 1)
            made.add_request(request.prompt_token_ids, ids, self._block_size, False, request.mm_hashes)
        self._requests_need_load.clear()
        return made

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        """Take what is to be loaded next."""
        self._connector_metadata = connector_metadata

    def clear_connector_metadata(self) -> None:
        """It has been loaded."""
        self._connector_metadata = None

    def _get_connector_metadata(self) -> Any:
        assert self._connector_metadata is not None, "nothing is to be loaded"
        return self._connector_metadata

    def start_load_kv(self, forward_context: PassFacts, **kwargs: Any) -> None:
        """Load it: the folder has done so."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Wait for one layer: all have come."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Requests whose blocks were sent, and whose blocks came, since the last call."""
        return None, None

    def get_block_ids_with_load_errors(self) -> set[int] | None:
        """Numbers of blocks that could not be loaded."""
        return set()


class AskedReading:
    """What was read, less what a connector does not take. See BlockReading."""

    def __init__(self, files: FileReading, ask: Any) -> None:
        self.files = files
        self._ask = ask
        self._found: tuple[list[np.ndarray], str] | None = None

    @property
    def ended(self) -> bool:
        """See BlockReading."""
        return self.files.ended

    @property
    def blocks(self) -> list[np.ndarray]:
        """See BlockReading."""
        return self._asked[0]

    @property
    def broken(self) -> str:
        """See BlockReading."""
        return self._asked[1]

    @property
    def _asked(self) -> tuple[list[np.ndarray], str]:
        if self._found is None:
            self._found = self._ask(self.files)
        return self._found


class AskingStore(FileStore):
    """See PrefixStore; asks a connector what to take of what the files hold."""

    def __init__(self, *given: Any, block_size: int) -> None:
        super().__init__(*given)
        self._size = block_size
        kind = own_connector(self._config)
        facts = ConnectorFacts(self._config, CacheFacts(block_size))
        self._decides, self._loads = (kind(vllm_config=facts, role=role) for role in KVConnectorRole)

    def read(self, request: EngineRequest, first: int, keys: Sequence[bytes]) -> Any:
        """See PrefixStore."""
        reading = super().read(request, first, keys)
        return None if reading is None else AskedReading(reading, lambda files: self._ask(request, first, files))

    def forget(self, reading: Any) -> None:
        """See PrefixStore."""
        super().forget(reading.files)

    def _ask(self, request: EngineRequest, first: int, files: FileReading) -> tuple[list[np.ndarray], str]:
        """The blocks to take, and what was wrong with the one after them."""
        try:
            count, wrong = self._count(request, first, len(files.blocks))
        except Exception as error:
            logger.exception("The connector failed; what it was asked about is computed.")
            return [], f"the connector failed: {first_line(error)}"
        if wrong:
            return files.blocks[:count], "the connector could not load a block"
        return files.blocks[:count], files.broken

    def _count(self, request: EngineRequest, first: int, num_found: int) -> tuple[int, bool]:
        """How many of these blocks come, and whether the connector wanted more of them."""
        size, known = self._size, first * self._size
        seen = StoredRequest(
            request.id,
            list(request.token_ids),
            [span.item.digest.hex() for span in request.spans],
            (first + num_found) * size if num_found else known,
        )
        matched, _ = self._decides.get_num_new_matched_tokens(seen, known)
        count = min(num_found, max(0, int(matched or 0)) // size)
        ids = [*range(1, first + count + 1)]
        self._decides.update_state_after_alloc(seen, KVCacheBlocks((ids,)), count * size)
        if not count:
            return 0, False
        self._loads.bind_connector_metadata(self._decides.build_connector_meta(None))
        self._loads.start_load_kv(PassFacts())
        wrong = self._loads.get_block_ids_with_load_errors() or set()
        self._loads.get_finished(set())
        self._loads.clear_connector_metadata()
        loaded = next((index for index in range(count) if first + index + 1 in wrong), count)
        return loaded, loaded < count


def own_connector(config: KVTransferConfig) -> type[SharedStorageConnector]:
    """The class that `kv_connector` names in the module `kv_connector_module_path`.

    Raises:
        ConfigError: there is none, or it does not derive from SharedStorageConnector.
    """
    path, name = str(config.kv_connector_module_path), str(config.kv_connector)
    try:
        module = importlib.import_module(path)
    except BeheldError:
        raise
    except Exception as error:
        raise ConfigError(
            f"{OPTION}: the module {path!r} cannot be imported: {first_line(error)}.",
            "It must be on Python's path; one that imports vllm needs `beheld run-vllm`.",
            param=OPTION,
        ) from error
    kind = getattr(module, name, None)
    if kind is None:
        raise ConfigError(f"{OPTION}: {path} has no {name!r}.", nearest(name, set(vars(module))), param=OPTION)
    if not (isinstance(kind, type) and issubclass(kind, SharedStorageConnector)):
        raise ConfigError(
            f"{OPTION}: {path}.{name} does not derive from SharedStorageConnector.",
            "Built is a shared folder; a class may decide what is taken from it.",
            param=OPTION,
        )
    return kind

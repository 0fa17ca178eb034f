"""Routes that change the server for all clients or tell how it is set up; off unless the operator wants them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Awaitable, Callable
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from beheld.api.async_llm import AsyncLLM
from beheld.core.errors import EngineDeadError, EngineError, LoRAError, LoRAMissingError, UserError
from beheld.server import limits
from beheld.server.adapters import Adapters
from beheld.server.body_schema import Body, Name
from beheld.server.errors import HttpError
from beheld.server.read import Reader

Handler = Callable[[Request], Awaitable[Response]]
Table = list[tuple[str, str, Handler]]


class LoadAdapter(Body):
    """POST /v1/load_lora_adapter."""

    says_nothing: ClassVar[dict[str, tuple[Any, ...]]] = {"is_3d_lora_weight": (False,)}

    lora_name: Annotated[Name, Field(min_length=1)]
    lora_path: Annotated[str, Field(min_length=1, max_length=4096)]
    load_inplace: bool | None = None


class UnloadAdapter(Body):
    """POST /v1/unload_lora_adapter."""

    without_effect: ClassVar[dict[str, str]] = {"lora_int_id": "The name says which adapter it is."}

    lora_name: Annotated[Name, Field(min_length=1)]


class SageMakerAdapter(Body):
    """POST /adapters."""

    without_effect: ClassVar[dict[str, str]] = {
        "preload": "An adapter is read when it comes.",
        "pin": "Adapters make room for those that are asked for.",
    }

    name: Annotated[Name, Field(min_length=1)]
    src: Annotated[str, Field(min_length=1, max_length=4096)]


class WeightCheck(Body):
    """POST /weight_checker."""

    action: Literal["checksum", "reset", "compare"]
    baseline: Annotated[dict[str, Name], Field(max_length=limits.MAX_TENSORS)] | None = None


class CollectiveCall(Body):
    """POST /collective_rpc."""

    says_nothing: ClassVar[dict[str, tuple[Any, ...]]] = {"args": ([],), "kwargs": ({},)}
    without_effect: ClassVar[dict[str, str]] = {"timeout": "It ends when the weights are read."}

    method: Name


# Flag -> the routes that it switches on.
_SWITCHES = {
    "--dashboard": ("/dashboard",),
    "--allow-runtime-lora-updating": ("/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/adapters"),
    "--operator-routes": (
        *("/sleep", "/wake_up", "/is_sleeping", "/pause", "/resume", "/is_paused", "/weight_checker"),
        *("/collective_rpc", "/reset_prefix_cache", "/reset_mm_cache", "/reset_encoder_cache", "/server_info"),
        *("/start_profile", "/stop_profile", "/tokenizer_info"),
    ),
}


def switch_of(path: str) -> str | None:
    """The flag that switches on the route of this path; None if there is none."""
    return next((flag for flag, paths in _SWITCHES.items() if path in paths), None)


class OperatorRoutes:
    """The handlers: each is (method, path, handler)."""

    def __init__(self, llm: AsyncLLM, reader: Reader, adapters: Adapters) -> None:
        self._llm = llm
        self._reader = reader
        self._adapters = adapters

    def of_engine(self) -> Table:
        """Sleeping and pausing, weights, caches, and what the engine was started with."""
        return [
            ("POST", "/sleep", _explained(self.sleep)),
            ("POST", "/wake_up", _explained(self.wake_up)),
            ("GET", "/is_sleeping", self.is_sleeping),
            ("POST", "/pause", _explained(self.pause)),
            ("POST", "/resume", _explained(self.resume)),
            ("GET", "/is_paused", self.is_paused),
            ("POST", "/weight_checker", _explained(self.check_weights)),
            ("POST", "/collective_rpc", _explained(self.call_all)),
            ("POST", "/reset_prefix_cache", self.reset_prefix_cache),
            ("POST", "/reset_mm_cache", self.reset_mm_cache),
            ("POST", "/reset_encoder_cache", self.reset_encoder_cache),
            ("GET", "/server_info", self.server_info),
            ("POST", "/start_profile", _explained(self.start_profile)),
            ("POST", "/stop_profile", _explained(self.stop_profile)),
        ]

    def of_adapters(self) -> Table:
        """Adapters that come and go."""
        return [
            ("POST", "/v1/load_lora_adapter", _explained(self.load_lora_adapter)),
            ("POST", "/v1/unload_lora_adapter", _explained(self.unload_lora_adapter)),
            ("POST", "/adapters", _explained(self.add_adapter)),
            ("DELETE", "/adapters/{name:path}", _explained(self.remove_adapter)),
        ]

    def of_tokenizer(self) -> Table:
        """The tokenizer's configuration."""
        return [("GET", "/tokenizer_info", self.tokenizer_info)]

    async def sleep(self, request: Request) -> Response:
        """POST /sleep?level=1&mode=abort."""
        await self._llm.sleep(_level(request), request.query_params.get("mode", "abort"))
        return Response()

    async def wake_up(self, request: Request) -> Response:
        """POST /wake_up?tags=weights&tags=kv_cache; without tags, all."""
        await self._llm.wake_up(request.query_params.getlist("tags") or None)
        return Response()

    async def is_sleeping(self, request: Request) -> Response:
        """GET /is_sleeping."""
        return JSONResponse({"is_sleeping": await self._llm.is_sleeping()})

    async def pause(self, request: Request) -> Response:
        """POST /pause?mode=abort&clear_cache=true."""
        await self._llm.pause_generation(
            mode=request.query_params.get("mode", "abort"),
            wait_for_inflight_requests=_switch(request, "wait_for_inflight_requests", usual="false"),
            clear_cache=_switch(request, "clear_cache", usual="true"),
        )
        return JSONResponse({"status": "paused"})

    async def resume(self, request: Request) -> Response:
        """POST /resume."""
        await self._llm.resume_generation()
        return JSONResponse({"status": "resumed"})

    async def is_paused(self, request: Request) -> Response:
        """GET /is_paused."""
        return JSONResponse({"is_paused": await self._llm.is_paused()})

    async def check_weights(self, request: Request) -> Response:
        """POST /weight_checker: digests of the weights, all of them zero, or which differ from earlier digests."""
        asked = await self._read(request, WeightCheck)
        if asked.action == "compare" and asked.baseline is None:
            raise HttpError(
                400,
                "The action 'compare' needs a baseline.",
                "Send the checksums that the action 'checksum' gave.",
                param="baseline",
            )
        if asked.action == "reset":
            await self._llm.reset_weights()
            return JSONResponse({"status": "reset"})
        found = await self._llm.weight_checksums()
        if asked.action == "checksum":
            return JSONResponse({"checksums": found})
        known = asked.baseline or {}
        wrong = sorted(name for name in found.keys() | known.keys() if found.get(name) != known.get(name))
        return JSONResponse({"match": not wrong, "mismatches": wrong})

    async def call_all(self, request: Request) -> Response:
        """POST /collective_rpc with the method reload_weights: the files of the weights are read again."""
        asked = await self._read(request, CollectiveCall)
        if asked.method != "reload_weights":
            raise HttpError(
                400,
                f"collective_rpc({asked.method!r}) is not available here: requests do not reach into the engine.",
                "Send reload_weights, which reads the weights from their files, or ask for another route.",
                param="method",
            )
        await self._llm.reload_weights()
        return JSONResponse({"results": [None]})

    async def reset_prefix_cache(self, request: Request) -> Response:
        """POST /reset_prefix_cache: what prompts have in common is computed again."""
        self._llm.reset_prefix_cache()
        return Response()

    async def reset_mm_cache(self, request: Request) -> Response:
        """POST /reset_mm_cache: nothing to do, as media are known by their content."""
        return Response()

    async def reset_encoder_cache(self, request: Request) -> Response:
        """POST /reset_encoder_cache: likewise."""
        return Response()

    async def server_info(self, request: Request) -> Response:
        """GET /server_info: the engine's configuration."""
        config = dataclasses.asdict(self._llm.config)
        return JSONResponse({"vllm_config": json.loads(json.dumps(config, default=str))})

    async def start_profile(self, request: Request) -> Response:
        """POST /start_profile: begin to record what the engine computes."""
        await self._llm.start_profile()
        return Response()

    async def stop_profile(self, request: Request) -> Response:
        """POST /stop_profile: write the record into a folder of the server's."""
        await self._llm.stop_profile()
        return Response()

    async def tokenizer_info(self, request: Request) -> Response:
        """GET /tokenizer_info: the class of the tokenizer, and its settings."""
        tokenizer = self._llm.tokenizer
        if tokenizer is None:
            raise HttpError(404, "There is no tokenizer.", "Start the server without skip_tokenizer_init.")
        made = {"tokenizer_class": type(tokenizer).__name__, **getattr(tokenizer, "init_kwargs", {})}
        made["chat_template"] = self._llm.chat_template
        return JSONResponse(json.loads(json.dumps(made, default=str)))

    async def load_lora_adapter(self, request: Request) -> Response:
        """POST /v1/load_lora_adapter."""
        asked = await self._read(request, LoadAdapter)
        await self._adapters.add(asked.lora_name, asked.lora_path, in_place=asked.load_inplace is True)
        return PlainTextResponse(f"Success: LoRA adapter '{asked.lora_name}' added successfully.")

    async def unload_lora_adapter(self, request: Request) -> Response:
        """POST /v1/unload_lora_adapter."""
        asked = await self._read(request, UnloadAdapter)
        await self._adapters.remove(asked.lora_name)
        return PlainTextResponse(f"Success: LoRA adapter '{asked.lora_name}' removed successfully.")

    async def add_adapter(self, request: Request) -> Response:
        """POST /adapters: load_lora_adapter as SageMaker asks for it."""
        asked = await self._read(request, SageMakerAdapter)
        await self._adapters.add(asked.name, asked.src, in_place=False)
        return PlainTextResponse(f"Success: LoRA adapter '{asked.name}' added successfully.")

    async def remove_adapter(self, request: Request) -> Response:
        """DELETE /adapters/NAME: unload_lora_adapter as SageMaker asks for it."""
        name = request.path_params["name"]
        await self._adapters.remove(name)
        return PlainTextResponse(f"Success: LoRA adapter '{name}' removed successfully.")

    async def _read(self, request: Request, kind: type[Any]) -> Any:
        state = request.state
        return await self._reader.read(request, kind, state.held, state.notes, lambda body: body)


def _explained(handler: Handler) -> Handler:
    """A handler whose errors tell the operator the whole reason, also where a client would read that the log has it."""

    async def explained(request: Request) -> Response:
        try:
            return await handler(request)
        except EngineDeadError:
            raise
        except (UserError, EngineError) as error:
            # What may succeed later is the server's state, and no error of the request.
            status = _status(error)
            param = error.param
            if param in request.query_params:
                # vLLM's name of it, which says where it stands.
                param = f"query.{param}"
            code = f"{error.stage}_error" if status == 500 else None
            raise HttpError(status, error.reason, error.advice(), param=param, code=code) from error

    explained.__name__ = handler.__name__
    return explained


def _status(error: UserError | EngineError) -> int:
    if isinstance(error, LoRAMissingError):
        return 404
    if isinstance(error, LoRAError) and error.param != "lora_path":
        # The request is right: the server's files are broken, or its options do not fit them.
        return 500
    return 400 if isinstance(error, UserError) else 503


def _level(request: Request) -> int:
    text = request.query_params.get("level", "1")
    if text not in ("0", "1", "2"):
        raise HttpError(400, f"level must be 0, 1 or 2, got {text[:32]!r}.", "Leave it out for 1.", param="query.level")
    return int(text)


def _switch(request: Request, name: str, *, usual: str) -> bool:
    text = request.query_params.get(name, usual)
    if text.lower() not in ("true", "false", "1", "0"):
        raise HttpError(
            400, f"{name} is true or false, got {text[:32]!r}.", "Write true or false.", param=f"query.{name}"
        )
    return text.lower() in ("true", "1")

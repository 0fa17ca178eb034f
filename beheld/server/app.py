"""The application: its routes and its middleware."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import BaseModel
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Scope

from beheld import __version__
from beheld.api.async_llm import AsyncLLM
from beheld.core.errors import BeheldError, CulpritError, EngineDeadError
from beheld.core.outputs import RequestOutput
from beheld.core.params import SamplingParams
from beheld.core.request import LoRARequest
from beheld.server import (
    chat,
    completions,
    decisions,
    fill_in,
    generate,
    generative_scoring,
    invocations,
    limits,
    load_report,
    operator,
    page,
    pooling,
    transcriptions,
    vector_bodies,
)
from beheld.server.acceptor import ConnectionCounts, CountedPlaces
from beheld.server.access_log import GONE, AccessLog, AccessLogMiddleware
from beheld.server.adapters import Adapters
from beheld.server.admission import AdmissionControl, Hold
from beheld.server.answer import AnswerForm, AnswerSender, shown, warned
from beheld.server.answer_marks import answer_marks, ends_reasoning
from beheld.server.chat import ChunkHead
from beheld.server.chat_order import ChatOrder, order_of, tokenize_options, without_inputs
from beheld.server.clients import Clients
from beheld.server.errors import HttpError, http_error
from beheld.server.field_effects import FieldEffects, note
from beheld.server.field_names import NO_NAMES, field_names_of
from beheld.server.front_table import Column, FrontTable, FrontWatch
from beheld.server.generate_schema import AbortRequest, GenerateRequest, GenerativeScoringRequest
from beheld.server.health import EngineHealth
from beheld.server.hosts import HostGuard
from beheld.server.http_protocol import Farewell, FrameGuard
from beheld.server.keys import KeyGuard
from beheld.server.long_json import LongResponse
from beheld.server.metrics import Metrics, counted, summed
from beheld.server.neighbours import NONE, Figures, Forwarding, Neighbours
from beheld.server.notes import Notes
from beheld.server.options import ServerOptions
from beheld.server.pooling_routes import POOLING_ROUTES
from beheld.server.pooling_schema import Pooled
from beheld.server.read import ClientDisconnect, Reader
from beheld.server.request_turns import RequestTurns
from beheld.server.response_store import ResponseStore, Stored
from beheld.server.sagemaker_sessions import SESSION, SessionRequest, Sessions
from beheld.server.sampling import check_answers, check_ids, with_all
from beheld.server.schema import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    Sampled,
    StreamOptions,
    TokenizeRequest,
)
from beheld.server.shutdown import CutOff
from beheld.server.speech_schema import (
    Speech,
    TranscriptionLink,
    TranscriptionRequest,
    TranslationLink,
    TranslationRequest,
)
from beheld.server.stream import Chunk, Gone, fold, until_gone
from beheld.text.detokenize import token_bytes
from beheld.utils.log import get_logger

if TYPE_CHECKING:
    # Classes of bodies take milliseconds each: those of these routes are made by the first request.
    from beheld.server import messages
    from beheld.server.messages_schema import CountRequest

logger = get_logger(__name__)
B = TypeVar("B", bound=BaseModel)
# The header with the names of the fields without effect.
_WARNED = "X-Without-Effect"
# How long an answer waits for the engine's load.
_REPORT_S = 0.2
_ABORT = "/inference/v1/abort_requests"
# vLLM's header that names an engine of several.
_RANK = "X-data-parallel-rank"
# What a prompt without a template has no use for.
_OF_TEMPLATES = (
    *("tools", "reasoning_effort", "chat_template", "chat_template_kwargs", "add_generation_prompt"),
    *("continue_final_message", "mm_processor_kwargs", "media_io_kwargs"),
)
Handler = Callable[[Request], Awaitable[Response]]


class Service:
    """The state that all routes share.

    Args:
        llm: the model.
        options: the server's, which are for all of its fronts together.
        neighbours: its other fronts.
    """

    def __init__(self, llm: AsyncLLM, options: ServerOptions, neighbours: Neighbours = NONE) -> None:
        options = options.shared(neighbours.place)
        # The largest body, and the one that most ask with: no chat waits for what checks it.
        ChatRequest.model_rebuild()
        self.llm = llm
        self.options = options
        self.front_table = FrontTable(neighbours.table, neighbours.place) if neighbours.several else None
        self.admission = AdmissionControl(options, self.front_table)
        self.front_watch: FrontWatch | None = None
        self.connection_counts: ConnectionCounts | None = None
        if self.front_table is not None:
            self.front_watch = FrontWatch(self.front_table)
            self.connection_counts = ConnectionCounts(self.front_table)
            self.admission.connections = CountedPlaces(
                options.max_connections, self.connection_counts, self.front_table
            )
        self.engine_health = EngineHealth(llm, self.admission, options.health_s, self.front_watch)
        self.metrics = Metrics(options.names[0], llm)
        self.neighbours = neighbours
        self.clients = Clients(options, secret=neighbours.secret)
        self.access_log = AccessLog(self.metrics, takes_names=options.takes_request_ids)
        self._starts = RequestTurns()
        self._reader = Reader(
            self.admission,
            options,
            replace(limits.JSON, values=max(limits.JSON.values, 2 * _longest(llm))),
            self._starts,
            llm.host,
        )
        self.created = int(time.time())
        self._store = ResponseStore(options.max_stored_bytes)
        self._answers = AnswerSender(options, self.admission, self.clients, neighbours.named)
        self._forms = answer_marks(llm, options)
        self._effects = FieldEffects(llm, self._forms)
        self._ends_reasoning = ends_reasoning(llm, self._forms.reasoning)
        self._openapi: JSONResponse | None = None
        self._adapters = Adapters(llm, options.loras, (*options.names, *options.aliases))
        self._sessions = Sessions()
        self._forwarding: Forwarding | None = None

    def forwarding(self, app: ASGIApp) -> ASGIApp:
        """The application of a front, some of whose requests belong to other fronts."""
        if self.front_watch is None:
            return app
        assert self.front_table is not None
        watch, table = self.front_watch, self.front_table
        operators = [path for _, path, _ in self._operators_routes()]
        figures = {
            "/metrics": lambda: self.metrics.text(None, self.admission.busy, self.admission.num_refused),
        }
        guard = FrameGuard(app, self._crowded)
        self._forwarding = Forwarding(
            app,
            self.neighbours,
            operators,
            self.admission,
            self.clients.peer,
            figures,
            refuses=lambda scope: guard.refusal(scope) is not None,
            hangs=lambda number: watch.silence_s(number) > self.options.health_s,
            restarts=lambda: table.column(Column.RESTARTS),
            counted=counted,
            orders={_ABORT: lambda body: self.llm.abort_answers(json.loads(body))},
        )
        return self._forwarding

    def app(self) -> Starlette:
        """The application."""
        routes = [
            Route("/v1/chat/completions", self._guarded(self.chat), methods=["POST"]),
            Route("/v1/completions", self._guarded(self.complete), methods=["POST"]),
            Route("/inference/v1/generate", self._guarded(self.generate), methods=["POST"]),
            Route(_ABORT, self._guarded(self.abort_requests), methods=["POST"]),
            Route("/generative_scoring", self._guarded(self.score_labels), methods=["POST"]),
            Route("/v1/systemone", self._guarded(self.decide), methods=["POST"]),
            Route("/v1/decisions", self._guarded(self.create_decision), methods=["POST"]),
            Route("/v1/audio/transcriptions", self._guarded(self.create_transcription), methods=["POST"]),
            Route("/v1/audio/translations", self._guarded(self.create_translation), methods=["POST"]),
            *(Route(path, self._guarded(self._pooling(kind)), methods=["POST"]) for path, kind in POOLING_ROUTES),
            Route("/invocations", self._guarded(self.invoke), methods=["POST"]),
            Route("/v1/messages", self._guarded(self.create_message), methods=["POST"]),
            Route("/v1/messages/count_tokens", self._guarded(self.count_tokens), methods=["POST"]),
            *(Route(f"{p}/v2/chat", self._guarded(self.create_cohere_chat), methods=["POST"]) for p in ("", "/cohere")),
            Route("/cohere/v2/chat/render", self._guarded(self.render_cohere_chat), methods=["POST"]),
            Route("/v1/responses", self._guarded(self.create_response), methods=["POST"]),
            Route("/v1/responses/{name}", self._guarded(self.stored_response), methods=["GET", "DELETE"]),
            Route("/v1/responses/{name}/cancel", self._guarded(self.cancel_response), methods=["POST"]),
            Route("/v1/streams/{name}", self._guarded(self.resumed_stream), methods=["GET"]),
            Route("/v1/models", self._guarded(self.models), methods=["GET"]),
            Route("/v1/models/{name:path}", self._guarded(self.model), methods=["GET"]),
            Route("/tokenize", self._guarded(self.tokenize), methods=["POST"]),
            Route("/detokenize", self._guarded(self.detokenize), methods=["POST"]),
            Route("/health", self._guarded(self.health), methods=["GET"]),
            Route("/ping", self._guarded(self.health), methods=["GET", "POST"]),
            Route("/version", self._guarded(self.version), methods=["GET"]),
            Route("/metrics", self._guarded(self.show_metrics), methods=["GET"]),
            Route("/load", self._guarded(self.load), methods=["GET"]),
        ]
        routes += [
            Route(path, self._guarded(handler), methods=[method]) for method, path, handler in self._operators_routes()
        ]
        if not self.options.hides_docs:
            routes.append(Route("/openapi.json", self._guarded(self.openapi), methods=["GET"]))
            routes.append(Route("/docs", self._guarded(self.docs), methods=["GET"]))
        if self.options.show_page:
            routes.append(Route("/", self._guarded(self.page), methods=["GET"]))
        if self.options.show_dashboard:
            routes.append(Route("/dashboard", self._guarded(self.dashboard), methods=["GET"]))
        app = Starlette(
            routes=routes,
            middleware=[
                Middleware(Farewell),
                Middleware(AccessLogMiddleware, access_log=self.access_log),
                Middleware(CutOff, admission=self.admission),
                Middleware(FrameGuard, crowded=self._crowded),
                Middleware(HostGuard, options=self.options),
                *self._cross_origin(),
                Middleware(KeyGuard, keys=self.options.api_keys),
            ],
            exception_handlers={HTTPException: _refused, Exception: _broken},
        )
        app.router.redirect_slashes = False
        return app

    def _operators_routes(self) -> operator.Table:
        """The further routes that the operator has switched on."""
        made, options = operator.OperatorRoutes(self.llm, self._reader, self._adapters), self.options
        return [
            *(made.of_engine() if options.operator_routes else ()),
            *(made.of_adapters() if options.changes_loras else ()),
            *(made.of_tokenizer() if options.tells_tokenizer or options.operator_routes else ()),
        ]

    def seen(self, scope: Scope) -> str:
        """Note that a request begins; returns its client."""
        client = self.clients.of(scope)
        self.llm.host.seen(client)
        return client

    def _crowded(self, scope: Scope) -> bool:
        """True if there are too many connections, and more than a few of them are of this one's peer."""
        return self.admission.crowded(self.clients.peer(scope))

    def _cross_origin(self) -> list[Middleware]:
        """The CORS middleware, if pages of other sites may send requests.

        It stands before the check of keys, because a browser's preflight request has none.
        """
        if not self.options.allowed_origins:
            return []
        return [
            Middleware(
                CORSMiddleware,
                allow_origins=self.options.allowed_origins,
                allow_methods=self.options.allowed_methods,
                allow_headers=self.options.allowed_headers,
                allow_credentials=self.options.allow_credentials,
                expose_headers=("X-Request-Id", _WARNED),
            )
        ]

    def _guarded(self, handler: Handler) -> Handler:
        """The handler with error responses and its name in the access log."""
        route = handler.__name__

        async def handle(request: Request) -> Response:
            request.state.route, request.state.names = route, NO_NAMES
            notes = request.state.notes = Notes(strict=self.options.strict_fields)
            client = self.seen(request.scope)
            request.state.held = self.admission.hold(client)
            try:
                await self._starts.take(client)
                response = await handler(request)
                if notes.fields:
                    self.metrics.accepted(notes.names)
                    response.headers[_WARNED] = ", ".join(notes.names)
                form = request.headers.get(load_report.FORMAT, "").upper()
                if request.method == "POST" and form in load_report.FORMS:
                    await self._report_load(response, form)
                return response
            except (ClientDisconnect, Gone):
                return Response(status_code=GONE)
            except Exception as error:
                return http_error(error, request.state.names).response()
            finally:
                if not request.state.streamed:
                    request.state.held.release()

        return handle

    async def _report_load(self, response: Response, form: str) -> None:
        """Add the header with the engine's load, unless the engine is too busy to tell it."""
        with contextlib.suppress(TimeoutError, BeheldError):
            async with asyncio.timeout(_REPORT_S):
                response.headers[load_report.HEADER] = load_report.report(form, await self.llm.ping())

    # ------------------------------------------------------------------ answers

    async def chat(self, request: Request) -> Response:
        """POST /v1/chat/completions."""
        body = with_all(await self._read(request, ChatRequest), self.llm.info.vocab_size)
        if body.chat_template is None and self.llm.chat_template is None:
            self._check_answers_texts("conversations")
        check_answers(body.n, self.options)
        check_ids(body.allowed_token_ids, self.llm.info.num_ids)
        salt = self._salt(request, body.cache_salt)
        head = self._head(request, "chatcmpl", body.model)

        def chunks() -> AsyncGenerator[Chunk, None]:
            made = chat.chunks(self.llm, body, orders.pop(), head, salt, self._forms)
            return warned(made, request.state.notes)

        self._effects.note_effort(body, request.state.notes)
        self._note_variables(request, body)
        self._effects.note_grammars(body, request.state.notes)
        self._effects.note_priority(body, request.state.notes)
        body = self._effects.with_read_args(body, request.state.notes)
        orders = await self._ordered(request, body)
        # The answer may take long.
        body = without_inputs(body)
        usage = body.stream_options is not None and body.stream_options.include_usage
        form = AnswerForm(lambda made: fold(made, "chat.completion"), lambda made: shown(made, usage=usage))
        columns, head = self._counted(body, head)
        stream, owner = body.stream is True, self._owner(request)
        return await self._answers.send(request, chunks, body.n or 1, form, stream=stream, owner=owner, columns=columns)

    async def complete(self, request: Request) -> Response:
        """POST /v1/completions."""
        self._check_answers_texts("prompts")
        # No name holds the body here: its prompts go as soon as they are prepared.
        return await self._complete(
            request,
            completions.with_max_tokens(await self._read(request, CompletionRequest)),
            lambda made: made,
            lambda made: fold(made, "text_completion"),
        )

    async def generate(self, request: Request) -> Response:
        """POST /inference/v1/generate."""
        asked = await self._read(request, GenerateRequest)
        prompt, mode = asked.return_token_ids is True, asked.output_mode
        states_length = self.llm.get_default_sampling_params().max_tokens != SamplingParams.max_tokens
        longest = None if states_length else self.llm.config.max_model_len
        is_open = longest is not None and asked.sampling_params.max_tokens is None
        bodies = [self._completed(generate.completion_of(asked, longest))]
        del asked
        return await self._complete(
            request,
            bodies.pop(),
            lambda made: generate.chunks(made, tells_prompt=prompt, mode=mode),
            generate.folded,
            is_open=is_open,
        )

    async def abort_requests(self, request: Request) -> Response:
        """POST /inference/v1/abort_requests: end answers by the ids that they have; others' are never guessed."""
        body = await self._read(request, AbortRequest)
        self._check_model(body.model)
        names = dict.fromkeys(body.request_ids)
        await self.llm.abort_answers(names)
        if self._forwarding is not None:
            await self._forwarding.tell_others(_ABORT, json.dumps([*names]).encode())
        return Response()

    async def score_labels(self, request: Request) -> Response:
        """POST /generative_scoring."""
        asked = await self._read(request, GenerativeScoringRequest)
        self._check_model(asked.model)
        generative_scoring.check(asked, self.options, self.llm.info.num_ids)
        client = request.state.held.client
        with self.admission.admitted(client=client):
            prompts = await until_gone(generative_scoring.prompts_of(asked, self.llm, client), request.receive)
        softmax, bodies = asked.apply_softmax is not False, [generative_scoring.completion_of(asked, prompts)]
        labels = bodies[0].logprob_token_ids or []
        del asked, prompts
        return await self._complete(
            request,
            bodies.pop(),
            lambda made: made,
            lambda made: generative_scoring.folded(made, labels, softmax=softmax),
        )

    async def decide(self, request: Request) -> Response:
        """POST /v1/systemone."""
        from beheld.server.decisions_schema import SystemOneRequest

        return await self._decided(request, SystemOneRequest, decisions.asked_systemone, decisions.folded_systemone)

    async def create_decision(self, request: Request) -> Response:
        """POST /v1/decisions."""
        from beheld.server.decisions_schema import DecisionsRequest

        return await self._decided(request, DecisionsRequest, decisions.asked_decisions, decisions.folded_decisions)

    async def _decided(
        self,
        request: Request,
        kind: type[B],
        asked: Callable[[B, ServerOptions], decisions.AskedQuestions],
        folded: Callable[
            [AsyncGenerator[Chunk, None], decisions.AskedQuestions, dict[str, Any]], Awaitable[dict[str, Any]]
        ],
    ) -> Response:
        """The answers of questions, `asked` of the body of a route and `folded` into its form."""
        held, notes, template = request.state.held, request.state.notes, self.llm.chat_template
        ask = await self._reader.read(request, kind, held, notes, lambda body: asked(body, self.options))
        request.state.names = ask.names
        head = self._head(request, "decision", ask.common["model"])
        salt = self._salt(request, ask.common["cache_salt"])
        questions = ask.questions
        variables = decisions.variables_of(ask, template, self.options.template_variables or {})
        with self.admission.admitted(client=head.client):
            probe = [{"role": "user", "content": "x"}]
            made = self.llm.chat_token_ids(
                probe, client=head.client, add_generation_prompt=True, template_kwargs=variables
            )
            begun = await self.llm.text_of(await until_gone(made, request.receive), client=head.client)
        labels = decisions.label_ids(self.llm.tokenizer, begun, questions)
        shared = decisions.shared_chat(ask, variables)
        self._effects.note_priority(shared, request.state.notes)
        held.grow_within(ask.num_text_bytes)
        preparing = asyncio.Semaphore(ask.num_at_once)

        def ordered(number: int) -> tuple[ChatRequest, ChatOrder]:
            body = decisions.chat_of(ask, shared, questions[number], labels)
            return body, order_of(self.llm, body, self.options, self._forms)

        async def start(number: int) -> AsyncGenerator[Chunk, None]:
            await preparing.acquire()
            with contextlib.ExitStack() as turn:
                turn.callback(preparing.release)
                # The request's body is held until the last question is answered.
                own = replace(head, id=f"{head.id}-{number}", used=turn.close)
                body, order = await self._reader.work(held, ordered, number)
                chunks = chat.chunks(self.llm, body, order, own, salt, self._forms)
                del order
                async with contextlib.aclosing(chunks):
                    async for chunk in chunks:
                        yield chunk

        def results() -> AsyncGenerator[Chunk, None]:
            return warned(decisions.reads(start, questions, labels), notes)

        shown = {"id": head.id, "created": head.created, "model": head.model}
        form = AnswerForm(lambda made: folded(made, ask, shown))
        owner = self._owner(request)
        return await self._answers.send(request, results, len(questions), form, stream=False, owner=owner)

    async def _complete(
        self,
        request: Request,
        body: CompletionRequest,
        turned: Callable[[AsyncGenerator[Chunk, None]], AsyncGenerator[Chunk, None]],
        folded: Callable[[AsyncGenerator[Chunk, None]], Awaitable[dict[str, Any]]],
        *,
        is_open: bool = False,
    ) -> Response:
        """A completion, its chunks `turned` into those of the route, and `folded` if there is no stream.

        With `is_open` its client does not say how long it may be, and log-probabilities have room as they come.
        """
        body = with_all(body, self.llm.info.vocab_size)
        body = fill_in.filled(body, self.llm.tokenizer, self.options.max_body_bytes)
        self._effects.note_priority(body, request.state.notes)
        body = self._effects.with_read_args(body, request.state.notes)
        check_ids(body.allowed_token_ids, self.llm.info.num_ids)
        head = self._head(request, "cmpl", body.model)
        salt = self._salt(request, body.cache_salt)
        prompts = completions.prompts_of(body, self.options)
        usual = self.llm.get_default_sampling_params().max_tokens
        longest = self.llm.config.max_model_len
        count, answers = len(prompts), len(prompts) * (body.n or 1)

        def of_answers(asked: CompletionRequest, come: int | None) -> int:
            return completions.answer_columns_bytes(asked, count, longest, usual, come=come)

        most = completions.prompt_columns_bytes(body, prompts, longest) + of_answers(body, 0 if is_open else None)
        # Taken out when the chunks are made, which let its prompts go as soon as they are prepared.
        bodies = [body]

        def chunks() -> AsyncGenerator[Chunk, None]:
            made = completions.chunks(self.llm, bodies.pop(), self.options, head, salt, self._answers.turns)
            return turned(warned(made, request.state.notes))

        usage = body.stream_options is not None and body.stream_options.include_usage
        form = AnswerForm(folded, lambda made: shown(made, usage=usage))
        columns, stream = self._answers.columns(most, body, head.client), body.stream is True
        if is_open:
            asked = completions.without_prompts(body)
            most -= of_answers(asked, 0)
            head = replace(head, grown=lambda tokens: columns.resize(most + of_answers(asked, tokens)))
        del body, prompts
        return await self._answers.send(
            request, chunks, answers, form, stream=stream, owner=self._owner(request), columns=columns
        )

    async def create_message(self, request: Request) -> Response:
        """POST /v1/messages."""
        from beheld.server import messages
        from beheld.server.messages_schema import MessagesRequest

        ask = await self._asked(request, MessagesRequest)
        self._effects.note_effort(ask.body, request.state.notes, "output_config.effort")
        self._note_variables(request, ask.body)
        prompted, notes = messages.Prompted(), request.state.notes
        head = replace(self._head(request, "msg", ask.body.model), begun=prompted.begun)
        salt = self._salt(request, ask.body.cache_salt)

        ask = replace(ask, body=self._effects.with_read_args(ask.body, request.state.notes))
        orders = await self._ordered(request, ask.body)
        ask = replace(ask, body=without_inputs(ask.body))

        def events() -> AsyncGenerator[Chunk, None]:
            chunks = chat.chunks(self.llm, ask.body, orders.pop(), head, salt, self._forms)
            return messages.events(chunks, ask, head, prompted, notes)

        form, owner = AnswerForm(messages.fold), self._owner(request)
        return await self._answers.send(request, events, 1, form, stream=ask.body.stream is True, owner=owner)

    async def create_cohere_chat(self, request: Request) -> Response:
        """POST /v2/chat."""
        from beheld.server import cohere_chat

        notes = request.state.notes
        ask = await self._asked_of_cohere(request)
        head = self._head(request, "chat", ask.body.model)
        salt = self._salt(request, ask.body.cache_salt)
        orders = await self._ordered(request, ask.body)
        ask = replace(ask, body=without_inputs(ask.body))
        columns, head = self._counted(cohere_chat.counted(ask.body), head)

        def events() -> AsyncGenerator[Chunk, None]:
            # Log-probabilities of a whole answer would be made at once.
            stepwise = ask.body.logprobs is True
            chunks = chat.chunks(self.llm, ask.body, orders.pop(), head, salt, self._forms, stepwise=stepwise)
            return cohere_chat.events(chunks, head, notes)

        form, owner, stream = AnswerForm(cohere_chat.fold), self._owner(request), ask.body.stream is True
        return await self._answers.send(request, events, 1, form, stream=stream, owner=owner, columns=columns)

    async def render_cohere_chat(self, request: Request) -> Response:
        """POST /cohere/v2/chat/render: what /inference/v1/generate answers in place of /v2/chat."""
        from beheld.server import cohere_render

        ask = await self._asked_of_cohere(request)
        head, held = self._head(request, "chat", ask.body.model), request.state.held
        cohere_render.check_media(ask.body)
        with self.admission.admitted(client=head.client):
            order = (await self._ordered(request, ask.body)).pop()
            cohere_render.check(ask.body, order, self._forms.reasoning)
            ids = await self.llm.chat_token_ids(order.messages, client=head.client, **order.shown)
        made = await self._reader.work(held, cohere_render.rendered, without_inputs(ask.body), order, head, ids)
        return JSONResponse(made)

    async def _asked_of_cohere(self, request: Request) -> messages.Asked:
        """A request in Cohere's form as one of chat's."""
        from beheld.server import cohere_chat
        from beheld.server.cohere_schema import CohereChatRequest

        held, notes, template = request.state.held, request.state.notes, self.llm.chat_template or ""
        ask = await self._reader.read(
            request,
            CohereChatRequest,
            held,
            notes,
            lambda body: cohere_chat.asked(body, notes, template=template, bounded=self._ends_reasoning),
        )
        request.state.names = ask.names
        self._effects.note_priority(ask.body, notes)
        return replace(ask, body=self._completed(ask.body))

    async def create_transcription(self, request: Request) -> Response:
        """POST /v1/audio/transcriptions."""
        return await self._transcribed(request, TranscriptionRequest, TranscriptionLink, "transcribe")

    async def create_translation(self, request: Request) -> Response:
        """POST /v1/audio/translations."""
        return await self._transcribed(request, TranslationRequest, TranslationLink, "translate")

    async def _transcribed(
        self, request: Request, form_kind: type[TranslationRequest], link_kind: type[TranslationLink], task: str
    ) -> Response:
        notes, held = request.state.notes, request.state.held
        body: Speech
        if request.headers.get("content-type", "").lower().startswith("application/json"):
            body = await self._reader.read(request, link_kind, held, notes, lambda body: body)
        else:
            body = await self._reader.read_form(request, form_kind, held, notes)
        head = self._head(request, "speech", body.model)
        if self.llm.speech is None or "audio" not in self.llm.info.modalities:
            raise HttpError(404, f"{head.model!r} makes no transcripts.", "Ask a model that hears.", param="model")
        salt = self._salt(request, None)

        def events() -> AsyncGenerator[Chunk, None]:
            # The samples count as the body does.
            grow = request.state.held.grow
            return transcriptions.chunks(
                self.llm,
                body,
                head,
                salt,
                grow,
                translate=task == "translate",
                tells_usage=self.options.tells_usage,
                max_answers=self.options.max_answers,
            )

        def response(found: dict[str, Any]) -> Response:
            return transcriptions.response(found, body, notes.warnings(), task)

        form = AnswerForm(transcriptions.fold, transcriptions.shown, response)
        owner = self._owner(request)
        return await self._answers.send(request, events, 1, form, stream=body.stream is True, owner=owner)

    async def count_tokens(self, request: Request) -> Response:
        """POST /v1/messages/count_tokens."""
        from beheld.server.messages_schema import CountRequest

        ask = await self._asked(request, CountRequest)
        self._check_model(ask.body.model)
        self._effects.note_effort(ask.body, request.state.notes, "output_config.effort")
        with self.admission.admitted(client=request.state.held.client):
            own, held = self.llm.chat_template, request.state.held
            options = await self._reader.work(held, tokenize_options, ask.body, self.options, own)
            ids = await self.llm.chat_token_ids(client=request.state.held.client, **options)
        return JSONResponse({"input_tokens": len(ids)})

    async def create_response(self, request: Request) -> Response:
        """POST /v1/responses."""
        from beheld.server import response_events, response_requests
        from beheld.server.responses_schema import ResponsesRequest

        notes, owner = request.state.notes, self._owner(request) or ""

        held = request.state.held
        given = await self._reader.read(request, ResponsesRequest, held, notes, lambda body: body)
        earlier: tuple[tuple[dict[str, Any], ...], int] = (), 0
        if given.previous_response_id is not None:
            earlier = self._store.history_of(given.previous_response_id, owner)
            # It is checked anew, and counts like a conversation that is sent.
            held.read(earlier[1], "previous_response_id")
        ask = await self._reader.work(held, response_requests.asked, given, earlier[0], notes, earlier[1])
        # The engine takes the media out of `ask`, and nothing else may hold them.
        del given, earlier
        check_ids(ask.body.allowed_token_ids, self.llm.info.num_ids)
        ask = replace(ask, body=with_all(self._completed(ask.body), self.llm.info.vocab_size))
        request.state.names = ask.names
        self._effects.note_effort(ask.body, request.state.notes, "reasoning.effort")
        self._note_variables(request, ask.body)
        self._effects.note_grammars(ask.body, request.state.notes)
        self._effects.note_priority(ask.body, request.state.notes)
        ask = replace(ask, body=self._effects.with_read_args(ask.body, request.state.notes))
        raw = ask.given.enable_response_messages is True
        if raw:
            ask = replace(ask, body=ask.body.model_copy(update={"return_token_ids": True, "return_prompt_text": True}))
        head = self._head(request, "resp", ask.body.model)
        salt = self._salt(request, ask.body.cache_salt)

        turns = self._answers.turns if request.state.held.slow else None
        orders = await self._ordered(request, ask.body)
        ask = replace(ask, body=without_inputs(ask.body))
        made_events = response_events.ResponseEvents(ask, head, notes, self._store, owner, turns)

        def events() -> AsyncGenerator[Chunk, None]:
            # Log-probabilities of a whole answer would be made at once.
            stepwise = ask.body.logprobs is True
            order = orders.pop()
            made = chat.chunks(self.llm, ask.body, order, head, salt, self._forms, stepwise=stepwise, raw=raw)
            del order
            return made_events.events(made)

        form = AnswerForm(response_events.fold)
        if ask.given.background:
            stored = made_events.queue()
            try:
                columns, head = self._counted(ask.body, head, kept=True)
                stored.task = self._answers.start(request, events, form, columns)
            except BaseException:
                self._store.discard(head.id)
                raise
            return JSONResponse(stored.response)
        # The last event of a stream has the whole response, too.
        columns, head = self._counted(ask.body, head, kept=True)
        stream = ask.body.stream is True
        return await self._answers.send(request, events, 1, form, stream=stream, owner=owner, columns=columns)

    async def stored_response(self, request: Request) -> Response:
        """GET and DELETE /v1/responses/NAME."""
        name, owner = request.path_params["name"], self._owner(request) or ""
        if request.method == "DELETE":
            self._store.delete(name, owner)
            return JSONResponse({"id": name, "object": "response", "deleted": True})
        if request.query_params.get("stream") not in (None, "false"):
            raise HttpError(400, "A stored response is not streamed.", "Leave stream out.", param="stream")
        return self._shown_response(self._store.get(name, owner), request)

    async def cancel_response(self, request: Request) -> Response:
        """POST /v1/responses/NAME/cancel: end an answer; its own request gets what there is."""
        stored = self._store.get(request.path_params["name"], self._owner(request) or "")
        status = stored.response["status"]
        if status not in ("queued", "in_progress", "cancelled"):
            kind = "synchronous" if stored.task is None else "completed"
            raise HttpError(
                400, f"Cannot cancel a {kind} response.", "It is complete: retrieve it.", code="response_complete"
            )
        if status == "queued" and stored.task is not None:
            # The engine does not know it yet.
            stored.task.cancel()
            stored.response["status"] = "cancelled"
            self._store.forget_history(stored)
        elif status != "cancelled":
            await self.llm.abort(stored.response["id"])
            await stored.over.wait()
        return self._shown_response(stored, request)

    def _shown_response(self, stored: Stored, request: Request) -> Response:
        """A response as it stands."""
        from beheld.server.response_events import in_pieces

        made = in_pieces(stored.response)
        if made.lists:
            return LongResponse(made, self._answers.turns, lambda error: None, request.state.names)
        return Response(made.whole(), media_type=LongResponse.media_type)

    async def _asked(self, request: Request, kind: type[CountRequest]) -> messages.Asked:
        """The request as one of chat's."""
        from beheld.server import messages

        notes = request.state.notes
        switch = messages.SWITCH in (self.llm.chat_template or "")
        marks = self._forms.reasoning
        ask = await self._reader.read(
            request,
            kind,
            request.state.held,
            notes,
            lambda body: messages.asked(
                body, notes, switch=switch, reasons=marks is not None, bounded=self._ends_reasoning
            ),
        )
        request.state.names = ask.names
        return replace(ask, body=self._completed(ask.body))

    async def resumed_stream(self, request: Request) -> Response:
        """GET /v1/streams/NAME: the events after Last-Event-ID of a stream that was cut."""
        name, owner = request.path_params["name"], self._owner(request) or ""
        return self._answers.resumed(name, owner, request.headers.get("last-event-id"))

    # ------------------------------------------------------------------ the rest

    def _pooling(self, kind: type[Pooled]) -> Handler:
        """The handler of a route that reads such a body and answers with vectors or scores."""

        async def pool(request: Request) -> Response:
            body = await self._read(request, kind)
            self._effects.note_priority(body, request.state.notes)
            head = self._head(request, "pool", body.model)
            salt = self._salt(request, body.cache_salt)
            self.clients.check(head.client)
            cuts = pooling.NO_CUTS
            if pooling.is_cut(body):
                with self.admission.admitted(client=head.client):
                    cuts = await until_gone(pooling.cuts_of(self.llm, body, head.client), request.receive)
            made_of = (self.llm, body, self.options, head, salt, cuts)
            work = await self._reader.work(request.state.held, pooling.work_of, *made_of)
            window = min(len(work.prompts), self.options.max_answers)
            with self.admission.admitted(window, head.client):
                try:
                    made = pooling.run(self.llm, work, head, body.priority or 0, window)
                    return vector_bodies.response(await until_gone(made, request.receive))
                except CulpritError:
                    self.clients.blame(head.client)
                    raise

        # Its name in the access log and in metrics.
        pool.__name__ = kind.__name__.removesuffix("Request").lower()
        return pool

    async def invoke(self, request: Request) -> Response:
        """POST /invocations: the body says which route answers it."""
        info, state = self.llm.info.pooler, request.state
        body = await self._reader.read_one_of(
            request, lambda given: invocations.kind_of(given, info), state.held, state.notes, lambda body: body
        )
        if isinstance(body, SessionRequest):
            if not self.options.sagemaker_sessions:
                remedy = "Send a request without one. The operator may start with --sagemaker-sessions."
                raise HttpError(400, "This server has no sessions.", remedy, param="requestType")
            return self._sessions.answer(body, request.headers.get(SESSION))
        adapter = request.headers.get(invocations.ADAPTER)
        state.given = [body if adapter is None else body.model_copy(update={"model": adapter})]
        kind = type(body)
        del body
        if issubclass(kind, Pooled):
            return await self._pooling(kind)(request)
        return await (self.chat if issubclass(kind, ChatRequest) else self.complete)(request)

    async def models(self, request: Request) -> Response:
        """GET /v1/models."""
        names = (*self.options.names, *self._adapters.names)
        return JSONResponse({"object": "list", "data": [self._card(name) for name in names]})

    async def model(self, request: Request) -> Response:
        """GET /v1/models/NAME."""
        name = request.path_params["name"]
        self._check_model(name)
        return JSONResponse(self._card(name))

    def _card(self, name: str) -> dict[str, Any]:
        info, config, advice = self.llm.info, self.llm.config, self.options.advice
        return {
            "id": name,
            "object": "model",
            "created": self.created,
            "owned_by": "beheld",
            "root": (self.options.root or name) if name in self.options.names else self._adapters.root(name),
            "permission": [],
            # The model that an adapter adapts.
            "parent": None if name in self.options.names else self.options.names[0],
            "max_model_len": config.max_model_len,
            "modalities": [m for m in info.modalities if config.limit_per_prompt.get(m, 0)],
            **({"advice": dict(zip(("answer", "text"), advice, strict=True))} if advice else {}),
        }

    async def tokenize(self, request: Request) -> Response:
        """POST /tokenize."""
        body = await self._read(request, TokenizeRequest)
        self._check_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise HttpError(
                400, "The request must have either a prompt or messages.", "Send one of them.", param="prompt"
            )
        with self.admission.admitted(client=request.state.held.client):
            if body.prompt is not None:
                for name in _OF_TEMPLATES:
                    if getattr(body, name) is not None:
                        raise HttpError(400, f"{name} needs messages.", "Send messages, or leave it out.", param=name)
                ids = await self.llm.token_ids(
                    body.prompt,
                    client=request.state.held.client,
                    add_special_tokens=body.add_special_tokens is not False,
                )
            else:
                self._effects.note_effort(body, request.state.notes)
                own, held = self.llm.chat_template, request.state.held
                asked = await self._reader.work(held, tokenize_options, body, self.options, own)
                ids = await self.llm.chat_token_ids(client=request.state.held.client, **asked)
        # As the vocabulary writes them, which is not always text.
        strings = self.llm.tokenizer.convert_ids_to_tokens(ids) if body.return_token_strs else None
        longest = self.llm.config.max_model_len
        return JSONResponse({"count": len(ids), "max_model_len": longest, "tokens": ids, "token_strs": strings})

    async def detokenize(self, request: Request) -> Response:
        """POST /detokenize."""
        body = await self._read(request, DetokenizeRequest)
        self._check_model(body.model)
        if len(body.tokens) > self.llm.config.max_model_len:
            raise HttpError(400, "There are more tokens than the model accepts.", "Send fewer.", param="tokens")
        with self.admission.admitted(client=request.state.held.client):
            return JSONResponse({"prompt": await self.llm.text_of(body.tokens, client=request.state.held.client)})

    async def health(self, request: Request) -> Response:
        """GET /health: whether the engine serves; of several, one that answers suffices."""
        return JSONResponse(self.engine_health.report())

    async def version(self, request: Request) -> Response:
        """GET /version."""
        return JSONResponse({"version": __version__})

    async def show_metrics(self, request: Request) -> Response:
        """GET /metrics."""
        return Response(await self.metrics_text(), media_type=self.metrics.content_type)

    async def metrics_text(self) -> bytes:
        """The metrics of this front, and of the others, in Prometheus' format."""
        others = asyncio.ensure_future(self._ask_others("/metrics"))
        stats = None
        with contextlib.suppress(TimeoutError, EngineDeadError):
            async with asyncio.timeout(1.0):
                stats = await self.llm.ping()
        found = await others
        if found.num_fronts > 1:
            self.metrics.asked_fronts(found.num_fronts, found.num_new)
        text = self.metrics.text(stats, self.admission.busy, self.admission.num_refused)
        return summed([text, *found.texts]) if found.texts else text

    async def load(self, request: Request) -> Response:
        """GET /load: how many answers are in work."""
        if self.front_table is not None:
            # What a front has that hangs counts until it is ended.
            return JSONResponse({"server_load": sum(self.front_table.column(Column.ANSWERS))})
        return JSONResponse({"server_load": self.admission.busy})

    async def _ask_others(self, path: str) -> Figures:
        """What each of the other fronts has to add to this one's figures."""
        return Figures() if self._forwarding is None else await self._forwarding.ask_others(path)

    async def openapi(self, request: Request) -> Response:
        """GET /openapi.json."""
        if self._openapi is None:
            from beheld.server.openapi import document

            self._openapi = JSONResponse(document())
        return Response(self._openapi.body, media_type=self._openapi.media_type)

    async def page(self, request: Request) -> Response:
        """GET /: a page for trying the model."""
        return _html("talk")

    async def docs(self, request: Request) -> Response:
        """GET /docs: a page that shows /openapi.json."""
        return _html("routes")

    async def dashboard(self, request: Request) -> Response:
        """GET /dashboard: a page that shows /metrics live."""
        return _html("dashboard")

    # ------------------------------------------------------------------ how

    async def _read(self, request: Request, kind: type[B]) -> B:
        given = getattr(request.state, "given", None)
        if given:
            # The route has read the body to find its kind. Popped, its prompts are freed once they are prepared.
            body: B = given.pop()
        else:
            body = await self._reader.read(request, kind, request.state.held, request.state.notes, lambda body: body)
        request.state.names = field_names_of(body)
        return self._completed(body)

    async def _ordered(self, request: Request, body: ChatRequest) -> list[ChatOrder]:
        """What the engine is asked; taken out for the chunks, so that media go as soon as they are prepared."""
        return [await self._reader.work(request.state.held, order_of, self.llm, body, self.options, self._forms)]

    def _completed(self, body: B) -> B:
        """The body with the operator's values where the request says nothing."""
        options, more = self.options, dict[str, Any]()
        if options.tokens_as_ids and isinstance(body, Sampled) and body.return_tokens_as_token_ids is None:
            more["return_tokens_as_token_ids"] = True
        if options.tells_usage and isinstance(body, Sampled) and body.stream:
            every = body.stream_options is None or body.stream_options.continuous_usage_stats
            more["stream_options"] = StreamOptions(include_usage=True, continuous_usage_stats=every)
        if options.template_variables and isinstance(body, ChatRequest | TokenizeRequest) and body.messages is not None:
            more["chat_template_kwargs"] = {**options.template_variables, **(body.chat_template_kwargs or {})}
        return body.model_copy(update=more) if more else body

    def _note_variables(self, request: Request, body: ChatRequest) -> None:
        self._effects.note_variables(body, request.state.notes, self.options.template_variables or ())

    def _check_model(self, name: str | None) -> LoRARequest | None:
        """The adapter of that name; None for the model itself."""
        if name is None or name in (*self.options.names, *self.options.aliases):
            return None
        found = self._adapters.find(name)
        if found is None:
            raise HttpError(
                404,
                f"There is no model {name[:128]!r} here.",
                f"Use {self.options.names[0]!r}.",
                param="model",
                code="model_not_found",
            )
        return found

    def _check_answers_texts(self, what: str) -> None:
        """Raise HttpError for a model that makes transcripts and nothing else: its routes for `what` are not there."""
        if self.llm.info.encoder_reads == "audio":
            name = self.options.names[0]
            reason = f"{name!r} makes transcripts of audio, and answers no {what}."
            raise HttpError(404, reason, "Ask /v1/audio/transcriptions, or another model.", param="model")

    def _head(self, request: Request, kind: str, model: str | None) -> ChunkHead:
        if _RANK in request.headers:
            note(
                request.state.notes, _RANK, "Each request goes to the engine that has most of its prompt in its cache."
            )
        lora = self._check_model(model)
        name = self.options.names[0] if lora is None else lora.lora_name
        number, tokenizer = request.state.number, self.llm.tokenizer
        return ChunkHead(
            f"{kind}-{number}",
            int(time.time()),
            name,
            self.metrics.generated,
            lora,
            lambda token_id: token_bytes(tokenizer, token_id),
            request.state.held.release,
            request.state.held.client,
        )

    def _counted(self, body: ChatRequest, head: ChunkHead, *, kept: bool = False) -> tuple[Hold, ChunkHead]:
        """What holds the bytes of a chat's log-probabilities, and the head that counts them anew.

        Args:
            kept: as in answer_bytes.

        Raises:
            HttpError: 400 or 503 if they are too many.
        """
        most_prompt: int | None = None

        def size(come: int = 0) -> int:
            return chat.columns_bytes(body, self.llm.config.max_model_len, most_prompt, kept=kept, come=come)

        def begun(output: RequestOutput) -> None:
            # Now the prompt's length is known, and not only the longest that there may be.
            nonlocal most_prompt
            most_prompt = len(output.prompt_token_ids or ())
            columns.shrink(size())

        columns = self._answers.columns(size(), body, head.client)
        grown = (lambda tokens: columns.resize(size(tokens))) if chat.is_open(body) else head.grown
        return columns, replace(head, begun=begun, grown=grown)

    def _owner(self, request: Request) -> str | None:
        """The client by its key, if there are several keys."""
        return getattr(request.state, "client", None) if len(self.options.api_keys) > 1 else None

    def _salt(self, request: Request, own: str | None) -> str | None:
        """The prefix cache's salt: clients with different keys or different salts share no cached prefix."""
        client = self._owner(request)
        return None if client is None and own is None else f"{client or ''}/{own or ''}"


def _longest(llm: AsyncLLM) -> int:
    """The most tokens of a prompt."""
    pooler = llm.info.pooler
    return max(llm.config.max_model_len, (pooler.longest or 0) if pooler is not None else 0)


def _html(name: str) -> Response:
    found = page.page(name)
    return HTMLResponse(found.html, headers=found.headers)


def _remedy(request: Request) -> str:
    """What to do where there is no route."""
    root, path = request.scope.get("root_path", ""), request.url.path
    flag = operator.switch_of(path.removeprefix(root).rstrip("/"))
    return "See /openapi.json." if flag is None else f"Start the server with {flag}."


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    status, methods = error.status_code, (error.headers or {}).get("Allow", "another")
    words = {
        404: ("This route does not exist.", _remedy(request)),
        405: (f"This route does not support the method {request.method[:16]}.", f"Use {methods}."),
    }
    reason, remedy = words.get(status, ("The request was refused.", "See /openapi.json."))
    return HttpError(status, reason, remedy, headers=error.headers).response()


async def _broken(request: Request, error: Exception) -> Response:
    return http_error(error).response()

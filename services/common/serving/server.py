"""gRPC (with health and reflection) and HTTP (/healthz, /readyz, /metrics) of one service, in one event loop."""

import asyncio
import hmac
import threading
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import grpc
import uvicorn
from fastapi import Depends, FastAPI, HTTPException, Request, Response
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from prometheus_client import CONTENT_TYPE_LATEST

from services.common.config import ServerConfig
from services.common.config.addresses import host_and_port, listen
from services.common.serving.exposition import EXPOSITION

START_TIMEOUT_SECONDS = 30.0
STOP_GRACE_SECONDS = 3.0
MAX_MESSAGE_BYTES = 256 * 2**20
HEALTH_METHODS = f"/{health.SERVICE_NAME}/"

# Adds the service's servicer to the server.
Register = Callable[[grpc.aio.Server], None]


class ServiceServer:
    """Start and stop run on the event loop that serves. `ready` returns why the service is not ready, or None."""

    def __init__(
        self, config: ServerConfig, *, grpc_name: str, register: Register, ready: Callable[[], str | None]
    ) -> None:
        self._config, self._grpc_name, self._register, self._ready = config, grpc_name, register, ready
        self.http = self._application()
        self.grpc_port = 0
        self.http_port = 0

    async def start(self) -> None:
        """Raises OSError when an address cannot be bound."""
        interceptors = [TokenInterceptor(self._config.token)] if self._config.token else []
        self._grpc = grpc.aio.server(
            interceptors=interceptors,
            options=[
                ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
                ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
                # Without it two services on one port share their callers in silence.
                ("grpc.so_reuseport", 0),
            ],
        )
        self._register(self._grpc)
        self._health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._grpc)
        names = (self._grpc_name, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._grpc)
        host, port = self._config.host, self._config.grpc_port
        try:
            self.grpc_port = self._grpc.add_insecure_port(host_and_port(host, port))
        except RuntimeError as error:
            raise self._cannot_listen("grpc_port", port, error) from error
        await self._grpc.start()
        try:
            self._sockets = listen(host, self._config.http_port)
        except OSError as error:
            await self._grpc.stop(0)
            raise self._cannot_listen("http_port", self._config.http_port, error) from error
        self.http_port = self._sockets[0].getsockname()[1]
        self._uvicorn = uvicorn.Server(uvicorn.Config(self.http, log_config=None, access_log=False, lifespan="off"))
        # The process decides about signals, not one of its servers.
        self._uvicorn.capture_signals = _no_signals  # type: ignore[method-assign,assignment]
        self._serving = asyncio.create_task(self._uvicorn.serve(sockets=self._sockets))
        self._watching = asyncio.create_task(self._watch_health())

    async def stop(self) -> None:
        self._watching.cancel()
        await self._health.enter_graceful_shutdown()
        self._uvicorn.should_exit = True
        await asyncio.wait_for(self._serving, STOP_GRACE_SECONDS + 1)
        await self._grpc.stop(STOP_GRACE_SECONDS)

    def _cannot_listen(self, key: str, port: int, error: Exception) -> OSError:
        section = self._grpc_name.rpartition(".")[2].removesuffix("Service").lower()
        address = host_and_port(self._config.host, port)
        return OSError(
            f"{section}.server.{key} is {port}: cannot listen on {address}, perhaps because another process does "
            f"({error}); expected a free port, or 0 for any"
        )

    async def _watch_health(self) -> None:
        while True:
            serving = self._ready() is None
            status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
            for name in ("", self._grpc_name):
                await self._health.set(name, status)
            await asyncio.sleep(0.5)

    def _application(self) -> FastAPI:
        application = FastAPI(title=self._grpc_name, docs_url=None, redoc_url=None)

        def authorized(request: Request) -> None:
            if self._config.token and not _allowed(request.headers.get("authorization"), self._config.token):
                raise HTTPException(401, "expected the header authorization: Bearer <token>")

        @application.get("/healthz")
        async def healthz() -> dict[str, str]:
            return {"status": "ok"}

        @application.get("/readyz")
        async def readyz(response: Response) -> dict[str, str]:
            problem = self._ready()
            response.status_code = 200 if problem is None else 503
            return {"status": problem or "ok"}

        @application.get("/metrics", dependencies=[Depends(authorized)])
        def metrics() -> Response:
            return Response(EXPOSITION.text(), media_type=CONTENT_TYPE_LATEST)

        return application


class BackgroundServer:
    """A ServiceServer on a thread of its own, for a service whose main thread computes."""

    def __init__(self, build: Callable[[], ServiceServer]) -> None:
        self._build = build
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="server", daemon=True)

    def start(self) -> ServiceServer:
        self._thread.start()

        async def start() -> ServiceServer:
            server = self._build()
            await server.start()
            return server

        self._server = asyncio.run_coroutine_threadsafe(start(), self._loop).result(START_TIMEOUT_SECONDS)
        return self._server

    def stop(self) -> None:
        asyncio.run_coroutine_threadsafe(self._server.stop(), self._loop).result(2 * STOP_GRACE_SECONDS + 5)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(STOP_GRACE_SECONDS)


class TokenInterceptor(grpc.aio.ServerInterceptor):
    """Refuses calls without the token, health checks excepted. Not one message of such a call is read, as a handler
    for a single request would, whatever its size, before it is called: a handler for streams reads when it asks to.
    """

    def __init__(self, token: str) -> None:
        self._token = token

    async def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]], details: grpc.HandlerCallDetails
    ) -> Any:
        handler = await continuation(details)
        given = dict(details.invocation_metadata).get("authorization")
        if handler is None or _allowed(given, self._token):
            return handler
        if details.method.startswith(HEALTH_METHODS):
            return _overall_health(handler)
        return grpc.stream_stream_rpc_method_handler(_refuse)


async def _refuse(_: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
    await context.abort(grpc.StatusCode.UNAUTHENTICATED, "expected the metadata authorization: Bearer <token>")


def _overall_health(handler: Any) -> Any:
    """For whichever service a caller asks: a process has one, whose health and the overall one are the same."""
    answer = handler.unary_stream if handler.response_streaming else handler.unary_unary
    make = grpc.stream_stream_rpc_method_handler if handler.response_streaming else grpc.stream_unary_rpc_method_handler

    async def overall(_: Any, context: Any) -> Any:
        return await answer(handler.request_deserializer(b""), context)

    return make(overall, response_serializer=handler.response_serializer)


def _allowed(header: Any, token: str) -> bool:
    return isinstance(header, str) and hmac.compare_digest(header.encode(), f"Bearer {token}".encode())


def _no_signals() -> AbstractContextManager[None]:
    return nullcontext()

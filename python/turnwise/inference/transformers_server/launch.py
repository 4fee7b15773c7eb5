"""Run the engine's server, and end it with its starter: ``python -m turnwise.inference.transformers_server.launch``.

The one argument has fields of :class:`ServeSettings` in JSON. ``turnwise serve --engine transformers`` starts this
program, watches it and restarts it.
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from turnwise.inference.common.model_files import make_model, read_config, read_model
from turnwise.inference.server.launch import end_with_starter
from turnwise.inference.server.settings import RETURN_EXPERTS, ServeSettings

if TYPE_CHECKING:
    from aiohttp import web

    from turnwise.inference.transformers_server.routes import Routes

MAX_CONNECTIONS = 4096
"""Connections that are open at once: one for each request of a run under way. Those without the key give way."""


def build_model(settings: ServeSettings) -> Any:
    """Load the model, or build it with random weights. It runs on a GPU if there is one, in the dtype of its files."""
    import torch

    config = read_config(settings.model)
    dtype = settings.engine_args.get("dtype") or getattr(config.get_text_config(), "dtype", None) or torch.float32
    kind = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    model = make_model(config, kind) if settings.dummy_weights else read_model(settings.model, kind)
    return model.to(settings.engine_args.get("device") or ("cuda" if torch.cuda.is_available() else "cpu"))


async def start(routes: Routes, host: str, port: int) -> web.AppRunner:
    """Listen for requests to ``routes``. Raises ``OSError`` for a port that is taken."""
    from aiohttp import web

    from turnwise.inference.common.listening import Listener, http_log, tcp_sockets

    app = routes.app()
    # Without handler_cancellation a client that hangs up would leave its request running.
    options: dict[str, Any] = {"auto_decompress": False, "logger": http_log(__name__)}
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=1.0, **options)
    sockets = await tcp_sockets(host, port, shared=True)

    async def close(_: web.Application) -> None:
        if routes.listener is not None:
            await routes.listener.close()

    app.on_shutdown.append(close)
    await runner.setup()
    assert runner.server is not None, "not set up"
    routes.listener = Listener(sockets, runner.server, MAX_CONNECTIONS)
    return runner


async def serve(settings: ServeSettings) -> None:
    """Serve until the process ends. Raises ``OSError`` for a port that is taken."""
    from turnwise.inference.transformers_server.engine import TransformersEngine
    from turnwise.inference.transformers_server.routes import Routes

    options: dict[str, Any] = {"adapter_slots": settings.adapter_slots, "adapter_rank": settings.adapter_rank}
    options |= {"max_batch_rows": settings.batch_size}
    options |= {"routed_experts": bool(settings.engine_args.get(RETURN_EXPERTS))}
    engine = TransformersEngine(build_model(settings), settings.model, **options)
    for name, folder in settings.adapters.items():
        engine.load_adapter(name, Path(folder), fixed=True)
    await start(Routes(engine), settings.host, settings.port)
    await asyncio.Event().wait()


def main() -> None:
    """Run the server in this process."""
    threading.Thread(target=end_with_starter, name="turnwise-starter", daemon=True).start()
    asyncio.run(serve(ServeSettings(**json.loads(sys.argv[1]))))


if __name__ == "__main__":
    main()

"""The same small service behind the PyPI package asgi-idempotency-header, with its memory backend.

    python asgi.py PORT EFFECTS_FILE
"""

import asyncio
import json
import sys
import uuid

import uvicorn
from idempotency_header_middleware import IdempotencyHeaderMiddleware
from idempotency_header_middleware.backends import MemoryBackend
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.responses import JSONResponse
from starlette.routing import Route

PORT, FILE = int(sys.argv[1]), sys.argv[2]
STATE = {"balance": True}


class Authenticated:
    def __init__(self, app):
        self.app = app

    async def __call__(self, scope, receive, send):
        if scope["type"] == "http":
            value = dict(scope["headers"]).get(b"authorization", b"").decode()
            if not (value.startswith("Bearer ") and ":" in value):
                return await JSONResponse({"error": "unauthenticated"}, 401)(scope, receive, send)
        await self.app(scope, receive, send)


async def balance(request):
    STATE.update(await request.json())
    return JSONResponse(STATE)


async def pay(request):
    body = json.loads(await request.body())
    if not body.get("amount", 0) > 0:
        return JSONResponse({"error": "amount"}, 400)
    if body.get("mode") == "fail":
        return JSONResponse({"error": "failed before any effect"}, 500)
    if not STATE["balance"]:
        return JSONResponse({"error": "insufficient funds"}, 402)
    made = uuid.uuid4().hex
    if body.get("mode") == "slow":
        await asyncio.sleep(0.7)
    with open(FILE, "a") as effects:
        effects.write(body["reference"] + "\n")
    if body.get("mode") == "late":
        await asyncio.sleep(3)
    answer = {"id": made, "reference": body["reference"], "amount": body["amount"]}
    return JSONResponse(answer, 201, headers={"location": "/payments/" + made})


app = Starlette(
    routes=[
        Route("/balance", balance, methods=["PUT"]),
        Route("/payments", pay, methods=["POST"]),
        Route("/refunds", pay, methods=["POST"]),
    ],
    middleware=[Middleware(Authenticated), Middleware(IdempotencyHeaderMiddleware, backend=MemoryBackend())],
)
uvicorn.run(app, host="127.0.0.1", port=PORT, log_level="warning")

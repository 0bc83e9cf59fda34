"""The least an aiohttp proxy does: forward the body, forward the answer as it comes, record nothing.

Run: `python -m benchmarks.plain_proxy URL`; prints its port.
"""

import asyncio
import sys

import aiohttp
from aiohttp import web


async def serve(upstream: str) -> None:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), auto_decompress=False) as session:

        async def proxy(request: web.Request) -> web.StreamResponse:
            raw = await request.read()
            headers = {"Content-Type": "application/json"}
            async with session.post(upstream + request.path, data=raw, headers=headers) as answer:
                if answer.content_type == "application/json":
                    return web.Response(body=await answer.read(), content_type="application/json")
                response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
                await response.prepare(request)
                async for chunk in answer.content.iter_any():
                    await response.write(chunk)
                await response.write_eof()
                return response

        async def ready(_: web.Request) -> web.Response:
            return web.Response()

        app = web.Application(client_max_size=1 << 26)
        app.add_routes([web.post("/v1/chat/completions", proxy), web.get("/readyz", ready)])
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0, backlog=1024).start()
        print(runner.addresses[0][1], flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1]))

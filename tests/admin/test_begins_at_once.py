"""Without admission a stream begins before its first output, as in vLLM."""

import asyncio

from tests.admin.test_http_admission import EVENTS, Head, Stream, part, start


async def test_a_stream_that_nobody_may_refuse_begins_at_once() -> None:
    stream = Stream()
    head = Head(stream)
    head.may_refuse = False
    client = head.request()
    async with asyncio.timeout(10):
        await stream.submitted.wait()
    assert client.sent == [start(headers=EVENTS)]
    stream.outputs.put_nowait(part(b"", more=False))
    assert await client.status() == 200

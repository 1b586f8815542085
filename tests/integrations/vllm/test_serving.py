"""The server as clients see it: many at once, one that leaves, one that asks for too much."""

import asyncio
import os
import socket
import subprocess
import sys
import time
import urllib.request

import pytest

pytest.importorskip("vllm", reason="run by `make test-vllm`")
from openai import AsyncOpenAI, BadRequestError

from tests import HANGS
from tests.integrations.vllm.engine import CAPACITY, TINY, prompt_of

pytestmark = pytest.mark.slow
NEW_TOKENS = 24
DRAFTING = (
    '{"method": "custom_class", "model": "specattn.integrations.vllm.PromptLookup", '
    '"num_speculative_tokens": 4}'
)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """Return a running server's port and process."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = tmp_path_factory.mktemp("server") / "log"
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(TINY)]
    command += ["--served-model-name", "tiny", "--port", str(port), "--dtype", "float32"]
    command += ["--max-model-len", str(CAPACITY), "--max-num-seqs", "8", "--enforce-eager"]
    command += ["--speculative-config", DRAFTING, "--kv-cache-memory-bytes", str(32 << 20)]
    environment = os.environ | {"SPECATTN_VLLM": "1"}
    environment.pop("VLLM_ENABLE_V1_MULTIPROCESSING", None)
    with log.open("wb") as file:
        process = subprocess.Popen(
            command, stdout=file, stderr=file, env=environment, cwd=log.parent
        )
    try:
        _wait(port, process, log)
        yield port, process
    finally:
        process.terminate()
        process.wait(HANGS)


def _wait(port, process, log):
    end = time.monotonic() + HANGS
    while time.monotonic() < end and process.poll() is None:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health")
            return
        except OSError:
            time.sleep(1)
    pytest.fail(log.read_text()[-2000:])


def ask_with(ask, server):
    """Run what a client of the server does."""

    async def run():
        url = f"http://127.0.0.1:{server[0]}/v1"
        async with AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
            await ask(client)

    asyncio.run(run())


async def stream(client, prompt, until=NEW_TOKENS):
    """Return the first parts of a text, token by token, and leave after so many."""
    parts = []
    answer = await client.completions.create(
        model="tiny", prompt=prompt, max_tokens=NEW_TOKENS, temperature=0, stream=True,
        extra_body={"ignore_eos": True},
    )  # fmt: skip
    async for part in answer:
        parts.append(part.choices[0].text)
        if len(parts) >= until:
            await answer.close()
            break
    return "".join(parts)


def test_clients_at_once_and_one_that_leaves(server):
    prompts = [prompt_of(40 + 30 * i, 60 + i) for i in range(8)]

    async def all_of_them(client):
        alone = [await stream(client, prompt) for prompt in prompts]
        gone, *together = await asyncio.gather(
            stream(client, prompts[0], until=2), *(stream(client, one) for one in prompts[1:])
        )
        assert together == alone[1:]
        assert alone[0].startswith(gone)
        assert len(gone) < len(alone[0])
        assert await stream(client, prompts[0]) == alone[0], "who left harmed nobody"

    ask_with(all_of_them, server)


def test_a_prompt_that_is_too_long(server):
    async def ask(client):
        with pytest.raises(BadRequestError, match=str(CAPACITY)):
            await stream(client, prompt_of(CAPACITY + 1, 70))
        assert await stream(client, prompt_of(30, 71))

    ask_with(ask, server)

"""A headless Chromium, driven over the DevTools protocol."""

import asyncio
import json
import shutil
import subprocess
import time

from tornado.httpclient import AsyncHTTPClient
from tornado.websocket import websocket_connect

from tests import HANGS

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)


class Browser:
    """One tab. `faults` lists what its console, its pages and its requests complained of."""

    def __init__(self, folder):
        self.folder, self.faults, self.requested, self.loop = (
            folder,
            [],
            [],
            asyncio.new_event_loop(),
        )
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0"]
        self.process = subprocess.Popen(
            [CHROMIUM, *options, f"--user-data-dir={folder}", "about:blank"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        self.count = 0
        self.loop.run_until_complete(self._connect())
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")

    def close(self):
        """End the browser."""
        self.process.terminate()
        self.process.wait(HANGS)
        self.loop.close()

    def size(self, width, height=900):
        """Give the window a size in CSS pixels."""
        self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )

    def open(self, address):
        """Load a page, and wait until it is complete."""
        self.send("Page.navigate", url=address)
        self.wait(f"location.href === {json.dumps(address)} && document.readyState === 'complete'")

    def evaluate(self, expression):
        """Return what an expression of JavaScript gives."""
        answer = self.send("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait(self, expression):
        """Wait until an expression is true."""
        until = time.monotonic() + HANGS
        while not self.evaluate(expression):
            assert time.monotonic() < until, f"never came true: {expression}"
            time.sleep(0.05)

    def send(self, method, **parameters):
        """Call a method of the protocol; keep what is told meanwhile."""
        return self.loop.run_until_complete(asyncio.wait_for(self._send(method, parameters), HANGS))

    async def _connect(self):
        port_file, until = self.folder / "DevToolsActivePort", time.monotonic() + HANGS
        while not (port_file.exists() and port_file.read_text().count("\n")):
            assert time.monotonic() < until, "Chromium did not start"
            await asyncio.sleep(0.05)
        port = port_file.read_text().split()[0]
        tabs = await AsyncHTTPClient().fetch(f"http://127.0.0.1:{port}/json")
        (tab,) = [x for x in json.loads(tabs.body) if x["type"] == "page"]
        self.socket = await websocket_connect(tab["webSocketDebuggerUrl"])

    async def _send(self, method, parameters):
        self.count += 1
        await self.socket.write_message(
            json.dumps({"id": self.count, "method": method, "params": parameters})
        )
        while True:
            message = json.loads(await self.socket.read_message())
            if message.get("id") == self.count:
                assert "error" not in message, message
                return message["result"]
            self._note(message.get("method"), message.get("params"))

    def _note(self, event, told):
        if event == "Runtime.exceptionThrown":
            self.faults.append(told["exceptionDetails"]["text"])
        elif event == "Runtime.consoleAPICalled" and told["type"] in ("error", "warning"):
            self.faults.append(str(told["args"]))
        elif event == "Log.entryAdded" and told["entry"]["level"] in ("error", "warning"):
            self.faults.append(f"{told['entry']['text']} {told['entry'].get('url')}")
        elif event == "Network.loadingFailed" and not told.get("canceled"):
            self.faults.append(told["errorText"])
        elif event == "Network.requestWillBeSent":
            self.requested.append(told["request"]["url"])

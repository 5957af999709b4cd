"""What both scripted model servers share: the script language, the request log and the HTTP loop.

A prompt scripts the model's turn. `directive(shell("date"), say("done"))` is text to put anywhere in a prompt:
the newest user message that carries a directive decides, and the n-th reply after it follows the n-th step.
Past the last step, and without a directive, the model says PLAIN_REPLY.
"""
import argparse
import collections
import contextlib
import itertools
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

MARK = "MODEL-STEPS "
PLAIN_REPLY = "scripted reply"


def directive(*steps):
    return MARK + json.dumps(steps)


def say(text, slow=0):
    """Answer with text and end the turn; the reply takes `slow` seconds, during which the turn is active."""
    return {"say": text, "slow": slow}


def shell(command, slow=0):
    """Ask the host to run a shell command, with whatever shell tool it offers; the request takes `slow` seconds."""
    return {"shell": command, "slow": slow}


def call(tool, **arguments):
    """Ask the host for any other tool by name."""
    return {"call": tool, "arguments": arguments}


def last_directive(text):
    """The steps of the last directive in a text; those that a step holds, such as a subagent's, do not count."""
    steps, at = None, text.find(MARK)
    while at >= 0:
        steps, end = json.JSONDecoder().raw_decode(text, at + len(MARK))
        at = text.find(MARK, end)
    return steps


def next_step(conversation):
    """The step for the coming reply. conversation: [(speaker, text)], oldest first."""
    replies = 0
    for speaker, text in reversed(conversation):
        if speaker == "model":
            replies += 1
        elif speaker == "user" and MARK in text:
            steps = last_directive(text)
            return steps[replies] if replies < len(steps) else say(PLAIN_REPLY)
    return say(PLAIN_REPLY)


def spread(text, seconds):
    """(part, pause after it) pairs that together take that long."""
    parts = text.split(" ") if seconds else [text]
    parts = [part + " " for part in parts[:-1]] + parts[-1:]
    if seconds and len(parts) < 10:
        parts += [""] * (10 - len(parts))
    return [(part, seconds / len(parts)) for part in parts]


class RequestLog:
    """The requests of one model server, one JSON object a line; readable while another process writes it.

    A record has `at`, `session`, `path`, `headers`, `body`, `step` (how the model answered) and `heard`: the texts
    of the conversation that the model did not say itself. System prompts and tool descriptions are in `body` only.
    A request that offers no tools is the host's own (a title, a summary): it follows no script and has no session.
    """

    def __init__(self, path):
        self.path = Path(path)
        self.path.touch()
        self._records, self._offset, self._lock = [], 0, threading.Lock()

    def append(self, record):
        with self._lock, open(self.path, "a") as file:
            file.write(json.dumps(record) + "\n")

    def requests(self):
        with self._lock, open(self.path, "rb") as file:
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self._offset += len(line)
                self._records.append(json.loads(line))
            return list(self._records)

    def of_session(self, session):
        return [record for record in self.requests() if session and record["session"] == session]

    def seen(self, session):
        """All that the model of this session has been told so far, in order, each text as often as it was shown."""
        shown, texts = collections.Counter(), []
        for record in self.of_session(session):
            now = collections.Counter()
            for text in record["heard"]:
                now[text] += 1
                if now[text] > shown[text]:
                    shown[text] += 1
                    texts.append(text)
        return "\n".join(texts)

    def times_seen(self, session, text):
        """How often a text stood in the model's context: the most that any single request held."""
        counts = ("\n".join(record["heard"]).count(text) for record in self.of_session(session))
        return max(counts, default=0)


class ModelServer:
    """A model server on loopback, in a thread: `with MockX("requests.jsonl") as server: server.url, server.log`.

    A subclass knows one API: `endpoint`, `session(headers)`, `conversation(body)`, `events(step, body)`.
    """

    def __init__(self, log, port=0):
        self.log = RequestLog(log)
        self._replying, self._lock = collections.Counter(), threading.Lock()
        self._unique = itertools.count(1)
        self._http = ThreadingHTTPServer(("127.0.0.1", port), self._handler())
        self._http.daemon_threads = True
        self.url = "http://127.0.0.1:%d" % self._http.server_port

    def __enter__(self):
        threading.Thread(target=self._http.serve_forever, args=[0.05], daemon=True).start()
        return self

    def __exit__(self, *exc):
        self._http.shutdown()
        self._http.server_close()

    def is_replying(self, session):
        return self._replying[session] > 0

    def new_id(self, prefix):
        return "%s_scripted_%d" % (prefix, next(self._unique))

    def answer(self, path, headers, body, send):
        """Logs the request, then sends the events of the reply, with their pauses."""
        conversation = self.conversation(body)
        in_session = bool(body.get("tools"))
        session = self.session(headers) if in_session else None
        step = next_step(conversation) if in_session else say(PLAIN_REPLY)
        with self._reply_in(session):
            self.log.append({"at": time.time(), "session": session, "path": path, "headers": headers, "body": body,
                             "step": step, "heard": [text for speaker, text in conversation if speaker != "model"]})
            for event, pause in self.events(step, body):
                send(event)
                time.sleep(pause)

    @contextlib.contextmanager
    def _reply_in(self, session):
        with self._lock:
            self._replying[session] += 1
        try:
            yield
        finally:
            with self._lock:
                self._replying[session] -= 1

    def _handler(self):
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self):
                self.send_error(404)

            do_HEAD = do_GET

            def do_POST(self):
                body = self.rfile.read(int(self.headers.get("content-length") or 0))
                if self.path.split("?")[0] != server.endpoint:
                    return self.send_error(404)
                headers = {name.lower(): value for name, value in self.headers.items()}
                headers.pop("authorization", None)
                self.send_response(200)
                self.send_header("content-type", "text/event-stream")
                self.send_header("connection", "close")
                self.end_headers()
                try:
                    server.answer(self.path, headers, json.loads(body), self.send_event)
                except ConnectionError:
                    pass  # the host gave the turn up: an interrupt, or it died

            def send_event(self, event):
                self.wfile.write(("event: %s\ndata: %s\n\n" % (event["type"], json.dumps(event))).encode())
                self.wfile.flush()

            def log_message(self, *args):
                pass

        return Handler


def main(server_class):
    """The command line of both servers: prints the URL and serves until it is killed."""
    parser = argparse.ArgumentParser(description=server_class.__doc__)
    parser.add_argument("--port", type=int, default=0, help="0: any free one")
    parser.add_argument("--log", required=True, help="JSON lines file that gets every request")
    options = parser.parse_args()
    with server_class(options.log, options.port) as server:
        print(server.url, flush=True)
        threading.Event().wait()

"""A stand-in for a running Claude Code: a registration and an inbox that answers as a test says.

usage: fake_claude.py CONFIG RUNTIME SESSION      commands on standard input, one JSON object a line

{"do": "answer", ...} sets what happens to the next lines: `receipts`, a list of receipts to dial (each holds what
differs from a receipt for that very line), `close` (false: the connection is never closed), `delay` (seconds before
the receipts), `become` (another session id, registered at once; "" takes the registration away), `die` (killed at once:
"connect" as soon as it is connected to, "line" with the line in its hand).
{"do": "receipts", "receipts": [...]} dials now, for the last line. Every line that comes is printed, with the
credentials of its writer. The ways of the real host that this one copies are told in claude_delivery.py.
"""
import json
import os
import select
import signal
import socket
import struct
import sys
import time

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import host_process  # noqa: E402


class FakeClaude:
    def __init__(self, config, runtime, session):
        self.path = os.path.join(runtime, "%d.sock" % os.getpid())
        self.file = os.path.join(config, "sessions", "%d.json" % os.getpid())
        self.session, self.settings, self.last = session, {}, None
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(self.path)
        os.chmod(self.path, 0o600)
        self.listener.listen(64)
        self.open, self.due = {}, []
        self.register()

    def register(self):
        record = {"pid": os.getpid(), "sessionId": self.session, "cwd": "/w",
                  "procStart": host_process.start_time(os.getpid()), "version": "2.1.332",
                  "messagingSocketPath": self.path, "name": "alpha two", "nameSource": "user", "status": "idle",
                  "updatedAt": int(time.time() * 1000)}
        with open(self.file + ".new", "w") as file:
            json.dump(record, file)
        os.replace(self.file + ".new", self.file)

    def serve(self):
        print(json.dumps({"ready": os.getpid(), "socket": self.path}), flush=True)
        while True:
            wait = max(0, min(at for at, _ in self.due) - time.monotonic()) if self.due else None
            for ready in select.select([sys.stdin, self.listener, *self.open], [], [], wait)[0]:
                if ready is sys.stdin:
                    self.command(sys.stdin.readline())
                elif ready is self.listener:
                    connection, _ = self.listener.accept()
                    self.die("connect")
                    self.open[connection] = b""
                else:
                    self.read(ready)
            for item in [item for item in self.due if item[0] <= time.monotonic()]:
                self.due.remove(item)
                self.dial(*item[1])

    def command(self, text):
        if not text:
            sys.exit(0)
        command = json.loads(text)
        if command["do"] == "answer":
            self.settings = command
        elif command["do"] == "receipts":
            for receipt in command["receipts"]:
                self.dial(self.last, receipt)
        print(json.dumps({"done": command["do"]}), flush=True)

    def read(self, connection):
        try:
            data = connection.recv(1 << 20)
        except OSError:
            data = b""
        self.open[connection] += data
        *lines, self.open[connection] = self.open[connection].split(b"\n")
        for line in lines:
            self.take(json.loads(line), connection)
        if not data and (self.settings.get("close", True) or not self.settings):
            connection.close()
            del self.open[connection]
        elif not data:
            del self.open[connection]  # kept open by the reference below
            self.kept = connection

    def take(self, line, connection):
        pid, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        try:
            mode = os.lstat(line["from"][4:]).st_mode & 0o777
        except (KeyError, OSError):
            mode = None
        print(json.dumps({"line": line, "pid": pid, "reply_mode": mode}), flush=True)
        if line.get("type") != "user":
            return
        self.die("line")
        self.last = line
        if "become" in self.settings:
            self.session = self.settings["become"]
            self.register() if self.session else os.unlink(self.file)
        for receipt in self.settings.get("receipts", []):
            self.due.append((time.monotonic() + self.settings.get("delay", 0), (line, receipt)))

    def die(self, moment):
        if self.settings.get("die") == moment:
            os.kill(os.getpid(), signal.SIGKILL)

    def dial(self, line, receipt):
        whole = {"type": "control", "action": "peer_message_status", "orig_msg_id": line["msg_id"], "msgV": 1,
                 "reason": "because", **receipt}
        data = json.dumps(whole).encode() + b"\n"
        try:
            with socket.socket(socket.AF_UNIX) as connection:
                connection.connect(line["from"][4:])
                data = receipt.get("junk", "").encode() + data
                for piece in [data[:7], data[7:]] if receipt.get("torn") else [data]:
                    connection.sendall(piece)
        except OSError as error:
            print(json.dumps({"undeliverable": str(error)}), flush=True)


if __name__ == "__main__":
    FakeClaude(*sys.argv[1:]).serve()

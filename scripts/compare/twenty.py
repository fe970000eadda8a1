"""Twenty requests, sent to a service behind an idempotency middleware, and what became of each.

    python twenty.py NAME COMMAND...      NAME: the column; COMMAND starts the service, {port} and {file} are replaced
    python twenty.py oncebox API PROVIDER  the example services of this repository

    npm install express@4 express-idempotency@1.0.6
    NODE_PATH=$PWD/node_modules python twenty.py express-idempotency node express.cjs {port} {file}
    pip install asgi-idempotency-header==0.2.0 starlette uvicorn fastapi redis
    python twenty.py asgi-idempotency-header python asgi.py {port} {file}

Prints a JSON object {"name", "rows": [[question, observed, effects], ...]}. The effects of a row are counted in the service's own file (or at
the provider), never by what was answered. Standard library only.
"""

import http.client
import json
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
import uuid

DEADLINE = 15


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def answers(port):
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
        return True
    except OSError:
        return False


class Service:
    """A process that is started, killed and started again on the same port and file."""

    def __init__(self, command, directory):
        self.port, self.file = free_port(), os.path.join(directory, "effects")
        open(self.file, "a").close()
        self.command = [part.format(port=self.port, file=self.file) for part in command]
        self.process = None

    def start(self):
        self.process = subprocess.Popen(self.command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + DEADLINE
        while not answers(self.port):
            if time.monotonic() > deadline or self.process.poll() is not None:
                raise SystemExit(f"{self.command[0]} did not start")
            time.sleep(0.02)

    def kill(self):
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()


class Other:
    """A middleware of others around the small service beside this file."""

    slow, late = "slow", "late"

    def __init__(self, command, directory):
        self.api = Service(command, directory)
        self.api.start()

    def path(self, other_operation):
        return "/refunds" if other_operation else "/payments"

    def body(self, reference, amount, mode=None):
        return {"reference": reference, "amount": amount, **({"mode": mode} if mode else {})}

    counted = 0

    def total(self):
        with open(self.api.file) as file:
            return len(file.read().split())

    def effects(self):
        return self.total() - self.counted

    def broke(self, is_broke):
        call(self.api.port, "PUT", "/balance", {"balance": not is_broke}, {"authorization": "Bearer t1:p1"})

    def fault(self, mode):
        pass

    def next_row(self):
        self.counted = self.total()

    def stop(self):
        self.api.kill()


class Oncebox:
    """The example services: charges at an outside provider."""

    slow, late = None, None
    counted = 0

    def __init__(self, api, provider, directory):
        self.database = f"{directory}/payments.db"
        self.provider = Service([provider, "--listen", "127.0.0.1:{port}", "--data", "{file}"], directory)
        os.remove(self.provider.file)
        self.provider.start()
        database = f"sqlite://{self.database}"
        at = f"http://127.0.0.1:{self.provider.port}"
        flags = ["--database", database, "--provider", at, "--deployment", "database", "--charge-budget", "5", "--lease", "8", "--listen", "127.0.0.1:{port}"]
        self.api = Service([api, *flags], directory)
        self.api.start()

    def path(self, other_operation):
        return "/payments" if other_operation else "/charges"

    def body(self, reference, amount, mode=None):
        return {"accountId": "acc-7", "amountMinor": amount, "currency": "EUR", "merchantReference": reference}

    def total(self):
        # Charges at the provider; payments of the other operation in the service's database.
        charges = call(self.provider.port, "GET", "/charges/count", None, {})
        with sqlite3.connect(f"file:{self.database}?mode=ro", uri=True) as database:
            payments = database.execute("select count(*) from payment").fetchone()[0]
        return json.loads(charges.body)["count"] + payments

    def effects(self):
        return self.total() - self.counted

    def next_row(self):
        self.counted = self.total()

    def broke(self, is_broke):
        self.fault("decline" if is_broke else None)

    def fault(self, mode):
        names = {"slow": ("late", 700), "late": ("late", 3000), "fail": ("error_before", 0), "decline": ("decline", 0)}
        call(self.provider.port, "DELETE", "/admin/faults", None, {})
        if mode in names:
            fault, delay = names[mode]
            body = {"fault": fault, "times": 1 if mode == "fail" else -1, "delayMs": delay}
            call(self.provider.port, "POST", "/admin/faults", body, {})

    def stop(self):
        self.api.kill()
        self.provider.kill()


class Answer:
    def __init__(self, status, headers, body):
        self.status, self.headers, self.body = status, headers, body

    def header(self, name):
        return next((value for key, value in self.headers if key.lower() == name), None)

    def __str__(self):
        code = ""
        try:
            parsed = json.loads(self.body)
            code = " " + parsed["code"] if isinstance(parsed, dict) and "code" in parsed else ""
        except ValueError:
            pass
        replayed = " (replayed)" if (self.header("idempotent-replayed") or "") == "true" else ""
        return f"{self.status}{code}{replayed}"


def call(port, method, path, body, headers, raw=None, doubled=(), give_up=None):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=give_up or DEADLINE)
    data = raw if raw is not None else (json.dumps(body).encode() if body is not None else b"")
    try:
        connection.putrequest(method, path)
        for name, value in [("content-type", "application/json"), ("content-length", str(len(data))), *headers.items(), *doubled]:
            connection.putheader(name, value)
        connection.endheaders(data)
        response = connection.getresponse()
        return Answer(response.status, response.getheaders(), response.read())
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()


class Session:
    def __init__(self, target):
        self.target, self.rows = target, []

    def post(self, reference, amount, key, mode=None, who="t1:p1", other_operation=False, raw=None, doubled=(), give_up=None):
        headers = {"authorization": f"Bearer {who}"} if who else {}
        if key is not None:
            headers["idempotency-key"] = key
        body = self.target.body(reference, amount, mode)
        return call(self.target.api.port, "POST", self.target.path(other_operation), body, headers, raw, doubled, give_up)

    def at_once(self, *calls):
        found = [None] * len(calls)

        def run(at):
            found[at] = calls[at]()

        threads = [threading.Thread(target=run, args=(at,)) for at in range(len(calls))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return found

    def row(self, question, answers, counted=False):
        texts = [str(answer) if answer else "no answer" for answer in answers]
        shown = " then ".join(texts)
        if counted:
            shown = ", ".join(f"{texts.count(text)} x {text}" for text in sorted(set(texts)))
        self.rows.append([question, shown, self.target.effects()])
        self.target.next_row()

    def settled(self, ask):
        """What a patient client gets: the same request until it is neither in progress nor pending."""
        deadline = time.monotonic() + DEADLINE
        while True:
            answer = ask()
            busy = answer is None or answer.status in (202, 503) or (answer.status == 409 and answer.header("retry-after"))
            if not busy or time.monotonic() > deadline:
                return answer
            time.sleep(0.2)

    def run(self):
        target, post = self.target, self.post

        def fresh():
            return f"ref-{uuid.uuid4().hex[:12]}", str(uuid.uuid4())

        reference, key = fresh()
        first = post(reference, 1000, key)
        self.row("the first request", [first])
        again = post(reference, 1000, key)
        same = first.body == again.body and first.header("location") == again.header("location")
        self.row(f"the same request again{'' if same else ' (body or Location differ)'}", [again])
        self.row("the key with another amount", [post(reference, 10_000, key)])
        turned = json.dumps(dict(reversed(target.body(reference, 1000).items())), indent=2).encode()
        self.row("the same members in another order, with blanks", [post(reference, 1000, key, raw=turned)])
        self.row("another tenant, the same key and command", [post(reference, 1000, key, who="t2:p2")])
        reference = fresh()[0]
        self.row("the same key at another operation", [post(reference, 1000, key, other_operation=True)])
        reference = fresh()[0]
        self.row("no key", [post(reference, 1000, None)])
        reference = fresh()[0]
        self.row("a key of one character", [post(reference, 1000, "7")])
        reference, key = fresh()
        self.row("two key headers", [post(reference, 1000, key, doubled=[("idempotency-key", fresh()[1])])])
        reference, key = fresh()
        self.row("401, then the same key authenticated", [post(reference, 1000, key, who=None), post(reference, 1000, key)])
        reference, key = fresh()
        self.row("400, then the same key corrected", [post(reference, -1, key), post(reference, 1000, key)])
        reference, key = fresh()
        target.broke(True)
        refused = post(reference, 1000, key)
        target.broke(False)
        self.row("402, then again after the balance rose", [refused, post(reference, 1000, key)])
        reference, key = fresh()
        target.fault("fail")
        failed = post(reference, 1000, key, mode="fail")
        target.fault(None)
        self.row("500 before any effect, then again", [failed, self.settled(lambda: post(reference, 1000, key))])

        target.fault("slow")
        reference, key = fresh()
        self.row("two at once", self.at_once(*[lambda: post(reference, 1000, key, mode=target.slow)] * 2), counted=True)
        reference, key = fresh()
        self.row("fifty at once", self.at_once(*[lambda: post(reference, 1000, key, mode=target.slow)] * 50), counted=True)
        reference, key = fresh()

        def other():
            time.sleep(0.3)
            return post(reference, 10_000, key, mode=target.slow)

        found = self.at_once(lambda: post(reference, 1000, key, mode=target.slow), other)
        self.row("another amount while the first runs", found)
        target.fault("late")
        reference, key = fresh()
        gone = post(reference, 1000, key, mode=target.late, give_up=1)
        again = self.settled(lambda: post(reference, 1000, key, mode=target.late))
        self.row("the client went away after a second, then again", [gone, again])
        reference, key = fresh()

        def kill():
            deadline = time.monotonic() + DEADLINE
            while target.effects() == 0 and time.monotonic() < deadline:
                time.sleep(0.02)
            target.api.kill()

        lost, _ = self.at_once(lambda: post(reference, 1000, key, mode=target.late), kill)
        target.fault(None)
        target.api.start()
        again = self.settled(lambda: post(reference, 1000, key))
        self.row("SIGKILL after the effect, then again", [lost, again])
        reference, key = fresh()
        first = post(reference, 1000, key)
        target.api.kill()
        target.api.start()
        self.row("answered, the service restarted, then again", [first, post(reference, 1000, key)])
        reference, key = fresh()
        first = post(reference, 1000, key)
        doubled = post(reference, 1000, key, raw=json.dumps(target.body(reference, 1000)).replace("{", '{"amount": 1, "amountMinor": 1, ', 1).encode())
        self.row("the key with a member twice in the body", [first, doubled])
        return self.rows


def main():
    name, *rest = sys.argv[1:]
    with tempfile.TemporaryDirectory() as directory:
        target = Oncebox(*rest, directory) if name == "oncebox" else Other(rest, directory)
        try:
            print(json.dumps({"name": name, "rows": Session(target).run()}))
        finally:
            target.stop()


main()

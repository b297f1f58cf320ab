"""A tiny product and its tests, to try the tools of this folder with (`tests/test_mutations.py`)."""

PRODUCT = """\
import os, signal, subprocess, sys, time

LIMIT = 3

def add(one, other):
    return one + other

def in_subprocess():
    return "subprocess"

def in_fork():
    return "fork"

def in_exit():
    os._exit(0)

def in_kill():
    os.kill(os.getpid(), signal.SIGKILL)

def in_exec():
    os.execv("/bin/true", ["true"])

def in_fixture():
    return "fixture"

def in_next_test():
    return "later"

def run(name):
    return subprocess.run([sys.executable, "-c", f"import product; product.{name}()"]).returncode

def fork(function):
    if os.fork() == 0:
        function()
        os._exit(0)
    os.wait()

def serve():
    for line in sys.stdin:
        time.sleep(1.0)
        in_next_test()
        print(line, flush=True)
"""
"""One module, whose functions run in processes of every kind, and end in every way."""
TESTS = """\
import subprocess, sys, time
import pytest, product

@pytest.fixture(scope="module")
def server():
    product.in_fixture()
    command = [sys.executable, "-c", "import product; product.serve()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        yield process

def test_add():
    assert product.add(1, 2) == product.LIMIT

def test_ends():
    assert [product.run("in_" + name) for name in ("subprocess", "exit", "kill", "exec")] == [0, 0, -9, 0]

def test_fork():
    product.fork(product.in_fork)

def test_first(server):
    assert server.poll() is None

def test_later(server):
    server.stdin.write(b"now\\n")
    server.stdin.flush()
    assert server.stdout.readline() == b"now\\n"

def test_fails():
    assert product.add(1, 2) == 4
"""

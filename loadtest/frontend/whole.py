"""The whole server, device side and all, over a tiny random Llama: its CPU time per token on this machine.

One layer, hidden size 64, a vocabulary of 49,152 and a real tokenizer: what the model computes is next to
nothing, but its output matrix, the sampler and the device thread are there. The server runs as `asyncserve
serve` does, and its CPU time is what the kernel says of its process, all threads and the prompts included.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from loadtest.frontend.cost import Cost
from loadtest.frontend.machine import Sockets, next_round
from loadtest.frontend.streaming import END, post
from tests.fakes.tiny_model import tiny_llama_folder

NUM_TOKENS = 128
PORT_MARK = "ready on http://"


@contextmanager
def whole_server(tokenizer: str, max_num_seqs: int) -> Iterator[tuple[int, int]]:
    """Run the server for the duration of the block; gives its process id and port.

    Raises:
        ConnectionError: It did not start.
    """
    with tempfile.TemporaryDirectory() as folder:
        model = tiny_llama_folder(
            Path(folder) / "tiny-llama", num_hidden_layers=1, vocab_size=49152, max_position_embeddings=512
        )
        command = [sys.executable, "-m", "asyncserve", "serve", str(model), "--tokenizer", tokenizer]
        command += ["--host", "127.0.0.1", "--port", "0", "--device", "cpu", "--dtype", "float32"]
        command += ["--max-num-seqs", str(max_num_seqs), "--num-threads", "1", "--disable-access-log"]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
            try:
                yield process.pid, _port(process)
            finally:
                process.terminate()
                process.communicate()


def _port(process: "subprocess.Popen[str]") -> int:
    assert process.stderr is not None
    log = []
    for line in process.stderr:
        log.append(line)
        if PORT_MARK in line:
            return int(line.partition(PORT_MARK)[2].split()[0].rpartition(":")[2])
    raise ConnectionError("the server did not start:\n" + "".join(log))


def measure_whole(sockets: Sockets, *, tokenizer: str, num_streams: int, num_rounds: int) -> list[Cost]:
    """Return the cost of each of so many rounds, after one that warms the server up.

    Raises:
        ConnectionError: The server did not start, or a stream broke off.
    """
    fields = {
        "prompt": "@@@@@@@@ " + "the lights of the town " * 4,
        "max_tokens": NUM_TOKENS,
        "temperature": 0.0,
        "ignore_eos": True,
        "stream": True,
    }
    costs = []
    with whole_server(tokenizer, num_streams) as (pid, port):
        request = post("/v1/completions", fields)
        with sockets.reading(port, num_streams, num_rounds + 1, request, END) as reader:
            next_round(reader)
            for _ in range(num_rounds):
                before, began_s = _cpu_s(pid), time.perf_counter()
                next_round(reader)
                wall_s = time.perf_counter() - began_s
                user_s, kernel_s = (after - first for after, first in zip(_cpu_s(pid), before, strict=True))
                costs.append(Cost(num_streams * NUM_TOKENS, user_s, kernel_s, wall_s))
    return costs


def _cpu_s(pid: int) -> tuple[float, float]:
    """Return user and kernel CPU seconds of a process, all its threads together."""
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    ticks_per_s = os.sysconf("SC_CLK_TCK")
    return int(words[11]) / ticks_per_s, int(words[12]) / ticks_per_s

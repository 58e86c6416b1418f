"""What HTTP, the queue and the resident process add to one question: `python -m benchmarks.gateway --collection NAME`.

Each question is answered twice, one at a time and in turns: by `POST /generate`, and in this process by the same retriever,
prompt builder and engine. The overhead is the difference of the two times. `first_token_ms` is how long the first token of
a streamed answer takes. Needs `ragspec up` and a collection; while one side works the other is idle; no other work may run on
the machine.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import httpx

from benchmarks.direct import Direct
from ragspec.jobs.options import AnswerOptions
from ragspec.settings import load_settings

#: What the project promises, milliseconds at the median.
LIMIT_MS = 30.0


def over_http(client: httpx.Client, question: str, options: AnswerOptions) -> tuple[float, int]:
    """Seconds and tokens of one answer."""
    body = {"prompt": question, "collection": options.collection, "max_tokens": options.max_tokens}
    began = time.perf_counter()
    response = client.post("/generate", json=body)
    seconds = time.perf_counter() - began
    if response.status_code != httpx.codes.OK:
        sys.exit(f"the gateway answers {response.status_code}: {response.text}")
    return seconds, response.json()["usage"]["completion_tokens"]


def first_token(client: httpx.Client, question: str, options: AnswerOptions) -> float:
    """Seconds until the first token is there."""
    body = {"prompt": question, "collection": options.collection, "max_tokens": options.max_tokens, "stream": True}
    began = time.perf_counter()
    with client.stream("POST", "/generate", json=body) as response:
        for line in response.iter_lines():
            if line.startswith("data: "):
                return time.perf_counter() - began
    sys.exit("the stream ended without a token")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--collection", required=True)
    parser.add_argument("--questions", type=Path, required=True, help="JSON Lines with a field `question`")
    parser.add_argument("--url", default="http://127.0.0.1:8080", help="of the gateway; default %(default)s")
    parser.add_argument("--limit", type=int, default=40)
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--format", choices=["text", "json"], default="text")
    wanted = parser.parse_args()
    lines = wanted.questions.read_text(encoding="utf-8").splitlines()[: wanted.limit]
    questions = [json.loads(line)["question"] for line in lines]
    options = AnswerOptions(collection=wanted.collection, max_tokens=wanted.max_tokens)
    direct = Direct(load_settings(), options, group=None)  # over HTTP no answer is of a job either
    with httpx.Client(base_url=wanted.url, timeout=300) as client:
        for question in questions[:3]:  # warm both
            direct.answer([question])
            over_http(client, question, options)
        apart, ours, theirs, firsts = [], [], [], []
        for number, question in enumerate(questions):
            runs = {}
            for side in ("direct", "http") if number % 2 else ("http", "direct"):
                runs[side] = direct.answer([question]) if side == "direct" else over_http(client, question, options)
            if runs["direct"][1] == runs["http"][1]:  # else they wrote other answers, and cannot be compared
                apart.append(runs["http"][0] - runs["direct"][0])
            ours.append(runs["direct"][0])
            theirs.append(runs["http"][0])
            firsts.append(first_token(client, question, options))
    overhead = 1000 * statistics.median(apart)
    result = {
        "questions": len(questions),
        "compared": len(apart),
        "direct_ms": round(1000 * statistics.median(ours), 1),
        "http_ms": round(1000 * statistics.median(theirs), 1),
        "overhead_ms": round(overhead, 1),
        "overhead_quartiles_ms": [round(1000 * value, 1) for value in statistics.quantiles(apart, n=4)],
        "first_token_ms": round(1000 * statistics.median(firsts), 1),
        "limit_ms": LIMIT_MS,
    }
    if wanted.format == "json":
        print(json.dumps(result))
    else:
        for name, value in result.items():
            print(f"{name:<22} {value}")
    sys.exit(overhead > LIMIT_MS)


if __name__ == "__main__":
    main()

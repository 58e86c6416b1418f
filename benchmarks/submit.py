"""How long `ragspec submit` takes for a big file, and how much memory: `python -m benchmarks.submit --collection NAME`.

Makes its own file, submits it as a user would, in a process of its own, and reads that process's peak memory from the
kernel. Needs the services of `ragspec up` (or RAGSPEC_* addresses) and a collection to ask; the job is cancelled
again. Exits with 1 where a limit is passed.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

#: What the project promises for 100,000 questions.
LIMIT_S = 20.0
LIMIT_MB = 250.0


def write_questions(path: Path, count: int) -> None:
    """`count` questions of some 80 characters, ids of their own."""
    with path.open("w") as file:
        for number in range(count):
            question = f"What does section {number} of the handbook say about the renewal of a licence, and where?"
            file.write(json.dumps({"custom_id": f"question-{number}", "question": question}) + "\n")


def measure(arguments: list[str]) -> tuple[float, float, dict[str, object]]:
    """Run `ragspec ARGUMENTS`: seconds, peak resident megabytes (1e6 bytes), and the JSON it printed."""
    started = time.perf_counter()
    done = subprocess.run([sys.executable, "-m", "ragspec", *arguments], stdout=subprocess.PIPE, check=False)
    if done.returncode:
        sys.exit(f"`ragspec {arguments[0]}` ended with {done.returncode}: nothing was measured")
    seconds = time.perf_counter() - started
    # The largest of all children so far, in KiB on Linux; this was the first.
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    return seconds, peak / 1e6, json.loads(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--collection", required=True, help="a collection with at least one passage")
    parser.add_argument("--questions", type=int, default=100_000)
    parser.add_argument("--format", choices=["text", "json"], default="text")
    wanted = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ragspec-submit-") as folder:
        path = Path(folder) / "questions.jsonl"
        write_questions(path, wanted.questions)
        size = path.stat().st_size / 1e6
        arguments = ["submit", str(path), "--collection", wanted.collection, "--json", "--new"]
        seconds, megabytes, status = measure(arguments)
    subprocess.run([sys.executable, "-m", "ragspec", "cancel", str(status["job_id"])], check=True, capture_output=True)
    result = {
        "questions": status["questions"],
        "file_mb": round(size, 1),
        "shards": status["enqueued"],
        "seconds": round(seconds, 2),
        "peak_mb": round(megabytes, 1),
        "limit_seconds": LIMIT_S,
        "limit_mb": LIMIT_MB,
    }
    if wanted.format == "json":
        print(json.dumps(result))
    else:
        print(
            f"{result['questions']} questions ({result['file_mb']} MB) recorded and enqueued as {result['shards']} shards "
            f"in {result['seconds']} s (limit {LIMIT_S:.0f}) with {result['peak_mb']} MB at most (limit {LIMIT_MB:.0f})"
        )
    if wanted.questions >= 100_000 and (seconds > LIMIT_S or megabytes > LIMIT_MB):
        sys.exit(1)


if __name__ == "__main__":
    main()

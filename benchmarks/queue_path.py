"""What the queue costs over the engine called directly: `python -m benchmarks.queue_path --collection NAME`.

The same questions are answered twice a round, in turns: through Redis, Celery, the resident process and PostgreSQL, as a user
submits them; and in this process, by the same retriever, prompt builder and engine, with nothing recorded. Both clocks run from
the moment the questions are handed over until the last is answered, models loaded before. Needs `ragspec up` and a collection;
rounds alternate which comes first. While one side works the other is idle; no other work may run on the machine.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from uuid import UUID

from sqlalchemy import text

from benchmarks.direct import Direct
from producer.submit import submit
from ragspec.jobs.database import connect
from ragspec.jobs.options import AnswerOptions
from ragspec.settings import Settings, load_settings

#: What the project promises.
LIMIT = 0.05


def through_the_queue(settings: Settings, path: Path, options: AnswerOptions) -> tuple[float, int]:
    """Seconds from `submit` to the job's end, and the tokens written."""
    engine = connect(settings.require_database())
    started = time.perf_counter()
    job_id: UUID = submit(settings, str(path), options, new=True).recorded.job_id
    while True:
        with engine.connect() as connection:
            state = connection.execute(text("SELECT state FROM jobs WHERE id = :id"), {"id": job_id}).scalar_one()
        if state in {"completed", "failed", "cancelled", "expired"}:
            break
        time.sleep(0.05)
    seconds = time.perf_counter() - started
    with engine.connect() as connection:
        counted = text(
            "SELECT sum(completion_tokens), count(*) FILTER (WHERE status <> 'completed') FROM answers WHERE job_id = :id"
        )
        tokens, failed = connection.execute(counted, {"id": job_id}).one()
    if state != "completed" or failed:
        sys.exit(f"job {job_id} ended as {state} with {failed} failed rows: nothing to compare")
    return seconds, int(tokens)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--collection", required=True)
    parser.add_argument("--questions", type=Path, required=True, help="JSON Lines with a field `question`")
    parser.add_argument("--limit", type=int, default=200)
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--format", choices=["text", "json"], default="text")
    wanted = parser.parse_args()
    settings = load_settings()
    subprocess.run([sys.executable, "-m", "ragspec", "worker", "--check"], check=True)
    rows = [json.loads(line) for line in wanted.questions.read_text(encoding="utf-8").splitlines()[: wanted.limit]]
    questions = [row["question"] for row in rows]
    options = AnswerOptions(collection=wanted.collection, max_tokens=wanted.max_tokens)
    direct = Direct(settings, options)
    direct.answer(questions[: settings.max_batch])

    rounds = []
    with tempfile.TemporaryDirectory(prefix="ragspec-queue-") as folder:
        path = Path(folder) / "questions.jsonl"
        path.write_text("".join(json.dumps({"question": q}) + "\n" for q in questions), encoding="utf-8")
        warm = Path(folder) / "warm.jsonl"
        warm.write_text(
            "".join(json.dumps({"question": q}) + "\n" for q in questions[: settings.max_batch]), encoding="utf-8"
        )
        through_the_queue(settings, warm, options)
        for number in range(wanted.rounds):
            measured = {}
            for side in ("direct", "queue") if number % 2 else ("queue", "direct"):
                run = direct.answer(questions) if side == "direct" else through_the_queue(settings, path, options)
                measured[side] = run
            rounds.append(measured)
            print(
                f"round {number + 1}: direct {measured['direct'][0]:.1f} s, {measured['direct'][1]} tokens; "
                f"queue {measured['queue'][0]:.1f} s, {measured['queue'][1]} tokens",
                file=sys.stderr,
            )
    overheads = [m["queue"][0] / m["direct"][0] - 1 for m in rounds]
    overhead = statistics.median(overheads)
    result = {
        "questions": len(questions),
        "rounds": len(rounds),
        "direct_s": round(statistics.median(m["direct"][0] for m in rounds), 2),
        "queue_s": round(statistics.median(m["queue"][0] for m in rounds), 2),
        "overhead": round(overhead, 4),
        "overheads": [round(overhead, 4) for overhead in overheads],
        "limit": LIMIT,
    }
    if wanted.format == "json":
        print(json.dumps(result))
    else:
        for name, value in result.items():
            print(f"{name:<10} {value}")
    if min(overheads) < 0:
        print("a round through the queue was the faster: the run is too short to tell; raise --limit", file=sys.stderr)
    sys.exit(overhead > LIMIT)


if __name__ == "__main__":
    main()

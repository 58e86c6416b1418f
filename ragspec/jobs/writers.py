"""What each export format makes of an answer. Every writer streams and returns the number of answers it wrote."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import IO, Any
from uuid import UUID

from ragspec.decoding.acceptance import Source
from ragspec.jobs.answer import Answer
from ragspec.jobs.row import RowFault

#: custom_id, question, answer.
Named = tuple[str, str, Answer]

_TIMINGS = ("queued_ms", "retrieval_ms", "prefill_ms", "decode_ms")
_COUNTERS = (
    "num_verify_steps",
    "num_spec_steps",
    "num_draft_tokens",
    "num_accepted_draft_tokens",
    "mean_acceptance_length",
    "draft_acceptance_rate",
)
_ARRAYS = ("acceptance_histogram", "token_ids", "token_logprobs", "per_step_drafted", "per_step_accepted")
_PLAIN = ("model", "head", "template_hash", "seed", "prompt_tokens", "completion_tokens")
#: Rows of a Parquet row group: some megabytes with passages and token arrays.
_ROW_GROUP = 1_000
_OPENAI_FINISH = {"stop": "stop", "stop_string": "stop", "no_context": "stop", "length": "length"}


def answer_json(custom_id: str, question: str, answer: Answer) -> dict[str, Any]:
    """An answer as one JSON object; token sources are written by name."""
    return {
        "custom_id": custom_id,
        "question": question,
        "status": answer.status,
        "answer": answer.text,
        "finish_reason": answer.finish_reason,
        "error": {"code": answer.error_code, "message": answer.error_message} if answer.error_code else None,
        **{name: getattr(answer, name) for name in _PLAIN},
        "passages": answer.passages,
        "acceptance": {
            **{name: getattr(answer, name) for name in (*_COUNTERS, *_ARRAYS)},
            "token_sources": source_names(answer),
        },
        "timings": {name: getattr(answer, name) for name in _TIMINGS},
    }


def source_names(answer: Answer) -> list[str]:
    """Who proposed each token, by name."""
    return [Source(source).name.lower() for source in answer.token_sources]


def write_jsonl(file: IO[bytes], answers: Iterable[Named]) -> int:
    """One JSON object a line, with everything that is recorded."""
    return _write_lines(file, (answer_json(*named) for named in answers))


def write_csv(file: IO[bytes], answers: Iterable[Named]) -> int:
    """One row an answer, without the arrays and the passages' texts; passage ids are a JSON list."""
    text = io.TextIOWrapper(file, encoding="utf-8", newline="")
    try:
        writer = csv.writer(text)
        header = ("custom_id", "question", "status", "answer", "finish_reason", "error_code", "error_message")
        writer.writerow((*header, *_PLAIN, *_TIMINGS, *_COUNTERS, "passages"))
        written = 0
        for custom_id, question, answer in answers:
            written += 1
            ids = json.dumps([passage["id"] for passage in answer.passages], ensure_ascii=False)
            values = (getattr(answer, name) for name in (*_PLAIN, *_TIMINGS, *_COUNTERS))
            error = (answer.error_code, answer.error_message)
            writer.writerow(
                (custom_id, question, answer.status, answer.text, answer.finish_reason, *error, *values, ids)
            )
        return written
    finally:
        text.detach()


def write_parquet(file: IO[bytes], answers: Iterable[Named]) -> int:
    """One row an answer, with everything that is recorded; passage metadata is JSON text."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = _parquet_schema(pa)
    written = 0
    remaining = iter(answers)
    with pq.ParquetWriter(file, schema, compression="zstd") as writer:
        while group := list(islice(remaining, _ROW_GROUP)):
            writer.write_table(pa.Table.from_pylist([_flat(*named) for named in group], schema=schema))
            written += len(group)
    return written


def write_openai(file: IO[bytes], job_id: UUID, answers: Iterable[Named], skipped: Iterable[RowFault]) -> int:
    """OpenAI Batch output lines; failed answers and skipped rows are lines with an error and no response."""
    written = 0

    def lines() -> Iterator[dict[str, Any]]:
        nonlocal written
        for custom_id, _, answer in answers:
            written += 1
            yield _openai_line(job_id, custom_id, answer)
        for fault in skipped:
            error = {"code": fault.code, "message": fault.message, "line": fault.line}
            yield {
                "id": f"batch_req_{job_id.hex}_line_{fault.line}",
                "custom_id": fault.custom_id,
                "response": None,
                "error": error,
            }

    _write_lines(file, lines())
    return written


def _write_lines(file: IO[bytes], objects: Iterable[dict[str, Any]]) -> int:
    written = 0
    for value in objects:
        written += 1
        file.write(json.dumps(value, ensure_ascii=False).encode() + b"\n")
    return written


def _flat(custom_id: str, question: str, answer: Answer) -> dict[str, Any]:
    nested = answer_json(custom_id, question, answer)
    error = nested.pop("error") or {"code": None, "message": None}
    passages = [{**passage, "metadata": json.dumps(passage.get("metadata", {}))} for passage in nested.pop("passages")]
    return {
        **nested,
        **nested.pop("acceptance"),
        **nested.pop("timings"),
        "error_code": error["code"],
        "error_message": error["message"],
        "passages": passages,
    }


def _parquet_schema(pa: Any) -> Any:
    texts = ("custom_id", "question", "status", "answer", "finish_reason", "error_code", "error_message")
    passage = [("id", pa.string()), ("document", pa.string()), ("title", pa.string()), ("score", pa.float64())]
    kinds: dict[str, Callable[[], Any]] = {"model": pa.string, "head": pa.string, "template_hash": pa.string}
    return pa.schema(
        [
            *((name, pa.string()) for name in texts),
            *((name, kinds.get(name, pa.int64)()) for name in _PLAIN),
            *((name, pa.float64()) for name in _TIMINGS),
            *((name, pa.int64() if name.startswith("num_") else pa.float64()) for name in _COUNTERS),
            *((name, pa.list_(pa.float32() if name == "token_logprobs" else pa.int32())) for name in _ARRAYS),
            ("token_sources", pa.list_(pa.string())),
            ("passages", pa.list_(pa.struct([*passage, ("text", pa.string()), ("metadata", pa.string())]))),
        ]
    )


def _openai_line(job_id: UUID, custom_id: str, answer: Answer) -> dict[str, Any]:
    request_id = f"{job_id.hex}_{answer.idx}"
    line = {"id": f"batch_req_{request_id}", "custom_id": custom_id}
    if answer.status == "failed":
        return {**line, "response": None, "error": {"code": answer.error_code, "message": answer.error_message}}
    usage = {
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": answer.completion_tokens,
        "total_tokens": answer.prompt_tokens + answer.completion_tokens,
    }
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": answer.text},
        "finish_reason": _OPENAI_FINISH[answer.finish_reason],
    }
    body = {
        "id": f"chatcmpl-{request_id}",
        "object": "chat.completion",
        "model": answer.model,
        "choices": [choice],
        "usage": usage,
    }
    return {**line, "response": {"status_code": 200, "request_id": request_id, "body": body}, "error": None}

"""From questions to prompts: retrieval in batches, and one prompt each."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ragspec.corpus.passage import Passage, Retriever
from ragspec.errors import RagspecError, RefusedError, ServiceUnavailableError
from ragspec.jobs.answer import Answer
from worker.resident.outcome import Identity, failed, without_context
from worker.resident.parts import BuiltPrompt, PromptWriter
from worker.resident.ticket import Ticket

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Prepared:
    """A question that is ready for the engine."""

    ticket: Ticket
    prompt: BuiltPrompt
    retrieval_s: float


#: What comes of a ticket.
Outcome = Prepared | Answer | ServiceUnavailableError


@dataclass(frozen=True, slots=True)
class Preparation:
    """Turns tickets into prompts; a row that cannot be prepared becomes its own failed answer.

    Attributes:
        retriever: finds passages.
        prompts: writes prompts.
        identity: written on the answers that end here.
        answer_without_context: whether a question with no passages goes to the engine all the same.
    """

    retriever: Retriever
    prompts: PromptWriter
    identity: Identity
    answer_without_context: bool

    def prepare(self, tickets: Sequence[Ticket]) -> Iterator[tuple[Ticket, Outcome]]:
        """Retrieve for the tickets, together where collection and `top_k` agree, and build their prompts.

        Who asks for no passages waits for no search. The searches are made in the order of their first tickets, so that who
        came first waits for no other search.

        Yields each ticket once, with its prompt, with the answer that it ended in, or with the error of a store that does
        not answer: the same ticket may be prepared later.
        """
        searches: dict[tuple[str, int], list[Ticket]] = {}
        for ticket in tickets:
            if ticket.collection is None:
                yield ticket, self._build(ticket, [], 0.0)
            else:
                searches.setdefault((ticket.collection, ticket.options.top_k), []).append(ticket)
        for (collection, top_k), group in searches.items():
            yield from self._group(group, collection, top_k)

    def _group(self, tickets: list[Ticket], collection: str, top_k: int) -> Iterator[tuple[Ticket, Outcome]]:
        started = time.monotonic()
        try:
            found = self._retrieve([ticket.question.text for ticket in tickets], collection, top_k)
        except ServiceUnavailableError as error:
            log.warning("retrieval: %s", error)
            yield from ((ticket, error) for ticket in tickets)
        except Exception as error:
            known = isinstance(error, RagspecError)
            of_all = known and not isinstance(error, RefusedError)  # a collection that is gone
            if not of_all and len(tickets) > 1:  # one of them is to blame: find out which
                log.exception("retrieval of %d questions failed; trying them one by one", len(tickets))
                for ticket in tickets:
                    yield from self._group([ticket], collection, top_k)
                return
            if not known:
                log.exception("retrieval failed for question %s", tickets[0].question.custom_id)
            code = "retrieval_failed" if isinstance(error, RefusedError) else None
            yield from ((ticket, failed(ticket, error, self.identity, code)) for ticket in tickets)
        else:
            elapsed = time.monotonic() - started
            for ticket, passages in zip(tickets, found, strict=True):
                yield ticket, self._build(ticket, passages, elapsed)

    def _retrieve(self, questions: list[str], collection: str, top_k: int) -> list[list[Passage]]:
        found = self.retriever.retrieve(questions, collection, top_k)
        if len(found) != len(questions):
            msg = f"the retriever gave {len(found)} results for {len(questions)} questions"
            raise RuntimeError(msg)
        return found

    def _build(self, ticket: Ticket, passages: list[Passage], retrieval_s: float) -> Prepared | Answer:
        if not passages and ticket.collection is not None and not self.answer_without_context:
            return without_context(ticket, retrieval_s, self.identity)
        try:
            prompt = self.prompts.build(ticket.question.text, passages, ticket.options.max_tokens)
        except RagspecError as error:
            return failed(ticket, error, self.identity)
        except Exception as error:
            log.exception("no prompt for question %s", ticket.question.custom_id)
            return failed(ticket, error, self.identity)
        return Prepared(ticket, prompt, retrieval_s)

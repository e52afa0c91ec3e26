# SPDX-License-Identifier: BSD-3-Clause
"""A continuous-batching engine over torch_gpukern.PagedKVCache.

Each step runs one packed batch. A sequence that decodes brings its newest token and the tokens
drafted behind it; a newcomer brings a chunk of its prompt, as long as the step has room. So prompts
do not stop the others, and a step's time is bounded.

- Pages of equal prefixes are shared: what one request has written, the next one finds by its
  tokens. Requests of a step that share pages stand side by side, so that attention reads those
  once.
- Requests of one `submit_all` with the same prompt share its pages and its computation. The first
  computes the prompt. The others wait for it, then fork its sequence and compute the last token of
  the prompt alone.
- When pages run out, the youngest request gives its pages back and waits. Its tokens stay; their
  keys are computed again, or found by prefix.
- Drafts are the tokens that followed the same n-gram before, in one branch or more. They are checked
  in one step, where each sees its ancestors alone and has the position of its depth. `keep` copies
  the accepted path together and takes the other tokens back. A token is drawn from (seed, position)
  alone, so a request's answer depends neither on the drafts nor on the other requests, but for the
  rounding of its logits.

`submit` and `cancel` may be called from any thread; `step` from one. `start` runs the steps in a
thread of its own.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from ..paged.kv_cache import OutOfPages
from .captured import FREE_TOKENS
from .costs import Costs
from .drafts import Draft, mask_of
from .metrics import Metrics
from .request import Busy, Request, Scores
from .sampling import Drawn, Place, Sampler

# Drafts have one branch beside a longer chunk of a prompt: a mask has a column for each of its
# tokens, and a row for each token of the step.
LONGEST_CHUNK_BESIDE_BRANCHES = 64


@dataclass
class Chunk:
    """What a request brings to a step: its next `count` tokens, then drafted ones.

    Attributes:
        start: how many of its tokens come before.
        ends: whether the last of the request's tokens is in it, so that a new one follows.
        source: where its only token is among those of the step before, if the host does not know
            it yet; else -1.
    """

    request: Request
    start: int
    count: int
    ends: bool
    source: int = -1
    draft: Draft = field(default_factory=Draft)


class Answer(NamedTuple):
    """What a request gets by a step."""

    chunk: Chunk
    new: list[int]
    scores: list[Scores]
    path: list[int]  # the drafted tokens that were right, as their numbers
    finish: str | None


class Flight(NamedTuple):
    """A batch that was launched, and whose tokens were not taken yet."""

    chunks: list[Chunk]
    drawn: Drawn | None  # a token for each chunk that ends, and for each drafted one
    tokens: int
    began: float
    graph_ms: float | None  # what its graph takes before there are keys; None if it has none


class Numbers(NamedTuple):
    """What an engine has done, and what it is doing."""

    metrics: Metrics
    running: int
    waiting: int
    pages: int
    used_pages: int


class Engine:
    """Runs requests on a model of models.py.

    Args:
        model: it has the cache.
        max_batch: requests that run at once.
        max_step_tokens: tokens of a step, at least max_batch: the longest chunk of a prompt.
        max_drafts: tokens of a branch that is drafted for a request in a step; 0 switches drafts
            off.
        draft_branches: continuations that are drafted for a request in a step. A request longer than
            the model's sliding window has one.
        max_waiting: requests that may wait; more are refused.

    Attributes:
        after_step: is called in the thread of the steps when the requests were told of a step.
        at_end: is called when that thread ends.

    Raises:
        ValueError: a setting is out of its range, or the model does not take branches.
    """

    def __init__(
        self,
        model,
        *,
        max_batch: int = 16,
        max_step_tokens: int = 256,
        max_drafts: int = 4,
        draft_branches: int = 1,
        max_waiting: int = 1024,
    ) -> None:
        if not 1 <= max_batch <= max_step_tokens:
            raise ValueError(
                f"max_batch is {max_batch}; expected 1 to max_step_tokens, {max_step_tokens}"
            )
        if not isinstance(draft_branches, int) or draft_branches < 1:
            raise ValueError(f"draft_branches is {draft_branches!r}; expected an integer from 1 on")
        if draft_branches > 1 and not model.branches:
            raise ValueError(
                f"draft_branches is {draft_branches}; {type(model).__name__} takes 1, because its "
                f"tokens_of reads the tokens before a token in the order of the step"
            )
        self.model, self.cache = model, model.cache
        self.max_batch, self.max_step_tokens = max_batch, max_step_tokens
        self.max_drafts, self.max_waiting = max_drafts, max_waiting
        self.draft_branches = draft_branches
        self.max_length = min(model.max_length, self.cache.num_blocks * self.cache.block_size)
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # the oldest first
        self.sampler = Sampler(max_batch, model.vocab, model.device)
        self.metrics = Metrics()
        self.costs = Costs(model)
        self._work = threading.Condition()  # its lock is reentrant
        self._thread: threading.Thread | None = None
        self._closing = self._draining = False
        self.after_step: Callable[[], None] = lambda: None
        self.at_end: Callable[[], None] = lambda: None
        self._flight: Flight | None = None
        self._taken = 0.0  # when the last step's tokens were taken
        self._would_draft = False
        self._gain = 0.0  # tokens that drafts are expected to add to the next step
        self._blocked: int | None = None  # free pages when the first waiting request had too few

    # ---- from any thread ----

    def submit(self, request: Request) -> Request:
        """Queues a request.

        Raises:
            Refused: what it asks for does not fit the model or the cache.
            Busy: too many wait, or the engine closes.
        """
        self.submit_all([request])
        return request

    def submit_all(self, requests: Sequence[Request]) -> None:
        """Queues all of them, or none where `submit` would raise for one."""
        prompts = [request.check(self.model.vocab, self.max_length) for request in requests]
        with self._work:
            if len(self.waiting) + len(requests) > self.max_waiting:
                raise Busy(f"{len(self.waiting)} requests wait already, of {self.max_waiting}")
            for request, prompt in zip(requests, prompts):
                # the caller may change its list while the request runs
                request.prompt, request.tokens = tuple(prompt), prompt
            if not self.queue(requests):
                raise Busy("the server closes")

    def queue(self, requests: Sequence[Request]) -> bool:
        """Queues requests that were checked and whose tokens are set; False if the engine
        closes."""
        with self._work:
            if self._closing:
                return False
            groups: dict[tuple[int, ...], list[Request]] = {}
            for request in requests:
                request.group = groups.setdefault(request.prompt, [])
                request.group.append(request)
                request.arrived = time.perf_counter()
                self.waiting.append(request)
            self._work.notify()
            return True

    def numbers(self) -> Numbers:
        return Numbers(
            self.metrics,
            len(self.running),
            len(self.waiting),
            self.cache.num_blocks,
            self.used_pages,
        )

    @property
    def closing(self) -> bool:
        """Whether new requests are refused."""
        return self._closing

    @property
    def alive(self) -> bool:
        """Whether the thread of the steps runs."""
        return self._thread is not None and self._thread.is_alive()

    def start(self) -> Engine:
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()
        return self

    def drain(self) -> None:
        """Refuses new requests from now on. The thread ends when the others are done."""
        with self._work:
            self._closing = self._draining = True
            self._work.notify()

    def stop(self) -> None:
        """`close` without waiting for the thread."""
        with self._work:
            self._closing, self._draining = True, False
            self._work.notify()

    def close(self) -> None:
        """Ends the thread. Requests that are not done end with "abort"."""
        self.stop()
        if self._thread is not None:
            self._thread.join()
        else:
            self._end_all("abort")

    def __enter__(self) -> Engine:
        return self.start()

    def __exit__(self, *error: object) -> None:
        self.close()

    # ---- one step ----

    def step(self) -> bool:
        """Takes the tokens of one batch; False where there is nothing to do.

        If the next batch is known, it is launched first. So the device does not wait for what is
        done with the tokens.
        """
        self._drop_cancelled()
        flight, self._flight = self._flight, None
        if flight is None or all(chunk.request.finish is not None for chunk in flight.chunks):
            self._admit()
            chunks = self._plan()
            if not chunks:
                return False
            flight = self._launch(chunks)
        self._flight = self._follow(flight)
        self._take(flight)
        now = time.perf_counter()
        seconds = now - max(flight.began, self._taken)
        used = self.used_pages / self.cache.num_blocks
        self.metrics.step(seconds, flight.tokens, used)
        self._learn(flight, seconds)
        self._taken = now
        return True

    def _learn(self, flight: Flight, seconds: float) -> None:
        """Tells the costs of a step of decoding requests. One without drafts counts if it was
        launched ahead, where the model can do that."""
        drafted = sum(len(chunk.draft) for chunk in flight.chunks)
        ahead = flight.began < self._taken
        if flight.graph_ms is None or flight.tokens != len(flight.chunks) + drafted:
            return
        if drafted or ahead or not self.model.follows:
            self.costs.took(seconds, flight.graph_ms, len(flight.chunks), drafted)

    def _launch(self, chunks: list[Chunk], known: Drawn | None = None) -> Flight:
        """A batch whose pages are reserved. known: the tokens of the step before."""
        began = time.perf_counter()
        ids: list[int] = []
        positions: list[int] = []
        starts: list[int] = []  # where each request's tokens begin
        rows: list[int] = []  # whose logits are asked for
        places: list[Place] = []  # how each of them is drawn
        for chunk in chunks:
            request, end = chunk.request, chunk.start + chunk.count
            starts.append(len(ids))
            ids += [0] if chunk.source >= 0 else request.tokens[chunk.start : end]
            ids += chunk.draft.tokens
            positions += range(chunk.start, end)
            positions += [end - 1 + depth for depth in chunk.draft.depths]
            if chunk.ends:
                first = len(ids) - 1 - len(chunk.draft)
                rows += range(first, len(ids))
                places.append(Place(request, end))
                places += [Place(request, end + len(x), x) for x in chunk.draft.paths()]
        if known is None:
            before = [c.request.tokens[max(c.start - 2, 0) : c.start] for c in chunks]
            logits = self.model.forward(ids, positions, rows, starts, before)
        else:
            tokens = self._tokens(chunks, ids, starts, known.tokens)
            logits = self.model.forward(tokens, positions, rows, starts, [])
        drawn = self.sampler.draw(logits, places, self.model.best) if rows else None
        graph = self.model.graph
        return Flight(chunks, drawn, len(ids), began, None if graph is None else graph.ms)

    def _tokens(
        self, chunks: list[Chunk], ids: list[int], starts: list[int], known: Tensor
    ) -> Tensor:
        """The ids on the device, with those that the host does not know."""
        sources = [chunk.source for chunk in chunks if chunk.source >= 0]
        if len(sources) == len(ids):
            whole = len(sources) == len(known) and sources == list(range(len(known)))
            return known if whole else known[self.sampler.ints(sources)]
        tokens = self.sampler.ints(ids)
        if sources:
            places = [start for start, c in zip(starts, chunks, strict=True) if c.source >= 0]
            tokens[self.sampler.ints(places)] = known[self.sampler.ints(sources)]
        return tokens

    def _follow(self, flight: Flight) -> Flight | None:
        """The batch behind one whose tokens the host does not know. Requests that end by their
        length are not in it. A request that ends by its token is, and what that computes is
        dropped.

        None if a request needs the host before its next token, or pages are too few.
        """
        drawn = flight.drawn
        if not self.model.follows or drawn is None or self._would_draft:
            return None
        self._admit()
        if any(chunk.draft for chunk in flight.chunks) or any(
            r.penalised or r.logprobs is not None or r.leaves for r in self.running
        ):
            return None
        chunks = self._in_order(self._chunks(flight))
        try:
            if not chunks:
                return None
            self._begin(chunks)
        except OutOfPages:
            return None
        return self._launch(chunks, drawn)

    @property
    def used_pages(self) -> int:
        """Pages that requests hold. Pages kept for `match` alone are free."""
        return self.cache.num_blocks - self.cache.free_blocks

    def _admit(self) -> None:
        cache = self.cache
        with self._work:  # other threads append to `waiting`
            waiting = list(self.waiting)
        for request in waiting:
            if len(self.running) >= self.max_batch:
                return
            if self.running and self._blocked == cache.free_blocks:
                return
            alike = [r for r in request.group if r.handle is not None]
            if alike and all(r.cached < len(r.prompt) for r in alike):
                continue  # the next step finds the prompt computed
            handle, known = self._known(request, alike)
            need = -(-(len(request.tokens) + 1) // cache.block_size) - known // cache.block_size
            if self.running and need > cache.free_blocks:
                cache.free(handle)
                self._blocked = cache.free_blocks
                return
            with self._work:
                self.waiting.remove(request)
            request.handle, request.cached = handle, known
            self.running.append(request)
            self.metrics.prefix(known, len(request.tokens))

    def _known(self, request: Request, alike: list[Request]) -> tuple[int, int]:
        """A sequence with as many of the request's tokens as the cache has, and their number: full
        pages that were published, or the prompt of a running request with the same prompt. The last
        token is left out, because its logits are asked for."""
        cache = self.cache
        handle, known = cache.match(request.tokens[:-1])
        prompt = min(len(request.prompt), len(request.tokens) - 1)
        if prompt <= known:
            return handle, known
        for other in alike:
            if other.handle is not None and other.cached >= prompt:
                cache.free(handle)
                return cache.fork(other.handle, prompt), prompt
        return handle, known

    def _chunks(self, flight: Flight | None = None) -> list[Chunk]:
        """What fits into the next step, or into the one behind `flight`. Decoding requests come
        first, so that each has its token."""
        chunks: list[Chunk] = []
        ahead: dict[Request, tuple[Chunk, int]] = {}  # a chunk, and where its token will be
        row = 0
        for chunk in flight.chunks if flight else ():
            ahead[chunk.request] = chunk, row
            row += chunk.ends
        for request in self.running:
            start, end, source = request.cached, len(request.tokens), -1
            if request in ahead:
                chunk, row = ahead[request]
                start = chunk.start + chunk.count
                if chunk.ends:
                    if request.answered + 1 == request.max_tokens:
                        continue
                    end, source = end + 1, row
            chunks.append(Chunk(request, start, end - start, True, source))
        chunks.sort(key=lambda chunk: chunk.count > 1)
        room = self.max_step_tokens
        for chunk in chunks:
            if chunk.count > room:
                chunk.count, chunk.ends = room, False
            room -= chunk.count
        return [chunk for chunk in chunks if chunk.count]

    def _in_order(self, chunks: list[Chunk]) -> list[Chunk]:
        """Those that share pages side by side, where the model reads such pages once."""
        if not chunks or not self.model.shares_prefixes([c.count + len(c.draft) for c in chunks]):
            return chunks
        order = self.cache.by_pages([chunk.request.handle for chunk in chunks])
        place = {handle: i for i, handle in enumerate(order)}
        return sorted(chunks, key=lambda chunk: place[chunk.request.handle])

    def _plan(self) -> list[Chunk]:
        """The chunks of the next step, whose pages are reserved."""
        chunks = self._chunks()
        self._draft(chunks)
        chunks = self._in_order(chunks)
        while chunks:
            try:
                self._begin(chunks)
                break
            except OutOfPages:
                if any(chunk.draft for chunk in chunks):
                    for chunk in chunks:
                        chunk.draft = Draft()
                    continue
                youngest = self.running[-1]
                self._preempt(youngest)
                chunks = [chunk for chunk in chunks if chunk.request is not youngest]
        return chunks

    def _draft(self, chunks: list[Chunk]) -> None:
        """Gives the chunks of a step their drafts. A captured step has drafts where they pay, and
        none beside a prompt."""
        counts = [chunk.count for chunk in chunks]
        longest, room = max(counts, default=0), self.max_step_tokens - sum(counts)
        wanted = [
            min(self.max_drafts, c.request.drafts) if c.ends and c.request.answered else 0
            for c in chunks
        ]
        spare = 0  # tokens that a graph has room for beside those that are wanted
        if chunks and self.model.captures(counts):
            if longest > 1 or not self._would_draft:
                return
            if captured := self.model.draft_room(len(chunks), sum(wanted)):
                room = min(room, captured)
                spare = max(room - sum(wanted), 0)
        for chunk, want in zip(chunks, wanted, strict=True):
            request = chunk.request
            left = (request.max_tokens or 0) - request.answered - 1
            most = min(self.max_drafts, want + spare, room, left)
            if not want or most <= 0:
                continue
            branches = self._branches(request, longest, most)
            whole = min(room, want + spare) if spare else room
            chunk.draft = request.ngrams.draft(request.tokens, most, branches, whole)
            room -= len(chunk.draft)
            spare = max(spare + want - len(chunk.draft), 0) if spare else 0

    def _most(self, request: Request, requests: int) -> int:
        """How many tokens a branch of the request's next draft will have: one more than were right
        the last time, or all where a captured step has room for everybody's."""
        tokens = requests * (1 + self.max_drafts * self.draft_branches)
        if tokens <= FREE_TOKENS and self.model.draft_room(requests):
            return self.max_drafts
        return min(self.max_drafts, request.drafts)

    def _branches(self, request: Request, longest: int, most: int) -> int:
        """How many branches of `most` tokens a draft of the request may have, in a step whose
        longest chunk has so many tokens."""
        if self.draft_branches == 1 or longest > LONGEST_CHUNK_BESIDE_BRANCHES:
            return 1
        window = self.model.window
        # Attention counts a window in places, and a drafted token's place is behind its position.
        if window is not None and len(request.tokens) + most * self.draft_branches > window:
            return 1
        return self.draft_branches

    def _begin(self, chunks: list[Chunk]) -> None:
        """Reserves the pages of a step; OutOfPages where they are too few."""
        handles = [c.request.handle for c in chunks]
        counts = [c.count + len(c.draft) for c in chunks]
        if not any(c.draft for c in chunks):
            self.model.begin(handles, counts)
            return
        mask = None
        if any(c.draft.branches for c in chunks):
            mask = mask_of([c.count for c in chunks], [c.draft for c in chunks])
        rows = sum(1 + len(c.draft) for c in chunks if c.ends)
        self.model.begin(handles, counts, mask, rows)

    def _answers(self, flight: Flight) -> list[Answer]:
        """What the requests of a step get that were not ended since it was launched."""
        answers = []
        there = flight.drawn
        drawn = [] if there is None else there.get()
        scores = [] if there is None else there.scores
        first = 0
        for chunk in flight.chunks:
            if not chunk.ends:
                continue
            rows = slice(first, first + 1 + len(chunk.draft))
            first = rows.stop
            request = chunk.request
            if request.finish is not None:
                continue
            tokens, its_scores = drawn[rows], scores[rows]
            path = chunk.draft.right(tokens)
            new, finish = [], None
            for row in (0, *(1 + i for i in path)):
                new.append(row)
                if tokens[row] in request.stop_ids:
                    finish = "stop"
                elif request.answered + len(new) == request.max_tokens:
                    finish = "length"
                if finish:
                    break
            found = [x for row in new if (x := its_scores[row]) is not None]
            answers.append(Answer(chunk, [tokens[row] for row in new], found, path, finish))
        return answers

    def _take(self, flight: Flight) -> None:
        """Counts what a step has written, and gives each request its new tokens: drafts as far as
        they were right, and one more."""
        gain = 0.0  # tokens that drafts may add to the next step
        drafted = 0  # the most that it may have
        n = len(flight.chunks)
        answers = self._answers(flight)
        self._keep([answer for answer in answers if answer.chunk.draft])
        if self._gain and any(chunk.draft for chunk in flight.chunks):
            self.costs.gave(sum(len(new) - 1 for _, new, *_ in answers), self._gain)
        now = time.perf_counter()
        for chunk in flight.chunks:
            if not chunk.ends:
                chunk.request.cached += chunk.count
        for chunk, new, scores, _, finish in answers:
            request = chunk.request
            first = not request.answered
            request.tokens += new
            request.scores += scores
            request.cached += chunk.count + len(new) - 1
            if first or finish:  # the prompt's pages, then the whole answer's
                self.cache.publish(request.handle, request.tokens)
            self.metrics.tokens(len(new), now, request.arrived, request.heard)
            request.heard = now
            if finish:
                self._end(request, finish, new)
            else:
                self._tell(request, new, None)
                if self.max_drafts and self.model.captured_batch:
                    streak = request.ngrams.streak(request.tokens, self.draft_branches)
                    # or the next draft would be shorter than what it is expected to add
                    request.drafts = max(request.drafts, min(streak, self.max_drafts))
                    most = self._most(request, n)
                    if expected := request.ngrams.expected(most):
                        gain += expected
                        drafted += most
        room = self.model.draft_room(n)
        if 0 < room < drafted:
            gain *= room / drafted
        self._gain = gain
        self._would_draft = self.costs.pays(gain, n, drafted, self._would_draft)

    def _keep(self, answers: list[Answer]) -> None:
        """Takes the drafted tokens that were wrong back, and copies the right ones together."""
        if not answers:
            return
        handles, ends, kept = [], [], []
        for chunk, new, _, path, _ in answers:
            chunk.request.drafts = len(path) + 1
            path = path[: len(new) - 1]
            beside = sum(node != i for i, node in enumerate(path))
            self.metrics.drafts(len(chunk.draft), len(path), beside)
            end = chunk.start + chunk.count
            handles.append(chunk.request.handle)
            ends.append(end)
            kept.append([end + node for node in path])
        self.cache.keep(handles, ends, kept)

    # ---- how requests leave ----

    def _preempt(self, request: Request) -> None:
        self.cache.free(request.handle)
        self.running.remove(request)
        self.sampler.counts.drop(request)
        request.handle, request.cached = None, 0
        request.preempted += 1
        self.metrics.preemptions += 1
        with self._work:
            self.waiting.appendleft(request)
        self._blocked = self.cache.free_blocks  # until another request gives pages back

    def _drop_cancelled(self) -> None:
        for request in self._all():
            if request.leaves:
                self._end(request, request.leaves, [])

    def _end(self, request: Request, finish: str, new: list[int]) -> None:
        if request.handle is not None:
            self.cache.free(request.handle)
            request.handle = None
            self.running.remove(request)
            self.sampler.counts.drop(request)
        else:
            with self._work:
                self.waiting.remove(request)
        self._blocked = None
        request.finish = finish
        self.metrics.end(finish)
        self._tell(request, new, finish)
        request.over.set()

    def _end_all(self, finish: str) -> None:
        for request in self._all():
            self._end(request, finish, [])

    def _all(self) -> list[Request]:
        with self._work:  # other threads append to `waiting`
            return [*self.running, *self.waiting]

    def _tell(self, request: Request, new: list[int], finish: str | None) -> None:
        if request.on_tokens is None:
            return
        try:
            request.on_tokens(request, new, finish)
        except Exception:  # who asked is gone; the others go on
            request.cancel()

    def _run(self) -> None:
        try:
            self._steps()
        finally:
            self._closing = True  # also where the thread ends by an error: nobody waits forever
            self._flight = None
            self._end_all("abort")
            self.after_step()
            self.at_end()

    def _steps(self) -> None:
        while True:
            with self._work:
                self._work.wait_for(lambda: self._closing or self.waiting or self.running)
                if self._closing and not (self._draining and (self.waiting or self.running)):
                    break
            try:
                self.step()
            except Exception as error:
                # The step may have written anything for the requests that ran.
                self._flight = None
                for request in list(self.running):
                    self._end(request, f"error: {error}", [])
                self.cache.forget()
            self.after_step()
